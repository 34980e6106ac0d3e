"""The watcher of notices when its sources fail, and the settings that make it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from bamboo_ds.config import NoticesConfig
from bamboo_ds.control.agent.command import worker_environment
from bamboo_ds.control.loop import AgentLoop
from bamboo_ds.control.notices import Notice, NoticeSource, NoticeWatcher, build_sources
from bamboo_ds.control.notices import watcher as watcher_module
from bamboo_ds.control.notices.aws import AwsSource
from bamboo_ds.control.notices.azure import AzureSource
from bamboo_ds.control.notices.gcp import GcpSource
from bamboo_ds.control.notices.hooks import FileSource, HttpSource
from bamboo_ds.control.settings import settings_told
from bamboo_ds.errors import ConfigError
from bamboo_ds.job_settings import JobSettings
from tests.support.metadata_servers import AwsMetadata, AzureMetadata, GoogleMetadata, HookServer, MetadataServer
from tests.support.notices import POLL_S, Log, Watching, recorded_log
from tests.support.settings import agent

pytestmark = [pytest.mark.claim("guides/notices.md", "reference/settings.md"), pytest.mark.usefixtures("leak_gate")]


@pytest.fixture
def log() -> Iterator[Log]:
    with recorded_log() as recorded:
        yield recorded


def test_passwords_in_urls_are_in_no_command_line_and_not_in_etcd() -> None:
    """A member that has the job's settings from there adds those of its own configuration; a query may be a token."""
    url = "http://me:secret@127.0.0.1/notice?token=secret"
    own = agent(sources=["http"], url=url)
    assert "secret" not in " ".join(own.agent_command)
    environment = own.environment({})
    assert settings_told(environment) == own
    assert "secret" not in " ".join(worker_environment(own, "m").values())
    record = own.record(1).settings
    assert record.values.notices.url == "http://***@127.0.0.1/notice?***"
    assert record.of_member(own.settings).values.notices.url == url
    for other in ({"url": "http://me:secret@127.0.0.2/notice?token=secret"}, {"sources": (), "url": None}):
        values = own.bamboo.overridden({f"notices.{name}": value for name, value in other.items()})
        with pytest.raises(ConfigError, match=r"bamboo\.notices\.url is ") as caught:
            record.of_member(JobSettings(values=values))
        assert "secret" not in str(caught.value)
    with pytest.raises(ConfigError, match="a password or a query, which etcd does not keep"):
        record.of_member(JobSettings(open=True))


# -- watcher --------------------------------------------------------------------------------------------


def hook(url: str) -> HttpSource:
    return HttpSource(f"{url}/notice")


@pytest.mark.parametrize(
    ("serve", "make", "key"),
    [
        (AwsMetadata, AwsSource, AwsMetadata.REBALANCE),
        (GoogleMetadata, GcpSource, GoogleMetadata.PREEMPTED),
        (AzureMetadata, AzureSource, AzureMetadata.EVENTS),
        (HookServer, hook, HookServer.NOTICE),
    ],
)
def test_service_that_goes_and_comes_back_is_logged_twice(
    serve: Callable[[], MetadataServer], make: Callable[[str], NoticeSource], key: str, log: Log
) -> None:
    with serve() as server, Watching(make(server.url)):
        server.wait_for(lambda: server.counts[key] >= 1)
        for _ in range(2):
            server.stop()
            assert "does not answer" in log.next().getMessage()
            server.start()
            assert "answers again" in log.next().getMessage()
            server.wait_for_requests(key)
    assert log.nothing_more()


@pytest.mark.parametrize(
    ("serve", "make", "path"),
    [
        (AwsMetadata, AwsSource, "/latest/meta-data/spot/instance-action"),
        (AwsMetadata, AwsSource, "/latest/meta-data/events/recommendations/rebalance"),
        (AwsMetadata, AwsSource, "/latest/api/token"),
        (GoogleMetadata, GcpSource, "/computeMetadata/v1/instance/preempted"),
        (AzureMetadata, AzureSource, "/metadata/scheduledevents"),
        (HookServer, hook, "/notice"),
    ],
)
@pytest.mark.parametrize("nonsense", [(200, b'{"action": "stop"'), (200, b"\xff\x00"), (500, b"")])
def test_nonsense_is_logged_once_and_its_end_too(
    serve: Callable[[], MetadataServer],
    make: Callable[[str], NoticeSource],
    path: str,
    nonsense: tuple[int, bytes],
    log: Log,
) -> None:
    status, body = nonsense
    with serve() as server:
        server.instead[path] = (status, {}, body)
        with Watching(make(server.url)) as watching:
            assert "breaks its protocol" in log.next().getMessage()
            server.wait_for_requests(next(key for key in server.counts if key.endswith(path)), 2)
            assert log.nothing_more()
            del server.instead[path]
            assert "answers again" in log.next().getMessage()
            assert watching.notices.empty()


def test_slow_service_delays_no_other(tmp_path: Path) -> None:
    path = tmp_path / "notice"
    with AwsMetadata() as slow, HookServer() as quick:
        slow.hold()
        watching = Watching(AwsSource(slow.url), HttpSource(f"{quick.url}/notice"), FileSource(str(path)))
        with watching:
            slow.wait_for(lambda: slow.held == 1)
            quick.say(detail="by URL")
            assert watching.next().source == "http"
            path.touch()
            assert watching.next().source == "file"
            assert slow.held == 1 and sum(slow.statuses.values()) == 0  # still that first question
            slow.action = {"action": "stop", "time": "2026-03-01T12:00:00Z"}
            slow.release()
            assert watching.next().source == "aws"


