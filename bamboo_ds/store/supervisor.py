"""Runs etcd for a parent process and leaves nothing behind when that is gone, however it went.

Executed as a file (``python -I -S supervisor.py ...``), so it must import nothing but light parts of the
standard library: it starts in milliseconds and stays small for as long as the job lives.

It prints one line of JSON when etcd runs (``pid``, ``data_dir``) and one when etcd ends by itself
(``exit``, ``log``). SIGTERM, SIGINT, SIGHUP or the parent's death end etcd and remove its data.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
#: The kernel sends it when the *thread* that started us ends; only the look at the parent's id decides.
_PARENT_SIGNAL = signal.SIGUSR1
_END = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_HANDLED = {*_END, _PARENT_SIGNAL, signal.SIGCHLD}
_LOG_TAIL = 4096


def die_with_parent(number: int) -> None:
    """Have the kernel send signal ``number`` to this process when its parent thread ends."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


def main(arguments: list[str]) -> int:
    """``parent_pid data_root command``, this as JSON; ``{data}`` in it stands for the data directory.

    Standard input is JSON: names and texts of files that only this user may read, for the command's working directory.
    """
    parent, root, command = int(arguments[0]), arguments[1], json.loads(arguments[2])
    signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a parent that ignores it would hide etcd's end from us
    die_with_parent(_PARENT_SIGNAL)
    if os.getppid() != parent:  # it died before the kernel knew that we want to be told
        return 0
    folder = tempfile.mkdtemp(prefix="bamboo-etcd-", dir=root)
    etcd: subprocess.Popen[bytes] | None = None
    try:
        for name, text in json.load(sys.stdin).items():
            with open(os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
                file.write(text)
        with open(os.path.join(folder, "etcd.log"), "wb") as output:
            etcd = subprocess.Popen(
                [part.replace("{data}", os.path.join(folder, "data")) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=folder,
                preexec_fn=_prepare(os.getpid()),
            )
        _say(pid=etcd.pid, data_dir=folder)
        if _asked_to_end(parent, etcd):
            return 0
        _say(exit=etcd.returncode, log=_tail(os.path.join(folder, "etcd.log")))
        return 1
    finally:
        if etcd is not None and etcd.poll() is None:
            etcd.kill()  # its data goes too: nothing to be saved by asking
            etcd.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _prepare(supervisor: int) -> Callable[[], None]:
    """What etcd's process does before it becomes etcd. Safe: the supervisor has one thread."""

    def prepare() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
        die_with_parent(signal.SIGKILL)
        if os.getppid() != supervisor:
            os._exit(1)

    return prepare


def _asked_to_end(parent: int, etcd: subprocess.Popen[bytes]) -> bool:
    """Wait for a reason to end etcd; false if it ended by itself."""
    while True:
        # The timeout is a second line of defence only, for a parent signal that got lost.
        received = signal.sigtimedwait(_HANDLED, 2.0)
        if os.getppid() != parent or (received is not None and received.si_signo in _END):
            return True
        if etcd.poll() is not None:
            return False


def _tail(path: str) -> str:
    with open(path, "rb") as file:
        file.seek(max(0, os.path.getsize(path) - _LOG_TAIL))
        return file.read().decode(errors="replace")


def _say(**message: object) -> None:
    try:
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        # The parent has just died; the wait that follows (or the end) deals with it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
