"""Whether jobs on a GPU are as exact as those on CPUs, and what they cost: several workers on one GPU.

With two and four workers, in fp32 and in bf16 with ZeRO-1, the same transformer is trained by stock DeepSpeed, with the
block, and with the block and one SIGKILL; losses and checkpoints are compared bit by bit. One worker alone builds an
engine on NCCL, aborts and ends. See ``--help``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import (
    PATIENCE_S,
    TRAININGS,
    WORKERS,
    Job,
    JobFailed,
    Training,
    Watcher,
    bamboo_job,
    console,
    environment,
    fresh,
    run_bamboo,
    run_stock,
    save_json,
    write_config,
)
from recovery import members

from bamboo_ds.cli.demo.compare import compare_checkpoints, compare_losses

STEPS, MICRO_BATCHES = 12, 8
#: Steps that do not count for times, and the one in the middle of whose successor a worker is killed.
WARM_UP, KILL_AFTER = 3, 5
SCRIPT = WORKERS / "transformer.py"
TIMEOUT_S = 600.0
MIB = 2**20
EMULATED = "EMULATED on the CPU: not a run on a GPU"


@dataclass(frozen=True)
class Case:
    """A job: its training, stages, and pipelines."""

    training: Training
    stages: int
    pipelines: int

    @property
    def workers(self) -> int:
        """One for each role."""
        return self.stages * self.pipelines

    @property
    def name(self) -> str:
        """For people and folders."""
        return f"{self.training.name}-{self.stages}x{self.pipelines}"


CASES = (
    Case(TRAININGS["fp32"], 2, 1),
    Case(TRAININGS["bf16-zero1"], 2, 1),
    Case(TRAININGS["fp32"], 4, 1),
    Case(TRAININGS["bf16-zero1"], 2, 2),
)


@dataclass
class Figures:
    """What a case has shown. Seconds are medians over iterations; bytes are the largest worker's peak.

    Attributes:
        stock: where the run with the block differs from stock DeepSpeed.
        killed: where the run with a SIGKILL differs from the undisturbed one with the block.
        struck: what was killed, and how the others went on.
        problem: why there are no figures.
    """

    case: str
    workers: int
    stock_s: float = 0.0
    block_s: float = 0.0
    stock_bytes: int = 0
    block_bytes: int = 0
    stock: list[str] | None = None
    killed: list[str] | None = None
    struck: str = ""
    problem: str = ""

    @property
    def good(self) -> bool:
        """Whether everything was equal, and the fault struck."""
        return not self.problem and self.stock == [] and self.killed == [] and bool(self.struck)


class Runner:
    """Runs the jobs of a case. ``size`` is that of the model, as arguments of the worker."""

    def __init__(self, out: Path, device: str, size: tuple[str, ...]) -> None:
        self._out, self._size = out, size
        self.variables = {"DS_ACCELERATOR": device, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        if device == "cuda":
            # The first one that is visible; all workers are on it.
            first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
            self.variables |= {"CUDA_VISIBLE_DEVICES": first, "LOCAL_RANK": "0"}

    def prepare(self, case: Case, kind: str, block: Mapping[str, Any] | None) -> tuple[Path, list[str]]:
        """The folder of a job, and the arguments of its workers."""
        folder = fresh(self._out / "jobs" / f"gpu-{case.name}-{kind}")
        changes = {**case.training.config, "train_micro_batch_size_per_gpu": 4}
        config = write_config(folder, MICRO_BATCHES, block, **changes)
        arguments = ["--deepspeed_config", str(config), "--out", str(folder), "--stages", str(case.stages)]
        return folder, [*arguments, "--steps", str(STEPS), *self._size]

    def stock(self, case: Case) -> Job:
        """Stock DeepSpeed."""
        folder, arguments = self.prepare(case, "stock", None)
        return run_stock(folder, case.workers, SCRIPT, [*arguments, "--gloo"], TIMEOUT_S, self.variables)

    def undisturbed(self, case: Case) -> Job:
        """With the block."""
        folder, arguments = self.prepare(case, "block", self.block())
        return run_bamboo(folder, case.workers, SCRIPT, arguments, TIMEOUT_S, self.variables)

    @staticmethod
    def block() -> dict[str, Any]:
        """NCCL refuses several workers on one GPU."""
        return {"comm": {"cuda_backend": "gloo"}, "redundancy": {"verify_every": 4}}

    def killed(self, case: Case) -> tuple[Job, str]:
        """With the block and a SIGKILL to the owner of the last stage in the middle of an iteration; what of it."""
        folder, arguments = self.prepare(case, "killed", self.block())
        with bamboo_job(folder, case.workers, SCRIPT, arguments, variables=self.variables) as process:
            watcher = Watcher(Job(folder), process)
            watcher.step(1)
            victim = members(process)[case.workers - 1]
            watcher.step(KILL_AFTER)
            typical = median(e["seconds"] for e in watcher.seen if e["event"] == "step" and e["step"] > 1)
            time.sleep(typical / 2)
            os.kill(victim.pid, signal.SIGKILL)
            watcher.wait("recovery", lambda seen: any(e["event"] == "recovered" for e in seen))
            code = process.wait(PATIENCE_S)
        job = Job(folder)
        if code:
            raise JobFailed(f"{folder}: exit code {code}\n{job.log()[-3000:]}")
        lost = [(e["member_id"], e["detail"]) for e in job.events("member_lost")]
        if lost != [(victim.id, "SIGKILL")] or job.events("replica_mismatch"):
            raise JobFailed(f"{folder}: {victim.id} was killed; lost: {lost}, see {folder}/events.jsonl")
        end = job.events("recovered")[0]
        return job, f"step {end['step']}, {end['mode']}, pause {end['pause_seconds'] * 1000:.0f} ms"

    def measure(self, case: Case) -> Figures:
        """All runs of a case, compared."""
        found = Figures(case.name, case.workers)
        try:
            stock, block = self.stock(case), self.undisturbed(case)
            found.stock_s, found.stock_bytes = self.cost(stock)
            found.block_s, found.block_bytes = self.cost(block)
            found.stock = differences(stock, block)
            job, found.struck = self.killed(case)
            found.killed = differences(block, job)
        except JobFailed as error:
            found.problem = error.message
        return found

    @staticmethod
    def cost(job: Job) -> tuple[float, int]:
        """Seconds per iteration at rank 0, and the largest worker's peak of memory."""
        results = job.results()
        return median(results[0]["seconds"][WARM_UP:]), max(next(iter(r["memory"].values())) for r in results.values())

    def alone(self) -> dict[str, Any]:
        """One rank on NCCL."""
        file = fresh(self._out / "jobs" / "gpu-alone") / "result.json"
        command = [sys.executable, str(WORKERS / "nccl_alone.py"), str(file)]
        env = {**environment(), **self.variables, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
        if done.returncode or not file.exists():
            return {"problem": f"exit code {done.returncode}\n{(done.stdout + done.stderr)[-3000:]}"}
        result: dict[str, Any] = json.loads(file.read_text())
        wanted = "nccl" if self.variables["DS_ACCELERATOR"] == "cuda" else "gloo"
        if result["inner"] != wanted or not result["raised"] or not result["sum_of_one"]:
            return {**result, "problem": f"not as it should be, on {wanted}"}
        return result


def differences(expected: Job, found: Job) -> list[str]:
    """Where losses and checkpoints of two jobs differ."""
    compared = [compare_losses(expected.folder, found.folder, STEPS)]
    # Of DeepSpeed's own, in its files of ZeRO.
    with torch.serialization.safe_globals([fragment_address, LossScaler, ZeroStageEnum]):
        compared += compare_checkpoints(expected.folder / "final", found.folder / "final")
    return [f"{each.what}: {each.differences or 'nothing to compare'}" for each in compared if not each.equal]


def table(rows: list[Figures], title: str) -> Table:
    """The figures for people."""
    result = Table(title=title)
    for column in ("case", "workers", "stock [s]", "block [s]", "ratio", "stock [MiB]", "block [MiB]"):
        result.add_column(column, justify="left" if column == "case" else "right")
    for column in ("= stock", "SIGKILL", "= undisturbed"):
        result.add_column(column)
    for row in rows:
        if row.problem:
            result.add_row(row.case, str(row.workers), f"[red]failed[/red]: {row.problem.splitlines()[0]}")
            continue
        sizes = (f"{size / MIB:.0f}" for size in (row.stock_bytes, row.block_bytes))
        seconds = (f"{row.stock_s:.3f}", f"{row.block_s:.3f}", f"{row.block_s / row.stock_s:.2f}")
        same = ["[green]yes[/green]" if found == [] else "[red]NO[/red]" for found in (row.stock, row.killed)]
        result.add_row(row.case, str(row.workers), *seconds, *sizes, same[0], row.struck, same[1])
    return result


@click.command()
@click.option("--allow-cpu", is_flag=True, help="Without a GPU, run the same on the CPU, labelled as emulated.")
@click.option(
    "--case", "wanted", type=click.Choice([case.name for case in CASES]), multiple=True, help="[default: all]"
)
@click.option("--layers", type=click.IntRange(min=2), default=6, show_default=True)
@click.option("--width", type=click.IntRange(min=64), default=512, show_default=True, help="A multiple of 8.")
@click.option("--context", type=click.IntRange(min=8), default=256, show_default=True)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("out"), show_default=True)
def main(allow_cpu: bool, wanted: tuple[str, ...], layers: int, width: int, context: int, out: Path) -> None:
    """Lose workers on a GPU, and compare with stock DeepSpeed."""
    gpu = torch.cuda.is_available()
    if not gpu and not allow_cpu:
        raise click.ClickException(
            f"torch {torch.__version__} sees no GPU, and nothing else is a run on one. --allow-cpu runs the same on "
            "the CPU, to try this program itself"
        )
    device = torch.cuda.get_device_name(0) if gpu else EMULATED
    console.print(f"[bold]{device}[/bold], torch {torch.__version__}, CUDA {torch.version.cuda}")
    size = ("--layers", str(layers), "--width", str(width), "--context", str(context))
    runner = Runner(out.resolve(), "cuda" if gpu else "cpu", size)
    alone = runner.alone()
    label = "one rank alone on NCCL" if gpu else f"one rank alone ({EMULATED}; gloo for NCCL)"
    console.print(f"{label}: {alone}", markup=False, highlight=False)
    rows = []
    for case in CASES:
        if not wanted or case.name in wanted:
            rows.append(runner.measure(case))
            for said in (rows[-1].problem, *(rows[-1].stock or ()), *(rows[-1].killed or ())):
                if said:
                    console.print(f"[red]{case.name}[/red] ({device}): {said}", markup=True, highlight=False)
    title = f"{device}: all workers on it, M={MICRO_BATCHES}, {layers} layers of width {width}, context {context}"
    console.print(table(rows, title))
    content = {"title": title, "device": device, "emulated": not gpu, "alone": alone}
    save_json(out / "gpu-smoke.json", {**content, "rows": [asdict(row) for row in rows]})
    if "problem" in alone or not all(row.good for row in rows):
        raise JobFailed(f"not all is as it should be ({device})")


if __name__ == "__main__":
    main()