def test_stopping_does_not_wait_for_answers() -> None:
    with AwsMetadata() as aws, GoogleMetadata() as gcp:
        aws.hold()
        gcp.hold()
        watching = Watching(AwsSource(aws.url), GcpSource(gcp.url))
        with watching:
            aws.wait_for(lambda: aws.held == 1)
            gcp.wait_for(lambda: gcp.held == 1)
            assert any(thread.name == "bamboo-loop" for thread in threading.enumerate())
        assert not any(thread.name == "bamboo-loop" for thread in threading.enumerate())
        assert watching.watcher.stop()  # a second time


class Defective(NoticeSource):
    """A source with a programming error."""

    name = "defective"
    where = "here"

    def __init__(self) -> None:
        self.asked = threading.Semaphore(0)

    async def poll(self, session: Any) -> Notice | None:
        self.asked.release()
        raise KeyError("oops")


def test_defects_silence_nobody(tmp_path: Path, log: Log) -> None:
    heard: queue.Queue[Notice] = queue.Queue()

    def hear(notice: Notice) -> None:
        heard.put(notice)
        raise ValueError("the agent has a defect too")

    (tmp_path / "notice").touch()
    defective = Defective()
    with HookServer() as server:
        sources: list[NoticeSource] = [
            defective,
            FileSource(str(tmp_path / "notice")),
            HttpSource(f"{server.url}/notice"),
        ]
        watcher = NoticeWatcher(sources, hear, AgentLoop(), POLL_S)
        watcher.start()
        try:
            assert heard.get(timeout=10).source == "file"
            server.say()
            assert heard.get(timeout=10).source == "http"
            assert all(defective.asked.acquire(timeout=10) for _ in range(3))
        finally:
            assert watcher.stop()
    records = [log.next() for _ in range(3)]
    assert log.nothing_more()
    assert sum("failed by a defect" in record.getMessage() for record in records) == 1
    assert all(record.exc_info for record in records)


def test_that_no_source_can_be_asked_is_told(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise OSError("no descriptors left")

    monkeypatch.setattr(watcher_module, "open_session", broken)
    watcher = NoticeWatcher([HttpSource("http://127.0.0.1:1/notice")], pytest.fail, AgentLoop(), POLL_S)
    watcher.start()
    record = log.next()
    assert watcher.stop() and record.exc_info and "preemptions come without a notice" in record.getMessage()


def test_without_sources_there_is_no_thread() -> None:
    before = threading.active_count()
    watcher = NoticeWatcher([], lambda notice: None, AgentLoop())
    watcher.start()
    assert threading.active_count() == before
    assert watcher.stop()


def test_wrong_uses_are_refused() -> None:
    with pytest.raises(ValueError, match="same name"):
        NoticeWatcher([FileSource("a"), FileSource("b")], lambda notice: None, AgentLoop())
    watcher = NoticeWatcher([FileSource("/absent/file")], lambda notice: None, AgentLoop())
    assert watcher.stop()
    watcher.start()
    with pytest.raises(RuntimeError, match="before"):
        watcher.start()
    assert watcher.stop()


# -- settings -------------------------------------------------------------------------------------------


def test_default_is_no_source() -> None:
    assert build_sources(NoticesConfig(), {}) == []
    assert NoticesConfig().poll_s == 1.0


@pytest.mark.parametrize(
    ("block", "where", "words"),
    [
        ({"sources": ["oracle"]}, ("sources", 0), "'aws', 'gcp', 'azure', 'file', 'http' or 'nvml'"),
        ({"sources": ["aws", "aws"]}, ("sources",), "list aws once"),
        ({"sources": ["file"]}, ("file",), '"bamboo.notices.file" is needed'),
        ({"sources": ["http"]}, ("url",), '"bamboo.notices.url" is needed'),
        ({"sources": ["http"], "url": "ftp://x"}, ("url",), "http://host:port/path"),
        ({"sources": ["http"], "url": "http://x:99999/"}, ("url",), "is not a URL"),
        ({"file": "/f"}, ("file",), 'add "file" to "bamboo.notices.sources"'),
        ({"poll_s": 0}, ("poll_s",), "greater than 0"),
        ({"polls": 1}, ("polls",), "Extra inputs"),
    ],
)
def test_wrong_settings_are_named(block: dict[str, Any], where: tuple[Any, ...], words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        NoticesConfig.model_validate(block)
    (error,) = caught.value.errors()
    assert error["loc"] == where and words in error["msg"]


def test_sources_are_built_as_the_settings_and_the_environment_say() -> None:
    text = (
        '{"sources": ["http", "gcp", "azure", "aws", "file"], "file": "/run/{slot}/{member}", "url": "http://h/{slot}"}'
    )
    env = {"BAMBOO_AWS_METADATA_URL": "http://127.0.0.1:1/{slot}/", "BAMBOO_GCP_METADATA_URL": ""}
    sources = build_sources(NoticesConfig.model_validate_json(text), env, {"slot": "3", "member": "m3-ab"})
    assert [(source.name, source.where) for source in sources] == [
        ("http", "http://h/3"),
        ("gcp", "http://169.254.169.254"),
        ("azure", "http://169.254.169.254"),
        ("aws", "http://127.0.0.1:1/3"),
        ("file", "/run/3/m3-ab"),
    ]


@pytest.mark.parametrize("name", ["aws", "gcp", "azure"])
def test_wrong_url_in_the_environment_is_named(name: str) -> None:
    variable = f"BAMBOO_{name.upper()}_METADATA_URL"
    with pytest.raises(ConfigError, match=variable):
        build_sources(NoticesConfig.model_validate({"sources": [name]}), {variable: "localhost:80"})
