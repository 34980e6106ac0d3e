"""Words in the terminal of an agent that a user has started, about its member: ``bamboo join`` becomes one."""

from __future__ import annotations

import time
from collections.abc import Callable

from ...topology.plan import Plan
from ..registry.records import LeftRecord

#: Seconds between two lines about the same thing that takes long.
_SPARSE_S = 10.0


class Telling:
    """Tells the course of one member, in few lines.

    Args:
        member: its id.
        say: shows a line.
        clock: monotonic seconds.
    """

    def __init__(self, member: str, say: Callable[[str], object], clock: Callable[[], float] = time.monotonic) -> None:
        self._member, self._say, self._clock = member, say, clock
        self._next = 0.0
        self._place: str | None = None

    def note_doing(self, doing: str | None) -> None:
        """The worker is at something that takes long."""
        if doing is not None and self._clock() >= self._next:
            self._next = self._clock() + _SPARSE_S
            self._tell(f"{self._member} {doing}")

    def note_plan(self, plan: Plan) -> None:
        """There is a new plan."""
        if self._member not in plan.members or plan.layout is None:
            return
        owned, shadowed = plan.owned_by(self._member), plan.shadowed_by(self._member)
        parts = [
            f"{verb} {', '.join(str(role) for role in roles)}"
            for verb, roles in (("owns", owned), ("shadows", shadowed))
            if roles
        ]
        place = " and ".join(parts) or "is a standby"
        if place != self._place:
            begins = "has joined the job and " if self._place is None else ""
            self._tell(f"{self._member} {begins}{place}, as one of {len(plan.members)} members")
            self._place = place

    def note_end(self, departure: LeftRecord) -> None:
        """The worker has ended."""
        self._tell(f"{self._member} has ended: {departure.outcome} ({departure.reason} {departure.detail})")

    def _tell(self, text: str) -> None:
        self._say(f"[bamboo] {time.strftime('%H:%M:%S')} {text}\n")
