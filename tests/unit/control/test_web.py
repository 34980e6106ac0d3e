"""The web server of a job: who is let in, what it answers, and that it ends and does no harm."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from bamboo_ds.addresses import split_address
from bamboo_ds.config import bamboo_config
from bamboo_ds.control.loop import AgentLoop
from bamboo_ds.control.registry.keys import Keys
from bamboo_ds.control.registry.mirror import Mirror
from bamboo_ds.control.registry.overview import overview
from bamboo_ds.control.registry.records import LeaderRecord, LeaveRecord, StopRecord, WebRecord
from bamboo_ds.control.web.access import Access, token_of
from bamboo_ds.control.web.display import JobPage
from bamboo_ds.control.web.feed import Feed
from bamboo_ds.control.web.server import WebServer
from bamboo_ds.errors import ConfigError, StoreUnavailable
from bamboo_ds.observe.events import Event
from bamboo_ds.observe.live import LiveJob
from bamboo_ds.observe.tail import EventTail
from bamboo_ds.secret import NONE, JobSecret
from bamboo_ds.store.records import KeyValue
from bamboo_ds.topology.planner import initial_plan
from tests.support.etcd import wait_until
from tests.support.leaks import no_leaks
from tests.support.page import ask, scraped, seen, served_at, streamed, value
from tests.support.patience import Patience
from tests.support.records import member, mirror
from tests.support.settings import agent

pytestmark = pytest.mark.claim("guides/observing.md", "guides/security.md")

RECORDED = Path(__file__).parents[2] / "support" / "recorded_job.jsonl"
SECRET = JobSecret("x" * 40)
TOKEN = token_of(SECRET, "recorded")
ACCESS = Access(SECRET, "recorded")


def serving(feed: Feed, change: Callable[[str, str], None] | None) -> WebServer:
    return WebServer(feed, ACCESS, "recorded", ("127.0.0.1", 0), change, AgentLoop())


class Served:
    """A server of the recorded job."""

    def __init__(self, events: str | None = str(RECORDED)) -> None:
        self.asked: list[tuple[str, str]] = []
        self.fails: Exception | None = None
        self.feed = Feed("recorded", events)
        self.server = serving(self.feed, self._change)
        self.url = self.server.url

    def _change(self, what: str, member: str) -> None:
        self.asked.append((what, member))
        if self.fails:
            raise self.fails

    def close(self) -> None:
        assert self.server.close(10.0)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    found = Served()
    yield found
    found.close()


# -- who is let in ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/api/view", "/api/stream", "/api/losses/1", "/metrics", "/nothing"])
@pytest.mark.parametrize("token", [None, "", "x" * 64, TOKEN[:-1], SECRET.text, TOKEN.upper() + " "])
def test_strangers_see_nothing(served: Served, path: str, token: str | None) -> None:
    status, headers, body = ask(served.url, path, token)
    assert status == 401 and headers["WWW-Authenticate"] == "Bearer"
    assert b"m0-6e12dfd6" not in body and b"train.py" not in body
    assert ask(served.url, path, token, "POST")[0] == 401


def test_the_token_does_not_lead_to_the_secret_and_is_of_one_job() -> None:
    assert re.fullmatch("[0-9a-f]{64}", TOKEN)
    assert TOKEN not in (token_of(SECRET, "other"), token_of(JobSecret("y" * 40), "recorded"), SECRET.text)
    assert SECRET.text not in TOKEN and TOKEN not in ACCESS.cookie()


def test_health_is_for_everybody(served: Served) -> None:
    assert ask(served.url, "/healthz")[::2] == (200, b"ok\n")
    assert ask(served.url, "/healthz", method="HEAD")[::2] == (200, b"")


def test_log_in(served: Served) -> None:
    form = {"Content_Type": "application/x-www-form-urlencoded"}
    status, _, page = ask(served.url, "/login")
    assert status == 200 and b'type="password"' in page and b"{{" not in page
    status, headers, page = ask(served.url, "/login", None, "POST", "token=wrong", **form)
    assert status == 401 and "Set-Cookie" not in headers and b"not the token" in page
    status, headers, _ = ask(served.url, "/login", None, "POST", f"token={TOKEN}", **form)
    assert (status, headers["Location"]) == (303, "./")
    cookie, *attributes = headers["Set-Cookie"].split("; ")
    assert set(attributes) == {"Path=/", "HttpOnly", "SameSite=Strict"}
    assert TOKEN not in cookie
    status, headers, page = ask(served.url, "/", Cookie=cookie)
    assert status == 200 and b"<script" in page
    assert json.loads(ask(served.url, "/api/view", Cookie=cookie)[2])["job"] == "recorded"
    assert ask(served.url, "/login", None, "POST", "token=" + "x" * 5000, **form)[0] == 413
    with socket.create_connection(("127.0.0.1", urlsplit(served.url).port or 0), 30.0) as line:
        line.sendall(
            b"POST /login HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n" + b"ff\r\n" + b"x" * 255 + b"\r\n"
        )
        for _ in range(16):  # of a length that it does not tell, and that does not end
            line.sendall(b"ff\r\n" + b"x" * 255 + b"\r\n")
        assert b" 413 " in line.recv(4096)
    # A cookie of another job, whose page is at another port of this host, is left alone.
    other = Access(SECRET, "other").cookie().partition("=")[0]
    assert other != cookie.partition("=")[0]


def test_answers_that_no_page_of_others_can_use(served: Served) -> None:
    for path, token in (("/", TOKEN), ("/", None), ("/api/view", TOKEN), ("/metrics", TOKEN), ("/healthz", None)):
        _, headers, body = ask(served.url, path, token)
        assert headers["X-Frame-Options"] == "DENY" and headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cache-Control"] == "no-store" and headers["Referrer-Policy"] == "no-referrer"
        assert "Access-Control-Allow-Origin" not in headers
        if path == "/":
            policy = headers["Content-Security-Policy"]
            nonce = re.search("script-src 'nonce-([^']+)'", policy)
            assert nonce is not None and "default-src 'none'" in policy and "unsafe" not in policy
            tags = re.findall(rb"<(?:script|style)[^>]*>", body)
            assert tags and all(f'nonce="{nonce[1]}"'.encode() in tag for tag in tags)
            assert not re.search(rb"""\son[a-z]+=["']|\sstyle=["']|(src|href)=["'](?!data:|#)""", body)
    first, second = (ask(served.url, "/", TOKEN)[1]["Content-Security-Policy"] for _ in range(2))
    assert first != second


def test_changes_need_more_than_a_cookie(served: Served) -> None:
    cookie = ACCESS.cookie().partition(";")[0]
    for origin in (None, "null", "http://evil.example", served.url.replace("127.0.0.1", "localhost"), "file://"):
        headers = {"Cookie": cookie} | ({} if origin is None else {"Origin": origin})
        assert ask(served.url, "/api/stop", None, "POST", **headers)[0] == 403, origin
    assert served.asked == []
    assert ask(served.url, "/api/stop", TOKEN)[0] == 404, "GET changes nothing"
    assert ask(served.url, "/api/stop", None, "POST", Cookie=cookie, Origin=served.url)[0] == 200
    assert ask(served.url, "/api/leave/m0-a", TOKEN, "POST")[0] == 200
    assert ask(served.url, "/api/other", TOKEN, "POST")[0] == 404
    assert served.asked == [("stop", ""), ("leave", "m0-a")]
    served.fails = StoreUnavailable("etcd is away")
    status, _, body = ask(served.url, "/api/stop", TOKEN, "POST")
    assert status == 503 and json.loads(body) == {"error": "etcd is away"}
    served.fails = LookupError("there is no member 'x'")
    assert ask(served.url, "/api/leave/x", TOKEN, "POST")[0] == 404
    assert json.loads(ask(served.url, "/api/controls", TOKEN)[2]) == {"control": True}


def test_a_page_that_only_shows() -> None:
    server = serving(Feed("recorded", None), None)
    try:
        status, _, body = ask(server.url, "/api/stop", TOKEN, "POST")
        assert status == 403 and "bamboo.observe.control" in json.loads(body)["error"]
        assert json.loads(ask(server.url, "/api/controls", TOKEN)[2]) == {"control": False}
    finally:
        assert server.close(10.0)


def test_nothing_secret_is_logged(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with socket.create_connection(("127.0.0.1", urlsplit(served.url).port or 0)) as line:
        line.sendall(f"GET / HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\x00\r\n\r\n".encode())
        assert b" 400 " in line.recv(4096)
    ask(served.url, "/metrics", TOKEN)
    assert TOKEN not in caplog.text and SECRET.text not in caplog.text


def test_strangers_cannot_keep_others_out(served: Served) -> None:
    port = urlsplit(served.url).port or 0
    lines = [socket.create_connection(("127.0.0.1", port)) for _ in range(60)]
    try:
        assert seen(served.url, TOKEN)["job"] == "recorded"
        gone = 0
        for line in lines:
            line.settimeout(0.0)
            with contextlib.suppress(BlockingIOError):
                gone += line.recv(1) == b""
        assert gone >= 60 - 33
    finally:
        for line in lines:
            line.close()


# -- what it answers --------------------------------------------------------------------------------------


def test_the_view_a_loss_and_the_metrics(served: Served) -> None:
    view = seen(served.url, TOKEN)
    assert (view["step"], view["state"], len(view["members"]), len(view["losses"])) == (25, "ended", 5, 1)
    detail = json.loads(ask(served.url, "/api/losses/1", TOKEN)[2])
    pauses = [each["pause_seconds"] for each in detail["survivors"]]
    assert detail["loss"] == view["losses"][0] and pauses[0] == detail["loss"]["pause_seconds"]
    assert sorted(each["name"] for each in detail["survivors"]) == ["m0", "m1", "m2"]
    assert pauses == sorted(pauses, reverse=True)
    for number in ("2", "x", "-1", "", "9" * 5000):
        assert ask(served.url, f"/api/losses/{number}", TOKEN)[0] == 404
    assert value(scraped(served.url, TOKEN), "bamboo_steps_committed_total") == 25
    kind = ask(served.url, "/metrics", TOKEN, Accept="application/openmetrics-text; version=1.0.0")[1]["Content-Type"]
    assert kind.startswith("application/openmetrics-text")


def test_the_stream_sends_what_has_changed(tmp_path: Path) -> None:
    lines = RECORDED.read_bytes().splitlines(keepends=True)
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"".join(lines[:9]))
    with no_leaks():
        served = Served(str(path))
        stream = iter(streamed(served.url, TOKEN))
        view: dict[str, Any] = {}
        while view.get("step") != 2:
            view |= next(stream)
        with open(path, "ab") as file:
            file.writelines(lines[9:])
        patches = []
        while view["step"] != 25 or view["state"] != "ended":
            patches.append(next(stream))
            view |= patches[-1]
        assert all("job" not in patch and "command" not in patch for patch in patches)
        assert view == seen(served.url, TOKEN)
        served.close()  # at once: 10 s at most, less than the next heartbeat
        assert list(stream) == []


def test_what_a_scrape_has_found_reaches_the_stream_as_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bamboo_ds.control.web.server._TICK_S", 0.3)
    monkeypatch.setattr("bamboo_ds.control.web.server._HEARTBEAT_S", 60.0)
    lines = RECORDED.read_bytes().splitlines(keepends=True)
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"".join(lines[:9]))
    served = Served(str(path))
    try:
        stream = iter(streamed(served.url, TOKEN))
        view: dict[str, Any] = {}
        while view.get("step") != 2:
            view |= next(stream)
        with open(path, "ab") as file:
            file.write(b"".join(lines[9:]))
        assert value(scraped(served.url, TOKEN), "bamboo_steps_committed_total") == 25
        while view["step"] != 25:
            view |= next(stream)  # fails after 20 s
    finally:
        served.close()


