"""What an OpenTelemetry collector gets: the same numbers as Prometheus, and the events as logs."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from bamboo_ds.config import bamboo_config
from bamboo_ds.control.settings import AgentSettings
from bamboo_ds.control.web.feed import Feed
from bamboo_ds.job_settings import JobSettings
from bamboo_ds.observe.events import EventWriter, read_events
from bamboo_ds.secret import JobSecret

from .support.leaks import no_leaks
from .support.page import ask, parsed
from .support.patience import Patience

pytestmark = pytest.mark.claim("guides/observing.md")

pytest.importorskip("opentelemetry.sdk", reason="OpenTelemetry is missing: pip install bamboo_ds[otel]")
RECORDED = Path(__file__).parent / "support" / "recorded_job.jsonl"


class Collector:
    """Takes what is sent by OTLP over HTTP."""

    def __init__(self) -> None:
        self.got: list[tuple[str, bytes]] = []
        self.status = 200
        mine = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                assert self.headers["Content-Type"] == "application/x-protobuf"
                if mine.status == 200:
                    mine.got.append((self.path, body))
                self.send_response(mine.status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def wait(self, path: str) -> None:
        patience, pause = Patience(20.0), threading.Event()
        while not any(each == path for each, _ in self.got):
            assert not patience.over(), f"nothing at {path}"
            pause.wait(0.02)

    def metrics(self) -> dict[str, Any]:
        """The newest ones by name."""
        from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

        body = [body for path, body in self.got if path == "/v1/metrics"][-1]
        (resource,) = ExportMetricsServiceRequest.FromString(body).resource_metrics
        assert attributes(resource.resource)["bamboo.job"] == "recorded"
        return {metric.name: metric for scope in resource.scope_metrics for metric in scope.metrics}

    def logs(self) -> list[Any]:
        from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest

        bodies = [ExportLogsServiceRequest.FromString(body) for path, body in self.got if path == "/v1/logs"]
        resources = [resource for body in bodies for resource in body.resource_logs]
        return [each for resource in resources for scope in resource.scope_logs for each in scope.log_records]


def attributes(of: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in of.attributes}


@pytest.fixture
def collector() -> Iterator[Collector]:
    found = Collector()
    yield found
    found.close()


def test_metrics_and_logs(collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bamboo_ds.control.web import exporter

    monkeypatch.setattr(exporter, "INTERVAL_S", 0.05)
    events = list(read_events(RECORDED))
    path = tmp_path / "events.jsonl"
    path.touch()
    with no_leaks():
        feed = Feed("recorded", str(path))
        exporting = exporter.Exporter(feed, "recorded", collector.url)
        try:
            with EventWriter(path) as writer:
                for event in events:
                    writer.emit(event.model_copy(update={"time": event.time - events[0].time + feed._since}))
            collector.wait("/v1/logs")
        finally:
            exporting.close(10.0)  # reports for the last time
    logs = collector.logs()
    assert [each.event_name for each in logs] == [f"bamboo.{event.event}" for event in events]
    (lost,) = [each for each in logs if each.event_name == "bamboo.member_lost"]
    assert lost.severity_text == "WARN" and attributes(lost)["bamboo.reason"] == "signal"
    assert '"event":"member_lost"' in lost.body.string_value
    sent = collector.metrics()
    exposed = feed.exposition("")
    assert exposed is not None
    scraped = parsed(exposed[0].decode())
    for name, metric in sent.items():
        points = getattr(metric, metric.WhichOneof("data")).data_points
        for point in points:
            labels = tuple(sorted(attributes(point).items()))
            if not metric.HasField("gauge"):  # it counts from the job's start, whoever leads
                assert point.start_time_unix_nano == pytest.approx(feed._since.timestamp() * 1e9, abs=1e6)
            if metric.HasField("histogram"):
                assert point.count == scraped[f"{name}_count", labels]
                assert point.sum == pytest.approx(scraped[f"{name}_sum", labels])
                total = 0
                for bound, count in zip([*point.explicit_bounds, "+Inf"], point.bucket_counts, strict=True):
                    total += count
                    assert total == scraped[f"{name}_bucket", tuple(sorted((*labels, ("le", str(bound)))))]
            else:
                assert point.as_double == pytest.approx(scraped[name, labels]), name
        assert metric.HasField("sum") == name.endswith("_total")
    families = {name for name, _ in scraped}
    assert len(sent) == 14 and all(name in families or f"{name}_count" in families for name in sent)


def test_a_collector_that_does_not_answer(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said once, and reports go on."""
    from bamboo_ds.control.web import exporter

    monkeypatch.setattr(exporter, "INTERVAL_S", 0.02)
    collector.status = 400
    exporting = exporter.Exporter(Feed("recorded", str(RECORDED)), "recorded", collector.url)
    try:
        patience, pause = Patience(20.0), threading.Event()
        while "takes no reports" not in caplog.text:
            assert not patience.over()
            pause.wait(0.02)
        collector.status = 200
        collector.wait("/v1/metrics")
        assert caplog.text.count("takes no reports") == 1
    finally:
        exporting.close(10.0)


def test_the_last_report_has_the_newest_events(collector: Collector, tmp_path: Path) -> None:
    """Also where there is a page beside it, which ends at the same time, and nobody waits: another member leads."""
    from bamboo_ds.control.web.site import Site

    path = tmp_path / "events.jsonl"
    path.touch()
    block = bamboo_config({"bamboo": {"observe": {"http": "127.0.0.1:0", "otlp": collector.url}}})
    assert block is not None
    known: dict[str, Any] = {"store": "x", "parent_pid": 1, "command": ("x",), "secret": JobSecret("x" * 40)}
    settings = AgentSettings(
        job="recorded", slot=0, world_size=1, settings=JobSettings(values=block), events=str(path), **known
    )
    event = next(read_events(RECORDED))
    with no_leaks():
        site = Site(settings, None)
        site.listen()
        assert ask(site.url or "", "/healthz")[0] == 200
        with EventWriter(path) as writer:
            writer.emit(event.model_copy(update={"time": site.feed._since}))
        site.close(0.0)
        collector.wait("/v1/logs")
        site.close(10.0)
    assert [each.event_name for each in collector.logs()] == ["bamboo.run_started"]
