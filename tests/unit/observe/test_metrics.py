"""What a job's events are for Prometheus, and what is made of it: the dashboard and the rules."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest

from bamboo_ds.observe import events as ev
from bamboo_ds.observe.events import Event, read_events
from bamboo_ds.observe.goodput import account
from bamboo_ds.observe.live import LiveJob
from bamboo_ds.observe.metrics import Metrics
from tests.support.page import Samples, gone_back, parsed, value
from tests.support.synthetic_job import four

pytestmark = pytest.mark.claim("guides/observing.md")

ROOT = Path(__file__).parents[3]
RECORDED = Path(__file__).parents[2] / "support" / "recorded_job.jsonl"
PROMETHEUS, GRAFANA = ROOT / "configs" / "prometheus", ROOT / "configs" / "grafana"
NAMES = {
    "bamboo_steps_committed_total",
    "bamboo_last_step_timestamp_seconds",
    "bamboo_step_seconds",
    "bamboo_samples_total",
    "bamboo_members",
    "bamboo_epoch",
    "bamboo_roles_unshadowed",
    "bamboo_frc_coverage_ratio",
    "bamboo_losses_total",
    "bamboo_notices_total",
    "bamboo_pause_seconds",
    "bamboo_checkpoint_seconds",
    "bamboo_goodput_ratio",
    "bamboo_badput_seconds_total",
}


class Folded:
    """A job and its metrics, as the web server has them."""

    def __init__(self, job: str) -> None:
        self.live = LiveJob(job)
        self.metrics = Metrics(self.live)
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self.metrics)

    def add(self, event: Event) -> None:
        self.live.add(event)
        self.metrics.add(event)

    def text(self) -> str:
        self.metrics.show(self.live.view())
        return generate_latest(self.registry).decode()


def exposed(events: list[Event]) -> Samples:
    folded = Folded(events[0].job)
    for event in events:
        folded.add(event)
    return parsed(folded.text())


def test_a_recorded_job_by_the_clients_own_parser() -> None:
    events = list(read_events(RECORDED))
    found = exposed(events)
    families = {re.sub(r"_(bucket|count|sum)$", "", name) for name, _ in found}
    assert families == NAMES
    steps = [event for event in events if isinstance(event, ev.Step)]
    recovered = [event for event in events if isinstance(event, ev.Recovered)]
    saved = [event for event in events if isinstance(event, ev.CheckpointSaved)]
    assert value(found, "bamboo_steps_committed_total") == value(found, "bamboo_step_seconds_count") == len(steps)
    assert value(found, "bamboo_step_seconds_sum") == pytest.approx(sum(event.seconds for event in steps))
    for bound in ("0.05", "0.1"):
        within = sum(event.seconds <= float(bound) for event in steps)
        assert value(found, "bamboo_step_seconds_bucket", le=bound) == within
    assert value(found, "bamboo_last_step_timestamp_seconds") == pytest.approx(steps[-1].time.timestamp())
    assert value(found, "bamboo_samples_total") == sum(event.samples or 0 for event in steps)
    assert value(found, "bamboo_members", state="running") == 4
    assert value(found, "bamboo_epoch") == 6
    assert value(found, "bamboo_roles_unshadowed") == 0
    covered = sum(event.frc_done for event in steps) / sum(event.frc_total for event in steps)
    assert value(found, "bamboo_frc_coverage_ratio") == pytest.approx(covered)
    lost = Counter(event.reason for event in events if isinstance(event, ev.MemberLost))
    assert {dict(labels)["reason"]: int(n) for (name, labels), n in found.items() if name == "bamboo_losses_total"} == {
        **dict.fromkeys(("exit", "signal", "heartbeat", "hang", "lease", "suspects", "abort"), 0),
        **lost,
    }
    assert value(found, "bamboo_notices_total", source="aws") == 0
    assert value(found, "bamboo_pause_seconds_count", phase="pause") == len(recovered) == 3
    for phase in ("detection", "plan", "rebuild", "redo", "pause"):
        told = [getattr(event, f"{phase}_seconds") for event in recovered]
        assert value(found, "bamboo_pause_seconds_sum", phase=phase) == pytest.approx(sum(told))
    assert value(found, "bamboo_checkpoint_seconds_count") == len(saved) == 3
    report = account(events)
    assert value(found, "bamboo_goodput_ratio") == pytest.approx(report.goodput)
    last = account(events[: events.index(steps[-1]) + 2])  # the last checkpoint is told after the last step
    for category, seconds in last.categories.items():
        if category.value not in ("productive", "other"):
            badput = value(found, "bamboo_badput_seconds_total", type=category.value)
            assert badput == pytest.approx(seconds, abs=0.1), category
    assert ("bamboo_badput_seconds_total", (("type", "productive"),)) not in found


def test_counters_do_not_go_back_and_do_not_depend_on_who_scrapes_when() -> None:
    events = list(read_events(RECORDED))
    often, before = Folded("recorded"), Samples()
    for event in events:
        often.add(event)
        now = parsed(often.text())
        assert not gone_back(before, now), event
        before = now
    once = exposed(events)
    rest = {"standby", "other"}  # what was seen as rest may turn out to have been a copy, or a checkpoint
    assert {key: number for key, number in once.items() if dict(key[1]).get("type") not in rest} == pytest.approx(
        {key: number for key, number in before.items() if dict(key[1]).get("type") not in rest}
    )


def test_what_is_not_known_is_not_told() -> None:
    """Before the engines are built; and of a job whose events do not tell the size of batches."""
    early = exposed(list(read_events(RECORDED))[:6])
    absent = {"bamboo_last_step_timestamp_seconds", "bamboo_samples_total", "bamboo_roles_unshadowed"}
    assert not absent & {name for name, _ in early}
    assert value(early, "bamboo_steps_committed_total") == 0
    assert "bamboo_samples_total" not in {name for name, _ in exposed(four().events)}


def test_another_start_in_the_file_begins_anew() -> None:
    events = list(read_events(RECORDED))
    assert exposed([*events, *events]) == pytest.approx(exposed(events))
    assert exposed([*events, *four("another").events]) == pytest.approx(exposed(events))


def test_what_is_told_twice_counts_once() -> None:
    events = list(read_events(RECORDED))
    twice = [event for event in events for _ in range(2 if isinstance(event, ev.Step | ev.CheckpointSaved) else 1)]
    keep = ("bamboo_steps", "bamboo_step_seconds_count", "bamboo_samples", "bamboo_checkpoint_seconds")
    found, whole = exposed(twice), exposed(events)
    assert {k: v for k, v in found.items() if k[0].startswith(keep)} == {
        k: v for k, v in whole.items() if k[0].startswith(keep)
    }


# -- what is made of it -----------------------------------------------------------------------------------


def used(text: str) -> set[str]:
    """Names of metrics in an expression, without what Prometheus adds to those of histograms; not those of labels."""
    names = re.findall(r"(?<![$\w])bamboo_[a-z_]+\b(?!=)", text)
    return {re.sub(r"_(bucket|count|sum)$", "", name) for name in names}


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((PROMETHEUS / "bamboo.rules.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_the_rules_use_what_there_is() -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    for rule in rules():
        names = used(rule["expr"])
        assert names and names <= NAMES | recorded, rule
    alerts = {rule["alert"]: rule for rule in rules() if "alert" in rule}
    assert {"BambooStageUnshadowed", "BambooNoStep", "BambooGoodputLow"} <= alerts.keys()
    for alert in alerts.values():
        assert alert["annotations"]["summary"] and alert["labels"]["severity"] in ("warning", "critical")


def test_the_dashboard_uses_what_there_is() -> None:
    board = json.loads((GRAFANA / "bamboo.json").read_text())
    targets = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    assert len(targets) >= 12
    assert set().union(*map(used, targets)) == NAMES, "each metric is shown"
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    for panel in board["panels"]:
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24


def test_the_scrape_configuration_fits() -> None:
    (job,) = yaml.safe_load((PROMETHEUS / "scrape.yml").read_text())["scrape_configs"]
    assert job["metrics_path"] == "/metrics"
    assert job["authorization"]["type"] == "Bearer" and "credentials" not in job["authorization"]
