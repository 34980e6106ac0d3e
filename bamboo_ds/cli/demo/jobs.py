"""Processes of the demo, and of a job that is measured: lines of output, events and ends, in one loop, no threads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType

from ...control.agent.command import place_variables
from ...control.agent.mailbox import Mailbox
from ...errors import LaunchError
from ...launchers.network import LOOPBACK, free_port
from ...observe.events import Event
from ...observe.tail import EventTail
from ...processes import die_with_parent, end_descendants

#: Seconds without a line of output or an event after which a job counts as hanging.
SILENCE_S = 120.0
#: Seconds between two looks at what was written.
_TICK_S = 0.01
#: Seconds from SIGTERM to SIGKILL for processes that are still there at the end.
_GRACE_S = 10.0
#: Lines of output shown when a job fails.
_TAIL = 30


class DemoJob:
    """Some processes that belong together. A context manager: at its end none of them is left.

    Args:
        what: the job's name for messages.
        folder: where its log and its events lie.
        on_line: called with each line of output.
        silence_s: seconds without a line of output or an event after which they count as hanging.
    """

    def __init__(self, what: str, folder: Path, on_line: Callable[[str], None], silence_s: float = SILENCE_S) -> None:
        self._silence_s = silence_s
        self._stopped = False
        self._what = what
        self._on_line = on_line
        self._path = folder / "log.txt"
        self._log = open(self._path, "ab")  # noqa: SIM115  # closed by __exit__
        self._written = open(self._path, "rb")  # noqa: SIM115  # the same
        self._rest = b""
        self._processes: list[subprocess.Popen[bytes]] = []
        self._heard = time.monotonic()
        self._events: EventTail | None = None
        self._on_event: Callable[[Event], None] = lambda event: None

    def __enter__(self) -> DemoJob:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()
        deadline = time.monotonic() + _GRACE_S
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        end_descendants()
        self._log.close()
        self._written.close()

    def start(self, argv: Sequence[str], env: Mapping[str, str], cwd: Path) -> None:
        """Starts a process; it ends with this one, however this one ends."""
        parent = os.getpid()
        process = subprocess.Popen(
            argv,
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,  # Ctrl-C is for the demo, which ends the others
            preexec_fn=lambda: die_with_parent(signal.SIGTERM, parent),
        )
        self._processes.append(process)

    def stop(self) -> None:
        """Ends all processes in order. What they exit with does not count."""
        self._stopped = True
        self._end()

    def _end(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.terminate()

    def follow(self, on_event: Callable[[Event], None]) -> Path:
        """A file whose events are given to ``on_event`` as they are written."""
        path = self._path.with_name("events.jsonl")
        path.touch(0o600)
        self._events, self._on_event = EventTail(path), on_event
        return path

    def serve(self, tick: Callable[[], None]) -> None:
        """Serves until all processes have ended well, calling ``tick`` every now and then.

        Raises:
            LaunchError: a process failed, or nothing was heard of them for too long; with the end of their output.
        """
        while True:
            codes = [process.poll() for process in self._processes]
            self._read()
            tick()
            if any(codes) and not self._stopped:
                raise LaunchError(f"{self._what} failed with exit code {next(filter(None, codes))}\n{self._last()}")
            if None not in codes:
                return
            if time.monotonic() - self._heard > self._silence_s:
                raise LaunchError(f"{self._what}: nothing happened for {self._silence_s:.0f} s\n{self._last()}")
            time.sleep(_TICK_S)

    def _read(self) -> None:
        """Passes on what has been written."""
        data = self._written.read()
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._on_line(line.decode(errors="replace"))
        found = self._events.read() if self._events is not None else []
        for _, event in found:
            self._on_event(event)
        if data or found:
            self._heard = time.monotonic()

    def _last(self) -> str:
        lines = self._path.read_text(errors="replace").splitlines()
        return "\n".join(["its last output:", *(f"  {line}" for line in lines[-_TAIL:])])


@contextmanager
def ended_by_signals() -> Iterator[Callable[[], None]]:
    """In the body SIGINT and the like end this process where it calls what it is given, which raises ``SystemExit``.

    Raising from a handler would not do: some libraries swallow what is raised inside their callbacks.
    """

    def leave(signum: signal.Signals, at: float) -> None:
        raise SystemExit(128 + signum)

    with ExitStack() as stack:
        mailbox = Mailbox()
        stack.callback(mailbox.close)
        stack.callback(mailbox.take_signals(leave))
        yield mailbox.handle_all


def start_stock(job: DemoJob, world: int, script: Path, arguments: Sequence[str], env: Mapping[str, str]) -> None:
    """``world`` plain workers, in whose processes no code of bamboo runs."""
    port = free_port(LOOPBACK)
    for rank in range(world):
        place = place_variables(rank, world, LOOPBACK, port)
        # Not even the entry point that torch would load.
        own = {**place, "RANK": str(rank), "WORLD_SIZE": str(world), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        argv = [sys.executable, "-u", str(script), *arguments]
        job.start(argv, {**env, **own}, script.parent)


def start_bamboo(
    job: DemoJob, name: str, world: int, script: Path, arguments: Sequence[str], env: Mapping[str, str], events: Path
) -> None:
    """The same script under ``bamboo run``."""
    options = ["run", "--quiet", "-n", str(world), "--job", name, "--events", str(events), "--logs", str(events.parent)]
    argv = [sys.executable, "-m", "bamboo_ds.cli.main", *options, str(script), *arguments]
    job.start(argv, env, script.parent)
