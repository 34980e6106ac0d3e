"""Runs etcd for a parent process and leaves nothing behind when that ends, in whatever way.

Executed as a file (``python -I -S supervisor.py ...``), so it must import nothing but light parts of the
standard library: it starts in milliseconds and stays small for as long as the job lives.

It prints one line of JSON when etcd runs (``pid``, ``data_dir``) and one when etcd ends by itself
(``exit``, ``log``). SIGUSR2 says that etcd serves: from then on an etcd that ends by itself is started again, on the
same data and address, and standard error tells of its end. SIGTERM, SIGINT, SIGHUP, the parent's death, or an etcd
that ends time and again, end etcd and remove its data.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence

_PR_SET_PDEATHSIG = 1
#: The kernel sends it when the *thread* that started us ends; only the look at the parent's id decides.
_PARENT_SIGNAL = signal.SIGUSR1
_END = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
#: Etcd serves: keep it running.
KEEP = signal.SIGUSR2
_HANDLED = {*_END, _PARENT_SIGNAL, KEEP, signal.SIGCHLD}
#: An etcd that has run for so many seconds was sound: if it ends, the pauses before it is started begin anew.
_SOUND_S = 60.0
_LOG_TAIL = 4096


def die_with_parent(number: int) -> None:
    """Has the kernel send signal ``number`` to this process when its parent thread ends."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


class Etcd:
    """The process of etcd, started anew as often as need be.

    Args:
        folder: for its data and its log.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Starts it with ``command``, on the data that there is; raises ``OSError``."""
        for entry in os.scandir(self.folder):
            if stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode):
                os.unlink(entry.path)  # of one that was killed; before 3.5 the next could not listen there
        with open(self._log, "wb") as output:
            self.process = subprocess.Popen(
                [part.replace("{data}", os.path.join(self.folder, "data")) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self.folder,
                preexec_fn=_prepare(os.getpid()),
            )
        return self.process

    @property
    def _log(self) -> str:
        return os.path.join(self.folder, "etcd.log")

    @property
    def last_words(self) -> str:
        """The end of its log."""
        try:
            with open(self._log, "rb") as file:
                file.seek(max(0, os.path.getsize(self._log) - _LOG_TAIL))
                return file.read().decode(errors="replace")
        except FileNotFoundError:
            return ""  # somebody has removed its folder

    @property
    def has_data(self) -> bool:
        """Whether its data is there; without, it would begin as an empty one that serves everybody."""
        return os.path.isdir(os.path.join(self.folder, "data", "member", "wal"))

    def ended(self) -> bool:
        """Whether it does not run."""
        return self.process is None or self.process.poll() is not None

    def kill(self) -> None:
        """Ends it; its data goes, too, so that there is nothing to be saved by asking."""
        if self.process is not None and not self.ended():
            self.process.kill()
            self.process.wait()


def main(arguments: list[str]) -> int:
    """``parent_pid data_root command pauses``, the last two as JSON.

    ``{data}`` in the command stands for the data directory. ``pauses``: seconds before each new start of an etcd that
    ends by itself; when there is none left it is given up. Standard input is JSON: names and texts of files that only
    this user may read, for the command's working directory.
    """
    parent, root, command, pauses = int(arguments[0]), arguments[1], json.loads(arguments[2]), json.loads(arguments[3])
    signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a parent that ignores it would hide etcd's end from us
    die_with_parent(_PARENT_SIGNAL)
    if os.getppid() != parent:  # it died before the kernel knew that we want to be told
        return 0
    etcd = Etcd(tempfile.mkdtemp(prefix="bamboo-etcd-", dir=root))
    try:
        for name, text in json.load(sys.stdin).items():
            with open(os.open(os.path.join(etcd.folder, name), os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
                file.write(text)
        process = etcd.start(command)
        _say(pid=process.pid, data_dir=etcd.folder)
        reason = _wait(parent, {*_END, KEEP}, etcd)
        if reason is None:
            _say(exit=process.returncode, log=etcd.last_words)
            return 1
        return _keep(parent, etcd, command, pauses) if reason == KEEP else 0
    finally:
        etcd.kill()
        shutil.rmtree(etcd.folder, ignore_errors=True)


def _keep(parent: int, etcd: Etcd, command: Sequence[str], pauses: Sequence[float]) -> int:
    """Starts etcd again, by ``command``, whenever it ends; returns 0 when asked to end, 1 when etcd is given up."""
    tries, begin = 0, time.monotonic()
    while True:
        if _wait(parent, _END, etcd) is not None:
            return 0
        end = f"the embedded etcd has ended ({_status(etcd.process)}): {etcd.last_words.strip() or 'it said nothing'}"
        tries = 0 if time.monotonic() - begin >= _SOUND_S else tries
        if tries == len(pauses) or not etcd.has_data:
            why = f"after {tries} times" if etcd.has_data else "without its data"
            _tell(f"{end}\nit is not started again, {why}")
            return 1
        _tell(f"{end}\nit is started again in {pauses[tries]:g} s, with its data")
        if _wait(parent, _END, seconds=pauses[tries]) is not None:
            return 0
        tries, begin = tries + 1, time.monotonic()
        try:
            etcd.start(command)
        except (OSError, subprocess.SubprocessError) as error:
            _tell(f"the embedded etcd cannot be started: {error}")


def _status(process: subprocess.Popen[bytes] | None) -> str:
    code = process.returncode if process is not None else 0
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _prepare(supervisor: int) -> Callable[[], None]:
    """Prepares etcd's process before its ``exec``. Safe: the supervisor has one thread."""

    def prepare() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
        die_with_parent(signal.SIGKILL)
        if os.getppid() != supervisor:
            os._exit(1)

    return prepare


def _wait(parent: int, signals: Collection[int], etcd: Etcd | None = None, seconds: float = math.inf) -> int | None:
    """Waits for one of ``signals`` or the parent's death; returns it, or ``None`` if ``etcd`` ends by itself before.

    Without an ``etcd``: ``None`` after so many ``seconds``.
    """
    until = time.monotonic() + seconds
    while True:
        # The timeout is a second line of defence only, for a parent signal that got lost.
        received = signal.sigtimedwait(_HANDLED, max(0.0, min(2.0, until - time.monotonic())))
        number = None if received is None else received.si_signo
        if os.getppid() != parent:
            return _PARENT_SIGNAL
        if number in signals:
            return number
        if (etcd is not None and etcd.ended()) or time.monotonic() >= until:
            return None


def _tell(text: str) -> None:
    """Says it where the parent's log goes, in its form (:mod:`bamboo_ds.observe.logs`)."""
    begin = f"{time.strftime('%H:%M:%S')}.{int(time.time() * 1000) % 1000:03d} E bamboo [- - e-] bamboo_ds.store.etcd: "
    try:
        os.write(2, "".join(f"{begin}{line}\n" for line in text.splitlines()).encode())
    except OSError:
        return  # it has been closed: the job goes on all the same


def _say(**message: object) -> None:
    try:
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        # The parent has just died; the wait that follows (or the end) deals with it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
