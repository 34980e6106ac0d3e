"""What is public on DeepSpeed's ``PipelineEngine`` does the same with bamboo, undisturbed and with members lost."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from deepspeed.runtime.pipe.engine import PipelineEngine

from tests.support.compare import assert_same_states, differences
from tests.support.faults import mark
from tests.support.jobs import SUPPORT, Result, run_bamboo, run_stock, run_text, write_config

pytestmark = [
    pytest.mark.claim("guides/timelines.md", "reference/guarantees.md", "reference/limits.md"),
    pytest.mark.integration,
]

SCRIPT = SUPPORT / "train_surface.py"
#: Ranks 0..3 are (pipeline, stage) = (0, 0), (1, 0), (0, 1), (1, 1). Steps: 3 with another batch size, 5 with another
#: length; what rank 0 has told DeepSpeed's monitors so far another member goes on with. Rank 0 leads, and goes in the
#: second evaluation, the first one with so many micro-batches: the others have committed the step that it has told of.
FAULTS: list[dict[str, Any]] = [
    {"rank": 0, "step": 2, "at": ".iteration.passes.forward", "micro_batch": 2, "evaluating": True},
    {"rank": 3, "step": 6, "at": "BackwardPass", "micro_batch": 4},
]


def config(folder: Path, bamboo: dict[str, Any] | None, **more: Any) -> Path:
    return write_config(
        folder,
        bamboo,
        4,
        steps_per_print=2,
        csv_monitor={"enabled": True, "output_path": str(folder / "monitor"), "job_name": "job"},
        **more,
    )


def told(folder: Path, own: bool = False) -> dict[str, list[list[str]]]:
    """The tables that the monitors have written, each with the one head of stock's: DeepSpeed's tags, or ours."""
    found = {}
    for file in (folder / "monitor" / "job").iterdir():
        if file.name.startswith("bamboo_") is own:
            with open(file) as lines:
                head, *found[file.name] = csv.reader(lines)
            assert head[0] == "step" and not any(row[0] == "step" for row in found[file.name]), file.name
    return found


def printed(result: Result) -> list[str]:
    """Steps and losses that DeepSpeed has printed, in the order of the steps."""
    lines = [line[line.index("steps: ") :] for line in result.output.splitlines() if "steps: " in line]
    return sorted(line.partition("iter time")[0] for line in lines if "iter time" in line)


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Result:
    folder = tmp_path_factory.mktemp("stock")
    result = run_stock(folder, 4, ["--stages", "2"], config(folder, None), SCRIPT)
    assert result.exit_code == 0, result.output[-4000:]
    assert len(told(folder)["Train_Samples_train_loss.csv"]) == 10 and len(printed(result)) == 5
    return result


@pytest.mark.parametrize(
    "faults", [pytest.param([], marks=pytest.mark.exhaustive), FAULTS], ids=["undisturbed", "losses"]
)
def test_surface(tmp_path: Path, stock: Result, faults: list[dict[str, Any]]) -> None:
    command = ["--stages", "2", "--faults", json.dumps(faults)]
    result = run_bamboo(tmp_path, 4, command, config(tmp_path, {}), SCRIPT)
    assert result.exit_code == 0, result.output[-4000:]
    assert len(result.events("step")) == 10, "the engine was DeepSpeed's own"
    assert result.faults() == sorted(mark(f) for f in faults)
    expected, found = stock.ranks(), result.ranks()
    assert set(found) == set(expected) - {f["rank"] for f in faults}
    for rank, seen in found.items():
        assert seen["losses"] == expected[rank]["losses"]
        for n, (mine, theirs) in enumerate(zip(seen["seen"], expected[rank]["seen"], strict=True)):
            assert differences(theirs, mine, f"rank {rank}, note {n}") == []
    assert_same_states(result, stock)
    rows, wanted = told(tmp_path), told(stock.out)
    if faults and rows != wanted:  # rank 0's heir was still before the line that rank 0 had written last
        rows["Train_Samples_eval_loss.csv"].remove(wanted["Train_Samples_eval_loss.csv"][0])
    assert rows == wanted
    assert printed(result) == printed(stock)
    tags = {name.removeprefix("bamboo_").removesuffix(".csv"): rows for name, rows in told(tmp_path, own=True).items()}
    assert set(tags) == {"members", "unshadowed_stages", "step_seconds", "pause_seconds"}
    members = [float(value) for _, value in tags["members"]]
    assert len(members) == 10 and members == sorted(members, reverse=True) and members[-1] == 4 - len(faults)
    pauses = [float(value) for _, value in tags["pause_seconds"]]
    assert pauses[0] == 0 and (pauses[2] > 0) is (pauses[6] > 0) is bool(faults)
    assert all(float(value) > 0 for _, value in tags["step_seconds"])


CURRICULUM = {
    "enabled": True,
    "curriculum_type": "seqlen",
    "min_difficulty": 2,
    "max_difficulty": 8,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 6, "difficulty_step": 2},
}


@pytest.mark.exhaustive
@pytest.mark.skipif(not hasattr(PipelineEngine, "curriculum_enabled_legacy"), reason="DeepSpeed 0.19.8 has removed it")
def test_curriculum(tmp_path: Path) -> None:
    """Losses in steps of different lengths, one in the first step of a length."""
    folders = [tmp_path / name for name in ("stock", "bamboo")]
    for folder in folders:
        folder.mkdir()
    configs = [
        config(folder, block, curriculum_learning=CURRICULUM) for folder, block in zip(folders, (None, {}), strict=True)
    ]
    stock = run_stock(folders[0], 4, ["--stages", "2"], configs[0], SCRIPT)
    assert stock.exit_code == 0, stock.output[-4000:]
    faults = [
        # Of the leader, as above: where it needs gradients.
        {"rank": 0, "step": 2, "at": "BackwardPass", "micro_batch": 1},
        {"rank": 3, "step": 5, "at": "BackwardPass", "micro_batch": 3},
    ]
    command = ["--stages", "2", "--faults", json.dumps(faults)]
    result = run_bamboo(folders[1], 4, command, configs[1], SCRIPT)
    assert result.exit_code == 0, result.output[-4000:]
    assert len(result.events("step")) == 8, "the engine was DeepSpeed's own"
    assert result.faults() == sorted(mark(f) for f in faults)
    expected = stock.ranks()
    for rank, seen in result.ranks().items():
        assert seen["losses"] == expected[rank]["losses"]
    assert_same_states(result, stock)


SEVERAL = """
import json
import deepspeed
from small_job import begin
from train import build, plain

from bamboo_ds.errors import UnsupportedError

engine, batches = begin(7)
config = json.load(open(sys.argv[sys.argv.index("--deepspeed_config") + 1]))

def another():
    net = build(plain(2))
    return deepspeed.initialize(model=net, model_parameters=list(net.parameters()), config=config)[0]

engine.train_batch(batches)
try:
    another()
except UnsupportedError as error:
    assert 'without "bamboo"' in str(error), error
else:
    raise AssertionError("not refused")
del config["bamboo"]
plain = another()
assert isinstance(plain, deepspeed.PipelineEngine) and type(plain).__name__ == "PipelineEngine"
plain.eval_batch(batches)
engine.train_batch(batches)
"""


def test_one_engine_of_a_process_is_kept_alive(tmp_path: Path) -> None:
    """A second one with the block is refused at once; one without it works beside the first."""
    result = run_text(tmp_path, SEVERAL)
    assert len(result.events("step")) == 2
