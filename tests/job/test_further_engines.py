"""Engines without the block in a job with it: what a loss leaves of them is an error, or right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import SUPPORT, run_bamboo, run_stock, write_config

pytestmark = pytest.mark.claim("reference/limits.md")

SCRIPT = SUPPORT / "train_further_engines.py"
ENGINES = ("reference", "engine", "copy")


def said(folder: Path) -> dict[tuple[int, int], list[list[Any]]]:
    """What each rank has told, by the start of the job and the rank."""
    found = {}
    for file in folder.glob("said-*.jsonl"):
        _, start, rank, _ = file.stem.split("-")
        found[int(start), int(rank)] = [json.loads(line) for line in file.read_text().splitlines()]
    return found


@pytest.mark.exhaustive
@pytest.mark.integration
def test_no_number_is_made_up_for_a_reference_model_and_the_job_goes_on(tmp_path: Path) -> None:
    folders = [tmp_path / "stock", tmp_path / "ours"]
    for folder in folders:
        folder.mkdir()
    stock = run_stock(folders[0], 2, [], write_config(folders[0], None, 2), SCRIPT)
    assert stock.exit_code == 0, stock.output[-4000:]
    undisturbed = {rank: lines for (_, rank), lines in said(folders[0]).items()}
    assert [line[:2] for line in undisturbed[0]] == [[step, name] for step in range(1, 6) for name in ENGINES]
    result = run_bamboo(folders[1], 2, ["--faults"], write_config(folders[1], {}, 2), SCRIPT)
    assert result.exit_code == 0, result.output[-6000:]
    assert sorted(file.name for file in result.out.glob("fault-*")) == ["fault-0", "fault-1"]
    assert [event["number"] for event in result.events("restart")] == [1, 2]
    found = said(result.out)
    for (_, rank), lines in found.items():
        assert lines == undisturbed[rank][: len(lines)]
    # The evaluation of step 2 gives nothing; step 3 is finished without rank 1, and then the next evaluation fails.
    assert [len(found[start, 0]) for start in range(3)] == [3, 9, 15]
    assert len(found[2, 1]) == 15
    told = [line for line in result.output.splitlines() if "FurtherEngineLost: eval_batch()" in line]
    assert len(told) == 2 and all("the processes that were ranks 1 when it was built are gone" in line for line in told)
