"""What an evicted member makes of the job that it looks for."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from bamboo_ds.config import BambooConfig
from bamboo_ds.control.agent.mailbox import Mailbox
from bamboo_ds.control.agent.rejoin import Rejoin
from bamboo_ds.control.agent.slot import Slot, State
from bamboo_ds.control.registry.keys import Keys
from bamboo_ds.observe.logs import LOGGER
from bamboo_ds.store.records import KeyValue, Snapshot
from bamboo_ds.topology.planner import initial_plan


def test_a_job_that_has_gone_on_with_a_newer_version_is_over_for_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It ends with a result, as one that finds no job."""
    caplog.set_level(logging.ERROR, LOGGER)
    plan = initial_plan(["a"]).to_json().replace('"schema":3', '"schema":4')
    store = SimpleNamespace(get_prefix=lambda prefix: Snapshot({Keys.PLAN: KeyValue(Keys.PLAN, plan, 1, 1)}, 1))
    block = BambooConfig.model_validate({"membership": {"rejoin_s": 600}, "recovery": {"max_restarts": 1}})
    settings: Any = SimpleNamespace(bamboo=block, rejoins=0, feeder=False, waiting=False, slot=1)
    slot = Slot(settings, "m1")
    slot.state = State.REJOINING
    rejoin = Rejoin("m1", slot)
    monkeypatch.setattr(rejoin, "_open", lambda: nullcontext(store))
    rejoin.find(Mailbox())
    assert slot.state is State.ENDED and slot.next is None
    assert "the bamboo_ds of this member reads 3 at most" in caplog.text
