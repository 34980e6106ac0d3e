"""Members whose scripts make different calls say so, instead of waiting for each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.jobs import run_text

pytestmark = pytest.mark.claim("guides/scripts.md")


ENDS = """
import os
from small_job import begin

engine, data = begin(7)
for step in range(1, 5):
    engine.train_batch(data)
    if step == 2 and os.environ["RANK"] == "1":
        sys.exit(0)
"""


@pytest.mark.integration
def test_a_script_that_ends_before_the_others_ends_the_job(tmp_path: Path) -> None:
    result = run_text(tmp_path, ENDS, exit_code=1)
    assert "CallsDiffer" in result.output
    for told in ("the script of rank 1 has ended, after step 2", "rank 0 has called train_batch, after step 2"):
        assert told in result.output
    assert not result.events("member_lost") and len(result.events("step")) == 2
