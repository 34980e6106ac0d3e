"""Where a worker is that does not get on is in its log."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.jobs import run_text

pytestmark = pytest.mark.claim("guides/elastic.md")


INSIDE = """
from small_job import begin

engine, data = begin(7)
activity = engine._parts.job.channel.activity

def watched():
    for batch in data:
        assert activity.inside
        yield batch

batches = watched()
for _ in range(2):
    assert not activity.inside
    engine.train_batch(batches)
"""


@pytest.mark.integration
def test_an_iteration_is_looked_at(tmp_path: Path) -> None:
    result = run_text(tmp_path, INSIDE)
    assert len(result.events("step")) == 2
