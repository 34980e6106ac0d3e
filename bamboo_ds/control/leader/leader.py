"""The leader's hands: brings a :class:`~.decisions.Decider`'s actions into etcd.

Every agent has a :class:`Leader`; only the one whose member holds the ``leader`` key acts. A leader that has
been deposed without knowing loses the compare-and-swap on the plan.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...config import BambooConfig
from ...observe.events import (
    Event,
    EventWriter,
    Fatal,
    MemberJoined,
    MemberLost,
    MemoryShort,
    PlanWritten,
    Restart,
    RunStarted,
    TakeoverDone,
    TakeoverPlanned,
)
from ...observe.story import Story
from ...store.client import Lease, Store
from ...topology.plan import UNSTARTED, Plan
from ...variables import ENV_LAUNCH
from ..registry.access import is_genuine, put_once
from ..registry.keys import Keys
from ..registry.mirror import Mirror
from ..registry.records import (
    HealthRequest,
    LeaderRecord,
    MemberRecord,
    ProgressRecord,
    RestartRecord,
    StopRecord,
    TimingRecord,
    in_slot_order,
    newest,
)
from ..registry.vacancies import claim_slot
from ..reporting import emit_or_log
from ..settings import AgentSettings
from .actions import Ask, Assign, Complete, Loss, StartDataWorkers, StopJob, Wait, WritePlan
from .boundary import short_of_memory
from .decisions import Decider
from .departures import Deadlines, going
from .pruning import obsolete
from .takeovers import Takeovers
from .view import View

logger = logging.getLogger("bamboo_ds.control.leader")

#: Seconds that a feeder gets to register until another one is started.
_FEEDER_S = 30.0


@dataclass(frozen=True)
class _Attempt:
    """A plan that may have been written: the answer has not come.

    Attributes:
        action: with the plan's nonce.
        old: the plan that it replaces.
        members, progress: those known at that time; known: also members that are gone.
    """

    action: WritePlan
    old: Plan | None
    known: Mapping[str, MemberRecord]
    members: Mapping[str, MemberRecord]
    progress: Mapping[str, ProgressRecord]


class Leader:
    """Contests the leadership for one member and, while it holds it, plans.

    Not thread-safe: everything is called from the coordinator's thread.

    Args:
        settings: of the member's agent.
        member: id of the contesting member.
        on_feed: starts a worker in a new slot (first argument) that runs as a rank (second), to draw its batches.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        store: Store,
        events: EventWriter,
        settings: AgentSettings,
        member: str,
        on_feed: Callable[[int, int], None] = lambda slot, rank: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._events, self._clock = store, events, clock
        self._settings, self._member = settings, member
        self._world_size = settings.world_size
        self._decider = Decider(settings.bamboo)
        self._on_feed = on_feed
        #: When a feeder was started, and in which slot, by rank.
        self._fed: dict[int, tuple[float, int]] = {}
        self._deadlines = Deadlines()
        self._told_last = False
        self._written = 0  # newest epoch written here; the mirror may still lag behind it
        self._assigned = UNSTARTED  # the same for restarts
        self._pruned = 0  # newest epoch in which stale keys were removed
        self._told: str | None = None
        self._stopped = False
        self._attempts: list[_Attempt] = []
        self._stop_attempt: StopJob | None = None
        self._takeovers = Takeovers()

    def step(self, mirror: Mirror, lease: Lease, trusted_from: float) -> float | None:
        """Contests, and acts if leading. Returns the monotonic time at which to call again at the latest.

        Raises ``StoreUnavailable`` if etcd does not answer (call again), ``LeaseExpired`` if the member has
        to register anew first.
        """
        now = self._clock()
        self.tell_takeovers(mirror)
        self._deadlines.note(mirror.notices, now)
        leader = mirror.leader
        if self._yields(mirror):
            if leader == self._member:
                self.abdicate()
            return None
        if leader is None and not self._stopped:
            mine = LeaderRecord(id=self._member).to_json()
            self._store.compare_and_swap(Keys.LEADER, mirror.forged_revision(Keys.LEADER), mine, lease)
            return None  # the watch tells who won
        plan = mirror.plan
        lagging = (plan is not None and plan.epoch < self._written) or (plan is None and self._written > 0)
        generation = mirror.restart.generation if mirror.restart else UNSTARTED
        if leader != self._member or lagging or generation < self._assigned or self._stopped:
            return None
        if mirror.plan_forged and plan is not None:
            # Members that begin, or come back, find no other.
            logger.warning("putting the plan of epoch %d back in its place", plan.epoch)
            self._store.compare_and_swap(Keys.PLAN, mirror.revision(Keys.PLAN), plan.to_json())
            return None  # the watch tells
        if plan is not None and plan.lost and self._remove_lost(plan, mirror):
            return None  # before any other plan, which does not name them any more
        view = View.of(mirror, self._world_size, trusted_from, self._deadlines.near(now))
        self._tell_last(view)
        listed = view.plan.members if view.plan is not None else ()
        came = {view.members[member].slot for member in listed if member in view.members}
        # The next one is for another need. An older one that leaves is in the plan until this one has come.
        self._fed = {rank: feeder for rank, feeder in self._fed.items() if feeder[1] not in came}
        action = self._decider.decide(view, now)
        if isinstance(action, Wait):
            if action.reason is not None and action.reason != self._told:
                logger.warning("the job waits: %s", action.reason)
            self._told = action.reason
            self._prune(mirror)
            return _earliest(action.until, self._deadlines.wake(now))
        if isinstance(action, Assign):
            self._assign(action.record, mirror)
            return None
        if isinstance(action, Ask):
            self._ask(action, mirror)
            return None  # the watch tells
        if isinstance(action, Complete):
            self._complete(action.settings, mirror)
            return None
        if isinstance(action, StartDataWorkers):
            again = min(self._feed(rank, mirror) for rank in action.ranks)
            return _earliest(again, self._deadlines.wake(now))
        if isinstance(action, StopJob):
            self._stop(action, mirror)
        else:
            self._write(action, mirror)
        return None

    def _yields(self, mirror: Mirror) -> bool:
        """Whether this member leaves and another one can lead."""
        me, plan = mirror.get(Keys.member(self._member), MemberRecord), mirror.plan
        if me is None or me.state != "leaving" or plan is None:
            return False
        return any(r.id in plan.members and r.state != "leaving" and not r.feeder for r in mirror.members.values())

    def abdicate(self) -> None:
        """Gives the leadership up, if this member has it."""
        now = Mirror(self._store.get_prefix(Keys.LEADER))
        if now.leader == self._member:
            logger.info("giving up the leadership: this member leaves")
            self._store.compare_and_delete(Keys.LEADER, now.revision(Keys.LEADER))

    def _tell_last(self, view: View) -> None:
        """Says once that members which should leave cannot, since nobody would be left."""
        plan = view.plan
        if plan is None or any(view.finished(member) for member in plan.members):
            return
        leaving = [r.id for r in view.members.values() if r.state == "leaving" and r.id in plan.members]
        stuck = bool(leaving) and not going(view, plan)
        if stuck and not self._told_last:
            logger.warning("nobody is left who could take over from %s: they stay", ", ".join(leaving))
        self._told_last = stuck

    def _feed(self, rank: int, mirror: Mirror) -> float:
        """Has a feeder started, unless one is on its way; returns when to look again."""
        now = self._clock()
        begun, slot = self._fed.get(rank, (-math.inf, None))
        if now >= begun + _FEEDER_S or any(departure.slot == slot for departure in mirror.left.values()):
            begun, slot = now, claim_slot(self._store, self._new_slot(mirror))
            self._fed[rank] = begun, slot
            self._on_feed(slot, rank)
        return begun + _FEEDER_S

    def _new_slot(self, mirror: Mirror) -> int:
        """The first one behind those of the job and of all members."""
        return max([self._world_size - 1, *(member.slot for member in mirror.members.values())]) + 1

    def _assign(self, record: RestartRecord, mirror: Mirror) -> None:
        """Has the workers started again."""
        first = self._new_slot(mirror)
        extra = {rank: claim_slot(self._store, first) for ranks in record.ranks.values() for rank in ranks[1:]}
        record = record.model_copy(update={"extra": extra})
        if not self._store.compare_and_swap(Keys.RESTART, mirror.revision(Keys.RESTART), record.to_json()):
            logger.warning("lost the leadership: another leader starts the job again")
            return
        self._assigned = record.generation
        slots = sorted(record.ranks)
        if record.generation == 0:
            self._emit(RunStarted, 0, members=len(slots), command=list(self._settings.command))
            return
        logger.warning(
            "restart %d on slots %s, from %s", record.generation, slots, record.checkpoint or "the beginning"
        )
        told = record.model_dump(include={"checkpoint", "step", "global_step"})
        self._emit(Restart, record.after_epoch, number=record.generation, slots=slots, **told)

    def _ask(self, action: Ask, mirror: Mirror) -> None:
        assert mirror.plan is not None
        for member in action.members:
            self._store.put(Keys.asked(member), HealthRequest(id=member, epoch=mirror.plan.epoch).to_json())

    def _complete(self, told: BambooConfig, mirror: Mirror) -> None:
        """Completes the job's record, once; the watch tells all."""
        job = mirror.job
        assert job is not None
        complete = job.model_copy(update={"settings": job.settings.completed(told)})
        self._store.compare_and_swap(Keys.SPEC, mirror.revision(Keys.SPEC), complete.to_json())

    def _prune(self, mirror: Mirror) -> None:
        """Removes stale keys, once in an epoch that all members have entered: each leader holds a copy of all keys."""
        plan = mirror.plan
        if plan is None or plan.epoch == self._pruned or (keys := obsolete(mirror, plan)) is None:
            return
        self._store.delete_keys(keys)
        self._pruned = plan.epoch
        logger.debug("have removed %d keys of departed members and past epochs", len(keys))

    # -- writing --------------------------------------------------------------------------------------

    def _write(self, action: WritePlan, mirror: Mirror) -> None:
        new_plan = replace(action.plan, places=_places(action.plan, mirror), nonce=secrets.token_hex(8))
        if not new_plan.origin:
            new_plan = replace(new_plan, origin=new_plan.nonce)
        if mirror.plan is None or (mirror.plan.layout is None and new_plan.layout is not None):
            # Before this no engine has been there that could commit.
            settings = self._settings.settings if mirror.job is None else mirror.job.settings
            new_plan = replace(new_plan, fence_s=settings.values.fence_s)
        times = {}
        if action.losses:
            # With the plan, so that whoever knows the plan knows its times.
            first = min(loss.noticed for loss in action.losses)
            detections = [loss.detection_s for loss in action.losses if loss.detection_s is not None]
            taken = self._clock() - first
            timing = TimingRecord(epoch=new_plan.epoch, detection_s=max(detections, default=None), plan_s=taken)
            times[Keys.timing(new_plan.epoch)] = timing.to_json()
        # Several may be under way if answers are lost; etcd takes one of them at most.
        self._attempts.append(
            _Attempt(replace(action, plan=new_plan), mirror.plan, mirror.known, mirror.members, mirror.progress)
        )
        if self._store.compare_and_swap(Keys.PLAN, mirror.revision(Keys.PLAN), new_plan.to_json(), also=times):
            self._won(self._attempts[-1])
        elif len(self._attempts) == 1:
            logger.warning("lost the leadership: another leader wrote a plan before epoch %d", new_plan.epoch)

    def _recognise(self, mirror: Mirror) -> None:
        """Finds out what has become of attempts without answer."""
        for attempt in list(self._attempts):
            epoch, nonce = attempt.action.plan.epoch, attempt.action.plan.nonce
            if mirror.nonce(epoch) == nonce:
                self._won(attempt)
                break
            if mirror.plan is not None and mirror.plan.epoch >= epoch:
                self._attempts.remove(attempt)
        if self._stop_attempt is not None and mirror.stop is not None:
            action, self._stop_attempt = self._stop_attempt, None
            if mirror.stop.by == self._member:
                self._tell_stop(action, mirror)

    def _remove_lost(self, plan: Plan, mirror: Mirror) -> bool:
        """Removes the records of members that ``plan`` has lost; returns whether there were any.

        One that was accused is registered all the time. Without its record it takes no part in an election and is not
        admitted again; a joiner learns by that what it may not have seen.
        """
        registered = [member for member in plan.lost if member in mirror.members]
        for member in registered:
            self._store.delete(Keys.member(member))
        return bool(registered)

    def _won(self, attempt: _Attempt) -> None:
        """The attempt is the plan now."""
        action = attempt.action
        self._attempts.clear()
        self._written = action.plan.epoch
        logger.info("wrote the plan of epoch %d: %s", action.plan.epoch, action.reason)
        self._emit_changes(attempt)

    def _stop(self, action: StopJob, mirror: Mirror) -> None:
        record = StopRecord(code=action.code, reason=action.reason, by=self._member)
        self._stop_attempt = action
        # What was decided holds for the plan that it was decided by.
        if put_once(self._store, Keys.STOP, record.to_json(), given={Keys.PLAN: mirror.revision(Keys.PLAN)}):
            self._stop_attempt = None
            self._tell_stop(action, mirror)
        elif not is_genuine(self._store, Keys.STOP):
            self._stop_attempt = None  # refused, since the plan has changed: what follows it decides anew
            return
        self._stopped = True

    def _tell_stop(self, action: StopJob, mirror: Mirror) -> None:
        logger.error("ending the job: %s", action.reason)
        epoch = mirror.plan.epoch if mirror.plan else 0
        for event in self._losses(action.losses, epoch):
            emit_or_log(self._events, event)
        if action.losses:
            self._emit_fatal([], action.losses, epoch, mirror.progress)

    # -- events -------------------------------------------------------------------------------------

    def _event(self, kind: Callable[..., Event], epoch: int, **fields: Any) -> Event:
        return kind(job=self._settings.job, member=self._member, epoch=epoch, **fields)

    def _emit(self, kind: Callable[..., Event], epoch: int, **fields: Any) -> None:
        emit_or_log(self._events, self._event(kind, epoch, **fields))

    def _joined(self, member: MemberRecord, epoch: int) -> Event:
        return self._event(MemberJoined, epoch, member_id=member.id, host=member.host, rank=member.script_rank)

    def _written_plan(self, plan: Plan, reason: str) -> Event:
        whole = {name: list(getattr(plan, name)) for name in ("members", "owners", "shadows", "lost")}
        lent = [(each.rank, *plan.lent_blocks(each)) for each in plan.lent]
        pipelines = plan.layout.pipelines if plan.layout else None
        return self._event(PlanWritten, plan.epoch, **whole, pipelines=pipelines, lent=lent, reason=reason)

    def _emit_changes(self, attempt: _Attempt) -> None:
        old, action, new = attempt.old, attempt.action, attempt.action.plan
        joined = set(new.members).difference(() if old is None else old.members)
        for member in in_slot_order(attempt.members.values()):
            if member.id in joined:
                emit_or_log(self._events, self._joined(member, new.epoch))
        lost, written = self._losses(action.losses, old.epoch if old else 0), self._written_plan(new, action.reason)
        for event in (*lost, written):
            emit_or_log(self._events, event)
        # In the terminal of another launcher no launcher of ours tells the story.
        if lost and old is not None and self._settings.launched and ENV_LAUNCH not in os.environ:
            known = [self._joined(each, old.epoch) for each in attempt.known.values()]
            logger.warning("%s", _loss_line([*known, self._written_plan(old, ""), *lost, written]))
        short = short_of_memory(new)
        if new.layout and (short != short_of_memory(old) if old else any(short.values())):
            self._emit(MemoryShort, new.epoch, **short)
        if new.lost_roles:
            roles = [new.layout.role(rank) for rank in new.lost_roles] if new.layout else []
            stages = [(role.pipeline, role.stage) for role in roles]
            self._emit_fatal(stages, action.losses, new.epoch, attempt.progress)
        if old is None or new.layout is None or old.lost_roles:
            return
        since = min((loss.noticed for loss in action.losses), default=self._clock())
        for each in self._takeovers.plan(old, new, since):
            self._emit(TakeoverPlanned, new.epoch, **{"role": each.role, "from": each.before, "to": each.after})

    def tell_takeovers(self, mirror: Mirror) -> bool:
        """Tells of plans of which it was not known whether they are written, and of takeovers that are done.

        Returns:
            Whether other takeovers are under way.
        """
        self._recognise(mirror)
        for each in self._takeovers.done(mirror.workers) if self._takeovers.under_way else ():
            change = {"role": each.role, "from": each.before, "to": each.after}
            self._emit(TakeoverDone, each.epoch, **change, seconds=max(0.0, self._clock() - each.since))
        return self._takeovers.under_way

    def _losses(self, losses: tuple[Loss, ...], epoch: int) -> list[Event]:
        return [
            self._event(
                *(MemberLost, epoch),
                member_id=loss.member,
                reason=loss.reason,
                detail=loss.detail,
                detection_seconds=loss.detection_s,
            )
            for loss in losses
        ]

    def _emit_fatal(
        self,
        stages: list[tuple[int, int]],
        losses: tuple[Loss, ...],
        epoch: int,
        progress: Mapping[str, ProgressRecord],
    ) -> None:
        saved = newest(progress.values(), saved=True)
        members, checkpoint = [loss.member for loss in losses], saved.checkpoint if saved else None
        self._emit(Fatal, epoch, stages=stages, members=members, checkpoint=checkpoint)


def _loss_line(events: Iterable[Event]) -> str:
    """A loss as one line.

    Args:
        events: members and the plan before the loss, the members that are lost, and the plan without them.
    """
    story = Story()
    for event in events:
        story.tell(event)
    return "; ".join(line.text for line in story.end())


def _earliest(*times: float | None) -> float | None:
    return min((time for time in times if time is not None), default=None)


def _places(plan: Plan, mirror: Mirror) -> tuple[str, ...]:
    """The addresses of the workers of the members of ``plan``."""
    known, before = mirror.known, mirror.plan
    places = {} if before is None else dict(zip(before.members, before.places, strict=False))
    return tuple(known[m].place if m in known else places.get(m, "") for m in plan.members)