def test_watchers_are_bounded(monkeypatch: pytest.MonkeyPatch, served: Served) -> None:
    monkeypatch.setattr("bamboo_ds.control.web.server._STREAMS", 1)
    stream = iter(streamed(served.url, TOKEN))
    next(stream)
    assert ask(served.url, "/api/stream", TOKEN)[0] == 503
    stream.close()  # type: ignore[attr-defined]
    wait_until(lambda: served.server._streams == 0, "the server sees that the client is gone", 20.0)


def test_a_stream_is_alive(monkeypatch: pytest.MonkeyPatch, served: Served) -> None:
    monkeypatch.setattr("bamboo_ds.control.web.server._HEARTBEAT_S", 0.05)
    with socket.create_connection(("127.0.0.1", urlsplit(served.url).port or 0), timeout=10.0) as line:
        line.sendall(f"GET /api/stream HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
        got = b""
        while b": alive\n\n" not in got:
            got += line.recv(1 << 16)


def test_a_file_that_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What etcd tells is shown all the same, and a warning says it once."""
    feed = Feed("recorded", str(tmp_path / "missing.jsonl"))
    feed.know(overview(known()))
    feed.refresh()
    feed.refresh()
    view = json.loads(feed.view()[1])
    assert [member["id"] for member in view["members"]] == ["a"]
    assert caplog.text.count("missing.jsonl") == 1


def test_a_long_past_is_read_while_the_page_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It shows how far it is, and who scrapes is told to come again: counters that climb once more look like news."""
    monkeypatch.setattr("bamboo_ds.control.web.feed._CHUNK", 4096)
    monkeypatch.setattr("bamboo_ds.control.web.feed._SHOW_S", 0.0)
    monkeypatch.setattr("bamboo_ds.control.web.server._PATIENCE_S", 0.05)
    path = tmp_path / "events.jsonl"
    path.write_bytes(RECORDED.read_bytes())
    go, chunks, read = threading.Event(), list[int](), EventTail.read

    def slow(tail: EventTail, limit: int = -1) -> Any:
        if tail.path != str(path):
            return read(tail, limit)
        chunks.append(limit)
        assert len(chunks) < 4 or go.wait(20.0)
        return read(tail, limit)

    monkeypatch.setattr(EventTail, "read", slow)
    served = Served(str(path))
    try:
        wait_until(lambda: len(chunks) == 4, "three chunks are read", 20.0)
        view = seen(served.url, TOKEN)
        assert view["state"] == "reading" and 0 < view["step"] < 25 and view["ended"] is None
        status, _, body = ask(served.url, "/metrics", TOKEN)
        assert status == 503 and "being read" in json.loads(body)["error"]
        go.set()
        wait_until(lambda: seen(served.url, TOKEN)["state"] == "ended", "the rest is read", 20.0)
        assert value(scraped(served.url, TOKEN), "bamboo_steps_committed_total") == 25
        assert len(chunks) > 5 and set(chunks) == {4096}
    finally:
        go.set()
        served.close()


def test_an_event_that_cannot_be_shown_hides_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    add = LiveJob.add

    def fail(live: LiveJob, event: Event) -> None:
        if event.event == "member_lost":
            raise RuntimeError("a test says so")
        add(live, event)

    monkeypatch.setattr(LiveJob, "add", fail)
    feed = Feed("recorded", str(RECORDED))
    feed.refresh()
    assert json.loads(feed.view()[1])["step"] == 25 and caplog.text.count("a test says so") == 1


# -- while a member leads -----------------------------------------------------------------------------------


def known(leader: str = "a") -> Mirror:
    return mirror(initial_plan(["a"]), LeaderRecord(id=leader), member("a"))


class StoreDouble:
    """Keeps what is written."""

    def __init__(self) -> None:
        self.written: dict[str, str] = {}

    def put(self, key: str, text: str, lease: object = None) -> None:
        self.written[key] = text

    def compare_and_swap(self, key: str, revision: int, text: str, **more: object) -> bool:
        self.written[key] = text
        return True

    def get(self, key: str) -> KeyValue | None:
        return KeyValue(key, "", 1, 1) if key == Keys.member("a") else None


def display(address: str, store: StoreDouble, secret: JobSecret = SECRET, **observe: Any) -> JobPage:
    settings = agent(job="recorded", secret=secret, http=address, **observe)
    return JobPage(settings, "a", store, AgentLoop())  # type: ignore[arg-type]


def lead(shown: JobPage, ready: Callable[[], Any]) -> None:
    """What the coordinator does, until ``ready``."""
    lease: Any = None
    patience, pause = Patience(20.0), threading.Event()
    while not ready():
        assert not patience.over()
        again = shown.follow(known(), lease)
        pause.wait(0.05 if again is None else max(0.0, min(0.05, again - shown._clock())))


def test_it_serves_while_its_member_leads() -> None:
    store: Any = StoreDouble()
    lease: Any = None
    with no_leaks():
        shown = display("127.0.0.1:0", store, control=True)
        assert shown.follow(known("b"), lease) is None and not store.written
        begin = time.monotonic()
        lead(shown, lambda: Keys.WEB in store.written)
        assert time.monotonic() - begin >= 0.5, "a member that begins to lead has a loss to handle first"
        record = WebRecord.from_json(store.written[Keys.WEB])
        assert record.id == "a" and seen(record.url, TOKEN)["members"][0]["id"] == "a"
        paths = "/api/leave/b", "/api/leave/a", "/api/stop"
        answers = [ask(record.url, path, TOKEN, "POST")[0] for path in paths]
        assert answers == [404, 200, 200]
        assert LeaveRecord.from_json(store.written[Keys.leave("a")]).source == "web"
        assert StopRecord.from_json(store.written[Keys.STOP]).code == 143
        shown.follow(known("b"), lease)  # it leads no more
        wait_until(lambda: not served_at(record.url), "the server has ended", 20.0)
        shown.close(5.0)


def test_a_page_that_ends_badly_keeps_nobody(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a test says so")

    store = StoreDouble()
    shown = display("127.0.0.1:0", store)
    lead(shown, lambda: store.written)
    server = shown._server
    assert server is not None
    with monkeypatch.context() as broken:
        broken.setattr("bamboo_ds.control.web.server.WebServer.close", fail)
        shown.close(0.0)
    assert "a test says so" in caplog.text
    server.close(5.0)


def test_a_port_in_use_is_told_once_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("bamboo_ds.control.web.display._RETRY_S", 0.05)
    store = StoreDouble()
    with no_leaks():
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            shown = display(f"127.0.0.1:{port}", store)
            lead(shown, lambda: shown._failures > 3)
            assert caplog.text.count("cannot serve the page") == 1 and f"127.0.0.1:{port}" in caplog.text
            assert not store.written
        lead(shown, lambda: store.written)
        assert WebRecord.from_json(store.written[Keys.WEB]).url == f"http://127.0.0.1:{port}"
        shown.close(5.0)


def test_a_failure_of_any_kind_is_no_failure_of_the_job(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failed = []

    def fail(*_: object) -> None:
        failed.append(1)
        raise RuntimeError("a test says so")

    monkeypatch.setattr("bamboo_ds.control.web.display._RETRY_S", 0.05)
    monkeypatch.setattr("bamboo_ds.control.web.server.WebServer.__init__", fail)
    shown = display("127.0.0.1:0", StoreDouble())
    lead(shown, lambda: len(failed) > 2)
    shown.close(5.0)
    monkeypatch.undo()
    monkeypatch.setattr("bamboo_ds.control.web.feed.Feed.know", fail)
    failed.clear()
    with no_leaks():
        shown = display("127.0.0.1:0", StoreDouble())
        lead(shown, lambda: len(failed) > 2)
        shown.close(5.0)
    assert caplog.text.count("a test says so") == 2


def test_all_addresses_are_told_as_the_one_that_others_know() -> None:
    store = StoreDouble()
    shown = display("0.0.0.0:0", store)
    lead(shown, lambda: store.written)
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+", WebRecord.from_json(store.written[Keys.WEB]).url)
    shown.close(5.0)


def test_a_server_that_has_ended_is_followed_by_another() -> None:
    store = StoreDouble()
    with no_leaks():
        shown = display("127.0.0.1:0", store)
        lead(shown, lambda: store.written)
        ended = shown._server
        assert ended is not None and ended.close(10.0)
        shown._try_at = 0.0
        lead(shown, lambda: shown._server not in (None, ended))
        shown.close(5.0)


def test_one_that_leads_for_a_moment_only_leaves_nothing() -> None:
    store, lease = StoreDouble(), None
    with no_leaks():
        shown = display("127.0.0.1:0", store)
        lead(shown, lambda: shown._opening is not None)
        shown.follow(known("b"), lease)  # type: ignore[arg-type]
        assert not store.written


def test_a_job_without_a_secret_serves_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("bamboo_ds.control.web.display._RETRY_S", 0.05)
    store = StoreDouble()
    shown = display("127.0.0.1:0", store, NONE)
    lead(shown, lambda: shown._failures > 2)
    assert caplog.text.count("has no secret") == 1 and not store.written
    shown.close(5.0)


# -- settings -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "address"),
    [("127.0.0.1:9400", ("127.0.0.1", 9400)), (":0", ("", 0)), ("[::1]:80", ("::1", 80)), ("host.a:1", ("host.a", 1))],
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert split_address(text) == address


@pytest.mark.parametrize("text", ["", "9400", "host", "host:", "host:x", "host:65536", "::1:80", "http://a:1", "a b:1"])
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match=r"observe\.http.*127\.0\.0\.1:9400"):
        bamboo_config({"bamboo": {"observe": {"http": text}}})
