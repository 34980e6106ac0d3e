"""Processes of this host: how they are named for good, and how they end with each other."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Collection
from functools import lru_cache
from pathlib import Path

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)
#: Time that processes which a worker leaves behind get between SIGTERM and SIGKILL, in seconds.
_LEFTOVER_GRACE_S = 0.5


@lru_cache(maxsize=1)
def boot_id() -> str:
    """Identifies the running kernel, that is one ``CLOCK_MONOTONIC``."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@lru_cache(maxsize=1)
def process_space() -> str:
    """Where this process's process ids mean something: the running kernel and the namespace of process ids."""
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
    """When process ``pid`` began, in clock ticks since the boot; ``None`` if there is no such process.

    With the process id this names a process for good.
    """
    status = status_of(pid)
    return None if status is None else int(status[19])


def status_of(pid: int) -> list[str] | None:
    """What the kernel tells of process ``pid``, from its state on (proc_pid_stat(5)); ``None`` if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


def die_with_parent(signum: int, parent_pid: int) -> None:
    """Have the kernel send ``signum`` to this process when its parent's main thread dies.

    The parent may be dead already; then the signal is sent at once.
    """
    _prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signum)


def adopt_orphans() -> None:
    """Make this process the parent of all descendants whose own parents die."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def reap_adopted(own: Collection[int]) -> None:
    """Collect dead children that became ours since their parents had died; those in ``own`` have somebody who does."""
    for child in psutil.Process().children():
        if child.pid in own:
            continue
        try:
            if child.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(child.pid, os.WNOHANG)
        except (psutil.NoSuchProcess, ChildProcessError):
            continue  # somebody has just done so


def end_descendants(spare: Collection[int] = (), grace_s: float = _LEFTOVER_GRACE_S) -> None:
    """End every child of this process, and theirs: SIGTERM, after ``grace_s`` seconds SIGKILL.

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
