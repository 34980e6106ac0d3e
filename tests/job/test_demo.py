"""The demo proves what it says, and would notice if it were not so; ready configurations are valid."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.support.jobs import bamboo_command
from tests.support.leaks import no_leaks

pytestmark = pytest.mark.claim("quickstart.md")


@pytest.mark.exhaustive
@pytest.mark.integration
def test_demo_kills_two_stages_and_proves_equality(tmp_path: Path) -> None:
    with no_leaks():
        run = subprocess.run(
            [bamboo_command(), "demo", "--steps", "14"],
            env={**os.environ, "TMPDIR": str(tmp_path), "COLUMNS": "150"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=280,
            check=False,
        )
    assert run.returncode == 0, run.stdout
    for stage in (0, 2):
        assert re.search(rf"stage {stage} killed in the middle of iteration \d+ .* yes", run.stdout), run.stdout
    for what in ("losses of every step", "weights", "optimizer state", "schedule and counters"):
        assert re.search(rf"{what}: bit-equal .* yes", run.stdout), run.stdout
    assert "NO" not in run.stdout
    left = [path for path in tmp_path.rglob("*") if not path.is_dir() or path.name.startswith("bamboo-demo")]
    assert not left
