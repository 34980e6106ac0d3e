"""What members make of the keys of their job."""

from __future__ import annotations

import logging

import pytest

from bamboo_ds.control.leader.pruning import obsolete
from bamboo_ds.control.registry.keys import Keys
from bamboo_ds.control.registry.mirror import Mirror
from bamboo_ds.errors import ProtocolError
from bamboo_ds.observe.logs import LOGGER
from bamboo_ds.store.records import KeyValue, Snapshot, WatchEvent
from bamboo_ds.topology import Layout
from bamboo_ds.topology.planner import initial_plan, with_redundancy
from tests.support.records import member

pytestmark = pytest.mark.claim("guides/elastic.md")

GOOD = member("a")
KINDS = (Keys.LEFT, Keys.REPORTS, Keys.WORKERS, Keys.SUSPECTS, Keys.HEALTH, Keys.PROGRESS, Keys.NOTICES)


def put(key: str, value: str, revision: int) -> WatchEvent:
    return WatchEvent("put", key, KeyValue(key, value, revision, 1))


def view(mirror: Mirror) -> None:
    """Read all that there is, as an agent does again and again."""
    assert (mirror.leader, mirror.stop, mirror.restart) == (None, None, None)
    found = (mirror.left, mirror.reports, mirror.workers, mirror.suspicions, mirror.healthy, mirror.progress)
    assert not any(found) and not mirror.notices


def test_records_that_cannot_be_read_are_told_once_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, LOGGER)
    bad = [f"{kind}a" for kind in KINDS] + [Keys.LEADER, Keys.STOP, Keys.RESTART]
    entries = {key: KeyValue(key, '{"token": "secret"}', n + 1, 1) for n, key in enumerate([*bad, "epochs/x/timing"])}
    mirror = Mirror(Snapshot(entries, 100))
    for _ in range(3):
        view(mirror)
    assert sorted(record.args[0] for record in caplog.records) == sorted(bad)  # type: ignore[index]
    assert "secret" not in caplog.text and "Field required" in caplog.text
    mirror.apply(put(Keys.STOP, "{}", 101))
    view(mirror)
    assert len(caplog.records) == len(bad) + 1
    plan = with_redundancy(initial_plan(["a", "b"]), Layout(1, 2), True)
    assert obsolete(mirror, plan) is None


@pytest.mark.parametrize("change", [("running", "draining"), ('"schema_version":1', '"schema_version":2')])
def test_a_member_whose_record_cannot_be_read_is_still_there(change: tuple[str, str]) -> None:
    key = Keys.member("a")
    mirror = Mirror(Snapshot({key: KeyValue(key, GOOD.to_json(), 1, 1)}, 1))
    assert mirror.members == {"a": GOOD}
    mirror.apply(put(key, GOOD.to_json().replace(*change), 2))
    assert mirror.members == {"a": GOOD}
    mirror.apply(WatchEvent("delete", key, KeyValue(key, "", 3, 0)))
    assert mirror.members == {}


def test_a_plan_that_cannot_be_read_is_an_error() -> None:
    plan = initial_plan(["a", "b"]).to_json()
    mirror = Mirror(Snapshot({}, 1))
    for version in (4, 6):  # of the older one members say nowhere where they are reached
        with pytest.raises(ProtocolError, match=rf"has version {version}.* reads 5: .* same version"):
            mirror.apply(put(Keys.PLAN, plan.replace('"schema":5', f'"schema":{version}'), version))
    with pytest.raises(ProtocolError, match=r"cannot be read: owners\.0: "):
        Mirror(Snapshot({Keys.PLAN: KeyValue(Keys.PLAN, plan.replace('"owners":[', '"owners":[null,'), 3, 1)}, 3))


def test_what_is_known_of_a_member_outlives_its_lease() -> None:
    """Until the job forgets the member; also where its record can be read under the lease alone."""
    key, known = Keys.member("a"), Keys.known("a")
    mirror = Mirror(Snapshot({each: KeyValue(each, GOOD.to_json(), 1, 1) for each in (key, known)}, 2))
    mirror.apply(put(key, GOOD.model_copy(update={"state": "leaving"}).to_json(), 3))
    assert mirror.known["a"].state == "leaving"
    mirror.apply(WatchEvent("delete", key, KeyValue(key, "", 4, 0)))
    assert (mirror.members, mirror.known) == ({}, {"a": GOOD})
    mirror.apply(WatchEvent("delete", known, KeyValue(known, "", 5, 0)))
    assert mirror.known == {}


def test_what_was_returned_stays_as_it_is_and_the_same_until_a_record_in_it_changes() -> None:
    """A leader sees by that what it need not think about again."""
    key = Keys.member("a")
    mirror = Mirror(Snapshot({key: KeyValue(key, GOOD.to_json(), 1, 1)}, 1))
    members, known, left = mirror.members, mirror.known, mirror.left
    mirror.apply(put(Keys.progress("a"), "{}", 2))
    assert mirror.members is members and mirror.known is known and mirror.left is left
    mirror.apply(put(Keys.member("b"), member("b").to_json(), 3))
    mirror.apply(WatchEvent("delete", key, KeyValue(key, "", 4, 0)))
    assert mirror.members == {"b": member("b")} and members == {"a": GOOD} and mirror.left is left
