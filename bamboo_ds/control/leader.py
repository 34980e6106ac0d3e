"""The leader's hands: brings a :class:`~bamboo_ds.control.decisions.Decider`'s actions into etcd.

Every agent has a :class:`Leader`; only the one whose member holds the ``leader`` key acts. A leader that has
been deposed without knowing loses the compare-and-swap on the plan.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ..observe.events import (
    Event,
    EventWriter,
    Fatal,
    MemberJoined,
    MemberLost,
    PlanWritten,
    Takeover,
)
from ..store import Lease, Store
from ..topology.plan import Plan
from .decisions import Decider, Feed, Loss, StopJob, View, Wait, WritePlan
from .membership import Keys, LeaderRecord, StopRecord, TimingRecord, in_slot_order
from .mirror import Mirror
from .reporting import emit_or_log

logger = logging.getLogger("bamboo_ds.control.leader")

#: Seconds that a feeder gets to register until another one is started.
_FEEDER_S = 30.0


class Leader:
    """Contests the leadership for one member and, while it holds it, plans.

    Not thread-safe: everything is called from the coordinator's thread.

    Args:
        member: id of the contesting member.
        job: name of the job, for events.
        world_size: number of slots.
        settle_s: see :class:`Decider`.
        patience_s: see :class:`Decider`.
        on_feed: starts a worker in a new slot (first argument) that runs as a rank (second), to draw its batches.
    """

    def __init__(
        self,
        store: Store,
        events: EventWriter,
        *,
        member: str,
        job: str,
        world_size: int,
        settle_s: float,
        patience_s: float,
        on_feed: Callable[[int, int], None] = lambda slot, rank: None,
    ) -> None:
        self._store = store
        self._events = events
        self._member = member
        self._job = job
        self._world_size = world_size
        self._decider = Decider(settle_s, patience_s)
        self._on_feed = on_feed
        self._fed: dict[int, float] = {}  # when a feeder was started, by rank
        self._written = 0  # newest epoch written here; the mirror may still lag behind it
        self._stopped = False

    def step(self, mirror: Mirror, lease: Lease, trusted_from: float) -> float | None:
        """Contest, and act if leading. Returns the monotonic time at which to call again at the latest.

        Raises ``StoreUnavailable`` if etcd does not answer (call again), ``LeaseExpired`` if the member has
        to register anew first.
        """
        leader = mirror.leader
        if leader is None and not self._stopped:
            self._store.create(Keys.LEADER, LeaderRecord(id=self._member).to_json(), lease)
            return None  # the watch tells who won
        plan = mirror.plan
        lagging = (plan is not None and plan.epoch < self._written) or (plan is None and self._written > 0)
        if leader != self._member or lagging or self._stopped:
            return None
        view = View(
            world_size=self._world_size,
            plan=plan,
            members=mirror.members,
            left=mirror.left,
            reports=mirror.reports,
            standings=mirror.standings,
            suspicions=mirror.suspicions,
            vouched=mirror.vouched,
            trusted_from=trusted_from,
            stopping=mirror.stop is not None,
        )
        action = self._decider.decide(view, time.monotonic())
        if isinstance(action, Wait):
            return action.until
        if isinstance(action, Feed):
            return self._feed(action.rank, mirror)
        if isinstance(action, StopJob):
            self._stop(action, mirror)
        else:
            self._write(action, mirror)
        return None

    def _feed(self, rank: int, mirror: Mirror) -> float:
        """Have a feeder started, unless one is on its way; returns when to look again."""
        now = time.monotonic()
        if now >= self._fed.get(rank, 0.0) + _FEEDER_S:
            self._fed[rank] = now
            first = max([self._world_size - 1, *(member.slot for member in mirror.members.values())]) + 1
            self._on_feed(claim_slot(self._store, first), rank)
        return self._fed[rank] + _FEEDER_S

    def _write(self, action: WritePlan, mirror: Mirror) -> None:
        new_plan = action.plan
        if action.losses:
            # Before the plan, so that whoever knows the plan knows its times.
            first = min(loss.noticed for loss in action.losses)
            detections = [loss.detection_s for loss in action.losses if loss.detection_s is not None]
            taken = time.monotonic() - first
            timing = TimingRecord(epoch=new_plan.epoch, detection_s=max(detections, default=None), plan_s=taken)
            self._store.put(Keys.timing(new_plan.epoch), timing.to_json())
        if not self._store.compare_and_swap(Keys.PLAN, mirror.plan_revision, new_plan.to_json()):
            logger.warning("lost the leadership: another leader wrote a plan before epoch %d", new_plan.epoch)
            return
        self._written = new_plan.epoch
        logger.info("wrote the plan of epoch %d: %s", new_plan.epoch, action.reason)
        self._emit_changes(mirror.plan, action, mirror)
        for loss in action.losses:
            if loss.member in mirror.members:
                # Accused but registered: without its key it cannot take part in an election.
                self._store.delete(Keys.member(loss.member))

    def _stop(self, action: StopJob, mirror: Mirror) -> None:
        record = StopRecord(code=action.code, reason=action.reason, by=self._member)
        if self._store.create(Keys.STOP, record.to_json()):
            logger.error("ending the job: %s", action.reason)
            epoch = mirror.plan.epoch if mirror.plan else 0
            self._emit_losses(action.losses, epoch)
            if action.losses:
                self._emit_fatal([], action.losses, epoch, mirror)
        self._stopped = True

    def _emit(self, event: Event) -> None:
        emit_or_log(self._events, event)

    # -- events -------------------------------------------------------------------------------------

    def _emit_changes(self, old: Plan | None, action: WritePlan, mirror: Mirror) -> None:
        new = action.plan
        for member in in_slot_order(mirror.members.values()):
            if member.id in new.members and (old is None or member.id not in old.members):
                self._emit(
                    MemberJoined(
                        job=self._job,
                        member=self._member,
                        epoch=new.epoch,
                        member_id=member.id,
                        host=member.host,
                        rank=member.home,
                    )
                )
        self._emit_losses(action.losses, old.epoch if old else 0)
        self._emit(
            PlanWritten(
                job=self._job,
                member=self._member,
                epoch=new.epoch,
                members=list(new.members),
                owners=list(new.owners),
                shadows=list(new.shadows),
                lost=list(new.lost),
                reason=action.reason,
            )
        )
        if old is None or new.layout is None:
            return
        for role in new.layout.roles:
            before, after = old.owners[new.layout.rank(role)], new.owners[new.layout.rank(role)]
            if before != after:
                self._emit(
                    Takeover.model_validate(
                        {
                            "job": self._job,
                            "member": self._member,
                            "epoch": new.epoch,
                            "role": (role.pipeline, role.stage),
                            "from": before,
                            "to": after,
                        }
                    )
                )
        if new.unheld:
            roles = [new.layout.role(rank) for rank in new.unheld]
            stages = [(role.pipeline, role.stage) for role in roles]
            self._emit_fatal(stages, action.losses, new.epoch, mirror)

    def _emit_losses(self, losses: tuple[Loss, ...], epoch: int) -> None:
        for loss in losses:
            self._emit(
                MemberLost(
                    job=self._job,
                    member=self._member,
                    epoch=epoch,
                    member_id=loss.member,
                    reason=loss.reason,
                    detail=loss.detail,
                    detection_seconds=loss.detection_s,
                )
            )

    def _emit_fatal(self, stages: list[tuple[int, int]], losses: tuple[Loss, ...], epoch: int, mirror: Mirror) -> None:
        newest = max(mirror.progress.values(), key=lambda p: (p.checkpoint is not None, p.step), default=None)
        self._emit(
            Fatal(
                job=self._job,
                member=self._member,
                epoch=epoch,
                stages=stages,
                members=[loss.member for loss in losses],
                checkpoint=newest.checkpoint if newest else None,
            )
        )


def claim_slot(store: Store, first: int) -> int:
    """A slot number from ``first`` on that nobody else has; claimed for the job's whole life."""
    slot = first
    while not store.create(Keys.slot(slot), str(slot)):
        slot += 1
    return slot
