"""Recoveries on integers: roles follow plans, members report and decide."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from bamboo_ds.engine.recovery.reports import (
    MemberReport,
    RoleReport,
    ScriptReport,
    all_at_boundary,
    all_in_iteration,
    decision_of,
)
from bamboo_ds.engine.recovery.roles import RoleTransfer
from bamboo_ds.engine.stage.layers import Changes
from bamboo_ds.schedule import Decision, PartProgress
from bamboo_ds.topology import Layout, Role, without_copies

from .case import Fatal
from .furthest import check_furthest
from .members import Job, Member, Runtime


class Recovery:
    """What members do in a recovery.

    Args:
        job: the job.
    """

    def __init__(self, job: Job) -> None:
        self._job, self._case, self._random = job, job.case, job.random
        self._layout, self._counts = job.layout, job.counts

    def follow(self, member: Member) -> None:
        """As :meth:`bamboo_ds.engine.recovery.roles.RoleTransfer.follow`."""
        plan, runtimes, name = member.plan, member.runtimes, member.name
        owned, followed = plan.owned_by(name), {*plan.shadowed_by(name), *plan.built_by(name)}
        for role in owned:
            runtime = runtimes.get(role)
            if runtime is None or not (runtime.owned or runtime.valid):
                runtime = self._clone(member, role)
            if not runtime.owned:
                runtime.owned, runtime.helps = True, False
                member.taken.add(role)
            elif runtime.divided and runtime.begun and plan.lending(role) is None:
                member.taken.add(role)
        for role in [role for role in runtimes if role not in owned]:
            runtime = runtimes[role]
            if role in followed and (runtime.owned or runtime.valid):
                before = runtime.owned
                runtime.helps |= before and runtime.divided
                runtime.spent |= before and runtime.begun and not runtime.divided
                runtime.owned = False
            else:
                del runtimes[role]
                member.lacked.add(role)

    def _clone(self, member: Member, role: Role) -> Runtime:
        siblings = [each for each in self._layout.siblings(role) if each != role] if self._layout.alike else []
        held = [member.runtimes[each] for each in siblings if each in member.runtimes]
        alike = [each for each in held if each.owned or each.valid]
        if not alike:
            gone = member.lacked | member.runtimes.keys()  # or what is there is not valid
            assert not gone.isdisjoint((role, *siblings)), f"{member.name} has nothing of {role}"
            raise Fatal
        runtime = self._job.runtime(role, steps=alike[0].steps, stale=alike[0].stale)
        runtime.reduced = alike[0].reduced
        member.runtimes[role] = runtime
        self._counts["clones"] += 1
        return runtime

    def _complete(self, runtime: Runtime) -> bool:
        at_end = runtime.role.stage in (0, self._layout.stages - 1)
        return runtime.reduced is not None and (runtime.loss or not at_end)

    def replicas(self, member: Member) -> tuple[int, ...]:
        held = (each for each in member.runtimes.values() if not each.owned and each.valid)
        return tuple(sorted(self._layout.rank(each.role) for each in held))

    def report(self, member: Member) -> MemberReport:
        rank = self._layout.rank
        roles = [
            RoleReport(
                role=(each.role.pipeline, each.role.stage),
                parts=each.told() if each.begun or each.broken else (),
                reduced=self._complete(each),
                state_only=each.role in member.taken,
                changes=Changes(),
            )
            for each in member.owned()
        ]
        replicas = [each for each in member.runtimes.values() if not each.owned]
        return MemberReport(
            step=member.step,
            entered=member.entered,
            at_boundary=member.at_boundary,
            training=not (member.at_boundary or member.joining) and member.step < self._case.iterations,
            roles=tuple(roles),
            helped=tuple((rank(each.role), part) for each in replicas if each.helps for part in each.told()),
            spent=tuple(rank(each.role) for each in replicas if each.spent),
            commit=member.vector,
            received={},
            repeatable=all(self._complete(each) for each in member.owned()),
            stale=any(each.stale for each in member.runtimes.values()),
            replicas=self.replicas(member),
            copying={rank(role): each.source for role, each in member.building.items()},
            sums=tuple(
                (rank(role), PartProgress(begin, end, sums=tuple(sorted(held))))
                for (role, begin, end), held in member.sums.items()
                if held
            ),
            joining=member.joining,
            history=member.step,
            steps=member.step,
            iteration_s=0.0,
            ahead=0,
            consumed=0,
            seed=0,
            nonce="",
            checksums=True,
            script=ScriptReport(gap=0, done={}, open=0, newcomers={}, had={}, missed=None),
            exact=0,
            device=None,
        )

    def decide(self, member: Member) -> Decision:
        """The same on all members: a pure function of what all have reported, in whatever order that is known."""
        epoch, name = member.epoch, member.name
        again = epoch.decision is not None
        if again and self._random.random() < 0.9:
            assert epoch.decision is not None
            return epoch.decision
        names = self._random.sample(list(epoch.reports), len(epoch.reports))
        reports = {each: epoch.reports[each] for each in names}
        lacking = {
            each: {self._layout.rank(role) for role in epoch.plan.shadowed_by(each)}.difference(report.replicas)
            for each, report in reports.items()
        }
        plan = epoch.plan if again else without_copies(epoch.plan, lacking)
        decision = decision_of(reports, plan, self._case.micro_batches, self._case.tied)
        if again:
            assert decision == epoch.decision, f"{name} decides otherwise: {decision}, {epoch.decision}"
            return decision
        members = [report for report in reports.values() if not report.joining]
        commits = all(report.entered and report.step == decision.step for report in members)
        commits &= all(report.repeatable for report in members)
        assert commits == (decision.mode == "commit"), f"{decision.mode} where {reports} have been told"
        if decision.mode == "resume" and self._random.random() < 0.3:
            self._counts["furthest"] += check_furthest(self._case, plan, reports, decision)
        if decision.mode == "resume" and all_in_iteration(reports, decision.step):
            epoch.begins = decision.step - 1, True
        elif all_at_boundary(reports, decision.step):
            epoch.begins = decision.step - 1, False
        epoch.plan, epoch.decision, epoch.lacking = plan, decision, lacking
        self._counts[decision.mode] += 1
        self._counts["behind"] += len(decision.behind)
        self._counts["lacking"] += sum(map(len, lacking.values()))
        return decision

    def check_redone(self, member: Member, decision: Decision) -> None:
        """What is told as redone has been done before."""
        told = _Redone(member, self._case.micro_batches)
        told.redone(member.plan, decision)
        for (role, begin), (forwards, backwards) in told.progress.operation.redone.items():
            (part,) = [part for part in decision.progress[role].parts if part.begin == begin]
            again = [("ForwardPass", m) for m in range(part.forwards, forwards)]
            again += [("BackwardPass", m) for m in range(part.backwards, backwards)]
            for kind, m in again:
                assert (role, kind, m) in self._job.did[decision.step], f"{kind} {m} of {role} counts as redone"
                self._counts["redone"] += 1

    def take_arrived(self, member: Member) -> None:
        """Of what is on its way to ``member`` some has arrived: gradients and sums are kept."""
        for key, messages in member.epoch.sent.items():
            kind, destination, *place = key
            if destination != member.name or kind not in ("B", "Sums"):
                continue
            for _ in range(self._random.randint(0, len(messages))):
                message = messages.popleft()
                if kind == "Sums":
                    member.hold(place[0], *message)
                    continue
                runtime = member.runtimes.get(place[0])
                for part in runtime.parts if runtime is not None else ():
                    if part.begin == place[1]:
                        part.given.add(message)

    def doubt(self, member: Member) -> None:
        """A pass that slices were in may have changed something."""
        if member.inside is not None:
            role, _, kind, _ = member.inside
            member.runtimes[role].broken |= kind == "BackwardPass" or self._random.random() < 0.5


class _Redone:
    """What :meth:`bamboo_ds.engine.recovery.roles.RoleTransfer.redone` looks at of a member."""

    redone: Any = RoleTransfer.redone
    _seen: Any = RoleTransfer._seen

    def __init__(self, member: Member, micro_batches: int) -> None:
        self.progress = SimpleNamespace(operation=_Taken(member.taken))
        self.epoch = _EpochOf(member.name, member.plan.world)
        self.ds = _Settings(micro_batches)


@dataclass
class _Taken:
    taken_over: set[Role]
    redone: dict[tuple[Role, int], tuple[int, int]] = field(default_factory=dict)


@dataclass
class _EpochOf:
    member: str
    layout: Layout


@dataclass
class _Settings:
    micro_batches: int
