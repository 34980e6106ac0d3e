"""What a job leaves in etcd stays bounded, whatever it loses."""

from __future__ import annotations

from pathlib import Path

import pytest

from bamboo_ds.control.leader.leader import Leader
from bamboo_ds.control.leader.pruning import KEPT_MEMBERS, obsolete
from bamboo_ds.control.registry.keys import Keys
from bamboo_ds.control.registry.mirror import Mirror
from bamboo_ds.observe.events import EventWriter
from bamboo_ds.store.client import Store
from tests.support.settings import agent
from tests.unit.control.test_pruning import DEPARTED, LIVING, plan, records

pytestmark = pytest.mark.claim("concepts.md")


def test_the_leader_removes_them(store: Store, tmp_path: Path) -> None:
    for key, record in records().items():
        store.put(key, record.to_json())
    store.put(Keys.PLAN, plan().to_json())
    store.put(Keys.slot(2), "2")
    leader = Leader(
        store,
        EventWriter(str(tmp_path / "events.jsonl")),
        agent(world_size=2, settle_ms=0, lease_ttl_s=2),
        "a",
    )
    before, lease = store.get_prefix(""), store.lease(60)
    leader.step(Mirror(before), lease, 0.0)
    after = store.get_prefix("")
    # Few transactions, however many keys: the leader has other things to do.
    assert len(before.entries) - len(after.entries) > 200 and after.revision - before.revision <= 5
    mirror = Mirror(after)
    assert mirror.left.keys() == set(DEPARTED[-KEPT_MEMBERS:])
    assert mirror.members.keys() == set(LIVING) and mirror.plan == plan()
    assert store.get(Keys.slot(2)) is not None
    assert obsolete(mirror, plan()) == []
