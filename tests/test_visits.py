"""What a script does for each stage is done for all, whoever computes them."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bamboo_ds import for_each_stage
from bamboo_ds.engine.operations.visits import StageVisits
from bamboo_ds.engine.script.changes import without_process
from bamboo_ds.topology import Layout, Plan, initial_plan, takeover, with_redundancy

from .support.faults import mark
from .support.jobs import run_stock, run_text, write_config
from .support.surviving import fault

pytestmark = pytest.mark.claim("guides/scripts.md")

SAVES = """
import json, os
from pathlib import Path

import bamboo_ds, torch
import torch.distributed as dist
from bamboo_ds.engine import BambooPipelineEngine as Engine
from bamboo_ds.errors import UnsupportedError
from faults import install
from small_job import begin

engine, data = begin(7, stages=4)
out, rank = Path(sys.argv[sys.argv.index("--out") + 1]), int(os.environ["RANK"])
survives = isinstance(engine, Engine)
if survives:
    install(engine, FAULTS, out)
for _ in range(3):
    engine.train_batch(data)

refused = []

def refuses(call):
    try:
        call()
    except UnsupportedError as error:
        refused.append(str(error))

def save(engine):
    stage = engine.grid.get_pipe_parallel_rank()
    assert stage == engine.stage_id == engine.global_rank == dist.get_rank() == engine.module.stage_id
    assert (engine.is_first_stage(), engine.is_last_stage()) == (stage == 0, stage == 3)
    if survives:
        refuses(dist.barrier)
        refuses(lambda: engine.train_batch(data))
    parameters = {name: p.detach() for name, p in engine.module.named_parameters()}
    torch.save(parameters, out / f"stage-{stage}.bin")
    return stage

stages = bamboo_ds.for_each_stage(engine, save)
assert (engine.stage_id, dist.get_rank()) == (rank, rank)
if survives:
    assert len(refused) == 2 * len(stages)
    assert "calls a collective, barrier" in refused[0] and "its for_each_stage has called" in refused[1]
(out / f"stages-of-{rank}.json").write_text(json.dumps(stages))
dist.barrier()
if bamboo_ds.speaks_for(0):
    (out / "there.json").write_text(json.dumps(sorted(f.name for f in out.glob("stage-*.bin"))))
engine.train_batch(data)
"""


@pytest.mark.integration
def test_each_stage_writes_its_file_whoever_computes_it(tmp_path: Path) -> None:
    """One rank is lost before, one just when it is to write; the files are those of an undisturbed job of DeepSpeed."""
    lost = [fault(2, 1, "BackwardPass", 1), fault(0, 3, ".visits._call")]
    text = f"FAULTS = {json.dumps(lost)!r}\n{SAVES}"
    result = run_text(tmp_path, text, 4)
    assert result.faults() == sorted(map(mark, lost)) and len(result.events("member_lost")) == 2
    assert {f.name: json.loads(f.read_text()) for f in tmp_path.glob("stages-of-*")} == {
        "stages-of-1.json": [1, 2],
        "stages-of-3.json": [0, 3],
    }
    assert "unless they were written before" not in result.output, "the script has written them"
    stock = tmp_path / "stock"
    stock.mkdir()
    undisturbed = run_stock(stock, 4, [], write_config(stock, None), tmp_path / "script.py")
    assert undisturbed.exit_code == 0, undisturbed.output[-4000:]
    files = [f"stage-{stage}.bin" for stage in range(4)]
    for folder in (tmp_path, stock):
        assert json.loads((folder / "there.json").read_text()) == files, "all are there when the call has returned"
    for name in files:
        found, expected = (torch.load(folder / name) for folder in (tmp_path, stock))
        assert list(found) == list(expected)
        assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_without_a_block_there_is_one_stage() -> None:
    engine = SimpleNamespace()
    assert for_each_stage(engine, lambda given: given is engine) == [True]


LAYOUT = Layout(1, 3)
PLAN = with_redundancy(initial_plan(["a", "b", "c"]), LAYOUT, True)


def moved() -> Plan:
    """Stages 0 and 1 have changed places."""
    return replace(PLAN, owners=("b", "a", "c"))


@pytest.mark.parametrize(
    ("plan", "made", "told"),
    [
        (PLAN, False, None),
        (takeover(PLAN, ["b"]), False, "for ranks 1 (stage 1 of pipeline 0)"),
        (takeover(PLAN, ["b"]), True, None),
        (moved(), False, "for ranks 0 (stage 0 of pipeline 0), 1 (stage 1 of pipeline 0)"),
    ],
)
def test_stages_without_a_process_are_told_at_the_end(
    plan: Plan, made: bool, told: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    visits: Any = SimpleNamespace(epoch=SimpleNamespace(plan=plan, layout=LAYOUT, leads=True), made=made)
    with caplog.at_level(logging.WARNING):
        StageVisits.tell_absent(visits)
    assert (told in caplog.text) if told else not caplog.text
    assert bool(without_process(plan)) is (plan is not PLAN)
