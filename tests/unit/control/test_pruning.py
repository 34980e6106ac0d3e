"""What a job leaves in etcd stays bounded, whatever it loses."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from bamboo_ds.control.leader.pruning import KEPT_EPOCHS, KEPT_MEMBERS, obsolete
from bamboo_ds.control.registry.keys import Keys
from bamboo_ds.control.registry.mirror import Mirror
from bamboo_ds.control.registry.records import (
    HealthReply,
    HealthRequest,
    JobRecord,
    LayoutRecord,
    LeaderRecord,
    NoticeRecord,
    ProgressRecord,
    Record,
    StopRecord,
    SuspicionRecord,
    TimingRecord,
    WorkerState,
)
from bamboo_ds.store.records import KeyValue, Snapshot
from bamboo_ds.topology import Layout, Plan
from tests.support.records import left, member
from tests.support.records import member as known_as

pytestmark = pytest.mark.claim("concepts.md")

LIVING = ("a", "b")
DEPARTED = tuple(f"gone-{n:03}" for n in range(KEPT_MEMBERS + 40))
EPOCH = 50


def plan(**changes: object) -> Plan:
    fields: dict[str, object] = {
        "epoch": EPOCH,
        "owners": LIVING,
        "members": LIVING,
        "layout": Layout(1, 2),
        "shadows": ("b", "a"),
        "script_ranks": (0, 1),
    }
    return Plan(**(fields | changes))  # type: ignore[arg-type]


def kept_by(member: str, epoch: int, step: int, checkpoint: str | None = None) -> dict[str, Record]:
    return {
        Keys.report(member): LayoutRecord(id=member, layout=Layout(1, 2), redundant=True),
        Keys.worker(member): WorkerState(id=member, epoch=epoch),
        Keys.health(member): HealthReply(id=member, epoch=epoch),
        Keys.progress(member): ProgressRecord(id=member, step=step, checkpoint=checkpoint),
    }


def departed(member: str, step: int, checkpoint: str | None = None) -> dict[str, Record]:
    return {
        **kept_by(member, 3, step, checkpoint),
        Keys.notice(member): NoticeRecord(id=member, kind="leave", source="file", detail=""),
        Keys.known(member): known_as(member, 1),
        Keys.suspect(member): SuspicionRecord(by=member, epoch=3, accused={"b": ""}),
        Keys.asked(member): HealthRequest(id=member, epoch=3),
        Keys.left(member): left(member, 1),
    }


def records(entered: Iterable[str] = LIVING) -> dict[str, Record]:
    found: dict[str, Record] = {Keys.LEADER: LeaderRecord(id="a"), Keys.SPEC: JobRecord(job="j", world_size=2)}
    for epoch in range(1, EPOCH + 1):
        found[Keys.timing(epoch)] = TimingRecord(epoch=epoch, detection_s=0.1, plan_s=0.1)
    for n, name in enumerate(DEPARTED):
        found |= departed(name, step=n)
    for name in LIVING:
        found[Keys.member(name)] = member(name, script_rank=0)
        found |= kept_by(name, EPOCH if name in entered else EPOCH - 1, len(DEPARTED))
    return found


def mirror_of(found: dict[str, Record], newest: Plan) -> Mirror:
    values = {key: record.to_json() for key, record in found.items()} | {Keys.PLAN: newest.to_json()}
    entries = {key: KeyValue(key, value, n + 1, n + 1, None) for n, (key, value) in enumerate(values.items())}
    return Mirror(Snapshot(entries, len(entries)))


def prune(found: dict[str, Record], newest: Plan) -> set[str]:
    keys = obsolete(mirror_of(found, newest), newest)
    assert keys is not None and len(set(keys)) == len(keys)
    return set(keys)


def test_the_living_the_newest_departed_and_the_newest_epochs_stay() -> None:
    found = records()
    left = found.keys() - prune(found, plan())
    stay = {*LIVING, *DEPARTED[-KEPT_MEMBERS:]}
    assert {key.split("/")[1] for key in left if key.startswith(Keys.LEFT)} == set(DEPARTED[-KEPT_MEMBERS:])
    of_members = [key for key in left if key.split("/")[0] + "/" not in (Keys.EPOCHS, Keys.LEADER, Keys.SPEC)]
    assert {part for key in of_members for part in key.split("/")[1:]} <= stay
    assert {int(key.split("/")[1]) for key in left if key.startswith(Keys.EPOCHS)} == {
        *range(EPOCH - KEPT_EPOCHS + 1, EPOCH + 1)
    }
    assert {Keys.LEADER, Keys.SPEC} <= left
    for name in LIVING:
        assert {Keys.member(name), *kept_by(name, 0, 0)} <= left
    assert prune({key: found[key] for key in left}, plan()) == set()


def test_members_that_are_needed_stay() -> None:
    first, second, third = DEPARTED[:3]
    found = records() | {Keys.member(first): member(first, script_rank=0)}
    removed = prune(found, plan(lost=(second,)))
    for name in (first, second):
        assert not removed & departed(name, 0).keys()
    assert departed(third, 0).keys() <= removed


def test_how_far_the_job_has_come_stays() -> None:
    far, saved = DEPARTED[4], DEPARTED[7]
    found = records() | departed(far, step=1000) | departed(saved, step=900, checkpoint="/c/step900")
    newest = plan()
    removed = prune(found, newest)
    assert Keys.left(far) in removed and Keys.left(saved) in removed
    assert not removed & {Keys.progress(far), Keys.progress(saved)}


@pytest.mark.parametrize(
    ("newest", "more"),
    [
        pytest.param(plan(layout=None, shadows=()), {}, id="no-layout"),
        pytest.param(plan(lost_roles=(1,)), {}, id="fatal"),
        pytest.param(plan(), {Keys.STOP: StopRecord(code=0, reason="", by="")}, id="stopped"),
        pytest.param(plan(), kept_by("b", EPOCH - 1, 0), id="not-entered"),
    ],
)
def test_nothing_is_removed_while_something_is_under_way(newest: Plan, more: dict[str, Record]) -> None:
    assert obsolete(mirror_of(records() | more, newest), newest) is None
