"""Plans that no loss asks for: what the leader writes, and what it could write."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from bamboo_ds.config import BambooConfig
from bamboo_ds.control.leader.boundary import next_change, policy_of, with_copies
from bamboo_ds.control.leader.view import View
from bamboo_ds.control.registry.records import LayoutRecord, MemberRecord
from bamboo_ds.topology import Plan

from .case import lent
from .world import World


@lru_cache(maxsize=256)
def _record(name: str, slot: int, script_rank: int, joiner: bool, leaves: bool) -> MemberRecord:
    common = {"host": name, "address": "h", "pid": 1, "agent_pid": 2, "incarnation": "x"}
    state = "leaving" if leaves else "running"
    return MemberRecord(id=name, slot=slot, script_rank=script_rank, joiner=joiner, state=state, **common)


class Leader:
    """Writes plans of a job on integers.

    Args:
        world: the job.

    Attributes:
        leaving: members that have been told to leave.
        waiting: members that wait to be admitted, and the ranks that their scripts run as.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.leaving: set[str] = set()
        self.waiting: dict[str, int] = {}
        self._joined: dict[str, int] = {}
        self._policy = policy_of(world.layout, True, BambooConfig())

    def lose(self, lost: list[str]) -> None:
        """Members are lost; copies that the others can make at once begin with the plan that follows."""
        self._world.lose(lost, lambda plan: with_copies(self._view(plan), plan, self._policy))

    def join(self) -> None:
        """A member comes."""
        name = f"j{len(self._joined)}"
        self._joined[name] = self.waiting[name] = self._world.random.randrange(self._world.layout.size)

    def leave(self) -> None:
        """A member is told to leave."""
        self.leaving.add(self._world.random.choice(self._world.plan.members))

    def improve(self) -> bool:
        """Come nearer to what the planner wants; whether there was anything to do."""
        world = self._world
        if not world.settled:
            return False
        found = next_change(self._view(world.plan), world.plan, self._policy)
        if found is None:
            return False
        self._write(found.plan)
        return True

    def move(self) -> bool:
        """As :meth:`exchange`, at once."""
        return self.exchange(at_once=True)

    def exchange(self, at_once: bool = False) -> bool:
        """Owner and shadow of a role change places, and other parts are lent; whether there was a role for that."""
        world = self._world
        plan, random = world.plan, world.random
        shadowed = [rank for rank, shadow in enumerate(plan.shadows) if shadow is not None]
        if not (world.settled and shadowed):
            return False
        owners, shadows = list(plan.owners), list(plan.shadows)
        for rank in random.sample(shadowed, min(len(shadowed), random.choice((1, 1, 2)))):
            owners[rank], shadows[rank] = str(shadows[rank]), owners[rank]
        changed = replace(plan, epoch=plan.epoch + 1, owners=tuple(owners), shadows=tuple(shadows), lost=())
        self._write(
            replace(lent(changed, world.case, random), when="iteration" if at_once or random.random() < 0.5 else False)
        )
        return True

    def _write(self, plan: Plan) -> None:
        for name in plan.members:
            self.waiting.pop(name, None)
        if plan.interrupts():
            self._world.counts["interrupted"] += 1
            self._world.interrupt(plan)
        else:
            self._world.change(plan)

    def _view(self, plan: Plan) -> View:
        world = self._world
        script_ranks = dict(zip(plan.members, plan.script_ranks, strict=True)) | self.waiting
        living = {
            name: _record(name, slot, script_rank, name in self._joined, name in self.leaving)
            for slot, (name, script_rank) in enumerate(script_ranks.items())
            if name in world.members or name in self.waiting
        }
        reports = {name: LayoutRecord(id=name, layout=world.layout, redundant=True, iterators=False) for name in living}
        return View(world.layout.size, plan, living, living, reports=reports, workers=world.states)
