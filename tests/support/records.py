"""Records of a job's members by what differs from the usual, and the mirror of a job that has them."""

from __future__ import annotations

from typing import Any

from bamboo_ds.control.registry import records
from bamboo_ds.control.registry.keys import Keys
from bamboo_ds.control.registry.mirror import Mirror
from bamboo_ds.control.registry.records import LeftRecord, MemberRecord, Record, WorkerRecord
from bamboo_ds.processes import boot_id
from bamboo_ds.store.records import KeyValue, Snapshot
from bamboo_ds.topology import Plan

_KEYS: dict[type, Any] = {
    MemberRecord: Keys.member,
    LeftRecord: Keys.left,
    records.NoticeRecord: Keys.notice,
    records.HealthReply: Keys.health,
    records.ProgressRecord: Keys.progress,
    records.JobRecord: Keys.SPEC,
    records.LeaderRecord: Keys.LEADER,
    records.RestartRecord: Keys.RESTART,
    records.StopRecord: Keys.STOP,
    Plan: Keys.PLAN,
}


def member(name: str, slot: int = 0, **more: Any) -> MemberRecord:
    """The record of a member that is there."""
    values = {"host": "h", "address": "127.0.0.1", "pid": 1, "agent_pid": 2, "incarnation": "x", **more}
    return MemberRecord.model_validate({"id": name, "slot": slot, **values})


def left(name: str, slot: int = 0, outcome: str = "lost", **more: Any) -> LeftRecord:
    """The record of a member that has gone."""
    values = {"reason": "exit", "detail": "0", "since": 0.0, "boot": boot_id(), **more}
    return LeftRecord.model_validate({"id": name, "slot": slot, "outcome": outcome, **values})


def key_of(record: Record | Plan) -> str:
    """Where a record is."""
    if isinstance(record, WorkerRecord):
        return record.key
    key = _KEYS[type(record)]
    return key if isinstance(key, str) else str(key(record.id))  # type: ignore[union-attr]


def mirror(*found: Record | Plan) -> Mirror:
    """Of a job with these records."""
    entries = {key: KeyValue(key, each.to_json(), 1, 1) for each in found for key in [key_of(each)]}
    return Mirror(Snapshot(entries, 1))
