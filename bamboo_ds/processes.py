"""Processes of this host: how they are named for good, and how they end with each other."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import time
from collections.abc import Collection, MutableMapping
from functools import lru_cache
from pathlib import Path

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)
#: The variable by which a worker gets the descriptor of its :class:`Tether`.
ENV_TETHER = "BAMBOO_TETHER_FD"
_PAGE = 4096
#: Bytes for a ``pthread_mutexattr_t``, which has 4 on Linux.
_ATTRIBUTES = 64
_PTHREAD_PROCESS_SHARED = _PTHREAD_MUTEX_ROBUST = 1
#: Places in what :func:`status_of` returns, and the flag of a thread that runs no code of its own any more.
_FLAGS, _STARTED, _EXIT_STATUS = 6, 19, 49
_PF_EXITING = 0x4
#: Time that processes which a worker leaves behind get between SIGTERM and SIGKILL, in seconds.
_LEFTOVER_GRACE_S = 0.5


@lru_cache(maxsize=1)
def boot_id() -> str:
    """Identifies the running kernel, that is one ``CLOCK_MONOTONIC``."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@lru_cache(maxsize=1)
def process_space() -> str:
    """The scope of this process's process ids: the running kernel and the namespace of process ids."""
    return f"{boot_id()} {os.readlink('/proc/self/ns/pid')}"


def who_has(path: Path) -> list[int]:
    """Processes of this host and user that have the file open."""
    real, found = os.path.realpath(path), []
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            opened = list((process / "fd").iterdir())
        except (PermissionError, FileNotFoundError, ProcessLookupError):
            continue  # another user's, or it has just ended
        if any(_target(each) == real for each in opened):
            found.append(int(process.name))
    return found


def _target(link: Path) -> str | None:
    try:
        return os.readlink(link)
    except OSError:
        return None  # closed meanwhile


def started(pid: int) -> int | None:
    """The start of process ``pid``, in clock ticks since the boot, or ``None``.

    With the process id this names a process for good.
    """
    status = status_of(pid)
    return None if status is None else int(status[_STARTED])


def status_of(pid: int) -> list[str] | None:
    """The kernel's status of process ``pid``, from its state on (proc_pid_stat(5)), or ``None``."""
    return _read_status(Path(f"/proc/{pid}/stat"))


def _read_status(path: Path) -> list[str] | None:
    try:
        return path.read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def is_ending(pid: int) -> bool:
    """Whether the kernel is ending process ``pid``, or has ended it, so that its main thread runs no code any more."""
    status = status_of(pid)
    return status is None or _exits(status)


def exit_of(pid: int) -> int | None:
    """The exit code of a process whose main thread has died, the negative number of a signal if one has ended it.

    Waits until all of its threads have died, too, so that none of its code runs any more. The kernel still has to give
    its memory and its devices back, and the process can not be waited for yet.

    Returns:
        ``None`` where it is too late or too early to tell: the process has been waited for, its main thread lives, as
        after ``exec``, or the code is 0, which the kernel also says to those who may not know.
    """
    while (status := status_of(pid)) is not None and _exits(status):
        try:
            threads = [_read_status(thread / "stat") for thread in Path(f"/proc/{pid}/task").iterdir()]
        except (FileNotFoundError, ProcessLookupError):
            break
        if all(thread is None or _exits(thread) for thread in threads):
            return os.waitstatus_to_exitcode(int(status[_EXIT_STATUS])) or None
        time.sleep(0.001)  # of this there is no event
    return None


def _exits(status: list[str]) -> bool:
    return bool(int(status[_FLAGS]) & _PF_EXITING)


class Tether:
    """Tells a process at once that the main thread of another one of this host has died, whatever has killed it.

    The kernel ends a dead process's connections, and tells its parent, after it has taken all of its memory apart:
    tenths of a second on a busy machine, and more for each GB. Before that it gives up what the threads held: a robust
    mutex in shared memory (``pthread_mutexattr_setrobust``), for which the other process waits.

    Attributes:
        fd: of the memory, to be passed on with the variable :data:`ENV_TETHER`; open in the body of ``with``.

    Raises:
        OSError, AttributeError: this machine, or this build of Python, has no such memory.
    """

    def __init__(self) -> None:
        self.fd = os.memfd_create("bamboo-tether", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, _PAGE)
            self._memory, self._mutex = _mutex_in(self.fd)
            attributes = ctypes.create_string_buffer(_ATTRIBUTES)
            _check(_libc.pthread_mutexattr_init(attributes))
            _check(_libc.pthread_mutexattr_setpshared(attributes, _PTHREAD_PROCESS_SHARED))
            _check(_libc.pthread_mutexattr_setrobust(attributes, _PTHREAD_MUTEX_ROBUST))
            _check(_libc.pthread_mutex_init(self._mutex, attributes))
        except BaseException:
            os.close(self.fd)
            raise

    def await_death(self) -> None:
        """Waits until the thread that holds it has died, or its process has called ``exec``. One must hold it."""
        _libc.pthread_mutex_lock(self._mutex)

    def __enter__(self) -> Tether:
        return self

    def __exit__(self, *_: object) -> None:
        """Closes :attr:`fd`; the memory stays."""
        os.close(self.fd)


def hold_tether(environ: MutableMapping[str, str]) -> None:
    """Holds the tether that this process has from its agent, if it has one, until this thread's death.

    Of several interpreters that a worker's command runs in turn the first one holds it.
    """
    text = environ.pop(ENV_TETHER, None)
    if text is not None:
        memory, mutex = _mutex_in(int(text))
        os.close(int(text))
        _libc.pthread_mutex_trylock(mutex)
        # For good: the interpreter would take it apart at its end, and the kernel looks into it after that.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))


def _mutex_in(fd: int) -> tuple[mmap.mmap, ctypes.c_void_p]:
    memory = mmap.mmap(fd, _PAGE)
    return memory, ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory)))


def _check(error: int) -> None:
    if error:
        raise OSError(error, os.strerror(error))


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


def die_with_parent(signum: int, parent_pid: int) -> None:
    """Has the kernel send ``signum`` to this process when its parent's main thread dies.

    The parent may be dead already; then the signal is sent at once.
    """
    _prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signum)


def adopt_orphans() -> None:
    """Makes this process the parent of all descendants whose own parents die."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def reap_adopted(own: Collection[int]) -> None:
    """Collects dead children that became ours since their parents had died; those in ``own`` have somebody who does."""
    for child in psutil.Process().children():
        if child.pid in own:
            continue
        try:
            if child.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(child.pid, os.WNOHANG)
        except (psutil.NoSuchProcess, ChildProcessError):
            continue  # somebody has just done so


def end_descendants(spare: Collection[int] = (), grace_s: float = _LEFTOVER_GRACE_S) -> None:
    """Ends every child of this process, and theirs: SIGTERM, after ``grace_s`` seconds SIGKILL.

    Children with process ids in ``spare`` keep theirs and live.
    """
    children = [child for child in psutil.Process().children() if child.pid not in spare]
    left = [*children, *(grandchild for child in children for grandchild in _below(child))]
    for process in left:
        _signal(process, signal.SIGTERM)
    _, left = psutil.wait_procs(left, timeout=grace_s)
    for process in left:
        _signal(process, signal.SIGKILL)
    psutil.wait_procs(left, timeout=grace_s)


def _below(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []  # its children are ours now: too late for this time


def _signal(process: psutil.Process, signum: int) -> None:
    try:
        process.send_signal(signum)
    except psutil.NoSuchProcess:
        return  # it has ended by itself meanwhile
