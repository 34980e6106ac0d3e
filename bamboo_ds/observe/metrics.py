"""The metrics of a job for Prometheus, folded from its events: a scrape agrees with the file by construction.

Counters begin with the job's start in the file. Pure, apart from the types of ``prometheus_client``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from . import events as ev
from .live import LiveJob
from .view import LiveView

#: States of members; what is known of others counts as ``other``.
STATES = ("starting", "building", "running", "leaving", "waiting", "evicted", "other")
REASONS: tuple[str, ...] = get_args(ev.MemberLost.model_fields["reason"].annotation)
SOURCES = ("aws", "gcp", "azure", "file", "http", "signal", "web")
#: Parts of a pause, by the field of ``recovered`` that they are; ``pause`` is the whole until work goes on.
PHASES = ("detection", "plan", "rebuild", "redo", "pause")

_STEP = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300)
_PAUSE = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_CHECKPOINT = (0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)


class _Histogram:
    """Counts of values up to each bound, and their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str] = ()) -> None:
        """Put it into a family, as cumulative counts."""
        total, buckets = 0, []
        for bound, count in zip([*map(float, self._bounds), float("inf")], self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else str(bound), float(total)))
        family.add_metric(labels, buckets, self._sum)


class Metrics(Collector):
    """Folds events beside a :class:`~.live.LiveJob`, whose views it completes.

    Call :meth:`add` with each event that the job gets, and :meth:`show` before :meth:`collect`, with no event between.
    """

    def __init__(self, job: LiveJob) -> None:
        self._job = job
        self._view: LiveView | None = None
        self._begin()

    def _begin(self) -> None:
        self._steps = _Histogram(_STEP)
        self._pauses = {phase: _Histogram(_PAUSE) for phase in PHASES}
        self._saves = _Histogram(_CHECKPOINT)
        self._saved: set[tuple[str, int]] = set()
        self._badput: dict[str, float] = {}
        self._number: int | None = None

    def add(self, event: ev.Event) -> None:
        """Take the next event."""
        if event.job != self._job.job:
            return
        match event:
            case ev.RunStarted():
                self._begin()
            case ev.Restart():
                self._number = None
            case ev.Step():
                if event.step != self._number:  # else it is emitted twice
                    self._steps.observe(event.seconds)
                self._number = event.step
            case ev.Recovered():
                for phase in PHASES:
                    seconds = getattr(event, f"{phase}_seconds")
                    if seconds is not None:
                        self._pauses[phase].observe(seconds)
            case ev.CheckpointSaved():
                if (event.path, event.step) not in self._saved:
                    self._saves.observe(event.seconds)
                self._saved.add((event.path, event.step))

    def show(self, view: LiveView) -> None:
        """What :meth:`collect` tells from now on."""
        self._view = view

    def collect(self) -> Iterable[Metric]:
        """All families, with a sample for each value that their labels may have."""
        view = self._view
        if view is None:
            return
        totals = view.totals
        steps = "Committed steps; those that are done again from a checkpoint count each time."
        yield CounterMetricFamily("bamboo_steps_committed", steps, value=totals.steps)
        if view.last_step_time is not None:
            newest = "When the newest step was committed, in seconds since 1970."
            yield GaugeMetricFamily("bamboo_last_step_timestamp_seconds", newest, value=view.last_step_time)
        durations = HistogramMetricFamily("bamboo_step_seconds", "Durations of iterations.")
        self._steps.add_to(durations)
        yield durations
        if totals.samples is not None:
            yield CounterMetricFamily("bamboo_samples", "Samples in committed steps.", value=totals.samples)
        yield _counted(
            GaugeMetricFamily("bamboo_members", "Members that are there, by what they do.", labels=["state"]),
            STATES,
            Counter(each.state if each.state in STATES else "other" for each in view.members if each.present),
        )
        yield GaugeMetricFamily("bamboo_epoch", "Number of the plan.", value=view.epoch)
        if view.unshadowed is not None:
            bare = "Roles (stages of pipelines) without a replica: the loss of an owner of one is fatal, or costs more."
            yield GaugeMetricFamily("bamboo_roles_unshadowed", bare, value=len(view.unshadowed))
        if view.coverage.ratio is not None:
            covered = "Share of the redundant forward passes that were done ahead of a loss, in the newest 64 steps."
            yield GaugeMetricFamily("bamboo_frc_coverage_ratio", covered, value=view.coverage.ratio)
        yield _counted(
            CounterMetricFamily("bamboo_losses", "Lost members, by how that was noticed.", labels=["reason"]),
            REASONS,
            totals.losses_by_reason,
        )
        yield _counted(
            CounterMetricFamily("bamboo_notices", "Notices that members have got, by origin.", labels=["source"]),
            SOURCES,
            totals.notices_by_source,
        )
        parts = "Parts of the pause after a loss, of each survivor; phase pause: from its notice to the agreement."
        pauses = HistogramMetricFamily("bamboo_pause_seconds", parts, labels=["phase"])
        for phase, histogram in self._pauses.items():
            histogram.add_to(pauses, [phase])
        yield pauses
        saves = HistogramMetricFamily("bamboo_checkpoint_seconds", "Time to write checkpoints, in the background.")
        self._saves.add_to(saves)
        yield saves
        if view.account is not None and view.account.goodput is not None:
            share = "Productive share of the member-seconds since the start."
            yield GaugeMetricFamily("bamboo_goodput_ratio", share, value=view.account.goodput)
        other = "Member-seconds that were not productive, up to the newest step, by what they were spent on."
        badput = CounterMetricFamily("bamboo_badput_seconds", other, labels=["type"])
        for category, seconds in self._job.badput().items():  # only here: it takes its time with many members
            self._badput[category] = max(seconds, self._badput.get(category, 0.0))
        yield _counted(badput, sorted(self._badput), self._badput)


def _counted(family: Metric, values: Iterable[str], counts: Mapping[str, float]) -> Metric:
    for value in dict.fromkeys((*values, *counts)):
        family.add_metric([value], counts.get(value, 0))  # type: ignore[attr-defined]
    return family
