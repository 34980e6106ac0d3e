"""Starting whole jobs: stock DeepSpeed and under ``bamboo run``."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

SUPPORT = Path(__file__).parent
TRAIN = SUPPORT / "train.py"
MARK = "BAMBOO_TEST_JOB"
#: Seconds after which a job counts as hanging.
DEADLINE_S = 180


def environment() -> dict[str, str]:
    """One computing thread per process; no JIT-compiled extensions."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONUNBUFFERED": "1"}


def write_config(folder: Path, bamboo: dict[str, Any] | None, micro_batches: int = 6, **changes: Any) -> Path:
    """A ``ds_config.json``."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": micro_batches,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 5}},
        "gradient_clipping": 0.5,
        "steps_per_print": 10**9,
    }
    config.update(changes)
    config = {k: v for k, v in config.items() if v is not None}
    if bamboo is not None:
        config["bamboo"] = bamboo
    path = folder / "ds_config.json"
    path.write_text(json.dumps(config))
    return path


@dataclass
class Result:
    """What a job left behind."""

    out: Path
    exit_code: int
    output: str

    def ranks(self) -> dict[int, dict[str, Any]]:
        """The dump of every worker that reached the end."""
        files = self.out.glob("result-*.pt")
        return {int(f.stem.split("-")[1]): torch.load(f, weights_only=True) for f in files}

    def joined(self) -> list[dict[str, Any]]:
        """The dump of every worker that joined the job and reached the end."""
        return [torch.load(f, weights_only=True) for f in sorted(self.out.glob("joined-*.pt"))]

    def roles(self) -> dict[tuple[int, int], Any]:
        """State of every role at its owner."""
        found: dict[tuple[int, int], Any] = {}
        for result in [*self.ranks().values(), *self.joined()]:
            found.update(result["roles"])
        return found

    def replicas(self) -> dict[tuple[int, int], Any]:
        """State of every replica."""
        found: dict[tuple[int, int], Any] = {}
        for result in [*self.ranks().values(), *self.joined()]:
            found.update(result["replicas"])
        return found

    def faults(self) -> list[str]:
        """Names of the faults that struck."""
        return sorted(f.name for f in self.out.glob("fault-*"))

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Events of one kind."""
        lines = (self.out / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    def drawn(self) -> list[list[int]]:
        """Indices of the samples that each worker read that joined the job, in order."""
        return [[int(x) for x in f.read_text().split()] for f in sorted(self.out.glob("drawn-*.txt"))]

    def samples(self) -> dict[int, list[int]]:
        """Indices of the samples that each worker read, in order."""
        files = self.out.glob("samples-*.txt")
        return {int(f.stem.split("-")[1]): [int(x) for x in f.read_text().split()] for f in files}


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def run_stock(folder: Path, world: int, arguments: list[str], config: Path, script: Path = TRAIN) -> Result:
    """The job without bamboo: ``world`` plain processes."""
    out = folder
    port = str(free_port())
    workers, logs = [], []
    for rank in range(world):
        env = environment() | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        command = [sys.executable, str(SUPPORT / "stock.py"), str(script)]
        command += ["--deepspeed_config", str(config), "--out", str(out), *arguments]
        log = open(out / f"log-{rank}.txt", "wb")  # noqa: SIM115
        logs.append(log)
        workers.append(subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = [w.wait(DEADLINE_S) for w in workers]
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.kill()
                worker.wait()
        for log in logs:
            log.close()
    output = "".join((out / f"log-{r}.txt").read_text(errors="replace") for r in range(world))
    return Result(out, max(codes, key=abs), output)


def bamboo_command() -> str:
    """The console script of the interpreter that runs the tests."""
    beside = Path(sys.executable).with_name("bamboo")
    return str(beside) if beside.exists() else str(shutil.which("bamboo"))


def run_bamboo(
    folder: Path, world: int, arguments: list[str], config: Path, script: Path = TRAIN, timeout: float = DEADLINE_S
) -> Result:
    """The job under ``bamboo run``."""
    command = [bamboo_command(), "run", "-n", str(world), "--events", str(folder / "events.jsonl"), str(script)]
    command += ["--deepspeed_config", str(config), "--out", str(folder), *arguments]
    # Marks every process of this job, and gives it a place of its own for temporary files.
    temporary = folder / "tmp"
    temporary.mkdir()
    env = environment() | {MARK: str(folder), "TMPDIR": str(temporary), "XDG_RUNTIME_DIR": str(temporary)}
    shared = set(os.listdir("/dev/shm"))
    done = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        output, _ = done.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        done.terminate()
        output, _ = done.communicate(timeout=30)
        raise AssertionError(f"the job hangs:\n{output.decode(errors='replace')[-6000:]}") from None
    left = {name for name in set(os.listdir("/dev/shm")) - shared if "bamboo" in name and not in_use(name)}
    left |= {str(path.relative_to(temporary)) for path in temporary.rglob("*") if path.is_file()}
    assert not left, f"the job left files behind: {left}"
    assert not marked(str(folder)), f"the job left processes behind: {marked(str(folder))}"
    return Result(folder, done.returncode, output.decode(errors="replace"))


class RunningJob:
    """A job under ``bamboo run`` that a test acts upon while it runs. Use it in a ``with`` statement."""

    def __init__(self, folder: Path, world: int, arguments: list[str], config: Path, script: Path = TRAIN) -> None:
        self.folder = folder
        temporary = folder / "tmp"
        temporary.mkdir()
        self.env = environment() | {MARK: str(folder), "TMPDIR": str(temporary), "XDG_RUNTIME_DIR": str(temporary)}
        self.command = [str(script), "--deepspeed_config", str(config), "--out", str(folder), *arguments]
        self.name = f"job-{os.urandom(4).hex()}"
        options = ["--job", self.name, "--events", str(folder / "events.jsonl")]
        self.process = self._start("run", ["-n", str(world), *options], "run")
        self.joiners: list[subprocess.Popen[bytes]] = []

    def _start(self, command: str, options: list[str], log: str) -> subprocess.Popen[bytes]:
        with open(self.folder / f"{log}.log", "wb") as file:
            return subprocess.Popen(
                [bamboo_command(), command, *options, *self.command],
                env=self.env,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def join(self) -> subprocess.Popen[bytes]:
        """``bamboo join`` with the job's script."""
        options = ["--job", self.name, "--events", str(self.folder / "events.jsonl")]
        self.joiners.append(self._start("join", options, f"join-{len(self.joiners)}"))
        return self.joiners[-1]

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        """Events so far; a line that is being written is left out."""
        try:
            text = (self.folder / "events.jsonl").read_text()
        except FileNotFoundError:
            return []
        found = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return [event for event in found if kind in (None, event["event"])]

    def plan(self) -> dict[str, Any]:
        """The newest plan."""
        return self.events("plan")[-1]

    def wait_for(self, what: str, condition: Callable[[], bool], seconds: float = 60.0) -> None:
        """Wait for a condition; fails when the job ends or the time is over before."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, f"the job ended before: {what}\n{self.output()[-6000:]}"
            assert time.monotonic() < deadline, f"not within {seconds} s: {what}\n{self.output()[-6000:]}"
            time.sleep(0.02)

    def output(self) -> str:
        """Everything that was printed."""
        return "".join(f.read_text(errors="replace") for f in sorted(self.folder.glob("*.log")))

    def finish(self, seconds: float = DEADLINE_S) -> Result:
        """Wait for the end of everything."""
        try:
            code = self.process.wait(seconds)
            for joiner in self.joiners:
                joiner.wait(30)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job hangs:\n{self.output()[-6000:]}") from None
        return Result(self.folder, code, self.output())

    def __enter__(self) -> RunningJob:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for process in (self.process, *self.joiners):
            if process.poll() is None:
                process.terminate()
                process.wait(30)
        if kind is None:
            assert not marked(str(self.folder)), f"the job left processes behind: {marked(str(self.folder))}"


def in_use(name: str) -> bool:
    """Whether a living process (of another job) names this file on its command line."""
    return any(name in part for process in psutil.process_iter(["cmdline"]) for part in process.info["cmdline"] or ())


def marked(mark: str) -> list[str]:
    """Command lines of the living processes that carry a job's mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # it has ended meanwhile, or is not ours
    return found
