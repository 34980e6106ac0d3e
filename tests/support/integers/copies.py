"""Copies of roles' states: first ones, and those that are made while the job goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from bamboo_ds.schedule import Decision
from bamboo_ds.topology import Role

from .members import Construction, Job, Member, Moment, Runtime, Waits


class Copies:
    """Makes copies of roles' states.

    Args:
        job: the job.
        members: all of them, by name.
        tell: has a member tell the leader what it holds.
    """

    def __init__(self, job: Job, members: Mapping[str, Member], tell: Callable[[Member], None]) -> None:
        self._job, self._case, self._random = job, job.case, job.random
        self._layout, self._counts = job.layout, job.counts
        self._members, self._tell = members, tell

    def make_first(self, member: Member) -> Iterator[Waits]:
        """As :meth:`bamboo_ds.engine.recovery.copies.Copies.copy_state`: no member waits for others' copies."""
        sent = member.epoch.sent
        for runtime in member.owned():
            shadow = member.plan.shadow(runtime.role)
            if shadow is not None:
                sent["State", shadow, runtime.role].append(runtime.steps)
        for role in member.plan.shadowed_by(member.name):
            yield None
            yield sent["State", member.name, role].__len__
            member.runtimes[role] = self._job.runtime(role, steps=sent["State", member.name, role].popleft())
            member.lacked.remove(role)
        self._tell(member)

    def begin(self, member: Member, decision: Decision) -> None:
        """As :meth:`bamboo_ds.engine.recovery.copies.Copies.begin`."""
        epoch, name = member.epoch, member.name
        wanted: dict[str, Role] = {}
        sources: dict[Role, tuple[str, str]] = {}
        for rank, builder in epoch.plan.builders:
            if rank in epoch.reports[builder].replicas:
                continue
            role, owner = self._layout.role(rank), epoch.plan.owners[rank]
            source = epoch.reports[builder].copying.get(rank)
            if source is None or source[0] != owner:
                source = owner, f"{epoch.plan.epoch}/{rank}"
            if owner == name:
                wanted[source[1]] = role
            if builder == name:
                sources[role] = source
        member.offers = {key: offer for key, offer in member.offers.items() if key in wanted}
        member.due = {key: role for key, role in wanted.items() if key not in member.offers}
        before = {role: built for role, built in member.building.items() if built.source == sources.get(role)}
        member.building = {role: before.get(role) or Construction(source) for role, source in sources.items()}
        self._counts["copies"] += len(sources)
        if epoch.begins is not None:
            self._offer(member, epoch.begins)

    def _offer(self, member: Member, moment: Moment) -> None:
        for key, role in member.due.items():
            member.offers[key] = moment, member.runtimes[role].steps
        member.due = {}

    def advance(self, member: Member) -> None:
        """The iteration is over: offer snapshots, catch up with those that have arrived."""
        decision = member.epoch.decision
        done = member.step - 1
        if decision is None or done >= decision.step:
            self._offer(member, (done, False))
        for role in list(member.building):
            if self._random.random() < 0.7:
                self._catch_up(member, role)

    def complete_arrived(self, member: Member) -> None:
        """In the middle of a long iteration: complete the copies that are there, but for the script's own stage."""
        for role, built in list(member.building.items()):
            if built.incoming is None and role != member.script_rank and self._random.random() < 0.05:
                self._catch_up(member, role)

    def _catch_up(self, member: Member, role: Role) -> None:
        built = member.building[role]
        if built.arrived is None:
            source = self._members.get(built.source[0])
            built.arrived = None if source is None else source.offers.get(built.source[1])
            if built.arrived is None:
                return
        if built.built is None:
            moment, built.built = built.arrived
            built.kept = [each for each in built.kept if each[0] > moment]
        runtime = self._job.runtime(role, steps=built.built)
        for (iteration, _), reduced in built.kept[:2]:
            self.step(runtime, reduced, iteration)
        built.built, built.kept = runtime.steps, built.kept[2:]
        if not built.kept:
            runtime.stale = self._layout.sharded
            member.runtimes[role] = runtime
            del member.building[role]
            self._counts["copied"] += 1
            self._tell(member)

    def step(self, runtime: Runtime, reduced: Sequence[tuple[int, ...]], iteration: int) -> None:
        assert all(each == tuple(range(self._case.micro_batches)) for each in reduced), f"{runtime.role}: {reduced}"
        assert runtime.steps == iteration, f"{runtime.role} takes step {iteration} after {runtime.steps}"
        runtime.steps += 1
        runtime.stale = self._layout.sharded
