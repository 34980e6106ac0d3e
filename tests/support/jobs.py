"""Starting whole jobs: stock DeepSpeed and under ``bamboo run``."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from . import far_device
from .etcd import wait_until
from .nccl import session
from .patience import Patience
from .ports import free_port
from .processes import Process, run, start

SUPPORT = Path(__file__).parent
TRAIN = SUPPORT / "train.py"
MARK = "BAMBOO_TEST_JOB"
#: A temporary file that some versions of torch leave behind whenever they are imported.
OF_TORCH = "_remote_module_non_scriptable."
#: What Python's ``tempfile`` writes and removes to see whether it can; a process may be killed in between.
OF_PYTHON = re.compile("[a-z0-9_]{8}")
#: Seconds after which a job counts as hanging.
DEADLINE_S = 180
#: Seconds of silence until a member is lost, where a test does not say. All losses there are noticed in another way.
LEASE_TTL_S = 20


def environment() -> dict[str, str]:
    """One computing thread per process; no JIT-compiled extensions."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONUNBUFFERED": "1"}


def write_config(folder: Path, bamboo: dict[str, Any] | None, micro_batches: int = 6, **changes: Any) -> Path:
    """A ``ds_config.json``. Unless ``bamboo`` sets them, leases are so long that a busy machine costs none, and the
    first steps are not checked.
    """
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": micro_batches,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True, "foreach": False}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 5}},
        "gradient_clipping": 0.5,
        "steps_per_print": 10**9,
    }
    config.update(changes)
    config = {k: v for k, v in config.items() if v is not None}
    if bamboo is not None:
        usual = {"membership": {"lease_ttl_s": LEASE_TTL_S}}
        if bamboo.get("redundancy", {}).get("mode") != "none":
            usual["redundancy"] = {"check_exact": 0}
        config["bamboo"] = bamboo | {part: {**values, **bamboo.get(part, {})} for part, values in usual.items()}
    path = folder / "ds_config.json"
    path.write_text(json.dumps(config))
    return path


def slow_until(file: Path, pace_s: float = 0.3) -> list[str]:
    """Arguments of a job that takes ``pace_s`` seconds a step until ``file`` exists, and ends some steps later."""
    return ["--steps", "1000", "--slow-until", str(file), "--slow-s", str(pace_s), "--end-after", "10"]


def slow_rank(folder: Path, rank: int) -> tuple[str, ...]:
    """Arguments of :data:`TRAIN` in which forward passes of ``rank`` take five times as long as those of all others.

    Its neighbours surely wait for longer than redundant passes take, and know that from the third iteration on.
    """
    file = folder / "slow"
    file.write_text(f"{rank} 5")
    return "--pause-s", "0.01", "--straggler", str(file)


@dataclass
class Result:
    """What a job left behind."""

    out: Path
    exit_code: int
    output: str

    @property
    def length(self) -> tuple[str, str]:
        """The arguments that make an undisturbed run as long as this one, which has ended by :func:`slow_until`."""
        return "--steps", (self.out / "last-step").read_text()

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

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        """Events of one kind, or all."""
        lines = (self.out / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if kind in (None, event["event"])]

    def drawn(self) -> list[list[int]]:
        """Indices of the samples that each worker read that joined the job, in order."""
        return [[int(x) for x in f.read_text().split()] for f in sorted(self.out.glob("drawn-*.txt"))]

    def samples(self) -> dict[int, list[int]]:
        """Indices of the samples that each worker read, in order."""
        files = self.out.glob("samples-*.txt")
        return {int(f.stem.split("-")[1]): [int(x) for x in f.read_text().split()] for f in files}


#: The fixture of undisturbed runs.
Reference = Callable[..., Result]


