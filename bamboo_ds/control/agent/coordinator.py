"""An agent's side towards etcd: registration, lease, plans, leadership.

Training never waits for anything in here, and nothing in here waits for the worker. Two threads:
``bamboo-coordinator`` does all reading, writing and planning; ``bamboo-lease`` keeps the lease alive (:mod:`.lease`).
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from ...errors import LeaseExpired, PlanForged, StoreError, StoreUnavailable
from ...job_settings import JobSettings
from ...store.client import Store
from ...store.records import WatchEvent
from ...store.watch import Watch
from ...topology.plan import Plan
from ..fencing import now as fence_clock
from ..leader.last_lead import last_lead
from ..leader.leader import Leader
from ..registry.access import is_genuine, put_once
from ..registry.keys import Keys
from ..registry.mirror import Mirror
from ..registry.records import (
    LeaveRecord,
    LeftRecord,
    MemberRecord,
    Record,
    StopRecord,
    TimingRecord,
)
from ..web.display import JobPage
from .callbacks import Callbacks, News
from .health import HealthReplies
from .lease import LeaseKeeper, register, renew
from .mailbox import Mailbox
from .membership import EVERYTHING, Membership, check_start, followed, over_for, peers
from .neighbours import Neighbours, report_dead_agent
from .states import State

logger = logging.getLogger("bamboo_ds.control.coordinator")

_RETRY_S = 0.1
_REFUSED_RETRY_S = 1.0
#: Seconds for which a member that is lost leads on at most.
_LAST_LEAD_S = 1.0
#: Seconds that the web server gets to end.
_DISPLAY_S = 1.0


class Coordinator:
    """Keeps one member registered and informed, and contests the leadership.

    Its work follows from the member's state in the job: see :class:`.membership.Membership`.

    Args:
        store: not used before :meth:`start`; closed at the end by the coordinator.
        leader: contests and plans for this member.
        record: the member's record, without lease.
        lease_ttl_s: seconds of silence after which the member counts as lost.
        callbacks: see :class:`Callbacks`.
        last_heartbeat: monotonic seconds of the worker's newest heartbeat; asked from the coordinator's
            thread.
        after_epoch: plans up to this one are none of the member's business.
        outage_s: seconds without etcd after which a member gives up that does not take part.
        settings: what the member knows of the job's.
        display: shows the job to users while the member leads.
        clock, fence_clock: monotonic seconds, and those of :func:`bamboo_ds.control.fencing.now`.
    """

    def __init__(
        self,
        store: Store,
        leader: Leader,
        record: MemberRecord,
        *,
        lease_ttl_s: float,
        callbacks: Callbacks,
        last_heartbeat: Callable[[], float | None],
        after_epoch: int = 0,
        outage_s: float = math.inf,
        settings: JobSettings = JobSettings(),  # noqa: B008  # immutable
        display: JobPage | None = None,
        clock: Callable[[], float] = time.monotonic,
        fence_clock: Callable[[], float] = fence_clock,
    ) -> None:
        self._store, self._lease_ttl_s = store, lease_ttl_s
        self._clock = clock
        self._leader: Leader | None = leader  # ``None``: the job is being ended, and this member plans no more
        self._membership = Membership(record, after_epoch)
        self._outage_s, self._settings = outage_s, settings
        self._display = display
        self._callbacks = callbacks
        self._peers = News[tuple[tuple[str, str], ...]](callbacks.on_peers, known=())
        self._restart = News(callbacks.on_restart)
        self._stop = News(callbacks.on_stop, once=True)
        self._leave = News(callbacks.on_leave, once=True)
        # The job of one that waits is whole again, and may never need another plan.
        self._whole = News(callbacks.on_plan, once=True)
        # The worker must know of a lineage before its first commit, and of that anew once it is fenced.
        self._lineage = News[tuple[tuple[str, int], float | None]](lambda _: self._keeper.look())
        self._health = HealthReplies(store, record.id, last_heartbeat, clock)
        self._inbox = Mailbox()
        self._pending: dict[str, Record] = {}
        self._neighbours = Neighbours()
        self._departure: tuple[LeftRecord | None, StopRecord | None] | None = None
        self._leads_until: float | None = None  # once its departure is told
        self._ending = threading.Event()
        self._keeper = LeaseKeeper(
            *(
                store,
                record.id,
                lease_ttl_s,
                lambda action: self._inbox.post(action),
                callbacks.on_contact,
                self._gives_up,
                self._ending,
            ),
            clock=clock,
            fence_clock=fence_clock,
        )
        self._mirror: Mirror | None = None  # ``None``: it is to be read anew
        self._last: Mirror | None = None  # the newest one that could be read
        self._followed = followed(self._membership, None, leads=False)  # prefixes of its keys
        self._watch: Watch | None = None
        #: Its worker has failed when the job went on without this member already.
        self.superseded = False
        #: After the departure: no other member is left on this host. False while that is not known.
        self.last_of_host = False
        self._thread = threading.Thread(target=self._run, name="bamboo-coordinator", daemon=True)

    # -- called by the agent ------------------------------------------------------------------------

    def start(self) -> None:
        """Registers the member, in the background."""
        self._thread.start()

    def write(self, key: str, record: Record) -> None:
        """Writes ``record`` as soon as etcd answers; a newer record of the same key replaces it."""

        def enqueue() -> None:
            self._pending[key] = record

        self._inbox.post(enqueue)

    def mark_leaving(self) -> None:
        """Says in the member's record that it is going to vanish. The leader then gives its roles to others."""

        def mark() -> None:
            self._membership.note_leaving()
            self._pending[Keys.member(self._id)] = self._membership.record

        self._inbox.post(mark)

    def resign(self) -> None:
        """Plans no more: the job is being ended."""

        self._inbox.post(self._stop_leading)

    def _stop_leading(self) -> None:
        self._leader = None

    def leave(self, departure: LeftRecord | None, stop: StopRecord | None = None) -> None:
        """Writes why the member leaves (``None``: not worth a word), and ``stop`` if given; revokes the lease, ends.

        ``on_ended`` tells.
        """

        def depart() -> None:
            self._departure = (departure, stop)

        self._inbox.post(depart)

    def timing(self, epoch: object) -> TimingRecord | None:
        """The course of the loss that made ``epoch``, where known. Callable from any thread."""
        mirror = self._mirror
        return mirror.get(Keys.timing(epoch), TimingRecord) if mirror and isinstance(epoch, int) else None

    def close(self, timeout_s: float) -> None:
        """Gives up what is not done yet; waits up to ``timeout_s`` seconds for the threads to end."""
        self._ending.set()
        self._inbox.post(lambda: None)
        deadline = self._clock() + timeout_s
        for thread in (self._thread, self._keeper.thread):
            if thread.is_alive():
                thread.join(max(0.0, deadline - self._clock()))

    # -- the coordinator's thread -------------------------------------------------------------------

    @property
    def _id(self) -> str:
        return self._membership.record.id

    def _run(self) -> None:
        wake: float | None = self._clock()
        try:
            while not self._ending.is_set():
                self._drain(wake)
                wake = self._turn()
        except StoreUnavailable as error:
            logger.error("%s gives up: etcd has not answered for %.0f s (%s)", self._id, self._outage_s, error)
            self._callbacks.on_error(error)
        except BaseException as error:  # the agent ends its worker and says why
            logger.exception("the coordinator of %s failed", self._id)
            self._callbacks.on_error(error)
        finally:
            self._ending.set()
            with ExitStack() as last:  # all of it, in the reverse order, whatever fails
                last.callback(self._callbacks.on_ended)
                last.callback(self._store.close)
                if self._display is not None:
                    last.callback(self._display.close, _DISPLAY_S)
                last.callback(self._neighbours.close)
                last.callback(self._inbox.close)

    def _turn(self) -> float | None:
        """Does all there is to do; returns when to look again at the latest."""
        try:
            if self._departure is not None:
                return self._depart(*self._departure)
            while (mirror := self._mirror) is None or self._needs_more(mirror):
                self._mirror = self._connect()
            return self._work(mirror)
        except (StoreUnavailable, LeaseExpired) as error:
            logger.debug("etcd does not answer: %s", error)
            if self._gives_up(self._keeper.silent_s):
                raise
            return self._clock() + _RETRY_S
        except StoreError as error:
            if self._membership.state is State.LOOKING and not isinstance(error, PlanForged):
                raise  # at the start it is the settings that are wrong
            logger.error("etcd refuses a request, training goes on: %s", error)
            return self._clock() + _REFUSED_RETRY_S

    def _gives_up(self, silent_s: float) -> bool:
        """Whether etcd has been away for so long that it is gone, and this member has nothing that others need."""
        return not self._membership.takes_part and silent_s > self._outage_s

    def _drain(self, wake: float | None) -> None:
        """Handles everything in the inbox, waiting until ``wake`` for something, or for the death of a neighbour."""
        timeout = None if wake is None else max(0.0, wake - self._clock())
        self._inbox.handle_next(timeout, self._neighbours.pidfds)
        self._inbox.handle_all()
        self._neighbours.look()

    def _needs_more(self, mirror: Mirror) -> bool:
        """Whether keys have to be followed from now on that ``mirror`` has not: by one that has begun to lead, all."""
        wanted = followed(self._membership, mirror.plan, leads=mirror.leader == self._id)
        more = self._followed != EVERYTHING and not set(self._followed).issuperset(wanted)
        self._followed = wanted if more else self._followed
        return more

    def _connect(self) -> Mirror:
        if self._watch is not None:
            self._watch.cancel(wait=False)  # what it still brings is for the mirror before
        self._mirror = None
        snapshot = self._store.get_prefix(*self._followed)
        self._last = mirror = Mirror(snapshot, self._last)
        check_start(self._membership.record, mirror)
        if self._keeper.lease is None:
            self._register(mirror)
        self._watch = self._store.watch(
            self._followed, partial(self._observe, mirror), snapshot.revision + 1, on_error=self._watch_failed
        )
        if self._membership.state is State.LOOKING:
            self._membership.note_found()
            self._keep_lease()
        return mirror

    def _keep_lease(self) -> None:
        """Has the lease refreshed from now on, whatever else this member does."""
        self._keeper.thread.start()

    def _register(self, found: Mirror) -> None:
        """Puts the member's record under a new lease, if it may; ``found`` is what etcd holds, the plan at least."""
        if not self._membership.may_register(found.plan, found.plan_forged):
            return
        lease = register(self._store, self._membership.record, self._lease_ttl_s, found.revision(Keys.PLAN))
        if lease is not None:
            self._keeper.hold(lease)

    def _observe(self, mirror: Mirror, event: WatchEvent) -> None:
        def apply() -> None:
            if self._mirror is not mirror:
                return  # it has been read anew, or is about to be
            try:
                mirror.apply(event)
                plan = mirror.plan
            except PlanForged:
                self._mirror = None  # nothing can be done until the plan can be read
                return
            if plan is not None and self._membership.joins:
                self._push(plan)  # each of them: it may be listed by one, and lost by the next

        self._inbox.post(apply)

    def _watch_failed(self, error: BaseException) -> None:
        def start_again() -> None:
            if not isinstance(error, StoreError):
                raise error  # a defect here
            self._mirror = None

        self._inbox.post(start_again)

    def _work(self, mirror: Mirror) -> float | None:
        """Does as :meth:`_turn`, with what etcd holds."""
        plan, member = mirror.plan, self._membership
        if self._settings.open and (job := mirror.job) is not None and not job.settings.open:
            self._settings = job.settings
            self._callbacks.on_settings(job.settings)
        if plan is not None:
            self._push(plan)
            self._keeper.know(mirror)
            self._lineage.tell((plan.lineage, plan.fence_s))
        if mirror.restart is not None:
            self._restart.tell(mirror.restart)
        if plan is not None and (member.record.joiner or member.state is State.WAITING):
            self._follow(mirror, plan)
        if mirror.stop is not None:
            self._stop.tell(mirror.stop)
        if (leave := mirror.get(Keys.leave(self._id), LeaveRecord)) is not None:
            self._leave.tell(leave)
        self._attend_neighbours(mirror)
        if plan is not None and member.state is State.UNSURE and not plan.lost_roles:
            self._check_seen(plan)
        if member.state is State.EVICTED:
            if self._display is not None:
                self._display.close(0.0)
            return None
        if self._keeper.lease is None:
            # The mirror may be older than the outage that cost the lease.
            newest = Mirror(self._store.get_prefix(Keys.PLAN), mirror)
            self._register(newest)
            if self._keeper.lease is None:
                # The watch will bring the plan that evicts us, or one that is newer than what was found.
                return None if member.is_out(newest.plan) else self._clock() + _RETRY_S
        try:
            while self._pending:
                key, record = next(iter(self._pending.items()))
                self._put(key, record)
                del self._pending[key]
            wakes = [self._health.reply(mirror, plan)]
            if self._leader is not None:
                wakes.append(self._leader.step(mirror, self._keeper.lease, self._keeper.trusted_from))
            if self._display is not None:
                wakes.append(self._display.follow(mirror, self._keeper.lease))
        except LeaseExpired:
            self._keeper.lease = None
            return self._clock()
        return min((wake for wake in wakes if wake is not None), default=None)

    def _push(self, plan: Plan) -> None:
        """Hands ``plan`` on, if it is new, and notes what it means for this member."""
        if self._membership.note_plan(plan):
            self._callbacks.on_plan(plan)

    def _check_seen(self, plan: Plan) -> None:
        """Finds out whether this joiner may have been listed, and lost, by plans that it has not seen.

        Its record is gone then: that hangs on the lease, and the leader removes those of members that are lost.
        """
        lost = self._id in plan.lost or self._store.get(Keys.member(self._id)) is None
        self._membership.note_seen(lost)
        if lost:
            logger.error("the job may have gone on without %s, which was out of etcd's reach", self._id)
            self._callbacks.on_evicted()

    def _attend_neighbours(self, mirror: Mirror) -> None:
        """Reports members of this host whose agents have died."""
        self._neighbours.follow(self._membership.record, mirror.on_host)
        for record, at in list(self._neighbours.dead.values()):
            report_dead_agent(self._store, record, at, f"agent died, as {self._id} saw")
            del self._neighbours.dead[record.id]

    def _follow(self, mirror: Mirror, plan: Plan) -> None:
        """Does the work of a member that does not take part yet."""
        if self._membership.joins:
            self._peers.tell(peers(mirror, plan))
        whole = not plan.lost_roles and mirror.members.keys() >= set(plan.members)
        if self._membership.state is State.WAITING and whole:
            self._whole.tell(plan)
        # Where all that took part have gone one that does not has the leadership, and knows.
        if self._leader is not None and mirror.leader == self._id and over_for(self._id, mirror, plan):
            self._leader.abdicate()  # it must not lead a job on that has finished; the next one finds that out, too
            self._stop_leading()
            self._stop.tell(StopRecord(code=0, reason="the job has finished", by=self._id))

    def _put(self, key: str, record: Record) -> None:
        """Writes ``record``; the end of the job only if that does not go on without this member at that moment."""
        if isinstance(record, MemberRecord):
            renew(self._store, record, self._keeper.lease)
            return
        if not isinstance(record, StopRecord):
            self._store.put(key, record.to_json())
            return
        while not self._ending.is_set():
            # The mirror may be older than an outage in which the others have gone on.
            now = Mirror(self._store.get_prefix(Keys.PLAN))
            if self._membership.is_out(now.plan):
                self.superseded = True
                logger.warning("the job goes on without this member, which does not end it: %s", record.reason)
                return
            written = put_once(self._store, key, record.to_json(), given={Keys.PLAN: now.revision(Keys.PLAN)})
            if written or is_genuine(self._store, key):
                return

    def _depart(self, departure: LeftRecord | None, stop: StopRecord | None) -> float | None:
        """Does as :meth:`_turn`, at the end."""
        if self._leads_until is None:
            self._tell_departure(departure, stop)
            lost = departure is not None and departure.outcome == "lost"
            self._leads_until = self._clock() + (_LAST_LEAD_S if lost else 0.0)
        mirror, lease, now = self._mirror, self._keeper.lease, self._clock()
        if self._leader is not None and mirror is not None and lease is not None and now < self._leads_until:
            wake = last_lead(self._leader, self._id, mirror, lease, self._keeper.trusted_from)
            if wake is not None:
                return min(wake, self._leads_until)
        if lease is not None:
            lease.revoke()
        me = self._membership.record
        if me.state == "leaving":
            others = Mirror(self._store.get_prefix(Keys.MEMBERS)).members.values()
            self.last_of_host = me.host not in {member.host for member in others}
        self._ending.set()
        return None

    def _tell_departure(self, departure: LeftRecord | None, stop: StopRecord | None) -> None:
        own = Keys.member(self._id)
        if stop is not None:
            self._pending[Keys.STOP] = stop
        if Keys.STOP in self._pending:
            self._put(Keys.STOP, self._pending[Keys.STOP])
            del self._pending[Keys.STOP]
        if departure is not None and self.superseded:
            departure = departure.model_copy(update={"outcome": "evicted", "code": 0})
        records: dict[str, Record] = {key: record for key, record in self._pending.items() if key != own}
        if departure is not None:
            records[Keys.left(departure.id)] = departure
        # A loss waits for each write. Else the record goes with the lease: etcd may be ended when no member is there.
        erase = [own] if departure is not None and departure.outcome == "lost" else []
        self._store.put_all({key: record.to_json() for key, record in records.items()}, erase)
        self._pending.clear()
