"""What a script does for each stage is done for all, whoever computes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support.faults import mark
from tests.support.jobs import run_stock, run_text, write_config
from tests.support.surviving import fault

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
