"""``bamboo chaos`` against a job that trains."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.compare import assert_computed
from tests.support.jobs import DEADLINE_S, TRAIN, Result, RunningJob, bamboo_command, slow_until, write_config

pytestmark = [pytest.mark.claim("benchmarks.md", "guides/chaos.md"), pytest.mark.integration, pytest.mark.exhaustive]

#: A held lock, a loss and a joiner in its place, an outage of etcd, a loss of that joiner.
SCRIPT = """
{"at_s": 0.0, "kind": "hold_gil", "target": "slot:0", "seconds": 0.3}
{"at_s": 1.0, "kind": "kill", "target": "owner:0,1"}
{"at_s": 1.5, "kind": "etcd_stop", "seconds": 0.5}
{"at_s": 2.0, "kind": "kill_agent", "target": "slot:2", "healed": true}
"""
#: The job's script, and it takes orders.
VICTIM = f"""
import runpy, sys
sys.path.insert(0, {str(TRAIN.parent)!r})
from bamboo_ds.chaos.victim import install
assert install(force=True)
runpy.run_path({str(TRAIN)!r}, run_name="__main__")
"""


def journal(folder: Path) -> list[dict[str, Any]]:
    """What ``bamboo chaos`` has told so far."""
    path = folder / "chaos" / "faults.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def test_job_bears_a_script_of_faults(tmp_path: Path, reference: Callable[..., Result]) -> None:
    (tmp_path / "faults.txt").write_text(SCRIPT)
    (tmp_path / "victim.py").write_text(VICTIM)
    # Whoever was hit by a fault is spared for the time of a lease.
    config = write_config(tmp_path, {"redundancy": {"verify_every": 2}, "membership": {"lease_ttl_s": 5}}, 4)
    hurry = tmp_path / "hurry"
    with RunningJob(tmp_path, 2, ["--stages", "2", *slow_until(hurry)], config, script=tmp_path / "victim.py") as job:
        job.wait_for("a step", lambda: bool(job.events("step")))
        command = [bamboo_command(), "chaos", "--job", job.name, "--script", str(tmp_path / "faults.txt")]
        command += ["--keep", "2", "--out", str(tmp_path / "chaos")]
        with open(tmp_path / "chaos.log", "wb") as log:
            chaos = subprocess.Popen(command, env=job.env, stdout=log, stderr=subprocess.STDOUT)
        try:
            job.wait_for("all faults", lambda: sum(d["number"] is not None for d in journal(tmp_path)) == 4)
            killed = {m for d in journal(tmp_path) if d["kind"].startswith("kill") for m in d["members"]}
            job.wait_for("joiners in place of both", lambda: len(set(job.plan()["members"]) - killed) == 2)
            hurry.touch()
            result = job.finish()
            code = chaos.wait(DEADLINE_S)
        finally:
            if chaos.poll() is None:
                chaos.terminate()
                chaos.wait(30)
    told = result.output[-6000:]
    assert result.exit_code == 0, told
    assert code == 0, told
    records = journal(tmp_path)
    injected = [(d["number"], d["kind"]) for d in records if d["outcome"] == "injected" and d["confirmed"]]
    assert sorted(pair for pair in injected if pair[0] is not None) == [
        (0, "hold_gil"),
        (1, "kill"),
        (2, "etcd_stop"),
        (3, "kill_agent"),
    ], told
    report = json.loads((tmp_path / "chaos" / "report.json").read_text())
    assert report["verified"] and report["problems"] == [], told
    lost = {e["member_id"] for e in result.events("member_lost")}
    assert lost == {m for d in records if d["kind"].startswith("kill") for m in d["members"]}, told
    # Nobody's child, but the other agents of this host have seen it die.
    reasons = {e["member_id"]: (e["reason"], e["detail"][:10]) for e in result.events("member_lost")}
    (joiner,) = next(d["members"] for d in records if d["number"] == 3)
    assert reasons[joiner] == ("signal", "agent died"), told
    assert_computed(result, reference(2, 1, 4, *result.length))
    assert {len(dump["losses"]) for dump in result.joined()} == {int(result.length[1])}, told
