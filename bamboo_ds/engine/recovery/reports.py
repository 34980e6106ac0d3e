"""Reports of a new plan's members to each other before they go on, and the decision that follows from them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

from pydantic import BaseModel, ConfigDict

from ...schedule import Decision, MemberProgress, PartProgress, RoleProgress, decide, settle
from ...topology import Plan, Role, Side, part_hosts
from ..stage.layers import Changes


class _Report(BaseModel):
    """Reports travel as JSON. One that does not parse is a defect: all members run the same version."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")  # a loss may be any number


class JobFacts(_Report):
    """The facts that all members go by.

    Attributes:
        seed: of the generators of passes and steps.
        nonce: names this run of the job in the ids of its saves.
        checksums: micro-batches get checksums.
        exact: the number of first steps that are checked; 0: none any more.
    """

    seed: int
    nonce: str
    checksums: bool
    exact: int


class StartReport(JobFacts):
    """A member's report to the others when its engine is built; that of the member that leads counts for all.

    Attributes:
        resumed: folder and tag of the checkpoint that the job goes on from, if it was started again.
        flags: settings of the process that decide how tensors are computed; all members must have the same.
        device: that the member computes on, by a name that no other of the job's devices has; ``None`` without memory
            of its own.
    """

    resumed: tuple[str, str] | None
    flags: dict[str, str]
    device: str | None


class RoleReport(_Report):
    """The owner's state of a role in the current iteration; see :class:`~bamboo_ds.schedule.RoleProgress`.

    Attributes:
        role: pipeline and stage.
        parts: what it computes itself; empty if it has not begun, so that it computes what the plan says.
        state_only: the role was taken over in this operation.
        changes: of the stage by its script, as far as the owner was told of them.
    """

    role: tuple[int, int]
    parts: tuple[PartProgress, ...]
    reduced: bool
    state_only: bool
    changes: Changes


class ScriptReport(_Report):
    """A member's place among the script's collectives and messages (:mod:`bamboo_ds.comm.calls.script`)."""

    gap: int
    done: dict[str, int]
    open: int
    newcomers: dict[str, int]
    had: dict[str, int]
    missed: str | None


class MemberReport(JobFacts):
    """One member's report to the others at the beginning of an epoch.

    Attributes:
        step: operations that it has committed and finished; it is in operation ``step``.
        entered: it has everything that the commit of that operation needs of it.
        at_boundary: its script has not gone on since the operation before.
        training: it is in an iteration.
        roles: progress of the roles that it owns under the new plan.
        helped: of roles that it shadows: rank, and what it has computed for the owner.
        spent: ranks of roles that it shadows, and of which it does not compute anything in this iteration: it has been
            the owner, and its passes have changed what the layers keep.
        commit: sum of the last commit all-reduce; ``None`` before the first.
        received: parts of batches that it has received in this operation: pipeline (as text), part, number.
        repeatable: it could enter the commit of this operation again, if it has entered it.
        stale: it lacks what the shards of other members' steps have changed.
        replicas: ranks of the roles whose replica it holds.
        copying: of the roles whose replica it builds, by rank: the member that offers the snapshot, and its key.
        sums: that it holds, of its own roles and of others': rank, and the part with the numbers of micro-batches.
        joining: it has just come, and takes over from the others where the job stands.
        history: operations of the script that it knows the results of.
        steps: iterations committed.
        iteration_s: seconds that they take; 0: it has seen none.
        ahead: by how much the script's count of steps is ahead of the job's.
        consumed: micro-batches of each pipeline that committed iterations have used.
        script: the script's own collectives.
        device: see :class:`StartReport`.
    """

    step: int
    entered: bool
    at_boundary: bool
    training: bool
    roles: tuple[RoleReport, ...]
    helped: tuple[tuple[int, PartProgress], ...]
    spent: tuple[int, ...]
    commit: tuple[float, ...] | None
    received: dict[str, dict[str, int]]
    repeatable: bool
    stale: bool
    replicas: tuple[int, ...]
    copying: dict[int, tuple[str, str]]
    sums: tuple[tuple[int, PartProgress], ...]
    joining: bool
    history: int
    steps: int
    iteration_s: float
    ahead: int
    consumed: int
    script: ScriptReport
    device: str | None

    def script_facts(self) -> dict[str, Any]:
        """Facts by which the script's collectives agree."""
        return {"joining": self.joining, "script": self.script.model_dump()}


#: The reports of all members of an epoch.
Reports = Mapping[str, MemberReport]


