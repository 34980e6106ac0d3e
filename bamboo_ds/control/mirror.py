"""A local copy of a job's keys, kept current by a watch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from ..store.records import KeyValue, Snapshot, WatchEvent
from ..topology.plan import Plan
from .membership import (
    Keys,
    LayoutRecord,
    LeaderRecord,
    LeftRecord,
    MemberRecord,
    NoticeRecord,
    ProgressRecord,
    Record,
    RestartRecord,
    StandingRecord,
    StopRecord,
    SuspicionRecord,
    VoucherRecord,
)

R = TypeVar("R", bound=Record)

#: Epochs whose nonces are known, the newest ones: more than one attempt to write a plan is hardly ever under way.
_KNOWN_NONCES = 64


class Mirror:
    """All keys of a job. Not thread-safe: one thread applies and reads."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._entries: dict[str, KeyValue] = dict(snapshot.entries)
        self._plan: tuple[int, Plan] | None = None
        self._nonces: dict[int, str] = {}
        self._note_plan()

    def apply(self, event: WatchEvent) -> None:
        """Take one change over."""
        if event.kind == "put":
            self._entries[event.key] = event.kv
        else:
            self._entries.pop(event.key, None)
        if event.key == Keys.PLAN:
            self._note_plan()

    def _note_plan(self) -> None:
        plan = self.plan
        if plan is not None:
            self._nonces[plan.epoch] = plan.nonce
            self._nonces.pop(plan.epoch - _KNOWN_NONCES, None)

    def nonce(self, epoch: int) -> str | None:
        """That of the plan of ``epoch``, if this mirror has seen it."""
        return self._nonces.get(epoch)

    @property
    def plan(self) -> Plan | None:
        """The newest plan."""
        entry = self._entries.get(Keys.PLAN)
        if entry is None:
            return None
        if self._plan is None or self._plan[0] != entry.mod_revision:
            self._plan = (entry.mod_revision, Plan.from_json(entry.value))
        return self._plan[1]

    @property
    def plan_revision(self) -> int:
        """Revision to compare with when replacing the plan; 0 if there is none."""
        return self.revision(Keys.PLAN)

    @property
    def leader(self) -> str | None:
        """The leading member."""
        entry = self._entries.get(Keys.LEADER)
        return LeaderRecord.from_json(entry.value).id if entry else None

    @property
    def stop(self) -> StopRecord | None:
        """The request to end the job."""
        entry = self._entries.get(Keys.STOP)
        return StopRecord.from_json(entry.value) if entry else None

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

    @property
    def members(self) -> dict[str, MemberRecord]:
        """Living members by id."""
        return {record.id: record for record in self._records(Keys.MEMBERS, MemberRecord)}

    @property
    def left(self) -> dict[str, LeftRecord]:
        """Departures by member id."""
        return {record.id: record for record in self._records(Keys.LEFT, LeftRecord)}

    @property
    def notices(self) -> dict[str, NoticeRecord]:
        """Notices by member id, also of members that are gone."""
        return {record.id: record for record in self._records(Keys.NOTICES, NoticeRecord)}

    @property
    def reports(self) -> dict[str, LayoutRecord]:
        """Layout reports by member id."""
        return {record.id: record for record in self._records(Keys.REPORTS, LayoutRecord)}

    @property
    def standings(self) -> dict[str, StandingRecord]:
        """What the workers have last said of themselves, by member id."""
        return {record.id: record for record in self._records(Keys.STANDINGS, StandingRecord)}

    @property
    def suspicions(self) -> list[SuspicionRecord]:
        """All accusations, also of epochs that are over."""
        return list(self._records(Keys.SUSPECTS, SuspicionRecord))

    @property
    def vouched(self) -> dict[str, int]:
        """Epoch of the newest voucher by member id."""
        return {record.id: record.epoch for record in self._records(Keys.VOUCHERS, VoucherRecord)}

    @property
    def progress(self) -> dict[str, ProgressRecord]:
        """Newest progress by member id."""
        return {record.id: record for record in self._records(Keys.PROGRESS, ProgressRecord)}

    def get(self, key: str, kind: type[R]) -> R | None:
        """The record at ``key``, if any."""
        entry = self._entries.get(key)
        return kind.from_json(entry.value) if entry else None

    def _records(self, prefix: str, kind: type[R]) -> Iterator[R]:
        for key, entry in self._entries.items():
            if key.startswith(prefix):
                yield kind.from_json(entry.value)
