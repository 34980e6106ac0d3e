"""A script that knows nothing of bamboo, killed from outside: each stage, two in a job."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.jobs import bamboo_command, run_stock, write_config
from tests.support.launching import LaunchedJob, losses
from tests.support.watching import wait_steps

pytestmark = [
    pytest.mark.claim("README.md", "guides/exactness.md", "guides/launchers.md", "quickstart.md"),
    pytest.mark.integration,
]

STAGES = 4
SCRIPT = """
import argparse, json, os
import deepspeed, torch
from deepspeed.pipe import PipelineModule
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=int(os.environ.get("DEFAULT_LOCAL_RANK", "-1")))
parser.add_argument("--out")
parser.add_argument("--settings")
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()

class Pictures(torch.utils.data.Dataset):
    def __len__(self):
        return 512
    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3, 16, 16, generator=generator), torch.randint(0, 10, (), generator=generator)

deepspeed.init_distributed()
torch.manual_seed(1138)
layers = [
    nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(4),
    lambda x: torch.flatten(x, 1), nn.Linear(512, 64), nn.ReLU(inplace=True), nn.Linear(64, 64), nn.Linear(64, 10),
]
net = PipelineModule(layers=layers, loss_fn=nn.CrossEntropyLoss(), num_stages=4, partition_method="uniform")
engine, _, _, _ = deepspeed.initialize(args=args, model=net, config=args.settings and json.load(open(args.settings)),
    model_parameters=[p for p in net.parameters() if p.requires_grad], training_data=Pictures())
losses = []
for step in range(60):
    losses.append(float(engine.train_batch()))
    if engine.global_rank == 0 or engine.is_last_stage():
        print(f"step {step} loss {losses[-1]}", flush=True)
with open(os.path.join(args.out, f"losses-{engine.global_rank}.json"), "w") as file:
    json.dump(losses, file)
"""


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("stock")
    script = folder / "pictures.py"
    script.write_text(SCRIPT)
    result = run_stock(folder, STAGES, [], write_config(folder, None, 8), script=script)
    assert result.exit_code == 0, result.output[-4000:]
    return losses(folder)[0]


@pytest.mark.parametrize(
    ("stages", "option"),
    [pytest.param((0, 2), "--deepspeed_config", marks=pytest.mark.exhaustive), ((1, 3), "--settings")],
)
def test_the_loss_of_each_stage(tmp_path: Path, stock: list[float], stages: tuple[int, int], option: str) -> None:
    """With ``--settings`` the script passes a dictionary, of which ``bamboo run`` is told by its own option."""
    script, events = tmp_path / "pictures.py", tmp_path / "events.jsonl"
    script.write_text(SCRIPT)
    # A stalled agent must be heard of the end of its worker before the others, who cannot reach that, accuse it.
    config = write_config(tmp_path, {"recovery": {"suspect_after_s": 30}}, 8)
    command = [bamboo_command(), "run", "-n", str(STAGES), "--events", str(events), "--check-exact", "3"]
    command += [*(["--config", str(config)] if option == "--settings" else []), str(script)]
    command += [option, str(config), "--out", str(tmp_path)]
    # Many scripts have this default, which only DeepSpeed's launcher overrides.
    with LaunchedJob(tmp_path, command, [], "unchanged", variables={"DEFAULT_LOCAL_RANK": "0"}) as job:
        for stage, steps in zip(stages, (4, 6), strict=True):
            wait_steps(job, steps)
            job.strike(job.workers()[stage])
        result = job.finish()
    output = result.output
    assert result.exit_code == 0, output[-4000:]
    assert "bamboo: the first 3 steps are exact: 4 stages " in output
    assert "args.local_rank is 0, the default of the script's own option" in output
    assert [(e["member_id"][:2], e["reason"], e["detail"]) for e in result.events("member_lost")] == [
        (f"m{stage}", "signal", "SIGKILL") for stage in stages
    ]
    assert losses(tmp_path) == {rank: stock for rank in range(STAGES) if rank not in stages}
