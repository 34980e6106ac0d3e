"""What the benchmarks share: starting jobs, statistics, tables, JSON and pictures."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

import click
import psutil
from rich.console import Console

from bamboo_ds.launchers.network import free_port

HERE = Path(__file__).parent
#: Scripts of the jobs that the benchmarks start.
WORKERS = HERE / "workers"
#: Seconds without the next expected event after which a job counts as hanging.
PATIENCE_S = 90.0
console = Console(width=None if sys.stdout.isatty() else 160)


class JobFailed(click.ClickException):
    """A job did not end well."""


@dataclass(frozen=True)
class Job:
    """A job that has ended well (or is being watched): its folder holds all that it left."""

    folder: Path

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        """Complete lines of the events file, of one kind or all, in the order in which they were written."""
        path = self.folder / "events.jsonl"
        if not path.exists():
            return []
        lines = path.read_text().split("\n")[:-1]
        events = [json.loads(line) for line in lines]
        return [event for event in events if kind in (None, event["event"])]

    def results(self) -> dict[int, dict[str, Any]]:
        """What each worker wrote to ``result-<rank>.json``."""
        files = sorted(self.folder.glob("result-*.json"))
        return {int(file.stem.split("-")[1]): json.loads(file.read_text()) for file in files}

    def log(self) -> str:
        """The job's output."""
        files = sorted(self.folder.glob("log*.txt"))
        return "".join(file.read_text(errors="replace") for file in files)


