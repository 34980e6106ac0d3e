"""Processes of the demo, and of a job that is measured: lines of output, events and ends, in one loop, no threads."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType

from ..errors import LaunchError
from ..launchers.network import free_port
from ..processes import die_with_parent, end_descendants

#: Seconds without a line of output or an event after which a job counts as hanging.
SILENCE_S = 120.0
#: Seconds between two calls of the loop's ``tick``.
_TICK_S = 0.2
#: Seconds from SIGTERM to SIGKILL for processes that are still there at the end.
_GRACE_S = 10.0
#: Lines of output shown when a job fails.
_TAIL = 30


class _Lines:
    """Splits what arrives on a descriptor into lines."""

    def __init__(self, fd: int, handle: Callable[[str], None]) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self._handle = handle
        self._rest = b""

    def read(self) -> bool:
        """Handle what has arrived; false if there was nothing."""
        try:
            data = os.read(self.fd, 1 << 16)
        except BlockingIOError:
            return False
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._handle(line.decode(errors="replace"))
        return bool(data)


class DemoJob:
    """Some processes that belong together. A context manager: at its end none of them is left.

    Args:
        what: the job's name for messages.
        folder: where its log and its FIFO lie.
        on_line: called with each line of output.
        silence_s: seconds without a line of output or an event after which they count as hanging.
    """

    def __init__(self, what: str, folder: Path, on_line: Callable[[str], None], silence_s: float = SILENCE_S) -> None:
        self._silence_s = silence_s
        self._stopped = False
        self._what = what
        self._folder = folder
        self._on_line = on_line
        self._log = open(folder / "log.txt", "w", buffering=1)  # noqa: SIM115  # closed by __exit__
        self._selector = selectors.DefaultSelector()
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._codes: list[int] = []
        self._heard = time.monotonic()
        read_end, self._write_end = os.pipe()
        self._inputs: list[_Lines] = []
        self._listen(read_end, self._take_line)

    def __enter__(self) -> DemoJob:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._running.values():
            process.terminate()
        deadline = time.monotonic() + _GRACE_S
        for process in self._running.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        end_descendants()
        for pidfd in self._running:
            os.close(pidfd)
        for lines in self._inputs:
            os.close(lines.fd)
        os.close(self._write_end)
        self._selector.close()
        self._log.close()

    def start(self, argv: Sequence[str], env: Mapping[str, str], cwd: Path) -> None:
        """Start a process; it ends with this one, however this one ends."""
        parent = os.getpid()
        process = subprocess.Popen(
            argv,
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=self._write_end,
            stderr=self._write_end,
            start_new_session=True,  # Ctrl-C is for the demo, which ends the others
            preexec_fn=lambda: die_with_parent(signal.SIGTERM, parent),
        )
        pidfd = os.pidfd_open(process.pid)
        self._running[pidfd] = process
        self._selector.register(pidfd, selectors.EVENT_READ, partial(self._reap, pidfd))

    def stop(self) -> None:
        """End all processes in order. What they exit with does not count."""
        self._stopped = True
        for process in self._running.values():
            process.terminate()

    def event_fifo(self, on_event: Callable[[str], None]) -> Path:
        """A FIFO whose lines are given to ``on_event`` as they are written."""
        path = self._folder / "events"
        os.mkfifo(path, 0o600)
        # Open for writing as well: else it would report an end of file whenever no writer has it open.
        self._listen(os.open(path, os.O_RDWR | os.O_CLOEXEC), on_event)
        return path

    def _listen(self, fd: int, handle: Callable[[str], None]) -> None:
        lines = _Lines(fd, handle)
        self._inputs.append(lines)
        self._selector.register(fd, selectors.EVENT_READ, lines.read)

    def _take_line(self, line: str) -> None:
        self._log.write(line + "\n")
        self._on_line(line)

    def _reap(self, pidfd: int) -> None:
        self._selector.unregister(pidfd)
        process = self._running.pop(pidfd)
        os.close(pidfd)
        self._codes.append(process.wait())

    def serve(self, tick: Callable[[], float | None]) -> None:
        """Until all processes have ended well.

        Args:
            tick: called every now and then; it returns the monotonic time by which it wants to be called again, or
                ``None`` if it does not matter.

        Raises:
            LaunchError: a process failed, or nothing was heard of them for too long; with the end of their output.
        """
        due: float | None = None
        while self._running:
            now = time.monotonic()
            wait = _TICK_S if due is None else min(_TICK_S, max(0.0, due - now))
            for key, _ in self._selector.select(wait):
                key.data()
                self._heard = time.monotonic()
            if any(self._codes) and not self._stopped:
                break
            if time.monotonic() - self._heard > self._silence_s:
                raise LaunchError(f"{self._what}: nothing happened for {self._silence_s:.0f} s\n{self._tail()}")
            due = tick()
        for lines in self._inputs:
            while lines.read():
                continue
        tick()
        failed = [code for code in self._codes if code and not self._stopped]
        if failed:
            raise LaunchError(f"{self._what} failed with exit code {failed[0]}\n{self._tail()}")

    def _tail(self) -> str:
        self._log.flush()
        lines = (self._folder / "log.txt").read_text(errors="replace").splitlines()
        return "\n".join(["its last output:", *(f"  {line}" for line in lines[-_TAIL:])])


class Interrupt:
    """Notes the first of SIGINT, SIGTERM and SIGHUP; the body asks for it where it can be left in order.

    Raising from the handler would not do: some libraries swallow what is raised inside their callbacks.
    """

    def __init__(self) -> None:
        self._signum: int | None = None

    def check(self) -> None:
        """Raise ``SystemExit`` with 128 + n if signal n has come."""
        if self._signum is not None:
            raise SystemExit(128 + self._signum)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Handle the signals within the body."""
        handled = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {signum: signal.signal(signum, self._note) for signum in handled}
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self._signum = self._signum or signum


def start_stock(job: DemoJob, world: int, script: Path, arguments: Sequence[str], env: Mapping[str, str]) -> None:
    """``world`` plain workers, in whose processes no code of bamboo runs."""
    port = free_port("127.0.0.1")
    for rank in range(world):
        own = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": world,
            "LOCAL_WORLD_SIZE": world,
            "LOCAL_SIZE": world,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            # Not even the entry point that torch would load.
            "TORCH_DEVICE_BACKEND_AUTOLOAD": 0,
        }
        argv = [sys.executable, "-u", str(script), *arguments]
        job.start(argv, {**env, **{name: str(value) for name, value in own.items()}}, script.parent)


def start_bamboo(
    job: DemoJob, name: str, world: int, script: Path, arguments: Sequence[str], env: Mapping[str, str], events: Path
) -> None:
    """The same script under ``bamboo run``."""
    options = ["run", "--quiet", "-n", str(world), "--job", name, "--events", str(events), "--logs", str(events.parent)]
    argv = [sys.executable, "-m", "bamboo_ds.cli.main", *options, str(script), *arguments]
    job.start(argv, env, script.parent)
