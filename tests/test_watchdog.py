"""When an agent takes its worker for hung."""

from __future__ import annotations

import time
from typing import Any

import pytest

from bamboo_ds.config import BambooConfig
from bamboo_ds.control.agent_settings import MemberOptions
from bamboo_ds.control.messages import Heartbeat
from bamboo_ds.control.watchdog import Watchdog


def test_a_worker_may_be_silent_for_longer_before_its_first_step() -> None:
    watchdog = Watchdog(5.0, 60.0, None)
    for step in (None, 0):
        watchdog.stuck(Heartbeat(step=step))
        assert not watchdog.silent(time.monotonic() - 59.0)
    watchdog.stuck(Heartbeat(step=1))
    assert not watchdog.silent(time.monotonic() - 4.0)
    assert watchdog.silent(begin := time.monotonic() - 5.0)
    assert watchdog.hung == ("heartbeat", begin)


def test_it_is_not_less_than_later() -> None:
    watchdog = Watchdog(90.0, 60.0, None)
    assert not watchdog.silent(time.monotonic() - 89.0)
    assert watchdog.silent(time.monotonic() - 90.0)


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
    block = BambooConfig.model_validate({"membership": membership})
    options = MemberOptions.from_block(block, job="j", address="127.0.0.1", command=("true",), **others)
    assert (options.heartbeat_timeout_s, options.start_timeout_s) == expected