def environment() -> dict[str, str]:
    """One computing thread per process, on the CPU."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONUNBUFFERED": "1"}


def package_of(checkout: Path) -> dict[str, str]:
    """Variables of processes that use the package of another checkout of the project, beside this one's benchmarks.

    Raises:
        JobFailed: they would use another one.
    """
    variables = {"PYTHONPATH": str(checkout)}
    command = [sys.executable, "-c", "import bamboo_ds; print(bamboo_ds.__file__)"]
    env = {**environment(), **variables}
    done = subprocess.run(command, env=env, cwd="/", capture_output=True, text=True, check=False)
    if Path(done.stdout.strip()) != checkout / "bamboo_ds" / "__init__.py":
        raise JobFailed(f"{checkout} is no checkout of the project: {done.stdout}{done.stderr}")
    return variables


def versions(against: Path | None) -> tuple[Path | None, ...]:
    """This checkout (``None``), and the other one if there is one."""
    return (None,) if against is None else (None, against.resolve())


def fresh(folder: Path) -> Path:
    """``folder``, empty."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def write_config(folder: Path, micro_batches: int, block: Mapping[str, Any] | None, **changes: Any) -> Path:
    """A ``ds_config.json`` with the ``"bamboo"`` block ``block``, or none; first steps are as long as all others."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": micro_batches,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "steps_per_print": 10**9,
        **changes,
    }
    if block is not None:
        config["bamboo"] = {**block, "redundancy": {"check_exact": 0, **block.get("redundancy", {})}}
    path = folder / "ds_config.json"
    path.write_text(json.dumps(config, indent=1))
    return path


@dataclass(frozen=True)
class Training:
    """What is trained: settings of DeepSpeed, arguments of the worker, number of pipelines."""

    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    pipelines: int = 1


TRAININGS = {
    training.name: training
    for training in (
        Training("fp32"),
        Training("fp16", {"fp16": {"enabled": True, "initial_scale_power": 8}}),
        Training("bf16", {"bf16": {"enabled": True}}),
        Training(
            "bf16-zero1",
            {
                "bf16": {"enabled": True},
                "zero_optimization": {"stage": 1},
                "data_types": {"grad_accum_dtype": "fp32"},
            },
            pipelines=2,
        ),
        Training("tied", arguments=("--tied",)),
    )
}


def ended_well(folder: Path, processes: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> Job:
    """The job in ``folder``, once all its processes have ended.

    Raises:
        JobFailed: one failed, or they took longer than ``timeout_s`` seconds.
    """
    deadline = time.monotonic() + timeout_s
    try:
        codes = [process.wait(max(0.0, deadline - time.monotonic())) for process in processes]
    except subprocess.TimeoutExpired as error:
        raise JobFailed(f"{folder}: the job still runs after {timeout_s} s\n{Job(folder).log()[-3000:]}") from error
    if any(codes):
        raise JobFailed(f"{folder}: exit codes {codes}\n{Job(folder).log()[-3000:]}")
    return Job(folder)


def run_stock(
    folder: Path,
    workers: int,
    script: Path,
    arguments: Sequence[str],
    timeout_s: float,
    variables: Mapping[str, str] | None = None,
) -> Job:
    """Run ``script`` without bamboo: ``workers`` plain processes, with ``variables`` more in their environment.

    Raises:
        JobFailed: a worker failed, or the job took longer than ``timeout_s`` seconds.
    """
    port = str(free_port("127.0.0.1"))
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(workers):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": workers, "LOCAL_SIZE": workers}
            env = environment() | {name: str(value) for name, value in place.items()}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **(variables or {})}
            with open(folder / f"log-{rank}.txt", "wb") as log:
                command = [sys.executable, str(script), *arguments]
                processes.append(subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT))
        return ended_well(folder, processes, timeout_s)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


@contextmanager
def ending(process: Any) -> Iterator[None]:
    """End ``process``, which is like ``subprocess.Popen``, when the body is left, if it has not ended by itself."""
    try:
        yield
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def bamboo_job(
    folder: Path,
    workers: int,
    script: Path,
    arguments: Sequence[str],
    job: str | None = None,
    options: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    checkout: Path | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """``bamboo run`` of ``script`` with its events in ``folder``; ended when the body is left.

    Args:
        variables: more of its environment.
        checkout: of another version of the project, whose package is used in place of this one.
    """
    command = [sys.executable, "-m", "bamboo_ds.cli.main", "run", "-n", str(workers)]
    command += ["--events", str(folder / "events.jsonl")] + (["--job", job] if job else [])
    command += [*options, str(script), *arguments]
    logs = {"BAMBOO_LOGS": str(folder / "logs")}
    env = {**environment(), **logs, **(variables or {}), **({} if checkout is None else package_of(checkout))}
    with open(folder / "log.txt", "wb") as log:
        process = subprocess.Popen(
            command,
            env=env,
            cwd=None if checkout is None else folder,  # Python would take the package that is in the working directory
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    with ending(process):
        yield process


def join(
    folder: Path,
    number: int,
    job: str,
    script: Path,
    arguments: Sequence[str],
    variables: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """``bamboo join`` of ``script`` to ``job``; ``number`` names its log."""
    command = [sys.executable, "-m", "bamboo_ds.cli.main", "join", "--job", job, str(script), *arguments]
    env = {**environment(), **(variables or {})}
    with open(folder / f"log-join-{number}.txt", "wb") as log:
        return subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)


def run_bamboo(
    folder: Path,
    workers: int,
    script: Path,
    arguments: Sequence[str],
    timeout_s: float,
    variables: Mapping[str, str] | None = None,
    checkout: Path | None = None,
) -> Job:
    """Run ``script`` under ``bamboo run`` to its end; as :func:`run_stock`, with a ``checkout`` of another version."""
    with bamboo_job(folder, workers, script, arguments, variables=variables, checkout=checkout) as process:
        return ended_well(folder, [process], timeout_s)


def wall(event: dict[str, Any]) -> float:
    """When an event was emitted, in seconds since 1970."""
    return datetime.fromisoformat(event["time"].replace("Z", "+00:00")).timestamp()


@dataclass
class Watcher:
    """Follows the events of a running job."""

    job: Job
    process: subprocess.Popen[bytes]
    patience_s: float = PATIENCE_S
    seen: list[dict[str, Any]] = field(default_factory=list)
    _size: int = -1

    def _look(self) -> None:
        """Read the events again if there are new ones: looking must not take the workers' time."""
        path = self.job.folder / "events.jsonl"
        size = path.stat().st_size if path.exists() else 0
        if size != self._size:
            self.seen, self._size = self.job.events(), size

    def wait(self, what: str, found: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
        """Events so far, as soon as ``found`` says yes of them."""
        deadline = time.monotonic() + self.patience_s
        while True:
            self._look()
            if found(self.seen):
                return self.seen
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise JobFailed(f"{self.job.folder}: {what} did not come\n{self.job.log()[-3000:]}")
            time.sleep(0.002)

    def step(self, number: int) -> int:
        """Wait for the end of step ``number``; returns the newest one that has ended."""
        self.wait(f"step {number}", lambda seen: any(e["event"] == "step" and e["step"] >= number for e in seen))
        return max(e["step"] for e in self.seen if e["event"] == "step")


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of ``values`` do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1)]


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median, 95th percentile and maximum."""
    return {"p50": median(values), "p95": percentile(values, 0.95), "max": max(values)}


def machine() -> dict[str, Any]:
    """Where and under which load the figures were measured."""
    import deepspeed
    import torch

    return {
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gb": round(psutil.virtual_memory().total / 2**30, 1),
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "deepspeed": deepspeed.__version__,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def save_json(path: Path, content: Mapping[str, Any], tell: bool = True) -> None:
    """Write ``content`` with the description of the machine."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**content, "machine": machine()}, indent=1) + "\n")
    if tell:
        console.print(f"[dim]{path}[/dim]")


def save_figure(figure: Any, path: Path) -> None:
    """Write a matplotlib figure."""
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    console.print(f"[dim]{path}[/dim]")


def new_figure(*arguments: Any, **keywords: Any) -> Any:
    """``matplotlib.pyplot.subplots`` without a display."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(*arguments, **keywords)


def verdict(reached: bool | None) -> str:
    """A mark for a table; ``None``: no target."""
    return "" if reached is None else "[green]reached[/green]" if reached else "[red]missed[/red]"
