"""A local copy of a job's keys, or of some of them, kept current by a watch."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TypeVar, cast

from pydantic import BaseModel, Field, ValidationError

from ...errors import PlanForged, ProtocolError, faults_of
from ...secret import ENV_SECRET_FILE
from ...store.records import KeyValue, Snapshot, WatchEvent
from ...topology import plan as plans
from ...topology.plan import Plan
from .keys import Keys
from .records import (
    HealthReply,
    HealthRequest,
    JobRecord,
    LayoutRecord,
    LeaderRecord,
    LeftRecord,
    MemberRecord,
    NoticeRecord,
    ProgressRecord,
    Record,
    RestartRecord,
    StopRecord,
    SuspicionRecord,
    WorkerState,
)

logger = logging.getLogger("bamboo_ds.control.mirror")

R = TypeVar("R", bound=Record)

_FORGED = f"is not from a process that knows the job's secret ({ENV_SECRET_FILE})"
#: Epochs whose nonces are known, the newest ones: more than one attempt to write a plan is hardly ever under way.
_KNOWN_NONCES = 64


class _Version(BaseModel):
    """The part that plans of all versions have."""

    number: int = Field(alias="schema")


class Mirror:
    """The keys of a job: all, or those that were asked for. Not thread-safe: one thread applies and reads.

    Each record is read once. What is returned does not change any more, and is the same object until one of the records
    in it changes.

    A record that cannot be read (a newer version's, somebody's mistake) or is not genuine is told in the log and counts
    for nothing: what its key held before, if that is known, stays in force. Without the plan nothing can be done: one
    that cannot be read raises :class:`ProtocolError`, also here and in :meth:`apply`, and one that is not genuine
    :class:`PlanForged` if none is known from before. Epochs only grow: a plan that is older than one known from before
    has been written again by somebody else, and is treated as one that is not genuine.

    Args:
        before: an older mirror of the same job, for what it knows of the newest plan.
    """

    def __init__(self, snapshot: Snapshot, before: Mirror | None = None) -> None:
        self._entries: dict[str, KeyValue] = dict(snapshot.entries)
        self._records_read: dict[str, tuple[int, Record | None]] = {}  # by key: revision, and what counts
        self._tables: dict[str, Mapping[str, Record]] = {}  # by prefix: what counts, by the rest of its key
        self._changed: dict[str, dict[str, None]] = {}  # by prefix: keys that its table does not have as they are
        self._all_known: tuple[Mapping[str, MemberRecord], ...] = ()  # those known, living, and both
        self._plan: tuple[int, Plan] | None = None if before is None or before._plan is None else (0, before._plan[1])
        self._plan_forged = False
        self._nonces: dict[int, str] = {}
        #: Counts what :meth:`apply` has taken over.
        self.changes = 0
        self._note_plan()

    def apply(self, event: WatchEvent) -> None:
        """Applies one change."""
        self.changes += 1
        self._changed.setdefault(event.key[: event.key.find("/") + 1], {})[event.key] = None
        if event.kind == "put":
            self._entries[event.key] = event.kv
        else:
            self._entries.pop(event.key, None)
            self._records_read.pop(event.key, None)
        if event.key == Keys.PLAN:
            self._note_plan()

    def _note_plan(self) -> None:
        plan = self.plan
        if plan is not None:
            self._nonces[plan.epoch] = plan.nonce
            self._nonces.pop(plan.epoch - _KNOWN_NONCES, None)

    def nonce(self, epoch: int) -> str | None:
        """The nonce of the plan of ``epoch``, if this mirror has seen it."""
        return self._nonces.get(epoch)

    @property
    def plan(self) -> Plan | None:
        """The newest plan."""
        entry = self._entries.get(Keys.PLAN)
        if entry is None:
            return None
        if self._plan is None or self._plan[0] != entry.mod_revision:
            self._plan = (entry.mod_revision, self._plan_of(entry))
        return self._plan[1]

    def _plan_of(self, entry: KeyValue) -> Plan:
        known, why = None if self._plan is None else self._plan[1], _FORGED
        if entry.genuine or known is None:
            found = read_plan(entry)
            if known is None or found.epoch >= known.epoch:
                self._plan_forged = False
                return found
            why = f"is that of epoch {found.epoch}, which somebody has written again"
        self._plan_forged = True
        logger.error("the plan in etcd %s; that of epoch %d stays in force", why, known.epoch)
        return known

    @property
    def plan_forged(self) -> bool:
        """Whether somebody else has overwritten the plan."""
        return Keys.PLAN in self._entries and self._plan_forged

    @property
    def leader(self) -> str | None:
        """The leading member; none while a record stands there that is not genuine, since that hangs on no lease."""
        record = None if self.forged_revision(Keys.LEADER) else self.get(Keys.LEADER, LeaderRecord)
        return record.id if record else None

    @property
    def job(self) -> JobRecord | None:
        """The job's record, with its settings."""
        return self.get(Keys.SPEC, JobRecord)

    @property
    def stop(self) -> StopRecord | None:
        """The request to end the job."""
        return self.get(Keys.STOP, StopRecord)

    @property
    def restart(self) -> RestartRecord | None:
        """The newest restart."""
        return self.get(Keys.RESTART, RestartRecord)

    def revisions(self) -> list[tuple[str, int]]:
        """All keys with the revisions of their last changes."""
        return [(key, entry.mod_revision) for key, entry in self._entries.items()]

    def revision(self, key: str) -> int:
        """Revision to compare with when replacing the value at ``key``; 0 if there is none."""
        entry = self._entries.get(key)
        return entry.mod_revision if entry else 0

    def forged_revision(self, key: str) -> int:
        """Revision to compare with when setting ``key`` if no genuine record is there: 0, or of one that is not."""
        entry = self._entries.get(key)
        return 0 if entry is None or entry.genuine else entry.mod_revision

    @property
    def members(self) -> Mapping[str, MemberRecord]:
        """Living members by id."""
        return self._table(Keys.MEMBERS, MemberRecord)

    @property
    def known(self) -> Mapping[str, MemberRecord]:
        """Members by id, living or gone, until the job forgets them."""
        parts = self._table(Keys.KNOWN, MemberRecord), self.members
        if self._all_known[:2] != parts:
            self._all_known = (*parts, {**parts[0], **parts[1]})
        return self._all_known[2]

    @property
    def on_host(self) -> Mapping[str, MemberRecord]:
        """Joiners that share a process space with others, by the rest of their keys."""
        return self._table(Keys.HOSTS, MemberRecord)

    @property
    def left(self) -> Mapping[str, LeftRecord]:
        """Departures by member id."""
        return self._table(Keys.LEFT, LeftRecord)

    @property
    def notices(self) -> Mapping[str, NoticeRecord]:
        """Notices by member id, also of members that are gone."""
        return self._table(Keys.NOTICES, NoticeRecord)

    @property
    def reports(self) -> Mapping[str, LayoutRecord]:
        """Layout reports by member id."""
        return self._table(Keys.REPORTS, LayoutRecord)

    @property
    def workers(self) -> Mapping[str, WorkerState]:
        """The newest reports of workers of themselves, by member id."""
        return self._table(Keys.WORKERS, WorkerState)

    @property
    def suspicions(self) -> Mapping[str, SuspicionRecord]:
        """Newest accusations by the id of the member that accuses, also of epochs that are over."""
        return self._table(Keys.SUSPECTS, SuspicionRecord)

    @property
    def asked(self) -> Mapping[str, HealthRequest]:
        """Members whose agents were asked, by id, with the newest question."""
        return self._table(Keys.ASKED, HealthRequest)

    @property
    def healthy(self) -> Mapping[str, HealthReply]:
        """The newest health reply by member id."""
        return self._table(Keys.HEALTH, HealthReply)

    @property
    def progress(self) -> Mapping[str, ProgressRecord]:
        """Newest progress by member id."""
        return self._table(Keys.PROGRESS, ProgressRecord)

    def get(self, key: str, kind: type[R]) -> R | None:
        """The record at ``key``, if there is one that can be read."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        revision, record = self._records_read.get(key, (0, None))
        if revision != entry.mod_revision:
            try:
                if entry.genuine:
                    record = kind.from_json(entry.value)
                else:
                    logger.error("%s in etcd %s: it is left out", key, _FORGED)
            except ValidationError as error:
                logger.error("%s in etcd cannot be read and is left out: %s", key, faults_of(error))
            self._records_read[key] = entry.mod_revision, record
        return record if isinstance(record, kind) else None

    def _table(self, prefix: str, kind: type[R]) -> Mapping[str, R]:
        """The valid records of ``kind`` under ``prefix``, one of :class:`Keys`."""
        before = self._tables.get(prefix)
        changed = self._changed.pop(prefix, None)
        if before is None or changed:
            keys = [key for key in self._entries if key.startswith(prefix)] if before is None else changed or ()
            table = dict(before or {})
            for key in keys:
                name, record = key.removeprefix(prefix), self.get(key, kind)
                if record is None:
                    table.pop(name, None)
                else:
                    table[name] = record
            self._tables[prefix] = table
        return cast("Mapping[str, R]", self._tables[prefix])


def read_plan(entry: KeyValue) -> Plan:
    """The plan in ``entry``; raises :class:`ProtocolError` if it cannot be read, :class:`PlanForged` if it is."""
    if not entry.genuine:
        raise PlanForged(
            f"the plan in etcd {_FORGED}, and no other one is known here. Delete the job's key {Keys.PLAN!r} in etcd, "
            "and see who can write there"
        )
    try:
        version = _Version.model_validate_json(entry.value).number
        if version == plans.SCHEMA:
            return Plan.from_json(entry.value)
    except ValidationError as error:
        raise ProtocolError(f"the plan in etcd cannot be read: {faults_of(error)}") from error
    raise ProtocolError(
        f"the plan in etcd has version {version}, but the bamboo_ds of this member reads {plans.SCHEMA}: all members "
        "of a job need the same version of the package"
    )
