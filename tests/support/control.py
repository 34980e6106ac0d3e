"""Whole jobs under ``bamboo run`` whose workers (:mod:`tests.support.plain_worker`) obey the test."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from .patience import Patience
from .processes import run
from .processes import start as start_process

WORKER = Path(__file__).with_name("plain_worker.py")
#: Several test suites may share two cores.
DEADLINE_S = 40.0


class Job:
    """One job. ``ranks[r]`` is worker r's connection; ``told`` all that the workers told, in order.

    ``ignored`` is a signal that the launcher is started to ignore, as ``nohup`` does; ``stdin`` a descriptor that it is
    given as its standard input. With ``output``, where it prints to, it is executed as users' are, and buffers that.
    """

    def __init__(
        self,
        folder: Path,
        world: int,
        *options: str,
        ignored: signal.Signals | None = None,
        stdin: int | None = None,
        output: int | None = None,
    ) -> None:
        self.folders: set[Path] = set()
        self.seen: dict[int, psutil.Process] = {}
        self.world = world
        self.folder = folder
        self.events_file = folder / "events.jsonl"
        self.runtime = Path(tempfile.mkdtemp(prefix="bt-"))  # short: a socket's path must be
        self.told: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        self._lines: dict[str, socket.socket] = {}  # by member
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.runtime / "s"))
        self._listener.listen(64)
        self._wake, self._waker = socket.socketpair()
        self._thread = threading.Thread(target=self._listen, name="test-job")
        self._thread.start()
        self.environment = {
            # The first is set by xdist.
            **{name: value for name, value in os.environ.items() if name not in ("COLUMNS", "PYTHONUNBUFFERED")},
            "XDG_RUNTIME_DIR": str(self.runtime),
            "TMPDIR": str(self.runtime),
            "PYTHONPATH": str(WORKER.parents[2]),
        }
        command = [*BAMBOO, "run", "-n", str(world), "--events", str(self.events_file), *options]
        self.log = open(folder / "log.txt", "wb")  # noqa: SIM115
        self.process = start_process(
            [*command, str(WORKER), str(self.runtime / "s")],
            self.environment,
            self.log.fileno() if output is None else output,
            ignored=() if ignored is None else (ignored,),
            fork=output is None,
            stdin=stdin,
        )

    # -- what workers tell --------------------------------------------------------------------------

    def _listen(self) -> None:
        rests: dict[socket.socket, bytes] = {}
        ranks: dict[socket.socket, int] = {}
        while True:
            ready, _, _ = select.select([self._listener, self._wake, *rests], [], [])
            if self._wake in ready:
                for sock in rests:
                    sock.close()
                return
            for sock in ready:
                if sock is self._listener:
                    rests[sock.accept()[0]] = b""
                    continue
                try:
                    data = sock.recv(1 << 16)
                except ConnectionError:
                    data = b""
                if not data:
                    del rests[sock]
                    if sock not in ranks:
                        sock.close()
                    continue
                *lines, rests[sock] = (rests[sock] + data).split(b"\n")
                for line in lines:
                    record = json.loads(line)
                    if record["kind"] == "hello":
                        ranks[sock] = record["rank"]
                    with self._changed:
                        if record["kind"] == "hello":
                            self._lines[record["member"]] = sock
                        self.told.append({**record, "rank": ranks[sock]})
                        self._changed.notify_all()

    def find(self, kind: str, rank: int | None = None) -> list[dict[str, Any]]:
        """All that was told of ``kind``, by one worker or all."""
        with self._changed:
            return [t for t in self.told if t["kind"] == kind and rank in (None, t["rank"])]

    def wait(self, ready: Callable[[], Any], what: str, timeout_s: float = DEADLINE_S) -> None:
        """Wait until ``ready()``, looked at whenever a worker tells something."""
        with self._changed:
            done = self._changed.wait_for(ready, timeout_s)
        assert done, f"not within {timeout_s} s: {what}; told: {self.told[-20:]}; log: {self.output()[-3000:]}"

    def wait_quietly(self, ready: Callable[[], Any], timeout_s: float = DEADLINE_S) -> None:
        """Poll ``ready`` for what no worker tells."""
        patience, pause = Patience(timeout_s), threading.Event()
        while not ready():
            assert not patience.over(), f"not within {timeout_s} s; log: {self.output()[-3000:]}"
            pause.wait(0.05)

    def tell(self, rank: int, words: str) -> None:
        """Give an order to the newest worker of ``rank``."""
        self.tell_member(self.find("hello", rank)[-1]["member"], words)

    def tell_member(self, member: str, words: str) -> None:
        """Give an order to a worker."""
        self._lines[member].sendall(words.encode() + b"\n")

    def tell_all(self, words: str, *but: int) -> None:
        for rank in range(self.world):
            if rank not in but:
                self.tell(rank, words)

    # -- the usual course ---------------------------------------------------------------------------

    def begin(self) -> Job:
        """Until every worker has connected."""
        self.wait(lambda: len(self.find("hello")) == self.world, "all workers said hello")
        self.remember()
        return self

    def run(self, pipelines: int = 1) -> Job:
        """Until epoch 2: everybody owns and shadows something."""
        self.begin().tell_all("go")
        self.tell_all(f"layout {pipelines} {self.world // pipelines} redundant")
        self.wait_epoch(2)
        return self

    def hello(self, rank: int) -> dict[str, Any]:
        return self.find("hello", rank)[0]

    def member(self, rank: int) -> str:
        return str(self.hello(rank)["member"])

    def worker(self, rank: int) -> int:
        return int(self.hello(rank)["pid"])

    def agent(self, rank: int) -> int:
        return int(self.hello(rank)["agent"])

    def plan(self, epoch: int, rank: int) -> dict[str, Any] | None:
        """The plan as the worker of ``rank`` learnt it; ``at`` says when."""
        for told in self.find("plan", rank):
            if told["plan"]["epoch"] == epoch:
                return {**told["plan"], "at": told["at"]}
        return None

    def wait_epoch(self, epoch: int, *but: int, timeout_s: float = DEADLINE_S) -> dict[str, Any]:
        """Wait until every worker ``but`` some knows the plan of ``epoch``; returns it, ``at`` the latest."""
        ranks = [r for r in range(self.world) if r not in but]
        self.wait(lambda: all(self.plan(epoch, r) for r in ranks), f"epoch {epoch} at {ranks}", timeout_s)
        plans = [self.plan(epoch, r) or {} for r in ranks]
        contents = [{k: v for k, v in plan.items() if k != "at"} for plan in plans]
        assert all(content == contents[0] for content in contents)
        return {**contents[0], "at": max(plan["at"] for plan in plans)}

    def finish(self, *but: int, code: int = 0) -> None:
        """Let the workers ``but`` some end; the run must end with ``code``."""
        self.tell_all("exit 0", *but)
        assert self.exit_code() == code, self.output()

    def exit_code(self, timeout_s: float = DEADLINE_S) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the run does not end: {self.output()[-3000:]}") from None

    # -- outside views ------------------------------------------------------------------------------

    def kill(self, pid: int, signum: int = signal.SIGKILL) -> float:
        """The fault; returns when it was done."""
        assert psutil.pid_exists(pid), "the victim is dead already"
        at = time.monotonic()
        os.kill(pid, signum)
        return at

    def remember(self) -> None:
        """Note all processes of the job, so that their end can be checked."""
        launcher = psutil.Process(self.process.pid)
        for process in [launcher, *launcher.children(recursive=True)]:
            self.seen[process.pid] = process
            if process.name() == "etcd":
                command = process.cmdline()
                self.folders.add(Path(command[command.index("--data-dir") + 1]).parent)

    def etcd(self) -> psutil.Process:
        return next(p for p in self.seen.values() if p.is_running() and p.name() == "etcd")

    def output(self) -> str:
        return (self.folder / "log.txt").read_text(errors="replace")

    def events(self, kind: str) -> list[dict[str, Any]]:
        whole = self.events_file.read_text().rpartition("\n")[0]  # without a line that is being written
        records = map(json.loads, whole.splitlines())
        return [record for record in records if record["event"] == kind]

    def bamboo(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Another ``bamboo`` command, as this job's user gives it."""
        return run([*BAMBOO, *arguments], self.environment, DEADLINE_S)

    def status(self) -> dict[str, Any]:
        done = self.bamboo("status", "--json")
        assert done.returncode == 0, done.stderr
        report: dict[str, Any] = json.loads(done.stdout)
        return report

    def left(self) -> list[psutil.Process]:
        """Processes of the job that live, zombies of ours apart."""
        return [p for p in self.seen.values() if lives(p)]

    def files_left(self) -> list[str]:
        """Files of the job that remain: below its own temporary folder, and etcd's."""
        mine = [str(p) for p in self.runtime.rglob("*") if p.is_file()]
        return mine + [str(p) for p in self.folders if p.exists()]

    def close(self) -> None:
        """End everything, whatever state the test left it in."""
        if self.process.poll() is None:
            self.remember()
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(15)
        for process in self.left():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
        self._waker.send(b"x")
        self._thread.join()
        for sock in (self._listener, self._wake, self._waker, *self._lines.values()):
            sock.close()
        self.log.close()
        shutil.rmtree(self.runtime)


BAMBOO = (sys.executable, "-m", "bamboo_ds.cli.main")


def lives(process: psutil.Process) -> bool:
    """Whether it runs: neither has it been waited for, nor could it be."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_gone(job: Job, timeout_s: float) -> float:
    """Wait until no process of ``job`` lives; returns the seconds it took."""
    begin, pause = time.monotonic(), threading.Event()
    while alive := job.left():
        assert time.monotonic() - begin < timeout_s, f"still there after {timeout_s} s: {alive}"
        pause.wait(0.01)
    return time.monotonic() - begin


Start = Callable[..., Job]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts jobs; after the test nothing of them may be left."""
    jobs: list[Job] = []

    def launch(world: int, *options: str, **more: Any) -> Job:
        folder = tmp_path / f"job-{len(jobs)}"
        folder.mkdir()
        jobs.append(Job(folder, world, *options, **more))
        return jobs[-1]

    ended_by_test = False
    try:
        yield launch
        ended_by_test = True
    finally:
        try:
            for job in jobs:
                if ended_by_test:
                    assert job.process.poll() is not None, "the test let the run go on"
                    wait_gone(job, 10.0)
                    assert not job.files_left()
        finally:
            for job in jobs:
                job.close()
