"""When an agent takes its worker for hung."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from bamboo_ds.config import MembershipConfig, parse_block
from bamboo_ds.control.agent.agent import Agent
from bamboo_ds.control.agent.watchdog import Watchdog
from bamboo_ds.control.messages import Heartbeat
from bamboo_ds.job_settings import JobSettings

from .support.control import Job
from .support.etcd import wait_until
from .support.jobs import write_config

pytestmark = pytest.mark.claim("reference/settings.md")

PTRACE_SEIZE = 0x4206
PTRACE_DETACH = 17
PTRACE_O_TRACEEXIT = 0x40
WALL = 0x40000000


@pytest.mark.parametrize(
    ("lease_ttl_s", "steps", "limit_s"),
    [(5, [None, 0], 60.0), (5, [None, 0, 1], 5.0), (90, [], 90.0)],
    ids=["before its first step", "later", "never less than a lease"],
)
def test_how_long_a_worker_may_be_silent(lease_ttl_s: float, steps: list[int | None], limit_s: float) -> None:
    watchdog = Watchdog(MembershipConfig(lease_ttl_s=lease_ttl_s))
    for step in steps:
        watchdog.stuck(Heartbeat(step=step))
    assert not watchdog.silent(time.monotonic() - limit_s + 1.0) and watchdog.hung is None
    assert watchdog.silent(begin := time.monotonic() - limit_s)
    assert watchdog.hung == ("heartbeat", begin)


def test_a_worker_that_never_has_a_heartbeat() -> None:
    assert Watchdog(MembershipConfig(lease_ttl_s=5)).due(None) is None
    watchdog = Watchdog(MembershipConfig(lease_ttl_s=60, start_timeout_s=1e-9))
    assert not watchdog.silent(None, closed=True)
    assert not watchdog.silent(time.monotonic() - 59.0)
    assert watchdog.silent(None)


def test_a_worker_that_hangs_before_its_first_heartbeat_is_killed(start: Callable[..., Job], tmp_path: Path) -> None:
    settings = {"heartbeat_timeout_s": 60, "start_timeout_s": 2, "lease_ttl_s": 60}
    config = write_config(tmp_path, {"membership": settings})
    job = start(2, "--config", str(config), "--max-restarts", "0")  # nobody tells its workers to go
    assert job.exit_code() == 86
    assert "no heartbeat of the worker" in job.output()


@pytest.mark.parametrize(
    ("membership", "others", "expected"),
    [
        ({}, {}, (5.0, 60.0)),
        ({"lease_ttl_s": 8}, {}, (8.0, 60.0)),
        ({"heartbeat_timeout_s": 3}, {}, (3.0, 0.0)),
        ({}, {"heartbeat_timeout_s": 3.0}, (3.0, 0.0)),
        ({"heartbeat_timeout_s": 3, "start_timeout_s": 9}, {}, (3.0, 9.0)),
    ],
)
def test_what_is_not_said_of_them(
    membership: dict[str, Any], others: dict[str, Any], expected: tuple[float, float]
) -> None:
    settings = JobSettings.resolve(parse_block({"membership": membership}), others).values.membership
    assert (settings.heartbeat_limit_s, settings.start_limit_s) == expected


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
    [(True, "does not end although it was killed"), (False, "the kernel still holds its memory or its devices")],
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


@pytest.mark.parametrize("held", [False, True])
def test_an_agent_that_was_stopped_waits_longer_for_the_first_heartbeat(
    monkeypatch: pytest.MonkeyPatch, held: bool
) -> None:
    """Whoever stops a job that starts stops its agents and workers alike."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    killed: list[int] = []
    agent: Any = Agent.__new__(Agent)
    agent._worker = SimpleNamespace(last_sign_of_life=None, dead_at=None, dead=False, kill=killed.append)
    agent._worker.lingers = lambda: False
    agent._worker.wire = SimpleNamespace(backlog=False)
    agent._watchdog = Watchdog(MembershipConfig(lease_ttl_s=60, start_timeout_s=2.0))
    agent._channel_open, agent._kill_at, agent._progress_due = True, None, None
    agent._leaving = SimpleNamespace(end_at=None)
    seconds = [3600.0, 0.5, 0.1] if held else [1.0, 1.2, 0.1]

    def select(timeout: float) -> list[Any]:
        now[0] += seconds.pop(0)
        return [] if seconds else [(SimpleNamespace(data="worker"), 1)]

    agent._watch(SimpleNamespace(select=select, modify=lambda *_: None))
    assert bool(killed) != held
