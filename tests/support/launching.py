"""Jobs that another launcher than ``bamboo run`` starts, of a script that knows nothing of bamboo."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from .jobs import DEADLINE_S, MARK, TemporaryFolder, environment, marked, stacks_of

#: Writes ``losses-<rank>.json`` to ``--out``; has as many stages as there are ranks. Steps take 0.2 s each until the
#: file ``--slow-until`` exists.
SCRIPT = """
import argparse, json, os, time
import deepspeed, torch
from deepspeed.pipe import PipelineModule
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--out")
parser.add_argument("--slow-until")
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 512
    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(16, generator=generator), torch.randint(0, 10, (), generator=generator)

deepspeed.init_distributed()
torch.manual_seed(1138)
layers = [nn.Linear(16, 64), nn.ReLU(inplace=True), nn.Linear(64, 64), nn.ReLU(inplace=True), nn.Linear(64, 10)]
stages = int(os.environ["WORLD_SIZE"])
net = PipelineModule(layers=layers, loss_fn=nn.CrossEntropyLoss(), num_stages=stages, partition_method="uniform")
engine, _, _, _ = deepspeed.initialize(args=args, model=net,
    model_parameters=[p for p in net.parameters() if p.requires_grad], training_data=Numbers())
losses = []
for step in range(60):
    begin = time.monotonic()
    losses.append(float(engine.train_batch()))
    while args.slow_until and not os.path.exists(args.slow_until) and time.monotonic() < begin + 0.2:
        time.sleep(0.005)
with open(os.path.join(args.out, f"losses-{engine.global_rank}.json"), "w") as file:
    json.dump(losses, file)
"""


def losses(folder: Path) -> dict[int, list[float]]:
    """Losses that every worker saw, by rank."""
    return {int(f.stem.split("-")[1]): json.loads(f.read_text()) for f in folder.glob("losses-*.json")}


class LaunchedJob:
    """A job under a launcher. Use it in a ``with`` statement: after it no process of the job may be left.

    Args:
        folder: for the log, events and results; the working directory.
        command: the launcher's whole command line.
    """

    def __init__(self, folder: Path, command: Sequence[str], variables: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self.events_file = folder / "events.jsonl"
        self._temporary = TemporaryFolder(folder)
        env = environment() | self._temporary.variables | {MARK: str(folder), "BAMBOO_EVENTS": str(self.events_file)}
        env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
        with open(folder / "log.txt", "wb") as log:
            self.process = subprocess.Popen(
                command, env=env | dict(variables or {}), stdout=log, stderr=subprocess.STDOUT, cwd=folder
            )

    def output(self) -> str:
        """Everything that was printed."""
        return (self.folder / "log.txt").read_text(errors="replace")

    def events(self, kind: str) -> list[dict[str, object]]:
        """Events of one kind so far; a line that is being written is left out."""
        text = self.events_file.read_text() if self.events_file.exists() else ""
        found = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return [event for event in found if event["event"] == kind]

    def wait_for_step(self, step: int) -> None:
        """Return as soon as the job has reported ``step``."""
        deadline = time.monotonic() + DEADLINE_S
        while not any(int(str(event["step"])) >= step for event in self.events("step")):
            assert self.alive(), f"the job ended before step {step}:\n{self.output()[-6000:]}"
            assert time.monotonic() < deadline, f"the job did not come to step {step}:\n{self.output()[-6000:]}"
            time.sleep(0.002)  # a poll of the file, not a synchronisation

    def alive(self) -> bool:
        """Whether the launcher runs."""
        return self.process.poll() is None

    def workers(self) -> dict[int, psutil.Process]:
        """The workers by rank."""
        return self._children_of(lambda command: "bamboo_ds.control.agent" in command, "BAMBOO_MEMBER")

    def launched(self) -> dict[int, psutil.Process]:
        """The processes that the launcher itself has started, by rank."""
        launchers = {"deepspeed.launcher.launch", "torchrun", "srun.py"}

        def launches(command: list[str]) -> bool:
            names = {Path(part).name for part in command}
            return bool(launchers & names) and "bamboo" not in names  # `bamboo launch -- torchrun …`

        return self._children_of(launches, "RANK")

    def _children_of(self, is_parent: Callable[[list[str]], bool], variable: str) -> dict[int, psutil.Process]:
        found = {}
        for rank, process in self._by_rank(variable):
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                parent = process.parent()
                if parent is not None and is_parent(parent.cmdline()):
                    found[rank] = process
        return found

    def _by_rank(self, variable: str) -> list[tuple[int, psutil.Process]]:
        found = []
        for process in psutil.process_iter():
            try:
                env = process.environ()
                if env.get(MARK) == str(self.folder) and "RANK" in env and variable in env:
                    found.append((int(env["RANK"]), process))
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue  # it has ended meanwhile, or is not ours
        return found

    def exit_code(self) -> int:
        """Wait for the launcher's end."""
        try:
            return self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            where = stacks_of(str(self.folder))
            raise AssertionError(f"the job hangs:\n{self.output()[-6000:]}\n{where}") from None

    def __enter__(self) -> LaunchedJob:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.alive():
            self.process.terminate()
            self.process.wait(60)
        deadline = time.monotonic() + 20
        while left := marked(str(self.folder)):
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)  # a poll of the process table
        files = self._temporary.close()
        if kind is None:
            assert not left, f"the job left processes behind: {left}"
            assert not files, f"the job left files behind: {files}"
