"""Checkpoints that a job takes without its script's doing, and what it goes on from after a fatal loss."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from bamboo_ds.cli.main import cli
from bamboo_ds.config import CheckpointConfig, parse_block
from bamboo_ds.engine.checkpoints.own import OwnCheckpoints
from bamboo_ds.engine.context.history import History
from bamboo_ds.engine.stage.commit import Contribution, Form, decode, encode
from bamboo_ds.engine.stage.deepspeed_adapter import DeepSpeedAdapter
from bamboo_ds.errors import ConfigError
from bamboo_ds.state.checkpoints import list_checkpoints
from bamboo_ds.state.intervals import PRIOR_S, SHORTEST_S, LossRate, interval_s
from bamboo_ds.state.own import list_own, own_folder
from bamboo_ds.topology import Layout
from tests.support.savers import Member
from tests.support.savers import members as members

pytestmark = pytest.mark.claim("guides/checkpoints.md", "guides/restarts.md", "reference/settings.md")

# -- how often ------------------------------------------------------------------------------------------------


@given(st.floats(0.01, 1e3), st.floats(60, 1e7))
def test_the_interval_is_that_which_costs_least(pause_s: float, mtbf_s: float) -> None:
    """Of the time that training waits for copies, and of what a loss takes back: half an interval, on average."""

    def cost(every_s: float) -> float:
        return pause_s / every_s + every_s / (2 * mtbf_s)

    found = interval_s(pause_s, 0.0, mtbf_s)
    assert found >= SHORTEST_S
    if found > SHORTEST_S:
        assert found == pytest.approx(math.sqrt(2 * pause_s * mtbf_s))
        assert cost(found) <= min(cost(found * 0.9), cost(found * 1.1))
    else:
        assert cost(SHORTEST_S) <= cost(SHORTEST_S * 1.1), "a longer one would be better"


def test_writing_takes_half_of_the_time_at_most() -> None:
    assert interval_s(0.5, 400.0, 3600.0) == 800.0
    assert interval_s(0.0, 0.0, 3600.0) == SHORTEST_S, "nothing was measured yet"


def test_losses_that_are_seen_count_more_than_what_is_expected_before() -> None:
    assert LossRate().mtbf_s == PRIOR_S
    calm, busy = LossRate().plus(36 * 3600.0, 0), LossRate().plus(3600.0, 30)
    assert calm.mtbf_s == 37 * 3600.0 and busy.mtbf_s == pytest.approx(2 * 3600.0 / 31)
    assert interval_s(2.0, 0.0, busy.mtbf_s) == SHORTEST_S < interval_s(2.0, 0.0, calm.mtbf_s) < 800
    assert busy.plus(0.0, 1) == LossRate(seconds=3600.0, fatal=31)


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), "often", True, None])
def test_an_interval_that_is_none_is_refused_by_its_name(value: Any) -> None:
    with pytest.raises(ConfigError, match=r'"bamboo\.checkpoint\.every_s" is .*it must be "auto", a number of seconds'):
        parse_block({"checkpoint": {"every_s": value}})


def test_a_place_that_is_none_is_refused_by_its_name() -> None:
    with pytest.raises(ConfigError, match=r'"bamboo\.checkpoint\.dir" is .*the path of a folder'):
        parse_block({"checkpoint": {"dir": " "}})
    lacking = [CheckpointConfig(every_s=every).lacks_place for every in ("auto", 0, 90)]
    assert lacking == [False, False, True]
    assert not CheckpointConfig(every_s=90, dir="/own").lacks_place


# -- where ----------------------------------------------------------------------------------------------------


def test_the_place_is_where_the_script_saves() -> None:
    history = History()
    history.add("load", {"folder": "/model", "tag": "base", "ours": False})
    assert history.place is None, "the script begins with what others have made there"
    history.add("load", {"folder": "/run", "tag": None, "ours": True})
    assert history.place == "/run"
    history.add("save", {"folder": "/first", "tag": "1", "save_id": "a"})
    history.add("save", {"folder": "/second", "tag": "1", "save_id": "b"})
    history.add("load", {"folder": "/first", "tag": "1", "ours": True})
    assert history.place == "/second"


# -- who says so ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("writes", "agreed"), [(False, 7), (True, 0)])
def test_members_take_it_together_or_not_at_all(writes: bool, agreed: int) -> None:
    layout = Layout(1, 2)
    parts = [Contribution({0: [0.5]}, {}, own=7), Contribution({}, {}, writes=writes)]
    total: torch.Tensor = sum(encode(layout, Form(), part) for part in parts)  # type: ignore[assignment]
    assert decode(layout, Form(), total.tolist()).own == agreed


def taker(saves: Any, every_s: Any = 5.0, steps: int = 3) -> Any:
    """What decides on a member that leads in epoch 7, which has seen no losses yet."""
    operation = SimpleNamespace(agreed=SimpleNamespace(own=7))
    progress = SimpleNamespace(operation=operation, steps=steps, rate=LossRate)
    context = SimpleNamespace(
        settings=SimpleNamespace(checkpoint=CheckpointConfig(every_s=every_s)),
        epoch=SimpleNamespace(plan=SimpleNamespace(epoch=7), leads=True),
        progress=progress,
        recording=SimpleNamespace(span=lambda kind: nullcontext()),
        binding=None,
    )
    saves.begun, saves.written_s, saves.writes = time.monotonic(), 0.0, False
    saves.own_folder = lambda: Path("/own/job")
    return OwnCheckpoints(context, saves)  # type: ignore[arg-type]


def test_one_is_due_when_the_last_one_of_either_kind_is_old_enough() -> None:
    saves: Any = SimpleNamespace()
    own = taker(saves)
    assert own.due() == (0, False)
    saves.begun -= 5.0
    assert own.due() == (7, False)
    saves.writes = True
    assert own.due() == (7, True), "all members hear that this one writes, and none takes part"
    own = taker(saves, every_s="auto")
    saves.begun -= SHORTEST_S - 1
    assert own.due() == (0, False)
    saves.begun -= 1
    assert own.due() == (7, False)
    saves.written_s = 50.0
    assert own.due() == (0, False)
    own = taker(saves, every_s=0)
    saves.begun -= 1e6
    assert own.due() == (0, False)


def test_a_stage_that_cannot_be_copied_ends_the_own_ones_and_not_the_job() -> None:
    told = []

    def collect(*_: Any) -> bool:
        raise TypeError("cannot pickle '_thread.lock' object")

    saves: Any = SimpleNamespace(collect=collect, give_up=lambda *facts: told.append(facts))
    own = taker(saves)
    saves.begun -= 5.0
    assert own.due() == (7, False)
    own.take()
    ((path, step, error),) = told
    assert (path, step, type(error)) == (Path("/own/job/step3"), 3, TypeError)
    assert own.due() == (7, True), "no member takes part any more"


def test_a_method_that_tells_what_deepspeed_s_converter_needs_is_called() -> None:
    """Megatron's modules have one, of which DeepSpeed would save the method itself, and the module with it."""
    saved: list[Any] = []
    engine = SimpleNamespace(module=SimpleNamespace(universal_checkpoint_info=lambda: {"tied": []}))
    engine.save_zero_checkpoint, engine._save_checkpoint = False, lambda *arguments: saved.append(arguments[2])
    for state in ({"step": 3}, {"universal_checkpoint_info": "the script's"}):
        DeepSpeedAdapter(engine).save_files("folder", "tag", state, False)
    assert saved == [
        {"universal_checkpoint_info": {"tied": []}, "step": 3},
        {"universal_checkpoint_info": "the script's"},
    ]
    engine.module = SimpleNamespace(universal_checkpoint_info={"tied": []})
    DeepSpeedAdapter(engine).save_files("folder", "tag", {"step": 3}, False)
    assert saved[2:] == [{"step": 3}]


