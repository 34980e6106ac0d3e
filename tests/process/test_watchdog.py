"""When an agent takes its worker for hung."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.support.control import Job
from tests.support.etcd import wait_until
from tests.support.jobs import write_config

pytestmark = pytest.mark.claim("reference/settings.md")

PTRACE_SEIZE = 0x4206
PTRACE_DETACH = 17
PTRACE_O_TRACEEXIT = 0x40
WALL = 0x40000000


def test_a_worker_that_hangs_before_its_first_heartbeat_is_killed(start: Callable[..., Job], tmp_path: Path) -> None:
    settings = {"heartbeat_timeout_s": 60, "start_timeout_s": 2, "lease_ttl_s": 60}
    config = write_config(tmp_path, {"membership": settings})
    job = start(2, "--config", str(config), "--max-restarts", "0")  # nobody tells its workers to go
    assert job.exit_code() == 86
    assert "no heartbeat of the worker" in job.output()


@contextmanager
def held_by_the_kernel(pid: int, alive: bool) -> Iterator[None]:
    """Killed in the body the process does not end, as when a driver or a file system holds one of its threads.

    A thread that is traced stays until its tracer has collected it, and the process with it.

    Args:
        alive: it stays where it is, as in the midst of a system call, instead of dying.
    """
    options = PTRACE_O_TRACEEXIT if alive else None
    thread = max(each.id for each in psutil.Process(pid).threads())
    libc = ctypes.CDLL(None, use_errno=True)
    assert thread != pid and libc.ptrace(PTRACE_SEIZE, thread, None, options) == 0, os.strerror(ctypes.get_errno())
    try:
        yield
    finally:
        wait_until(lambda: os.waitpid(thread, WALL | os.WNOHANG)[0], "the thread is collected")
        libc.ptrace(PTRACE_DETACH, thread, None, None)  # it has only stopped if it was to stay alive


@pytest.mark.parametrize(
    ("alive", "told"),
    [
        (True, "does not end although it was killed"),
        pytest.param(False, "the kernel still holds its memory or its devices", marks=pytest.mark.exhaustive),
    ],
)
def test_a_worker_that_cannot_be_killed_is_lost_all_the_same(start: Callable[..., Job], alive: bool, told: str) -> None:
    job = start(3, "--heartbeat-timeout-s", "4", "--lease-ttl-s", "60").run()
    victim = job.worker(2)
    with held_by_the_kernel(victim, alive):
        job.tell(2, "hold")
        assert job.wait_epoch(3, 2)["lost"] == [job.member(2)]
        assert psutil.pid_exists(victim), "it has ended"
        job.finish(2)
    (lost,) = job.events("member_lost")
    assert lost["reason"] == "heartbeat"
    assert told in job.output()
