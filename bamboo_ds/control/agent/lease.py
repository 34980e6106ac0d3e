"""Keeps a member's lease, and its connection to etcd, alive, on a thread of its own, which no slow request holds up."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from functools import partial

from ...errors import ProtocolError, StoreError, StoreUnavailable
from ...store.client import Lease, Store
from ...store.records import KeyValue
from ...topology.plan import Plan
from ..fencing import contact_with
from ..fencing import now as fence_clock
from ..messages import Contact
from ..registry.keys import Keys
from ..registry.mirror import Mirror, read_plan
from ..registry.records import MemberRecord

logger = logging.getLogger("bamboo_ds.control.lease")

#: Shares of the TTL after which the lease is refreshed, and after which a missing refresh means an outage.
#: A member that was refreshed in time survives an outage of (1 - REFRESH) TTLs, so every outage that can
#: cost a lease is longer than _OUTAGE TTLs for everyone.
REFRESH = 0.2
#: A broken connection, a stopped etcd and a cluster without quorum leave a watch silent forever; none of them answers a
#: refresh.
_OUTAGE = 0.6
#: Share of ``fence_s`` after which the plan is read again.
_LOOK = 0.1


def register(store: Store, record: MemberRecord, ttl_s: float, plan_revision: int) -> Lease | None:
    """Puts a member's ``record`` under a new lease of ``ttl_s`` seconds.

    Returns:
        The lease; ``None`` if that was not done, since the plan is not of ``plan_revision`` any more.
    """
    store.put(Keys.known(record.id), record.to_json())
    key, lease = Keys.member(record.id), store.lease(ttl_s)
    entry, leased = store.get(key), record.model_copy(update={"lease": lease.id})
    if record.joiner and record.process_space:
        store.put(Keys.host(record.process_space, record.id), leased.to_json(), lease)
    before = entry.mod_revision if entry else 0
    if store.compare_and_swap(key, before, leased.to_json(), lease, {Keys.PLAN: plan_revision}):
        return lease
    lease.revoke()
    return None


def renew(store: Store, record: MemberRecord, lease: Lease | None) -> None:
    """Puts a member's ``record`` again, unless the leader has removed it."""
    entry = store.get(Keys.member(record.id))
    if entry is not None and lease is not None:
        leased = record.model_copy(update={"lease": lease.id})
        store.compare_and_swap(Keys.member(record.id), entry.mod_revision, leased.to_json(), lease)


class LeaseKeeper:
    """The lease of one member, and the time of etcd's last answer.

    Args:
        store: of the member's coordinator.
        member: its id, for the log.
        ttl_s: seconds that the lease lasts without a refresh.
        post: has an action called on the coordinator's thread.
        on_contact: called with what etcd has just said of its newest plan, on this object's thread.
        gives_up: whether the member, which has not had contact for so many seconds, need not be kept any more.
        ending: set when the coordinator ends.
        clock, fence_clock: monotonic seconds, and those of :func:`bamboo_ds.control.fencing.now`.

    Attributes:
        lease: the one that the member is registered under. Set by the coordinator's thread.
    """

    def __init__(
        self,
        store: Store,
        member: str,
        ttl_s: float,
        post: Callable[[Callable[[], None]], None],
        on_contact: Callable[[Contact], None],
        gives_up: Callable[[float], bool],
        ending: threading.Event,
        clock: Callable[[], float] = time.monotonic,
        fence_clock: Callable[[], float] = fence_clock,
    ) -> None:
        self._store, self._member, self._ttl_s = store, member, ttl_s
        self._post, self._on_contact, self._gives_up, self._ending = post, on_contact, gives_up, ending
        self._clock, self._fence_clock = clock, fence_clock
        self.lease: Lease | None = None
        self._lost: Lease | None = None
        self._seen: tuple[int, Plan | None] = 0, None  # the plan that was read last
        self._read_epoch = 0  # the newest epoch that was
        self._looked_at = 0.0
        self._last_contact = clock()
        self._trusted_from = 0.0
        self.thread = threading.Thread(target=self._keep, name="bamboo-lease", daemon=True)

    def hold(self, lease: Lease) -> None:
        """The member has been registered under ``lease``."""
        self.lease = lease
        self._last_contact = self._clock()
        # Nothing is known of what was before: others may have lost their leases by an outage, and be about to return.
        self._trusted_from = self._last_contact + self._ttl_s

    @property
    def silent_s(self) -> float:
        """Seconds since etcd has answered."""
        return self._clock() - self._last_contact

    @property
    def trusted_from(self) -> float:
        """Monotonic seconds from which on absence means loss; see :class:`~bamboo_ds.control.leader.view.View`."""
        if self.silent_s > _OUTAGE * self._ttl_s:
            return self._clock() + self._ttl_s
        return self._trusted_from

    def _keep(self) -> None:
        while not self._ending.wait(REFRESH * self._ttl_s):
            try:
                self.stay()
            except StoreUnavailable as error:
                if self._ending.is_set():
                    return
                logger.warning("cannot refresh the lease of %s, training goes on: %s", self._member, error)
                if self._gives_up(self.silent_s):
                    self._post(partial(_raise, error))
                    return
            except StoreError as error:
                if self._ending.is_set():  # then it is only that the store has been closed
                    return
                logger.error("etcd refuses to refresh the lease of %s: %s", self._member, error)
            except ProtocolError as error:
                self._post(partial(_raise, error))
                return

    def stay(self) -> None:
        """Refreshes the lease; now and then learns whether the job goes on with the plan that the worker has."""
        lease = self.lease
        if lease is not None and lease is not self._lost:
            alive = lease.refresh()
            now = self._clock()
            if now - self._last_contact > _OUTAGE * self._ttl_s:
                self._trusted_from = now + self._ttl_s
            self._last_contact = now
            if not alive:
                self._lost = lease
                logger.warning("the lease of %s ran out", self._member)
                self._post(partial(self._forget, lease))
        plan = self._seen[1]
        pause_s = 0.0 if plan is None or lease is None or lease is self._lost else _LOOK * (plan.fence_s or math.inf)
        if self._clock() >= self._looked_at + pause_s:
            self.look()

    def know(self, mirror: Mirror) -> None:
        """Takes the plan over that ``mirror`` has read, so that it is not read twice. From the coordinator's thread."""
        plan, revision = mirror.plan, mirror.revision(Keys.PLAN)
        if plan is not None and not mirror.plan_forged and revision > self._seen[0]:
            self._seen = revision, plan

    def look(self) -> None:
        """Learns whether the job still goes on with the plan that the worker has. Callable from any thread."""
        begun = self._fence_clock()
        plan = self._read(self._store.get(Keys.PLAN))
        self._looked_at = self._clock()
        if plan is None or plan.epoch < self._read_epoch:
            return  # one of the past says nothing of the present
        self._read_epoch = plan.epoch
        contact = contact_with(plan, begun)
        if contact is not None:
            self._on_contact(contact)

    def _read(self, entry: KeyValue | None) -> Plan | None:
        """The plan in ``entry``; mostly it has been read before."""
        if entry is None:
            return None
        revision, plan = self._seen
        if revision != entry.mod_revision:
            plan = read_plan(entry)
            self._seen = entry.mod_revision, plan
        return plan

    def _forget(self, lease: Lease) -> None:
        if self.lease is lease:
            self.lease = None


def _raise(error: BaseException) -> None:
    raise error
