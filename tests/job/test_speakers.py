"""What a rank prints and writes for the whole job goes on when the rank is lost, once."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.faults import in_turn, mark
from tests.support.jobs import SUPPORT, RunningJob, run_stock, slow_until, write_config

pytestmark = pytest.mark.claim("guides/scripts.md")

SCRIPT = SUPPORT / "train_like_megatron.py"
LINE = re.compile(r"(?:iteration \d+ \|.*|validation at .*|rank 0 has seen .*|timers: .*)$", re.MULTILINE)
LAST = 3


def lines(*files: Path) -> list[str]:
    """What the script has printed on ranks 0 and last."""
    return [line for file in files for line in LINE.findall(file.read_text())]


def values(folder: Path) -> dict[str, list[list[Any]]]:
    """What each process has written to TensorBoard, by its id."""
    files = (folder / "tensorboard").glob("events.*")
    return {file.suffix: [json.loads(line) for line in file.read_text().splitlines()] for file in files}


@pytest.mark.integration
@pytest.mark.exhaustive
def test_megatron_s_output_goes_on(tmp_path: Path) -> None:
    """The last rank is lost, then rank 0; then somebody joins as one of them. Nothing is missing, nothing is twice."""
    # The speaker needs what the lost rank does in that step: it has told of the step before, as the lost rank has.
    faults = in_turn(
        {"rank": LAST, "step": 3, "at": "BackwardPass", "micro_batch": 2},
        {"rank": 0, "step": 5, "at": "BackwardPass", "micro_batch": 2},
    )
    go = tmp_path / "go"
    command = ["--stages", "2", *slow_until(go, 0.1), "--faults", json.dumps(faults)]
    with RunningJob(tmp_path, 4, command, write_config(tmp_path, {}, 4), SCRIPT) as job:
        job.wait_for("two losses", lambda: len(job.events("member_lost")) == 2)
        job.join()
        joined = tmp_path / "join-0.log"
        job.wait_for("output of the member that joined", lambda: joined.exists() and len(lines(joined)) > 2, 120)
        go.touch()
        result = job.finish()
    assert result.exit_code == 0, result.output[-6000:]
    assert result.faults() == sorted(mark(fault) for fault in faults)
    stock = tmp_path / "stock"
    stock.mkdir()
    undisturbed = run_stock(stock, 4, ["--stages", "2", *result.length], write_config(stock, None, 4), SCRIPT)
    assert undisturbed.exit_code == 0, undisturbed.output[-4000:]
    expected = lines(*stock.glob("log-*.txt"))
    assert len(set(expected)) > 40 and any("validation" in line for line in expected)
    assert Counter(lines(*tmp_path.glob("*.log"))) == Counter(expected)
    # One of the two ranks is back, and the other one is still spoken for by a survivor.
    assert len({line.startswith("rank 0") for line in lines(joined)}) == 1
    check_values(tmp_path, stock)
    # The norm over all stages lacks a stage from the first loss on, which is said.
    told = [event for event in result.events("collective_incomplete") if "calc_params_l2_norm" in event["place"]]
    assert [event["lost_ranks"] for event in told][:1] == [[LAST]]
    assert all(event["operation"] == "allreduce" and LAST - 2 in event["ranks"] for event in told[:1])
    warned = (
        r"allreduce over ranks 1, 3, called at \S+/utils.py:\d+ in calc_params_l2_norm: no process runs as ranks \(3\)"
    )
    assert len(re.findall(warned, result.output)) == 1


def check_values(folder: Path, stock: Path) -> None:
    """Those of TensorBoard: each once, by two processes or three; equal but for norms after a loss."""
    (expected,) = values(stock).values()
    found = values(folder)
    assert len(found) in (2, 3) and all(found.values())
    written = [value for each in found.values() for value in each]
    assert sorted((name, step) for name, _, step in written) == sorted((name, step) for name, _, step in expected)
    exact = [value for value in expected if value[0] != "params-norm"]
    assert sorted(value for value in written if value[0] != "params-norm") == sorted(exact)
