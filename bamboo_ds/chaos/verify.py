"""Verdict on how a job bore its faults, from its events, their model, and the journal of what was done to it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median

from ..observe.events import (
    Event,
    Fatal,
    MemberJoined,
    MemberLost,
    PlanWritten,
    ReplicaMismatch,
    RunFinished,
    RunStarted,
    Step,
)
from ..observe.model import JobModel
from ..observe.view import ToldPlan
from .faults import GIVEN_UP, HIT_ELSEWHERE, FaultKind, FaultRecord

#: Seconds after a fault within which its delay of training is looked for, beyond its own duration.
_WINDOW_S = 3.0
#: How much the time of a fault and that of an event may be confused, in seconds.
_CLOCKS_S = 0.2
#: A timed fault of a worker that is shorter than this share of the timeout must not cost the member.
_SAFE_SHARE = 0.8


@dataclass(frozen=True)
class Effect:
    """The effect of a fault on the job; ``None`` without one, or where events do not tell.

    Attributes:
        lost: members that were lost by it.
        pause_s: the longest pause of a member: of the takeover, or of its admission or departure.
        redo_s: longest time of redone and remaining work after a takeover.
        delay_s: the longest iteration from the fault on, beyond the median of all.
        healed_s: from the loss to the plan in which every role is shadowed again, and ``healed_steps`` committed
            meanwhile.
    """

    record: FaultRecord
    lost: tuple[str, ...] = ()
    pause_s: float | None = None
    redo_s: float | None = None
    delay_s: float | None = None
    healed_s: float | None = None
    healed_steps: int | None = None


@dataclass
class Verdict:
    """Whether the job is as it must be.

    Attributes:
        problems: what must not be; none: verified.
        notes: what is worth knowing.
        effects: of every fault that was injected.
        healing_s: pauses of boundary plans that no fault asked for: healing, rebalancing.
    """

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)
    healing_s: list[float] = field(default_factory=list)
    steps: int = 0
    plans: int = 0


def verify(
    events: Sequence[Event],
    records: Sequence[FaultRecord],
    *,
    finished: bool,
    timeout_s: float = 5.0,
) -> Verdict:
    """Checks that the job went on through all ``records`` as if nothing had happened.

    Args:
        events: of the job, in the order of the file.
        records: the journal.
        finished: the job is over and must have ended well.
        timeout_s: seconds of silence after which a member of the job is lost.
    """
    verdict = Verdict()
    _check_run(events, verdict, finished)
    _check_steps(events, records, verdict)
    _check_plans(events, verdict)
    _check_losses(events, records, verdict, timeout_s)
    for record in records:
        _check_record(record, verdict)
    job, causes, steps = JobModel(bounded=False), _causes(events, records), _of(events, Step)
    for event in events:
        job.fold(event)
    verdict.effects = [
        _effect(record, causes.get(n, ()), job, steps)
        for n, record in enumerate(records)
        if record.outcome == "injected"
    ]
    asked = {plan.epoch for effect in verdict.effects for plan in _asked(effect.record, job)}
    verdict.healing_s = [
        plan.pause_seconds for plan in job.plans if plan.pause_seconds is not None and plan.epoch not in asked
    ]
    return verdict


def _of(events: Sequence[Event], kind: type) -> list:
    return [event for event in events if isinstance(event, kind)]


def _check_run(events: Sequence[Event], verdict: Verdict, finished: bool) -> None:
    starts, ends = _of(events, RunStarted), _of(events, RunFinished)
    if len(starts) > 1:
        verdict.problems.append(f"the job was started {len(starts)} times")
    for event in _of(events, Fatal):
        verdict.problems.append(f"fatal loss in epoch {event.epoch}: stages {event.stages}, lost {event.members}")
    for event in _of(events, ReplicaMismatch):
        verdict.problems.append(f"the replica of {event.role} differs from its owner at step {event.step}")
    if finished and not ends:
        verdict.problems.append("the job did not say how it ended")
    for end in ends if finished else ():
        if end.exit_code != 0:
            verdict.problems.append(f"the job ended with exit code {end.exit_code}")


def _check_steps(events: Sequence[Event], records: Sequence[FaultRecord], verdict: Verdict) -> None:
    """Steps are contiguous and each is done once. One member tells of them: what it has not told when it died is told
    by nobody, or again by its successor."""
    steps = _of(events, Step)
    verdict.steps = len({event.step for event in steps})
    if not steps:
        verdict.problems.append("no step was done")
        return
    mortal = {event.member_id for event in _of(events, MemberLost)} | {m for record in records for m in record.members}
    for before, event in pairwise(steps):
        if event.step == before.step + 1:
            continue
        explained = event.member != before.member and before.member in mortal
        if event.step == before.step:
            if not explained or event.loss != before.loss:
                verdict.problems.append(f"step {event.step} was done twice: losses {before.loss} and {event.loss}")
            else:
                verdict.notes.append(f"step {event.step} was told twice: {before.member} was lost after it had told")
        elif event.step == before.step + 2 and explained:
            verdict.notes.append(f"step {before.step + 1} was not told: {before.member} was lost before it could")
        else:
            verdict.problems.append(f"step {event.step} came after step {before.step}")
    if steps[0].step > 1:
        verdict.problems.append(f"the first step told of is {steps[0].step}")


def _check_plans(events: Sequence[Event], verdict: Verdict) -> None:
    """One chain of plans: each epoch once, nobody comes back, nobody owns who is no member."""
    plans: list[PlanWritten] = _of(events, PlanWritten)
    verdict.plans = len(plans)
    gone: set[str] = set()
    for before, plan in zip([None, *plans], plans, strict=False):
        if before is not None:
            if plan.epoch <= before.epoch:
                verdict.problems.append(f"the plan of epoch {plan.epoch} was written after that of {before.epoch}")
            elif plan.epoch > before.epoch + 1:
                verdict.notes.append(f"nobody told of the plans between epochs {before.epoch} and {plan.epoch}")
            gone |= set(before.members) - set(plan.members)
        gone |= set(plan.lost)
        for member in sorted(gone & set(plan.members)):
            verdict.problems.append(f"{member} is a member again in epoch {plan.epoch}")
        strangers = {*plan.owners, *(s for s in plan.shadows if s)} - set(plan.members)
        if strangers:
            verdict.problems.append(f"the plan of epoch {plan.epoch} gives roles to {', '.join(sorted(strangers))}")


def _check_losses(events: Sequence[Event], records: Sequence[FaultRecord], verdict: Verdict, timeout_s: float) -> None:
    """Every loss has a cause and every lethal fault a loss."""
    hits: dict[str, list[FaultRecord]] = {}
    for record in records:
        for member in record.members if record.outcome == "injected" and record.kind.risky else ():
            hits.setdefault(member, []).append(record)
    outages = [record for record in records if record.kind is FaultKind.ETCD_STOP and record.outcome == "injected"]
    joined = {event.member_id: event.time.timestamp() for event in _of(events, MemberJoined)}
    late = [
        record
        for record in records
        if record.time is not None and any(record.time <= joined.get(m, 0.0) + _CLOCKS_S for m in record.members)
    ]
    lost: dict[str, MemberLost] = {}
    for event in _of(events, MemberLost):
        lost.setdefault(event.member_id, event)
    for member, event in lost.items():
        found = hits.get(member, [])
        what = f"{member} was lost ({event.reason}: {event.detail})"
        if not found and any(member in d.members and d.kind is FaultKind.NOTICE for d in late):
            verdict.notes.append(f"{what}: it was told to leave before it was admitted")
        elif not found:
            near = any(
                o.time is not None and -1 <= event.time.timestamp() - o.time <= (o.seconds or 0) + 30 for o in outages
            )
            verdict.problems.append(f"{what} without a fault that hit it{' after etcd was away' if near else ''}")
        elif all(not record.kind.lethal and (record.seconds or 0.0) < _SAFE_SHARE * timeout_s for record in found):
            length = max(record.seconds or 0.0 for record in found)
            kinds = ", ".join(record.kind.value for record in found)
            verdict.problems.append(f"{what} though it was hit for {length:.2f} s only ({kinds})")
    plans = _of(events, PlanWritten)
    final = plans[-1].members if plans else ()
    for member, found in hits.items():
        lethal = [record for record in found if record.kind.lethal]
        if lethal and member in final:
            verdict.problems.append(f"{member} was hit by {lethal[0].kind.value}, but the last plan lists it")


def _check_record(record: FaultRecord, verdict: Verdict) -> None:
    name = f"fault {record.number}" if record.number is not None else "joiner"
    what = f"{name} ({record.kind.value} {', '.join(record.members)})"
    if record.outcome == "failed":
        verdict.problems.append(f"{what} failed: {record.detail}")
    elif record.outcome == "injected" and not record.confirmed and record.detail not in (HIT_ELSEWHERE, GIVEN_UP):
        verdict.problems.append(f"{what} was not confirmed: {record.detail}")
    elif record.outcome in ("spared", "absent"):
        verdict.notes.append(f"{what} did not happen: {record.detail}")


# -- effects --------------------------------------------------------------------------------------------


def _asked(record: FaultRecord, job: JobModel) -> list[ToldPlan]:
    """Plans that a joiner's admission or a notice's departure made."""
    members = set(record.members)
    changed = [plan for plan in job.plans if plan.kind != "start" and members & {*plan.joined, *plan.gone}]
    return changed if record.kind in (FaultKind.JOIN, FaultKind.NOTICE) else []


def _causes(events: Sequence[Event], records: Sequence[FaultRecord]) -> dict[int, tuple[str, ...]]:
    """The members lost by each fault (by its position in ``records``): the last one that hit them before."""
    found: dict[int, tuple[str, ...]] = {}
    for event in _of(events, MemberLost):
        hits = [
            (record.time, n)
            for n, record in enumerate(records)
            if record.outcome == "injected"
            and record.kind.risky
            and event.member_id in record.members
            and record.time is not None
        ]
        before = [hit for hit in hits if hit[0] <= event.time.timestamp() + _CLOCKS_S]
        if before:
            cause = max(before)[1]
            found[cause] = (*found.get(cause, ()), event.member_id)
    return found


def _effect(record: FaultRecord, lost: tuple[str, ...], job: JobModel, steps: Sequence[Step]) -> Effect:
    effect = Effect(record, lost, delay_s=_delay(record, steps))
    if record.kind in (FaultKind.JOIN, FaultKind.NOTICE):
        pauses = [plan.pause_seconds for plan in _asked(record, job) if plan.pause_seconds is not None]
        return replace(effect, pause_s=max(pauses, default=None))
    found = [loss for loss in job.losses.views if set(lost) & {member.id for member in loss.members}]
    if not found or found[0].epoch is None:
        return effect
    loss, healed_s, healed_steps = found[0], found[0].replicas_back_seconds, None
    if any(plan.epoch == loss.epoch and plan.unshadowed == 0 for plan in job.plans):
        healed_s, healed_steps = 0.0, 0  # a standby without duties
    elif healed_s is not None:
        healed_steps = sum(loss.time <= step.time.timestamp() <= loss.time + healed_s for step in steps)
    # Where another loss interrupts the recovery, members recover from both at once.
    details = (job.losses.detail(each.number) for each in job.losses.views if each.number >= loss.number)
    taken = next((each for each in details if each is not None and each.survivors), None)
    return replace(
        effect,
        pause_s=taken.loss.pause_seconds if taken else None,
        redo_s=taken.loss.redo_seconds if taken else None,
        healed_s=healed_s,
        healed_steps=healed_steps,
    )


def _delay(record: FaultRecord, steps: Sequence[Step]) -> float | None:
    """The longest time between two steps from the fault on, beyond the median."""
    times = [event.time.timestamp() for event in steps]
    if len(times) < 3 or record.time is None:
        return None
    until = record.time + _WINDOW_S + (record.seconds or 0.0 if record.kind.timed else 0.0)
    gaps = list(pairwise(times))
    normal = median(after - before for before, after in gaps)
    near = [after - before for before, after in gaps if after >= record.time and before <= until]
    return max(0.0, max(near) - normal) if near else None