# -- writing --------------------------------------------------------------------------------------------------

ALONE = Layout(1, 1)


def test_two_are_kept(members: Callable[..., Member], tmp_path: Path) -> None:
    folder = own_folder(tmp_path, "job")
    member = members(0, folder, keep=1)
    for step in (1, 2, 3):
        member.save(step, layout=ALONE, own=True, latest=False).wait()
    assert sorted(p.name for p in folder.iterdir()) == ["step2", "step3"] and not member.failed
    assert [info.tag for info in list_own(tmp_path)] == ["step2", "step3"] and list_checkpoints(tmp_path) == []


def test_one_of_the_script_s_goes_first(members: Callable[..., Member], tmp_path: Path) -> None:
    """The other member of the first one never writes, so that it would last until its timeout."""
    member = members(0)
    member.begin(1, own=True)
    member.saver.add(0, [])
    member.saver.submit()
    assert member.saver.busy and not member.saver.owes
    member.save(2, layout=ALONE).wait()
    assert [result.step for result in member.complete] == [2]
    assert [(result.step, result.aborted) for result in member.failed] == [(1, True)]


def test_the_end_waits_for_none(members: Callable[..., Member]) -> None:
    member = members(0)
    member.begin(1, own=True)
    member.saver.add(0, [])
    member.saver.submit()
    member.saver.give_way()
    member.wait()
    assert [(result.step, result.aborted) for result in member.failed] == [(1, True)]


def test_the_list_says_whose_they_are(members: Callable[..., Member], tmp_path: Path) -> None:
    members(0, tmp_path).save(1, layout=ALONE).wait()
    members(0, own_folder(tmp_path, "job")).save(2, layout=ALONE, own=True, latest=False).wait()
    told = CliRunner().invoke(cli, ["checkpoints", str(tmp_path)])
    lines = [line for line in told.output.splitlines() if "step" in line]
    assert told.exit_code == 0 and ["(own)" in line for line in lines[-2:]] == [False, True], told.output
