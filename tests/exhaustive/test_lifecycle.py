"""The life of one job, as ``benchmarks/lifecycle.py`` makes it happen, in its short form."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.jobs import DEADLINE_S, MARK, TemporaryFolder, environment, marked

pytestmark = pytest.mark.claim(
    "README.md", "benchmarks.md", "guides/elastic.md", "reference/events.md", "reference/limits.md"
)

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "lifecycle.py"


@pytest.mark.exhaustive
@pytest.mark.integration
@pytest.mark.timeout(4 * DEADLINE_S)
def test_one_uninterrupted_job(tmp_path: Path) -> None:
    """2 x 2 stages: a kill, a joiner, the loss of a host, no etcd for longer than leases last, a spot notice."""
    temporary = TemporaryFolder(tmp_path)
    env = environment() | {MARK: str(tmp_path)} | temporary.variables
    command = [sys.executable, str(BENCHMARK), "--small", "--etcd-s", "7", "--json", "--out", str(tmp_path / "out")]
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        try:
            output, errors = process.communicate(timeout=3 * DEADLINE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 2)  # it ends its job
            raise
    assert process.returncode in (0, 1), errors.decode()[-6000:]
    report = json.loads(output)
    assert all(report["verdicts"].values()), report
    assert len(report["verdicts"]) == 11
    kill, join, host, etcd, notice = report["deeds"]
    assert [len(deed["lost"]) for deed in report["deeds"]] == [1, 0, 2, 0, 0]
    assert (len(join["joined"]), notice["left"]) == (1, join["joined"])
    assert kill["lost"][0].startswith("m1-") and sorted(name[:2] for name in host["lost"]) == ["m2", "m3"]
    assert etcd["steps"] >= report["steps_without_etcd"] > 0
    assert not marked(str(tmp_path))
    assert not temporary.close()
