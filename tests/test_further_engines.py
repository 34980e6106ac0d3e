"""Engines without the block in a job with it: what a loss leaves of them is an error, or right."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from bamboo_ds.comm.calls.participants import founding
from bamboo_ds.errors import PeerLost, UnsupportedError
from bamboo_ds.topology import Layout, Plan
from bamboo_ds.worker.further import engine_class

from .support.jobs import SUPPORT, run_bamboo, run_stock, write_config

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


# -- without processes ----------------------------------------------------------------------------------


def test_its_groups_are_those_of_the_processes_that_have_built_it() -> None:
    """Whoever owns the stages now, and whoever else runs as one of the ranks."""
    plan = Plan(epoch=5, owners=("b", "x"), members=("a", "b", "x"), layout=Layout(1, 2), homes=(0, 1, 1))
    group = founding(plan, (0, 1), {0: "a", 1: "b"})
    assert group.complete and group.members == ("a", "b")
    with pytest.raises(PeerLost, match=r"the processes of ranks \[1\] are gone"):
        founding(replace(plan, members=("a", "x"), homes=(0, 1)), (0, 1), {0: "a", 1: "b"})


def test_a_worker_that_joins_is_told() -> None:
    plan = SimpleNamespace(members=("a", "b"), homes=(0, 1))
    channel = SimpleNamespace(joiner=True, world_size=2, newest_plan=plan, need_every_rank=lambda: None)
    session = SimpleNamespace(plan=plan, among_itself=False, among_founders=lambda *_: nullcontext())
    job = Mock(channel=channel, session=session)
    engine = type("Engine", (), {"forward": lambda self: "computed"})
    with pytest.raises(UnsupportedError, match="a worker that joins cannot compute what it has computed"):
        engine_class(job, engine, pipeline=True)
    assert engine_class(job, engine, pipeline=False)().forward() == "computed"
