"""How far members are that build, compile, replay or copy, as one line. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ..control.registry.keys import slot_of
from ..control.registry.mirror import Mirror

#: Members that are named; of more only the number is told.
_NAMED = 4
#: Seconds between two lines.
SPARSE_S = 10.0


def progress(mirror: Mirror) -> str | None:
    """The line about a job with these keys; ``None``: nothing is under way that takes long."""
    plan, parts = mirror.plan, []
    if plan is not None and plan.layout is None and plan.members:
        built = len(mirror.reports.keys() & set(plan.members))
        parts.append(f"{built} of {len(plan.members)} engines are built{_missing(mirror, plan.members)}")
    found: dict[str, list[str]] = {}
    for member in sorted(mirror.members, key=slot_of):
        record = mirror.progress.get(member)
        if record is not None and record.doing is not None:
            found.setdefault(record.doing, []).append(member.partition("-")[0])
    return "; ".join([*parts, *(f"{_listed(names)} {doing}" for doing, names in found.items())]) or None


def _missing(mirror: Mirror, members: Sequence[str]) -> str:
    """Whose engines are not built, and where their scripts are then."""
    missing = [member.partition("-")[0] for member in members if member not in mirror.reports]
    if not missing:
        return ""
    who = "all scripts are" if len(missing) == len(members) else f"the script of {_listed(missing)} is"
    return f": {who} at or before deepspeed.initialize (libraries, data, layers, extensions that DeepSpeed compiles)"


def _listed(names: list[str]) -> str:
    if len(names) > _NAMED:
        return f"each of {len(names)} members"
    return names[0] if len(names) == 1 else f"each of {', '.join(names)}"


class Sparse:
    """Which lines are told: at most one each ``SPARSE_S`` seconds, and none about what is short.

    Args:
        now: monotonic seconds.
    """

    def __init__(self, now: float) -> None:
        self._next, self._told = now + SPARSE_S, ""

    def due(self, line: str | None, now: float) -> bool:
        """Whether ``line`` is to be told."""
        if line is None:
            self._next, self._told = max(self._next, now + SPARSE_S), ""
        if line is None or now < self._next or line == self._told:
            return False
        self._next, self._told = now + SPARSE_S, line
        return True
