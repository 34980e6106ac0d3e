"""What an evicted member makes of the job that it looks for."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from bamboo_ds.control.comeback import Comeback
from bamboo_ds.control.membership import Keys
from bamboo_ds.observe.logs import LOGGER
from bamboo_ds.store.records import KeyValue, Snapshot
from bamboo_ds.topology.planner import initial_plan


def test_a_job_that_has_gone_on_with_a_newer_version_is_over_for_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It ends with a result, as one that finds no job."""
    caplog.set_level(logging.ERROR, LOGGER)
    plan = initial_plan(["a"]).to_json().replace('"schema":1', '"schema":2')
    store = SimpleNamespace(get_prefix=lambda prefix: Snapshot({Keys.PLAN: KeyValue(Keys.PLAN, plan, 1, 1)}, 1))
    settings: Any = SimpleNamespace(comebacks=0, feeder=False, rejoin_s=600.0, lease_ttl_s=5.0, max_restarts=1, slot=1)
    comeback = Comeback(settings, "m1", 0.0, lambda seconds: True)
    monkeypatch.setattr(comeback, "_open", lambda: nullcontext(store))
    assert comeback.find() is None
    assert "the bamboo_ds of this member reads 1 at most" in caplog.text
