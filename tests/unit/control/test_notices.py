"""Sources of notices against servers that speak the clouds' protocols."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from bamboo_ds.control.notices import Notice
from bamboo_ds.control.notices.aws import AwsSource
from bamboo_ds.control.notices.azure import AzureSource
from bamboo_ds.control.notices.gcp import GcpSource
from bamboo_ds.control.notices.hooks import FileSource, HttpSource
from bamboo_ds.control.notices.transport import SourceBroken, SourceSilent
from tests.support.metadata_servers import AwsMetadata, AzureMetadata, GoogleMetadata, HookServer, MetadataServer
from tests.support.notices import Log, Watching, poll, recorded_log

pytestmark = [pytest.mark.claim("guides/notices.md"), pytest.mark.usefixtures("leak_gate")]


@pytest.fixture
def log() -> Iterator[Log]:
    with recorded_log() as recorded:
        yield recorded


@pytest.fixture(autouse=True)
def clock_of_the_clouds(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not this host's."""
    monkeypatch.setattr(MetadataServer, "date", http_date(0))


NOW = datetime(2026, 3, 1, 12, 0, 0, tzinfo=timezone.utc)


def iso(seconds: float) -> str:
    return (NOW + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def http_date(seconds: float) -> str:
    return (NOW + timedelta(seconds=seconds)).strftime("%a, %d %b %Y %H:%M:%S GMT")


# -- AWS ------------------------------------------------------------------------------------------------


def test_aws_tells_of_an_interruption_once() -> None:
    with AwsMetadata() as server, Watching(AwsSource(server.url)) as watching:
        server.wait_for_requests(server.REBALANCE, 2)
        assert watching.notices.empty()
        server.action = {"action": "terminate", "time": iso(120)}
        notice = watching.next()
        assert (notice.kind, notice.source, notice.deadline_s, notice.vanishes) == ("preempt", "aws", 120.0, True)
        assert "terminate" in notice.detail and "12:02:00" in notice.detail
        server.wait_for_requests(server.ACTION, 3)
        assert watching.notices.empty()
        assert server.counts[server.TOKEN] == 1 and not server.statuses[401]
        server.action = {"action": "stop", "time": iso(60)}
        assert watching.next().deadline_s == 60.0


def test_aws_recommends_and_then_interrupts() -> None:
    with AwsMetadata() as server, Watching(AwsSource(server.url)) as watching:
        server.rebalance = {"noticeTime": iso(-5)}
        notice = watching.next()
        assert (notice.kind, notice.deadline_s, notice.vanishes) == ("rebalance", None, False)
        server.action = {"action": "hibernate", "time": iso(120)}
        notice = watching.next()
        assert (notice.kind, notice.deadline_s) == ("preempt", 0.0)  # hibernation waits for nobody


def test_aws_time_that_has_passed_leaves_no_time() -> None:
    with AwsMetadata() as server:
        server.action = {"action": "stop", "time": iso(-30)}
        notice = poll(AwsSource(server.url))
        assert notice is not None and notice.deadline_s == 0.0


def test_aws_without_a_clock_goes_by_this_host_s() -> None:
    with AwsMetadata() as server:
        server.date = "tomorrow"
        server.action = {"action": "stop", "time": (datetime.now(timezone.utc) + timedelta(seconds=900)).isoformat()}
        notice = poll(AwsSource(server.url))
        assert notice is not None and notice.deadline_s is not None and 600.0 < notice.deadline_s <= 900.0


def test_aws_token_is_renewed_when_it_has_expired(log: Log) -> None:
    with AwsMetadata() as server, Watching(AwsSource(server.url)) as watching:
        server.wait_for_requests(server.REBALANCE)
        server.expire_tokens()
        server.wait_for(lambda: server.statuses[401] == 1 and server.counts[server.TOKEN] == 2)
        server.action = {"action": "stop", "time": iso(9)}
        assert watching.next().deadline_s == 9.0
        assert server.statuses[401] == 1
    assert log.nothing_more()


def test_aws_that_refuses_its_own_tokens_is_asked_twice_at_most() -> None:
    with AwsMetadata() as server:
        server.instead["/latest/meta-data/spot/instance-action"] = (401, {}, b"")
        with pytest.raises(SourceBroken, match="refuses a token"):
            poll(AwsSource(server.url))
        assert server.counts[server.TOKEN] == 1 and server.statuses[401] == 1


# -- Google ---------------------------------------------------------------------------------------------


def test_google_tells_of_a_preemption_once() -> None:
    with GoogleMetadata() as server, Watching(GcpSource(server.url)) as watching:
        server.wait_for_requests(server.PREEMPTED)
        assert watching.notices.empty()
        server.preempted = "TRUE"
        notice = watching.next()
        assert (notice.kind, notice.source, notice.deadline_s, notice.vanishes) == ("preempt", "gcp", 30.0, True)
        server.wait_for_requests(server.PREEMPTED, 2)  # it is asked on, and says the same
        assert watching.notices.empty()


def test_google_migration_is_new_each_time_and_only_a_pause() -> None:
    with GoogleMetadata() as server, Watching(GcpSource(server.url)) as watching:
        for _ in range(2):
            server.wait_for_told("NONE")
            server.maintenance = "MIGRATE_ON_HOST_MAINTENANCE"
            notice = watching.next()
            assert (notice.kind, notice.deadline_s, notice.vanishes) == ("maintenance", 60.0, False)
            server.maintenance = "NONE"
        server.wait_for_told("NONE")
        server.maintenance = "TERMINATE_ON_HOST_MAINTENANCE"
        notice = watching.next()
        assert (notice.kind, notice.vanishes) == ("maintenance", True)


def test_google_preemption_counts_though_the_other_question_fails() -> None:
    with GoogleMetadata() as server:
        server.preempted = "TRUE"
        server.instead["/computeMetadata/v1/instance/maintenance-event"] = (503, {}, b"")
        notice = poll(GcpSource(server.url))
        assert notice is not None and notice.kind == "preempt"
        server.preempted = "FALSE"
        with pytest.raises(SourceBroken, match="503"):
            poll(GcpSource(server.url))


@pytest.mark.parametrize(
    ("headers", "body", "words"),
    [({}, b"TRUE", "did not come from Google"), ({"Metadata-Flavor": "Google"}, b"PERHAPS", "known values: TRUE")],
)
def test_google_answers_must_be_google_s(headers: dict[str, str], body: bytes, words: str) -> None:
    with GoogleMetadata() as server:
        server.instead["/computeMetadata/v1/instance/preempted"] = (200, headers, body)
        with pytest.raises(SourceBroken, match=words):
            poll(GcpSource(server.url))


# -- Azure ----------------------------------------------------------------------------------------------


def test_azure_tells_of_a_preemption_and_takes_the_acknowledgement() -> None:
    with AzureMetadata("trainer_3") as server, Watching(AzureSource(server.url)) as watching:
        server.events = [AzureMetadata.event("e-other", "Preempt", http_date(30), "trainer_4")]
        server.wait_for_requests(server.EVENTS, 2)
        assert watching.notices.empty()
        server.events = [*server.events, AzureMetadata.event("e-mine", "Preempt", http_date(30), "trainer_3")]
        notice = watching.next()
        assert (notice.kind, notice.source, notice.deadline_s, notice.vanishes) == ("preempt", "azure", 30.0, True)
        assert "e-mine" in notice.detail
        assert server.acknowledged == []
        assert watching.watcher.acknowledge(notice)
        assert server.acknowledged == ["e-mine"] and server.counts[server.START] == 1
        assert server.counts[server.NAME] == 1
        started = watching.next()  # the same event, now begun
        assert (started.kind, started.deadline_s) == ("preempt", 0.0)
        assert watching.watcher.acknowledge(started)
        assert server.acknowledged == ["e-mine"], "once for both notices of the event"
    assert not server.statuses[400]


@pytest.mark.parametrize(
    ("event", "kind", "vanishes"),
    [
        ("Terminate", "preempt", True),
        ("Reboot", "maintenance", True),
        ("Redeploy", "maintenance", True),
        ("Freeze", "maintenance", False),
    ],
)
def test_azure_events_differ_in_what_they_do(event: str, kind: str, vanishes: bool) -> None:
    with AzureMetadata() as server:
        server.events = [AzureMetadata.event("e", event, http_date(900), "Trainer_0", "other")]
        notice = poll(AzureSource(server.url))
        assert notice is not None
        assert (notice.kind, notice.vanishes, notice.deadline_s) == (kind, vanishes, 900.0)


def test_azure_most_urgent_event_comes_first() -> None:
    with AzureMetadata() as server:
        server.events = [
            AzureMetadata.event("pause", "Freeze", http_date(10), "trainer_0"),
            AzureMetadata.event("later", "Redeploy", http_date(600), "trainer_0"),
            AzureMetadata.event("soon", "Preempt", http_date(30), "trainer_0"),
        ]
        notice = poll(AzureSource(server.url))
        assert notice is not None and "soon" in notice.detail


def test_azure_event_of_several_machines_is_not_acknowledged_by_one() -> None:
    with AzureMetadata() as server, Watching(AzureSource(server.url)) as watching:
        server.events = [AzureMetadata.event("e", "Reboot", http_date(900), "trainer_0", "trainer_1")]
        assert not watching.watcher.acknowledge(watching.next())
        assert server.counts[server.START] == 0


def test_failed_acknowledgement_is_logged(log: Log) -> None:
    with AzureMetadata() as server, Watching(AzureSource(server.url)) as watching:
        server.events = [AzureMetadata.event("e", "Preempt", http_date(30), "trainer_0")]
        notice = watching.next()
        server.events = []  # the event is over
        assert not watching.watcher.acknowledge(notice)
        assert server.counts[server.START] == 1
        assert "was not acknowledged" in log.next().getMessage()
        server.hold()
        server.wait_for(lambda: server.held == 1)
        assert not watching.watcher.acknowledge(notice, timeout_s=0.2)
        assert "did not take the acknowledgement" in log.next().getMessage()
    assert not watching.watcher.acknowledge(notice)  # the watcher has ended


# -- hooks ----------------------------------------------------------------------------------------------


def test_file_is_a_notice_when_it_appears_and_when_it_is_replaced(tmp_path: Path) -> None:
    path, new = tmp_path / "notice", tmp_path / "new"
    with Watching(FileSource(str(path))) as watching:
        path.touch()
        notice = watching.next()
        assert (notice.kind, notice.source, notice.deadline_s, notice.vanishes) == ("leave", "file", None, True)
        assert str(path) in notice.detail
        new.write_text(json.dumps({"kind": "preempt", "deadline_s": 25, "detail": "the bill"}))
        new.rename(path)
        notice = watching.next()
        assert (notice.kind, notice.deadline_s, notice.detail) == ("preempt", 25.0, "the bill")
        assert watching.notices.empty()


def test_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceBroken, match="not a regular file"):
        poll(FileSource(str(tmp_path)))
    (tmp_path / "file").write_text("{")
    with pytest.raises(SourceBroken, match="Invalid JSON"):
        poll(FileSource(str(tmp_path / "file")))
    with pytest.raises(SourceSilent, match="Not a directory"):
        poll(FileSource(str(tmp_path / "file" / "below")))
    assert poll(FileSource(str(tmp_path / "absent"))) is None


