"""Starting Python programs: forked by a server that has made their imports, or executed."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

#: Have all processes executed (``make test FORK=0``).
ENV_FORK = "BAMBOO_TEST_FORK"
SERVER = Path(__file__).with_name("fork_server.py")
_IMPORTS_S = 120.0


class _Server:
    """The fork servers of this process, started when they are first needed.

    Attributes:
        problem: why they cannot fork anything, if so.
    """

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        env = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONUNBUFFERED": "1"}
        with theirs:
            self._process = subprocess.Popen([sys.executable, str(SERVER)], env=env, stdin=theirs)
        self._ours.settimeout(_IMPORTS_S)
        hello, fds, _, _ = socket.recv_fds(self._ours, 1 << 16, 1)
        assert hello, "the fork server has failed, see its output"
        self._stock = socket.socket(fileno=fds[0])
        atexit.register(self.close)
        self.problem: str = json.loads(hello)["problem"]
        server = psutil.Process(self._process.pid)
        self.pids = {server.pid, *(child.pid for child in server.children())}

    @property
    def pid(self) -> int:
        """The parent of all forked processes but those of stock DeepSpeed."""
        return self._process.pid

    def request(self, request: dict[str, Any], fds: Sequence[int], stock: bool) -> None:
        """Have a process forked."""
        socket.send_fds(self._stock if stock else self._ours, [json.dumps(request).encode()], fds)

    def close(self) -> None:
        """End the servers."""
        self._stock.close()
        self._ours.close()
        self._process.wait(30)


_server: _Server | None = None


def servers() -> tuple[set[int], int]:
    """Process ids of the fork servers of this process, if there are any, and the number of sockets towards them.

    They outlive single tests.
    """
    return (set(), 0) if _server is None else (_server.pids, 2)


def parent_pid() -> int:
    """The parent that processes have which :func:`start` starts."""
    server = _get_server()
    return os.getpid() if server is None else server.pid


def _get_server() -> _Server | None:
    """The server; ``None`` where processes cannot be forked or shall not be."""
    global _server
    if os.environ.get(ENV_FORK) == "0":
        return None
    if _server is None:
        _server = _Server()
        if _server.problem:
            print(f"processes are executed, not forked: {_server.problem}", file=sys.stderr)
    return None if _server.problem else _server


class Forked:
    """A process of the fork server, with the part of :class:`subprocess.Popen` that tests use."""

    def __init__(self, answers: socket.socket, arguments: Sequence[str]) -> None:
        self.args = list(arguments)
        self.returncode: int | None = None
        self._answers = answers
        pid, (self._pidfd,), _, _ = socket.recv_fds(answers, 64, 1)
        self.pid = int(pid)

    def poll(self) -> int | None:
        """The exit code, or the negative number of the signal that has ended it; ``None`` while it runs."""
        if self.returncode is None and select.select([self._answers], [], [], 0)[0]:
            self._collect()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end.

        Raises:
            subprocess.TimeoutExpired: not within ``timeout`` seconds.
        """
        if self.returncode is None:
            if not select.select([self._answers], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self._collect()
        assert self.returncode is not None
        return self.returncode

    def _collect(self) -> None:
        self.returncode = int(self._answers.recv(64))
        self._answers.close()
        os.close(self._pidfd)

    def send_signal(self, signum: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it ends now, and its parent has collected it already
                signal.pidfd_send_signal(self._pidfd, signum)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


#: What :func:`start` returns.
Process = Forked | subprocess.Popen[bytes]


def start(
    arguments: Sequence[str],
    env: Mapping[str, str],
    log: int,
    *,
    pass_fds: Sequence[int] = (),
    namespace: str = "",
    ignored: Sequence[signal.Signals] = (),
    fork: bool = True,
    stock: bool = False,
    stdin: int | None = None,
    errors: int | None = None,
) -> Process:
    """Start a Python program in a session of its own, with its output in ``log``.

    Args:
        arguments: ``[python, SCRIPT or "-m" MODULE, …]``.
        env: its whole environment.
        log: descriptor of a file.
        pass_fds: descriptors that it inherits under the same numbers.
        namespace: network namespace that it runs in.
        ignored: signals that it ignores from the beginning; all others have their defaults.
        fork: it may be forked, and what the product starts in it.
        stock: it must not find anything of ours imported.
        stdin: descriptor of its standard input; ``None``: it has none.
        errors: descriptor of a file for its standard error, in place of ``log``.
    """
    told = log if errors is None else errors
    server = _get_server() if fork else None
    if server is None:

        def begin() -> None:
            for signum in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
                signal.signal(signum, signal.SIG_IGN if signum in ignored else signal.SIG_DFL)

        command = ["ip", "netns", "exec", namespace, *arguments] if namespace else list(arguments)
        return subprocess.Popen(
            command,
            env=dict(env),
            stdin=subprocess.DEVNULL if stdin is None else stdin,
            stdout=log,
            stderr=told,
            pass_fds=pass_fds,
            start_new_session=True,
            preexec_fn=begin,
        )
    request = {
        "arguments": list(arguments),
        "environment": dict(env),
        "cwd": os.getcwd(),
        "pass_fds": list(pass_fds),
        "namespace": namespace,
        "ignored": [int(signum) for signum in ignored],
    }
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, open(os.devnull) as nothing:
        given = nothing.fileno() if stdin is None else stdin
        server.request(request, [given, log, told, *pass_fds, theirs.fileno()], stock)
        return Forked(ours, arguments)


def run(arguments: Sequence[str], env: Mapping[str, str], timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    """The whole life of a Python program that :func:`start` starts, and what it has printed.

    Raises:
        subprocess.TimeoutExpired: it does not end within ``timeout_s``; it is killed.
    """
    with tempfile.TemporaryFile() as log, tempfile.TemporaryFile() as errors:
        process = start(arguments, env, log.fileno(), errors=errors.fileno())
        try:
            process.wait(timeout_s)
        finally:
            process.kill()
            code = process.wait()
        printed = []
        for file in (log, errors):
            file.seek(0)
            printed.append(file.read().decode())
    return subprocess.CompletedProcess(list(arguments), code, *printed)


def wait_stopped(pid: int, timeout_s: float = 20.0) -> None:
    """Wait until the kernel has stopped every thread of the process, which has been sent SIGSTOP.

    The thread that gets the signal stops the others, and has to be scheduled first: until then they serve.
    """
    begin = time.monotonic()
    while any(_state(task) not in "TZX" for task in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < begin + timeout_s, f"process {pid} does not stop"
        time.sleep(0.001)


def _state(task: Path) -> str:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # the thread has ended
        return "X"
