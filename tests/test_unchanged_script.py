"""A script that knows nothing of bamboo, killed from outside: each stage, two in a job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from .support.jobs import DEADLINE_S, bamboo_command, environment, run_stock, write_config

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


def losses(folder: Path) -> dict[int, list[float]]:
    """Losses that every worker saw, by rank."""
    return {int(f.stem.split("-")[1]): json.loads(f.read_text()) for f in folder.glob("losses-*.json")}


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
    with open(tmp_path / "log.txt", "wb") as log:
        # Many scripts have this default, which only DeepSpeed's launcher overrides.
        env = {**environment(), "DEFAULT_LOCAL_RANK": "0"}
        job = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            for stage, step in zip(stages, (4, 10), strict=True):
                wait_for_step(events, step, job)
                os.kill(worker_of_rank(job.pid, stage), signal.SIGKILL)
            assert job.wait(DEADLINE_S) == 0, (tmp_path / "log.txt").read_text()[-4000:]
        finally:
            if job.poll() is None:
                job.terminate()
                job.wait(30)
    output = (tmp_path / "log.txt").read_text()
    assert "bamboo: the first 3 steps are exact: 4 stages " in output
    assert "args.local_rank is 0, the default of the script's own option" in output
    lost = [json.loads(line) for line in events.read_text().splitlines() if '"member_lost"' in line]
    assert [(e["member_id"][:2], e["reason"], e["detail"]) for e in lost] == [
        (f"m{stage}", "signal", "SIGKILL") for stage in stages
    ]
    assert losses(tmp_path) == {rank: stock for rank in range(STAGES) if rank not in stages}


def wait_for_step(events: Path, step: int, job: subprocess.Popen[bytes]) -> None:
    """Return as soon as the job has reported ``step``."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline and job.poll() is None:
        text = events.read_text() if events.exists() else ""
        whole = text.rpartition("\n")[0].splitlines()
        if any('"event":"step"' in line and json.loads(line)["step"] >= step for line in whole):
            return
        time.sleep(0.01)  # a poll of the file, not a synchronisation
    raise AssertionError(f"the job did not come to step {step}")


def worker_of_rank(launcher: int, rank: int) -> int:
    """Process id of the worker with ``RANK`` ``rank``."""
    for process in psutil.Process(launcher).children(recursive=True):
        try:
            command = process.cmdline()
            is_worker = (
                any(part.endswith("pictures.py") for part in command) and "bamboo_ds.control.agent" not in command
            )
            if is_worker and process.environ().get("RANK") == str(rank):
                return process.pid
        except psutil.NoSuchProcess:
            continue  # of a member that was lost before
    raise AssertionError(f"no worker of rank {rank}")
