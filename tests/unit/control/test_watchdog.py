"""When an agent takes its worker for hung."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from bamboo_ds.config import MembershipConfig, parse_block
from bamboo_ds.control.agent.agent import Agent
from bamboo_ds.control.agent.data_workers import DataWorkers
from bamboo_ds.control.agent.watchdog import Watchdog
from bamboo_ds.control.messages import Heartbeat
from bamboo_ds.job_settings import JobSettings

pytestmark = pytest.mark.claim("reference/settings.md")


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


@pytest.mark.parametrize("held", [False, True])
def test_an_agent_that_was_stopped_waits_longer_for_the_first_heartbeat(
    monkeypatch: pytest.MonkeyPatch, held: bool
) -> None:
    """Whoever stops a job that starts stops its agents and workers alike."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    killed: list[int] = []
    agent: Any = Agent.__new__(Agent)
    agent._worker = SimpleNamespace(last_sign_of_life=None, dead_at=None, dead=False, kill=killed.append, pid=0)
    agent._worker.lingers = lambda: False
    agent._worker.wire = SimpleNamespace(backlog=False)
    agent._watchdog = Watchdog(MembershipConfig(lease_ttl_s=60, start_timeout_s=2.0))
    agent._channel_open, agent._kill_at, agent._progress_due = True, None, None
    agent._leaving, agent._data_workers = SimpleNamespace(end_at=None), DataWorkers()
    seconds = [3600.0, 0.5, 0.1] if held else [1.0, 1.2, 0.1]

    def select(timeout: float) -> list[Any]:
        now[0] += seconds.pop(0)
        return [] if seconds else [(SimpleNamespace(data="worker"), 1)]

    agent._watch(SimpleNamespace(select=select, modify=lambda *_: None))
    assert bool(killed) != held
