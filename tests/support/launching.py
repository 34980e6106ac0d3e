"""Jobs that another launcher than ``bamboo run`` starts, and a script that knows nothing of bamboo."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from .jobs import RunningJob, processes_of

#: Writes ``losses-<rank>.json`` to ``--out``; has as many stages as there are ranks. Steps take 0.2 s each until the
#: file ``--slow-until`` exists. Its local rank must be that of its rank, as Megatron and GPT-NeoX demand. With
#: ``--apart`` each rank draws other batches; once the file ``--fails-once-there`` exists it raises at its beginning.
SCRIPT = """
import argparse, json, os, time
import deepspeed, torch
from deepspeed.pipe import PipelineModule
from deepspeed.utils import RepeatingLoader
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--out")
parser.add_argument("--slow-until")
parser.add_argument("--apart", action="store_true")
parser.add_argument("--fails-once-there")
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()

rank, world, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
devices = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ["LOCAL_SIZE"])
assert local == rank % devices, f"rank {rank} has local rank {local} among {devices} devices"
assert args.local_rank in (-1, local), f"LOCAL_RANK is {local}, --local_rank={args.local_rank}"
if args.fails_once_there and os.path.exists(args.fails_once_there):
    raise RuntimeError("no such data set")

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 512
    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index + 1000 * rank * args.apart)
        return torch.randn(16, generator=generator), torch.randint(0, 10, (), generator=generator)

deepspeed.init_distributed()
torch.manual_seed(1138)
layers = [nn.Linear(16, 64), nn.ReLU(inplace=True), nn.Linear(64, 64), nn.ReLU(inplace=True), nn.Linear(64, 10)]
net = PipelineModule(layers=layers, loss_fn=nn.CrossEntropyLoss(), num_stages=world, partition_method="uniform")
engine, _, _, _ = deepspeed.initialize(args=args, model=net,
    model_parameters=[p for p in net.parameters() if p.requires_grad], training_data=None if args.apart else Numbers())
loader = torch.utils.data.DataLoader(Numbers(), batch_size=engine.train_micro_batch_size_per_gpu())
batches = iter(RepeatingLoader(loader)) if args.apart else None
losses = []
for step in range(60):
    begin = time.monotonic()
    losses.append(float(engine.train_batch(batches)))
    while args.slow_until and not os.path.exists(args.slow_until) and time.monotonic() < begin + 0.2:
        time.sleep(0.005)
with open(os.path.join(args.out, f"losses-{engine.global_rank}.json"), "w") as file:
    json.dump(losses, file)
"""


def losses(folder: Path) -> dict[int, list[float]]:
    """Losses that every worker saw, by rank."""
    return {int(f.stem.split("-")[1]): json.loads(f.read_text()) for f in folder.glob("losses-*.json")}


class LaunchedJob(RunningJob):
    """A job under any launcher. Use it in a ``with`` statement: after it no process of the job may be left.

    Args:
        folder: for logs, events and results; the working directory.
        command: what starts the job, or gives it.
        script: the script with its arguments.
        name: of the job.
        path: a folder in front of PATH.
        variables: more environment variables.
    """

    def __init__(
        self,
        folder: Path,
        command: Sequence[str] | Callable[[LaunchedJob], Sequence[str]],
        script: Sequence[str],
        name: str,
        path: Path | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._prepare(folder, name, variables)
        folders = [*([path] if path else ()), Path(sys.executable).parent, self.env["PATH"]]
        self.env["PATH"] = os.pathsep.join(map(str, folders))
        self.command = list(script)
        self.process = self.start(command(self) if callable(command) else command, "run")

    def start(self, command: Sequence[str], log: str) -> subprocess.Popen[bytes]:
        """Start a process of the job, with its output in a file of the job."""
        with open(self.folder / f"{log}.log", "wb") as file:
            return subprocess.Popen(
                command,
                env=self.env,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def shell(self, command: Sequence[str], **variables: str) -> str:
        """The command for a shell of another host, in the job's folder and with the environment that it needs there."""
        needed = ("OMP_NUM_THREADS", "DS_ACCELERATOR", "PYTHONPATH", "PATH", "PYTHONUNBUFFERED")
        told = {name: self.env[name] for name in needed if name in self.env} | self.marks | variables
        setting = " ".join(f"{name}={shlex.quote(value)}" for name, value in told.items())
        return f"cd {shlex.quote(str(self.folder))} && exec env {setting} {shlex.join(command)}"

    def workers(self) -> dict[int, psutil.Process]:
        """The workers by rank."""
        return self.children_of("bamboo_ds.control.agent")

    def tasks(self) -> dict[int, psutil.Process]:
        """The rank supervisors by rank: what the processes have become that the launcher had started."""
        return {rank: parent for rank, agent in self._agents().items() if (parent := agent.parent()) is not None}

    def _agents(self) -> dict[int, psutil.Process]:
        return {rank: parent for rank, each in self.workers().items() if (parent := each.parent()) is not None}

    def children_of(self, parent: str) -> dict[int, psutil.Process]:
        """The job's processes by rank whose parent has that word on its command line."""
        found = {}
        for process in processes_of(str(self.folder)):
            try:
                above, rank = process.parent(), process.environ().get("RANK")
                if rank is not None and above is not None and parent in above.cmdline():
                    found[int(rank)] = process
            except psutil.NoSuchProcess:
                continue  # it has ended meanwhile
        return found

    def strike(self, process: psutil.Process) -> None:
        """SIGKILL; returns when the process is gone."""
        process.send_signal(signal.SIGKILL)
        process.wait(30)
