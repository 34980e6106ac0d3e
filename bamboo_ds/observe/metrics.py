"""The metrics of a job for Prometheus, folded from its events: a scrape agrees with the file by construction.

Counters begin with the job's start in the file. Pure, apart from the types of ``prometheus_client``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import get_args

from prometheus_client import Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from . import events as ev
from .live import LiveJob
from .view import LiveView

#: States of members; what is known of others counts as ``other``.
STATES = ("starting", "building", "running", "leaving", "waiting", "evicted", "other")
REASONS: tuple[str, ...] = get_args(ev.MemberLost.model_fields["reason"].annotation)
#: Parts of a pause, by the field of ``recovered`` that they are; ``pause`` is the whole until work goes on.
PHASES = ("detection", "plan", "rebuild", "redo", "pause")

_STEP = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300)
_PAUSE = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_CHECKPOINT = (0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)


class Metrics(Collector):
    """Folds events beside a :class:`~.live.LiveJob`, whose views it completes.

    Call :meth:`add` with each event that the job gets, and :meth:`show` before :meth:`collect`, with no event between.
    """

    def __init__(self, job: LiveJob) -> None:
        self._job = job
        self._view: LiveView | None = None
        self._begin()

    def _begin(self) -> None:
        self._steps = Histogram("bamboo_step_seconds", "Durations of iterations.", buckets=_STEP, registry=None)
        parts = "Parts of the pause after a loss, of each survivor; phase pause: from its notice to the agreement."
        self._pauses = Histogram("bamboo_pause_seconds", parts, ["phase"], buckets=_PAUSE, registry=None)
        for phase in PHASES:
            self._pauses.labels(phase)
        saves = "Time to write checkpoints, in the background."
        self._saves = Histogram("bamboo_checkpoint_seconds", saves, buckets=_CHECKPOINT, registry=None)
        self._saved: set[tuple[str, int]] = set()
        self._badput: dict[str, float] = {}
        self._number: int | None = None

    def add(self, event: ev.Event) -> None:
        """Takes the next event."""
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
                        self._pauses.labels(phase).observe(seconds)
            case ev.CheckpointSaved():
                if (event.path, event.step) not in self._saved:
                    self._saves.observe(event.seconds)
                self._saved.add((event.path, event.step))

    def show(self, view: LiveView) -> None:
        """Sets the view that :meth:`collect` tells from now on."""
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
        yield from _families(self._steps)
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
            ev.NOTICE_ORIGINS,
            totals.notices_by_source,
        )
        yield from _families(self._pauses)
        yield from _families(self._saves)
        if view.account is not None and view.account.goodput is not None:
            share = "Productive share of the member-seconds since the start."
            yield GaugeMetricFamily("bamboo_goodput_ratio", share, value=view.account.goodput)
        other = "Member-seconds that were not productive, up to the newest step, by what they were spent on."
        badput = CounterMetricFamily("bamboo_badput_seconds", other, labels=["type"])
        for category, seconds in self._job.badput().items():  # only here: it takes its time with many members
            self._badput[category] = max(seconds, self._badput.get(category, 0.0))
        yield _counted(badput, sorted(self._badput), self._badput)


def _families(histogram: Histogram) -> Iterable[Metric]:
    """The families of a histogram, without the time of its creation: another leader's counts the same job."""
    for family in histogram.collect():
        family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
        yield family


def _counted(family: Metric, values: Iterable[str], counts: Mapping[str, float]) -> Metric:
    for value in dict.fromkeys((*values, *counts)):
        family.add_metric([value], counts.get(value, 0))  # type: ignore[attr-defined]
    return family
