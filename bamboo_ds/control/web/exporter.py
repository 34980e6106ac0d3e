"""Sends the metrics of a job, and its events as logs, to an OpenTelemetry collector (OTLP over HTTP)."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import Any

from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk._logs import LoggerProvider, LogRecordProcessor, ReadableLogRecord, ReadWriteLogRecord
from opentelemetry.sdk._logs.export import LogRecordExportResult
from opentelemetry.sdk.metrics import export
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client.core import Metric

from ...observe.events import Event
from .feed import Feed

logger = logging.getLogger("bamboo_ds.control.web")

#: Seconds between two reports.
INTERVAL_S = 10.0
_TIMEOUT_S = 5.0
#: Events that wait to be sent; older ones are dropped.
_WAITING = 4096
_SCOPE = InstrumentationScope("bamboo_ds")
#: Kinds of events that are no course of things; others are information.
_SEVERE = {"member_lost": SeverityNumber.WARN, "fatal": SeverityNumber.ERROR, "checkpoint_failed": SeverityNumber.ERROR}


class _Last(LogRecordProcessor):
    """Keeps records until they are exported."""

    def __init__(self) -> None:
        self.records: deque[ReadableLogRecord] = deque(maxlen=_WAITING)

    def on_emit(self, log_record: ReadWriteLogRecord) -> None:
        """Take a record, complete with its resource."""
        self.records.append(
            ReadableLogRecord(
                log_record=log_record.log_record,
                resource=log_record.resource,
                instrumentation_scope=log_record.instrumentation_scope,
            )
        )

    def shutdown(self) -> None:
        """Nothing to do."""

    def force_flush(self, timeout_millis: int = 0) -> bool:
        """Nothing to do."""
        return True


class Exporter:
    """Reports from a thread of its own until :meth:`close`. A collector that does not answer is told once in the log.

    Args:
        feed: what is reported; its events from now on.
        job: the job's name, attribute ``bamboo.job`` of all that is sent.
        url: the collector's, without ``/v1/metrics``. ``OTEL_EXPORTER_OTLP_HEADERS`` may have a credential for it.
    """

    def __init__(self, feed: Feed, job: str, url: str) -> None:
        self._feed, self._url = feed, url
        self._resource = Resource.create({"service.name": "bamboo_ds", "bamboo.job": job})
        self._metrics = OTLPMetricExporter(endpoint=f"{url}/v1/metrics", timeout=_TIMEOUT_S)
        self._logs = OTLPLogExporter(endpoint=f"{url}/v1/logs", timeout=_TIMEOUT_S)
        self._kept = _Last()
        provider = LoggerProvider(self._resource, shutdown_on_exit=False)
        provider.add_log_record_processor(self._kept)
        self._logger = provider.get_logger(_SCOPE.name)
        self._begin = time.time_ns()
        self._failed = False
        self._end, self._closed_at = threading.Event(), 0.0
        feed.on_event = self._note
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # it is said here, once
        self._thread = threading.Thread(target=self._run, name="bamboo-otlp", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Report for the last time; wait up to ``timeout_s`` seconds for that. Idempotent."""
        if not self._end.is_set():
            self._closed_at = time.monotonic()
            self._end.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._end.wait(INTERVAL_S):
            self._report()
        self._report()

    def _late(self) -> bool:
        """Whether the last report must not take longer."""
        return self._end.is_set() and time.monotonic() > self._closed_at + _TIMEOUT_S

    def _report(self) -> None:
        try:
            known = self._feed.families(self._late)
            if known is None:
                return
            started, families = known
            begin = self._begin if started is None else int(started * 1e9)  # else a new leader's sums look new
            done = self._metrics.export(self._data(families, begin)) is export.MetricExportResult.SUCCESS
            records = list(self._kept.records)
            if done and records:
                done = self._logs.export(records) is LogRecordExportResult.SUCCESS
                for record in records if done else ():
                    if self._kept.records and self._kept.records[0] is record:
                        self._kept.records.popleft()
            if not done and not self._failed:
                logger.warning('the collector at "bamboo.observe.otlp" = %r takes no reports; trying on', self._url)
            self._failed = not done
        except Exception:  # of OpenTelemetry's; the next report may do
            if not self._failed:
                logger.exception("a report to the collector at %s has failed; trying on", self._url)
            self._failed = True

    # -- logs -----------------------------------------------------------------------------------------

    def _note(self, event: Event) -> None:
        severity = _SEVERE.get(event.event, SeverityNumber.INFO)
        fields = event.model_dump(mode="json", by_alias=True, exclude={"schema_", "time", "event", "job"})
        self._logger.emit(
            LogRecord(
                timestamp=int(event.time.timestamp() * 1e9),
                observed_timestamp=time.time_ns(),
                severity_number=severity,
                severity_text=severity.name,
                event_name=f"bamboo.{event.event}",
                body=event.to_json(),
                attributes={f"bamboo.{name}": value for name, value in fields.items() if _plain(value)},
            )
        )

    # -- metrics --------------------------------------------------------------------------------------

    def _data(self, families: list[Metric], begin: int) -> export.MetricsData:
        """The families as OpenTelemetry has them, under the same names; they count from ``begin``, in ns since 1970."""
        metrics = [self._metric(family, begin) for family in families]
        scope = export.ScopeMetrics(scope=_SCOPE, metrics=metrics, schema_url="")
        resource = export.ResourceMetrics(resource=self._resource, scope_metrics=[scope], schema_url="")
        return export.MetricsData(resource_metrics=[resource])

    def _metric(self, family: Metric, begin: int) -> export.Metric:
        data: Any
        if family.type == "histogram":
            data = export.Histogram(self._distributions(family, begin), export.AggregationTemporality.CUMULATIVE)
        else:
            points = [
                export.NumberDataPoint(
                    attributes=sample.labels,
                    start_time_unix_nano=begin,
                    time_unix_nano=time.time_ns(),
                    value=float(sample.value),
                )
                for sample in family.samples
            ]
            data = export.Gauge(points)
            if family.type == "counter":
                data = export.Sum(points, export.AggregationTemporality.CUMULATIVE, is_monotonic=True)
        name = f"{family.name}_total" if family.type == "counter" else family.name
        return export.Metric(name=name, description=family.documentation, unit="", data=data)

    def _distributions(self, family: Metric, begin: int) -> list[export.HistogramDataPoint]:
        found: dict[tuple[tuple[str, str], ...], dict[str, Any]] = {}
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name != "le"}
            each = found.setdefault(tuple(labels.items()), {"bounds": [], "counts": [], "sum": 0.0})
            if sample.name.endswith("_bucket"):
                each["bounds"].append(float(sample.labels["le"]))
                each["counts"].append(int(sample.value))
            elif sample.name.endswith("_sum"):
                each["sum"] = sample.value
        points = []
        for labels_, each in found.items():
            counts = [now - before for before, now in zip([0, *each["counts"]], each["counts"], strict=False)]
            points.append(
                export.HistogramDataPoint(
                    attributes=dict(labels_),
                    start_time_unix_nano=begin,
                    time_unix_nano=time.time_ns(),
                    count=sum(counts),
                    sum=each["sum"],
                    bucket_counts=counts,
                    explicit_bounds=each["bounds"][:-1],
                    min=None,
                    max=None,
                )
            )
        return points


def _plain(value: object) -> bool:
    return isinstance(value, str | int | float | bool)