def run_stock(folder: Path, world: int, arguments: list[str], config: Path, script: Path = TRAIN) -> Result:
    """The job without bamboo: ``world`` plain processes, forked from one that has done their imports."""
    command = [sys.executable, str(SUPPORT / "stock.py"), "-n", str(world), "--logs", str(folder), str(script)]
    command += ["--deepspeed_config", str(config), "--out", str(folder), *arguments]
    temporary = TemporaryFolder(folder)  # the workers of DataLoaders are killed at its end, and leave theirs behind
    env = environment() | temporary.variables | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with open(folder / "log.txt", "wb") as log:
        process = start(command, env, log.fileno(), stock=True)
    try:
        code = process.wait(DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()  # the kernel ends the ranks with it
        raise
    finally:
        temporary.close()
    output = "".join(log.read_text(errors="replace") for log in sorted(folder.glob("log*.txt")))
    return Result(folder, code, output)


def bamboo_command() -> str:
    """The console script of the interpreter that runs the tests."""
    beside = Path(sys.executable).with_name("bamboo")
    return str(beside) if beside.exists() else str(shutil.which("bamboo"))


def start_bamboo(arguments: Sequence[str], env: Mapping[str, str], log: Path) -> Process:
    """Start a ``bamboo`` command."""
    with open(log, "wb") as file:
        return start([sys.executable, bamboo_command(), *arguments], env, file.fileno())


class TemporaryFolder:
    """A folder for the temporary files of a job, below ``folder``; its name leaves room for those of sockets in it.

    Attributes:
        variables: make processes use it.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "tmp"
        self._path.mkdir()
        self._name = Path(tempfile.gettempdir(), f"bamboo-test-{os.urandom(4).hex()}")
        self._name.symlink_to(self._path)  # sockets of DataLoaders have names of at most 107 characters
        self.variables = {"TMPDIR": str(self._name), "XDG_RUNTIME_DIR": str(self._name)}

    def close(self) -> set[str]:
        """Remove its name; returns the files that are left in it."""
        self._name.unlink()
        files = [path for path in self._path.rglob("*") if path.is_file() and not path.name.startswith(OF_TORCH)]
        return {str(path.relative_to(self._path)) for path in files if not OF_PYTHON.fullmatch(path.name)}


def run_bamboo(
    folder: Path, world: int, arguments: list[str], config: Path, script: Path = TRAIN, timeout: float = DEADLINE_S
) -> Result:
    """The job under ``bamboo run``, which must leave no file behind either."""
    shared = in_memory()
    with RunningJob(folder, world, arguments, config, script) as job:
        result = job.finish(timeout)
    assert not job.files_left, f"the job left files behind: {job.files_left}"
    # A job of another test may have made its folder a moment ago, or be about to remove it.
    wait_until(lambda: not in_memory() - shared, f"the job left files behind: {in_memory() - shared}")
    return result


def run_text(
    folder: Path, text: str, world: int = 2, bamboo: dict[str, Any] | None = None, exit_code: int = 0
) -> Result:
    """A job of a script that is given as text and imports modules of this folder; it must end with ``exit_code``."""
    script = folder / "script.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(SUPPORT)!r})\n{text}")
    result = run_bamboo(folder, world, [], write_config(folder, bamboo or {}), script)
    assert result.exit_code == exit_code, result.output[-4000:]
    return result


class RunningJob:
    """A job under ``bamboo run`` that a test acts upon while it runs. Use it in a ``with`` statement.

    Attributes:
        files_left: temporary files that its processes have left behind.

    Args:
        options: more options of ``bamboo run``.
        variables: more environment variables.
    """

    files_left: set[str]
    _events: list[dict[str, Any]]
    _parsed: int  # bytes of the event file
    _reading = threading.Lock()  # threads of tests ask, too

    def __init__(
        self,
        folder: Path,
        world: int,
        arguments: list[str],
        config: Path,
        script: Path = TRAIN,
        *,
        options: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        reduces = session.reduces(world, arguments, script)
        self._prepare(folder, f"job-{os.urandom(4).hex()}", variables, reduces)
        if session.ON_NCCL and session.stays_on_host(arguments, script):
            self.env.pop(far_device.SEED, None)
        self.command = [str(script), "--deepspeed_config", str(config), "--out", str(folder), *arguments]
        usual = ["--job", self.name, "--events", str(folder / "events.jsonl")]
        self.process = self._start("run", ["-n", str(world), *usual, *options], "run")

    def _prepare(
        self, folder: Path, name: str, variables: Mapping[str, str] | None = None, reduces: bool = False
    ) -> None:
        """What jobs have however they are started."""
        if session.ON_NCCL and not reduces:
            pytest.skip("nothing is known to be added up over members in this job")
        self.folder, self.name = folder, name
        self.events_file = folder / "events.jsonl"
        self._events, self._parsed = [], 0
        self._temporary = TemporaryFolder(folder)
        #: What makes processes those of this job.
        self.marks = {MARK: str(folder), **self._temporary.variables}
        self.env = environment() | self.marks | dict(variables or {})
        self.joiners: list[Process] = []

    def _start(self, command: str, options: list[str], log: str) -> Process:
        return start_bamboo([command, *options, *self.command], self.env, self.folder / f"{log}.log")

    def join(self, *more: str) -> Process:
        """``bamboo join`` with the job's script and ``more`` options; it finds the job's events."""
        options = ["--job", self.name, *more]
        self.joiners.append(self._start("join", options, f"join-{len(self.joiners)}"))
        return self.joiners[-1]

    def status(self) -> dict[str, Any]:
        """``bamboo status``."""
        done = run([sys.executable, bamboo_command(), "status", "--job", self.name, "--json"], self.env)
        assert done.returncode == 0, done.stderr
        report: dict[str, Any] = json.loads(done.stdout)
        return report

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        """Events so far; a line that is being written is left out. Each is parsed once: tests ask often."""
        with self._reading, contextlib.suppress(FileNotFoundError), open(self.events_file, "rb") as file:
            file.seek(self._parsed)
            whole = file.read().rpartition(b"\n")[0]
            if whole:
                self._events += map(json.loads, whole.splitlines())
                self._parsed += len(whole) + 1
        return [event for event in self._events if kind in (None, event["event"])]

    def plan(self) -> dict[str, Any]:
        """The newest plan."""
        return self.events("plan")[-1]

    def wait_for(self, what: str, condition: Callable[[], bool], seconds: float = DEADLINE_S) -> None:
        """Wait for a condition; fails when the job ends or the time is over before."""
        patience = Patience(seconds)
        while not condition():
            assert not self.over(), f"the job ended before: {what}\n{self.output()[-6000:]}"
            assert not patience.over(), f"not within {seconds} s: {what}\n{self.report()}"
            time.sleep(0.02)

    def over(self) -> bool:
        """Whether the job has ended."""
        return self.process.poll() is not None

    def output(self) -> str:
        """Everything that was printed."""
        return "".join(f.read_text(errors="replace") for f in sorted(self.folder.glob("*.log")))

    def report(self) -> str:
        """What tells why it does not go on: its output and events, and where its processes are."""
        events = "\n".join(json.dumps(event) for event in self.events()[-20:])
        return f"{self.output()[-6000:]}\n{events}\n{stacks_of(str(self.folder))}"

    def finish(self, seconds: float = DEADLINE_S) -> Result:
        """Wait for the end of everything."""
        try:
            code = self.process.wait(seconds)
            for joiner in self.joiners:
                joiner.wait(30)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job hangs:\n{self.report()}") from None
        if session.ON_NCCL and not code:
            session.check(self.folder)
        return Result(self.folder, code, self.output())

    def __enter__(self) -> RunningJob:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for process in (self.process, *self.joiners):
            if process.poll() is None:
                process.terminate()
                process.wait(30)
        try:
            if kind is None:
                wait_until(lambda: not marked(str(self.folder)), "none of the job's processes is left", 20.0)
        finally:
            self.files_left = self._temporary.close()


def in_memory() -> set[str]:
    """Our files in ``/dev/shm`` that no living process (of another job) names on its command line."""
    named = [part for process in psutil.process_iter(["cmdline"]) for part in process.info["cmdline"] or ()]
    return {name for name in os.listdir("/dev/shm") if "bamboo" in name and not any(name in part for part in named)}


def processes_of(mark: str) -> list[psutil.Process]:
    """The living processes that carry a job's mark."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # it has ended meanwhile, or is not ours
    return found


def marked(mark: str) -> list[str]:
    """Command lines of the living processes that carry a job's mark."""
    return [" ".join(process.info["cmdline"] or ()) for process in processes_of(mark)]


def stacks_of(mark: str) -> str:
    """Where the living processes that carry a job's mark are, as py-spy sees them; where it cannot, what it says."""
    command = Path(sys.executable).with_name("py-spy")
    told = []
    for process in processes_of(mark):
        call = [str(command), "dump", "--pid", str(process.pid)]
        try:
            done = subprocess.run(call, capture_output=True, text=True, timeout=30, check=False)
            told.append(done.stdout or f"process {process.pid}: {done.stderr}")
        except (subprocess.TimeoutExpired, FileNotFoundError) as error:
            told.append(f"process {process.pid}: {error}")
    return "\n".join(told)
