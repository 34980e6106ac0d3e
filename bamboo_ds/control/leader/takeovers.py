"""Roles that a plan has given to other members, until these compute by it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ...topology.plan import Plan
from ..registry.records import WorkerState


@dataclass(frozen=True)
class Handover:
    """A role that changes its owner.

    Attributes:
        role: (pipeline, stage).
        since: monotonic seconds: when the loss was noticed, or, without one, the plan was written.
    """

    role: tuple[int, int]
    before: str
    after: str
    epoch: int
    since: float


class Takeovers:
    """The takeovers under way. Another leader does not know of them."""

    def __init__(self) -> None:
        self._under_way: dict[tuple[int, int], Handover] = {}

    def plan(self, old: Plan, new: Plan, since: float) -> list[Handover]:
        """Takes a plan that was written, and returns what it changes."""
        found = []
        for role in new.layout.roles if new.layout is not None else ():
            rank = new.layout.rank(role) if new.layout is not None else 0
            before, after = old.owners[rank], new.owners[rank]
            if before != after:
                found.append(Handover((role.pipeline, role.stage), before, after, new.epoch, since))
        self._under_way = {role: each for role, each in self._under_way.items() if each.after in new.members}
        self._under_way.update({each.role: each for each in found if each.after in new.members})
        return found

    @property
    def under_way(self) -> bool:
        """Whether there are any."""
        return bool(self._under_way)

    def done(self, workers: Mapping[str, WorkerState]) -> Iterator[Handover]:
        """The takeovers whose new owners have entered the plan, each once."""
        for role, each in list(self._under_way.items()):
            state = workers.get(each.after)
            if state is not None and state.epoch >= each.epoch:
                del self._under_way[role]
                yield each