def decision_of(reports: Reports, plan: Plan, micro_batches: int, tied: Collection[int]) -> Decision:
    """The decision on the interrupted operation; equal on all members. What is resumed from is settled.

    Args:
        reports: of all members.
        plan: the new plan.
        micro_batches: of an iteration.
        tied: stages that hold weights of other stages, too.
    """
    present = {member: report for member, report in reports.items() if not report.joining}
    step = max((report.step for report in present.values()), default=0)
    records = {}
    for member, report in present.items():
        roles = {Role(*each.role): _progress(plan, each, report.step, present, step) for each in report.roles}
        records[member] = MemberProgress(report.step, report.entered, roles, report.commit)
    decision = decide(records, plan.world)
    if decision.mode == "commit" and all(report.repeatable for report in reports.values()):
        return decision
    return replace(decision, mode="resume", progress=settle(plan.world, micro_batches, decision.progress, tied))


def _progress(plan: Plan, mine: RoleReport, step: int, reports: Reports, newest: int) -> RoleProgress:
    """Progress of a role, from the reports of its owner and of its shadow.

    A member that has not begun computes what the plan says, and one that has begun goes on. Where the two do not fit
    together, the owner computes what the shadow would have.

    Args:
        plan: the new plan.
        mine: of the owner.
        step: that the owner is in.
        reports: of all members that do not join.
        newest: step that the job is in.
    """
    role, now = Role(*mine.role), step == newest
    side: Side | None = None
    lent, blocks = plan.lending(role), plan.world.blocks_of(role.stage)
    own = {part.blocks: part for part in mine.parts} if now else {}
    shadow, theirs = reports.get(plan.shadow(role) or ""), {}
    rank = plan.world.rank(role)
    if shadow is None or rank not in shadow.replicas:
        lent = None  # what the shadow holds has been found to differ
    if shadow is not None and shadow.step == newest:
        lent = None if rank in shadow.spent else lent
        theirs = {part.blocks: part for place, part in shadow.helped if place == rank}
    ranges = [(0, blocks)] if lent is None else [(0, lent.cut), (lent.cut, blocks)]
    if lent is not None and own.keys() <= {ranges[lent.side == "front"]}:
        side = lent.side
        computed = ranges[side == "rear"]
        # Where it has begun other parts, as an owner before, it begins the role again.
        again = any(part.forwards for each, part in theirs.items() if each != computed)
        theirs = {} if again else {each: part for each, part in theirs.items() if each == computed}
    elif own:  # the owner computes all of it, or what is left of it
        theirs = {}
        ranges = list(pairwise(sorted({0, blocks, *(bound for part in own for bound in part)})))
    known = {**theirs, **own}
    parts = [known.get(each) or PartProgress(*each) for each in ranges]
    owner = plan.owner(role)
    computing = (owner,) * len(parts) if side is None else part_hosts(owner, plan.shadow(role), side)
    return RoleProgress(
        parts=tuple(
            _with_sums(part, reports.get(each), rank, newest) for part, each in zip(parts, computing, strict=True)
        ),
        reduced=mine.reduced and now,
        state_only=now and (mine.state_only or (mine.reduced and not known.keys() >= set(ranges))),
        lent=side,
    )


def _with_sums(part: PartProgress, member: MemberReport | None, rank: int, step: int) -> PartProgress:
    """``part`` of the role of ``rank`` with the sums of it that ``member``, which computes it, holds in ``step``."""
    if member is None or member.step != step:
        return part
    held = [each.sums for place, each in member.sums if (place, each.blocks) == (rank, part.blocks)]
    return replace(part, sums=held[0]) if held else part


def all_at_boundary(reports: Reports, step: int) -> bool:
    """Whether all members are between the operation before ``step`` and whatever their scripts do next.

    Of those that join: what their scripts do before operation ``step`` is to come.
    """
    done = newest_of(reports)[0].history
    return all(
        report.history < done if report.joining else report.at_boundary and report.step == step and not report.stale
        for report in reports.values()
    )


def all_in_iteration(reports: Reports, step: int) -> bool:
    """Whether all members are in the iteration that is operation ``step``: states are what they were at its begin.

    Those that join, and have no roles yet, will be in it.
    """
    return all(
        not report.roles if report.joining else report.training and report.step == step and not report.stale
        for report in reports.values()
    )


def newest_of(reports: Reports) -> tuple[MemberReport, list[str]]:
    """The report of a member that knows all that the job has done, and all such members."""
    told = {member: report for member, report in reports.items() if not report.joining}
    newest = max(told.values(), key=lambda report: (report.history, report.step))
    return newest, [member for member, report in told.items() if report.history == newest.history]
