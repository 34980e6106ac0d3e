"""Restarts of a job after a fatal loss, as the leader sees them. Pure.

Every worker ends, and every agent waits, registered but without a worker. The leader waits for those that are on their
way back and for as many as the job needs, and says who starts which workers: one for every rank, several on a member
where there are too few. When all are registered it writes their first plan, as at the job's first start. Workers
beyond the first of a member give their roles away as soon as the job runs. A loss on the way is one more fatal loss.

The first start of a job whose members come one by one (``bamboo join --start N``) is such a start as well, number 0,
after a plan in which nobody has ever held anything: :func:`unstarted_plan`. It waits for N members, of which there may
be fewer than ranks.

Workers that nobody has seen end may train on where etcd is out of their reach. A restart waits until they commit
nothing any more: :mod:`bamboo_ds.control.fencing`.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...config import RecoveryConfig
from ...errors import EXIT_FATAL_LOSS
from ...topology import Plan
from ...topology.plan import UNSTARTED
from ...topology.planner import initial_plan
from ..fencing import restart_wait_s
from ..registry.records import RestartRecord, newest
from .actions import Assign, StopJob, Wait, WritePlan
from .view import View


@dataclass(frozen=True)
class RestartLimits:
    """The limits of a restart's waits.

    Attributes:
        return_s: seconds that members on their way back are waited for.
        start_s: seconds that the workers have to register.
    """

    return_s: float = 15.0
    start_s: float = 300.0


def assign(slots: Sequence[int], world_size: int) -> dict[int, tuple[int, ...]]:
    """The ranks whose workers each slot starts: all of them, neighbours together where slots are few."""
    slots = sorted(slots)[:world_size]
    bounds = [i * world_size // len(slots) for i in range(len(slots) + 1)]
    return {slot: tuple(range(bounds[i], bounds[i + 1])) for i, slot in enumerate(slots)}


def fatal_plan(plan: Plan, members: Sequence[str], lost: Sequence[str] = ()) -> Plan:
    """The plan after ``plan`` that makes ``members`` end their workers."""
    return replace(
        plan,
        epoch=plan.epoch + 1,
        members=tuple(members),
        script_ranks=(0,) * len(members),
        lost=tuple(lost),
        lost_roles=tuple(range(len(plan.owners))),
        builders=(),
        when="now",
    )


def unstarted_plan(world_size: int, fence_s: float | None) -> Plan:
    """The first plan of a job that waits for its members: of none, and with every role lost."""
    nonce = secrets.token_hex(8)
    return Plan(
        epoch=0,
        owners=("",) * world_size,
        members=(),
        lost_roles=tuple(range(world_size)),
        origin=nonce,
        generation=UNSTARTED,
        fence_s=fence_s,
        nonce=nonce,
    )


class Restarts:
    """Decides for one leader; remembers only since when it has waited for what."""

    def __init__(self, settings: RecoveryConfig, limits: RestartLimits) -> None:
        self._settings, self._limits = settings, limits
        self._since: dict[tuple[str, int], float] = {}

    def next(self, view: View, plan: Plan, now: float) -> Assign | WritePlan | StopJob | Wait:
        """The next step after the fatal ``plan``; ``now`` is monotonic seconds."""
        for key in [key for key in self._since if key[1] < plan.epoch]:
            del self._since[key]
        record = view.restart
        if record is None or record.after_epoch != plan.epoch:
            return self._gather(view, plan, now)
        return self._start(view, plan, record, now)

    def _until(self, what: str, plan: Plan, now: float, seconds: float) -> float:
        return self._since.setdefault((what, plan.epoch), now) + seconds

    def _gather(self, view: View, plan: Plan, now: float) -> Assign | StopJob | Wait:
        waiting = [record for record in view.members.values() if record.state == "waiting"]
        wait_s = restart_wait_s(plan, view.left, view.workers, view.restart)
        fenced_at = self._until("fence", plan, now, 0.0) + wait_s
        if any(member in view.members for member in plan.members):
            return Wait()  # their workers have yet to end
        if now < fenced_at:
            return Wait(None if wait_s == math.inf else fenced_at, _unfenced(plan, wait_s))
        coming = self._coming(view, plan, now) - {record.slot for record in waiting}
        until = self._until("back", plan, now, self._limits.return_s)
        if coming and now < until:
            return Wait(until)
        previous, last = view.restart, newest(view.progress.values())
        step = last.step if last else 0
        # `bamboo run` leaves no record of the first start, and members that start the job do: it is no restart.
        failures = 0
        if previous is not None and previous.generation > 0 and step <= previous.step:
            failures = previous.failures + 1
        if failures >= self._settings.max_restarts:
            why = f"it was started again {failures} times in a row without getting beyond step {step}"
            return StopJob(EXIT_FATAL_LOSS, why)
        wanted, setting = self._settings.min_members, "bamboo.recovery.min_members"
        if plan.generation == UNSTARTED:
            wanted, setting = view.starters or view.world_size, "--start"
        if len(waiting) < wanted:
            return Wait(None, f"{len(waiting)} of {setting} = {wanted} are there")
        saved = newest(view.progress.values(), saved=True)
        record = RestartRecord(
            generation=(plan if previous is None else previous).generation + 1,
            after_epoch=plan.epoch,
            ranks=assign([record.slot for record in waiting], view.world_size),
            checkpoint=saved.checkpoint if saved else None,
            step=step,
            global_step=last.global_step if last else None,
            failures=failures,
        )
        return Assign(record)

    def _coming(self, view: View, plan: Plan, now: float) -> set[int]:
        """Slots whose agents come back: of the newest plan, or evicted shortly before it."""
        concerned = {*plan.members, *plan.lost}
        back = set()
        for left in view.left.values():
            age = left.age_s(now)
            recent = left.id in concerned or (age is not None and age < self._limits.return_s)
            if recent and left.outcome in ("fatal", "evicted"):
                back.add(left.slot)
        return back

    def _start(self, view: View, plan: Plan, record: RestartRecord, now: float) -> WritePlan | Wait:
        mine = [m for m in view.members.values() if m.generation == record.generation and m.state != "waiting"]
        workers = {m.script_rank: m.id for m in mine}
        if len(workers) == view.world_size:
            first = initial_plan([workers[rank] for rank in range(view.world_size)])
            lineage = replace(first, origin=plan.origin, generation=record.generation, fence_s=plan.fence_s)
            return WritePlan(replace(lineage, epoch=plan.epoch + 1), "all workers have been started again")
        gone = [left for left in view.left.values() if left.generation == record.generation]
        waiting = [m for m in view.members.values() if m.state == "waiting"]
        # An agent that went to join a job that it took for running, say, and found this restart when it came back.
        anew = {m.slot for m in waiting if m.generation is not None and m.generation >= record.generation}
        here = {m.slot for m in (*waiting, *mine)}
        missing = [slot for slot in record.ranks if slot not in here]
        if missing:
            return_by = self._until(f"slots {missing}", plan, now, self._limits.return_s)
        started_by = self._until("start", plan, now, self._limits.start_s)
        if gone:
            why = f"{gone[0].id} was lost ({gone[0].reason}: {gone[0].detail})"
        elif (late := anew.intersection(record.ranks)) and (not missing or now >= return_by):
            why = f"slot {min(late)} has come too late for it"
        elif missing and now >= return_by:
            why = f"slot {missing[0]} did not come back"
        elif now >= started_by:
            why = f"{view.world_size - len(workers)} workers have not registered"
        else:
            return Wait(min(started_by, return_by) if missing else started_by)
        return WritePlan(fatal_plan(plan, sorted(workers.values())), f"restart {record.generation} failed: {why}")


def _unfenced(plan: Plan, wait_s: float) -> str:
    what = "whether any worker of the last plan has ended is not known"
    if wait_s == math.inf:
        return (
            f"{what}, and since bamboo.membership.fence_s is null they may train on without etcd. "
            "End them, and the job with `bamboo stop`"
        )
    return f"{what}: in {wait_s:.0f} s (bamboo.membership.fence_s = {plan.fence_s:g}) they commit nothing any more"