@pytest.mark.parametrize("status", [204, 404])
def test_url_that_has_nothing_to_say(status: int) -> None:
    with HookServer() as server:
        server.status = status
        assert poll(HttpSource(f"{server.url}/notice")) is None


def test_url_whose_deadline_counts_down_is_one_notice() -> None:
    with HookServer() as server, Watching(HttpSource(f"{server.url}/notice")) as watching:
        server.say(deadline_s=90, detail="spot market")
        assert watching.next() == Notice("leave", "http", "spot market", 90.0, key="leave\nspot market\n\n")
        server.say(deadline_s=80, detail="spot market")
        server.wait_for_requests(server.NOTICE, 2)
        assert watching.notices.empty()
        server.change(status=204, body=None)
        server.wait_for_requests(server.NOTICE, 2)
        server.say(deadline_s=30, detail="spot market")
        assert watching.next().deadline_s == 30.0


@pytest.mark.parametrize("body", ['{"deadline_s": -1}', '{"deadline_s": NaN}', '{"kind": "party"}', "[]", "", "{"])
def test_url_that_answers_nonsense(body: str) -> None:
    with HookServer() as server:
        server.status, server.body = 200, body
        with pytest.raises(SourceBroken):
            poll(HttpSource(f"{server.url}/notice"))


def test_answers_without_end_are_cut() -> None:
    with HookServer() as server:
        server.status, server.body = 200, " " * 2_000_000
        with pytest.raises(SourceBroken, match="more than"):
            poll(HttpSource(f"{server.url}/notice"))


def test_redirects_are_not_followed() -> None:
    with HookServer() as server, HookServer() as elsewhere:
        elsewhere.say()
        server.instead["/notice"] = (302, {"Location": f"{elsewhere.url}/notice"}, b"")
        with pytest.raises(SourceBroken, match="302"):
            poll(HttpSource(f"{server.url}/notice"))
        assert server.statuses[302] == 1 and not elsewhere.counts


def test_proxies_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with HookServer() as server, HookServer() as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        assert poll(HttpSource(f"{server.url}/notice")) is None
        assert server.counts and not proxy.counts
