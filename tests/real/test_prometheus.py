"""Prometheus's own tool on the rules, and on what a job exposes."""

from __future__ import annotations

import subprocess

import pytest

from bamboo_ds.observe.events import read_events
from tests.unit.observe.test_metrics import PROMETHEUS, RECORDED, Folded

from .conftest import TOOLS

pytestmark = pytest.mark.claim("guides/observing.md")


@pytest.mark.tools("promtool")
def test_rules_and_exposition() -> None:
    """Alert rules, what they do to made-up series, scrape configuration, form of the metrics"""
    recorded = Folded("recorded")
    for event in read_events(RECORDED):
        recorded.add(event)
    for arguments in (
        ["check", "rules", "bamboo.rules.yml"],
        ["test", "rules", "bamboo.rules.test.yml"],
        ["check", "config", "--syntax-only", "scrape.yml"],
        ["check", "metrics"],
    ):
        command = [str(TOOLS["promtool"].path()), *arguments]
        done = subprocess.run(
            command, input=recorded.text(), cwd=PROMETHEUS, capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
