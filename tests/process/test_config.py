"""The "bamboo" block: defaults, refusals that name the setting and the cure."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.jobs import bamboo_command, environment, run_bamboo, run_stock, write_config
from tests.support.processes import start

pytestmark = pytest.mark.claim(
    "README.md", "guides/launchers.md", "quickstart.md", "reference/limits.md", "reference/settings.md"
)


SCRIPT = """
import sys, deepspeed
from deepspeed.pipe import PipelineModule, LayerSpec
from torch import nn
kind = sys.argv[1]
deepspeed.init_distributed()
layers = [LayerSpec(nn.Linear, 4, 4) for _ in range(2)]
net = nn.Linear(4, 4) if kind == "plain" else PipelineModule(
    layers, num_stages=2, loss_fn=nn.MSELoss(), partition_method="uniform")
deepspeed.initialize(model=net, model_parameters=net.parameters(), config=sys.argv[3])
print("INITIALISED")
"""


def run_script(folder: Path, kind: str, config: Path, launcher: list[str]) -> tuple[int, str]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    command = [*launcher, str(script), kind, "--deepspeed_config", str(config)]
    log = folder / "log.txt"
    with open(log, "wb") as file:
        done = start(command, environment(), file.fileno())
    return done.wait(120), log.read_text(errors="replace")


@pytest.mark.integration
def test_unsupported_models_are_refused(tmp_path: Path) -> None:
    config = write_config(tmp_path, {}, 2)
    code, output = run_script(tmp_path, "plain", config, [sys.executable, bamboo_command(), "run", "-n", "2"])
    assert code == 1, output[-3000:]
    assert "the model is not a PipelineModule" in output and "INITIALISED" not in output


@pytest.mark.integration
def test_a_block_without_an_agent_says_how_to_start(tmp_path: Path) -> None:
    config = write_config(tmp_path, {}, 2)
    code, output = run_script(tmp_path, "pipe", config, [sys.executable])
    assert code == 1
    assert "this process has no agent: start the job with `bamboo run" in output


@pytest.mark.integration
def test_a_wrong_block_stops_the_run_before_anything_exists(tmp_path: Path) -> None:
    config = write_config(tmp_path, {"redundancy": {"mod": "none"}}, 2)
    code, output = run_script(tmp_path, "pipe", config, [sys.executable, bamboo_command(), "run", "-n", "2"])
    assert code != 0
    assert 'did you mean "mode"?' in output
    assert "INITIALISED" not in output


STOCK = """
import sys, threading, os
import deepspeed, deepspeed.comm, torch
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
from deepspeed.pipe import PipelineModule, LayerSpec
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import nn
deepspeed.init_distributed()
net = PipelineModule([LayerSpec(nn.Linear, 4, 4)], num_stages=1, loss_fn=nn.MSELoss())
engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=sys.argv[2])
assert type(engine) is PipelineEngine, type(engine)
assert type(torch.distributed.group.WORLD) is torch.distributed.ProcessGroup
loaded = sorted(name for name in sys.modules if name.startswith("bamboo_ds"))
assert set(loaded) <= {"bamboo_ds", "bamboo_ds.addresses", "bamboo_ds.autoload", "bamboo_ds.config",
                       "bamboo_ds.config_parts", "bamboo_ds.deepspeed_config", "bamboo_ds.errors", "bamboo_ds.hooks",
                       "bamboo_ds.launch", "bamboo_ds.patching", "bamboo_ds.stages", "bamboo_ds.variables",
                       "bamboo_ds.version", "bamboo_ds.worker", "bamboo_ds.worker.plan_changes"}, loaded
assert not [t.name for t in threading.enumerate() if "bamboo" in t.name]
print("STOCK")
"""


@pytest.mark.integration
def test_a_job_without_a_block_runs_stock_deepspeed(tmp_path: Path) -> None:
    config = write_config(tmp_path, None, 1)
    script = tmp_path / "stock.py"
    script.write_text(STOCK)
    env = environment() | {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    command = [sys.executable, str(script), "--deepspeed_config", str(config)]
    done = subprocess.run(command, env=env, capture_output=True, timeout=120, check=False)
    assert b"STOCK" in done.stdout, done.stderr.decode()[-3000:]


TRAINING = """
import argparse, json, os
import deepspeed, torch
from deepspeed.pipe import PipelineModule, LayerSpec
from torch import nn
parser = argparse.ArgumentParser()
parser.add_argument("--out")
args = deepspeed.add_config_arguments(parser).parse_args()
deepspeed.init_distributed()
torch.manual_seed(3)
net = PipelineModule([LayerSpec(nn.Linear, 4, 4)] * 4, num_stages=2, loss_fn=nn.MSELoss(), partition_method="uniform")
data = [(torch.full((4,), 0.01 * i), torch.ones(4)) for i in range(64)]
engine, *_ = deepspeed.initialize(args=args, model=net, model_parameters=net.parameters(), training_data=data)
losses = [float(engine.train_batch()) for _ in range(2)]
with open(os.path.join(args.out, f"losses-{engine.global_rank}.json"), "w") as file:
    json.dump([type(engine).__name__, losses], file)
"""


@pytest.mark.integration
def test_jobs_of_both_kinds_train_with_comments_in_the_configuration(tmp_path: Path) -> None:
    """A job without a block, in whose processes the plugin is, and one with it."""
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    losses = []
    for name, block in (("PipelineEngine", None), ("BambooPipelineEngine", {})):
        folder = tmp_path / name
        folder.mkdir()
        config = write_config(folder, block, 4)
        config.write_text(f"// for a test\n{config.read_text()[:-1]},  # nothing follows\n}}\n")
        result = (run_stock if block is None else run_bamboo)(folder, 2, [], config, script)
        assert result.exit_code == 0, result.output[-4000:]
        dumps = [json.loads((folder / f"losses-{rank}.json").read_text()) for rank in range(2)]
        assert [engine for engine, _ in dumps] == [name] * 2
        losses += [values for _, values in dumps]
    assert len(losses[0]) == 2 and losses == losses[:1] * 4
