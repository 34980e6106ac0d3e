"""Stages that owner and shadow compute together, so that no member has much more to do than another."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bamboo_ds.engine.stage.blocks import CutSearch, StageBlocks, bounds, cuttable
from bamboo_ds.errors import UnsupportedError

from .support.jobs import RunningJob, bamboo_command, slow_until, write_config
from .support.surviving import Reference
from .test_elastic import assert_same

pytestmark = pytest.mark.claim("guides/even-shares.md")

AUTO = {"topology": {"blocks": "auto"}, "redundancy": {"verify_every": 2}}


# -- blocks -------------------------------------------------------------------------------------------------


class Stage(nn.Module):
    """What of a ``PipelineModule`` a stage's blocks look at."""

    def __init__(self, *layers: Any, interval: int = 0) -> None:
        super().__init__()
        self.forward_funcs, self.activation_checkpoint_interval = list(layers), interval
        self.micro_offset, self._local_start, self.is_checkpointable_results = 0, 4, [True] * len(layers)
        for number, layer in enumerate(layers):
            if isinstance(layer, nn.Module):
                self.add_module(str(number), layer)

    def forward(self, inputs: Any) -> Any:
        for layer in self.forward_funcs:
            inputs = layer(inputs)
        return inputs


@given(st.integers(1, 60), st.integers(0, 9), st.integers(1, 16))
def test_bounds_of_blocks(layers: int, together: int, most: int) -> None:
    """Blocks are as even as what is checkpointed together allows."""
    groups = -(-layers // max(1, together))
    count = min(most, groups)
    found = bounds(layers, together, count)
    assert len(found) == count + 1 and found[0] == 0 and found[-1] == layers
    sizes = [stop - start for start, stop in pairwise(found)]
    assert min(sizes) >= 1 and all(start % max(1, together) == 0 for start in found[:-1])
    whole = sizes[:-1]
    assert not whole or max(whole) - min(whole) <= max(1, together)


def test_passes_of_some_blocks() -> None:
    torch.manual_seed(1)
    stage = Stage(nn.Linear(2, 2), torch.tanh, nn.Linear(2, 2), nn.Dropout(0.5))
    blocks, seeds, x = StageBlocks(stage, 4), [], torch.randn(3, 2)
    times: dict[int, float] = {}
    with blocks.computing(0, 2, seeds.append, timed=times.__setitem__):
        middle = stage(x)
    assert times.keys() == {0, 1} and min(times.values()) > 0
    assert torch.equal(middle, torch.tanh(stage.forward_funcs[0](x))) and seeds == [1]
    with blocks.computing(2, 4, lambda block: torch.manual_seed(block)):
        end = stage(middle)
    torch.manual_seed(3)
    assert torch.equal(end, stage.forward_funcs[3](stage.forward_funcs[2](middle)))
    assert "forward" not in vars(stage)
    assert blocks.names(2, 4) == {"2", "3"} and len(blocks.parameters(2, 4)) == 2
    stage.compile()
    with blocks.computing(0, 4, seeds.append, timed=times.__setitem__):
        pass
    assert times.keys() == {0, 1, 2, 3} and min(times.values()) > 0
    with pytest.raises(UnsupportedError, match="blocks"), blocks.computing(0, 2, seeds.append):
        pass


def looked_at(stage: Stage, inputs: Any) -> tuple[int, ...] | None:
    blocks = StageBlocks(stage, len(stage.forward_funcs))
    search = CutSearch(blocks)
    assert search.found() in (None, ()), "there was no pass"
    with blocks.computing(0, blocks.count, lambda block: None, search.note):
        outputs = stage(inputs)
    found = outputs if torch.is_tensor(outputs) else outputs[0]
    weights = torch.rand(found.shape)
    with search.backward(torch.device("cpu")):
        (found * weights).sum().backward()
    return search.found()


def test_where_stages_can_be_divided() -> None:
    x, linear = torch.randn(3, 2, requires_grad=True), nn.Linear(2, 2)
    assert looked_at(Stage(nn.Linear(2, 2), torch.tanh, nn.Linear(2, 2)), x) == (1, 2)
    assert CutSearch(StageBlocks(Stage(torch.tanh, torch.tanh), 2)).found() is None
    # Weights, or what a layer keeps, on both sides; what is no tensor; several gradients; none.
    assert looked_at(Stage(linear, nn.Linear(2, 2), linear, nn.Linear(2, 2)), x) == (3,)
    assert looked_at(Stage(torch.tanh, lambda y: (y, "text"), lambda pair: pair[0]), x) == (1,)
    assert looked_at(Stage(lambda y: (y, 2 * y), lambda pair: pair[0] + pair[1]), x) == ()
    assert looked_at(Stage(lambda y: (y, y > 0), lambda pair: pair[0] * pair[1]), x) == (1,)
    assert looked_at(Stage(torch.tanh, lambda y: (y.detach() + 1).requires_grad_(), torch.tanh), x) == (2,)
    assert not cuttable({"a": x}) and not cuttable((x, x.detach())) and not cuttable(x.t())
    # What is not contiguous; functions that refer to weights; parameters and hooks of the whole; what is called args.
    assert looked_at(Stage(lambda y: y.t(), lambda y: 2 * y, torch.tanh), x) == ()
    assert looked_at(Stage(torch.tanh, lambda y: linear(y), torch.tanh), x) == ()
    whole = Stage(torch.tanh, torch.tanh)
    whole.scale = nn.Parameter(torch.ones(1))
    assert looked_at(whole, x) == ()
    hooked = Stage(torch.tanh, torch.tanh)
    hooked.register_full_backward_hook(lambda module, given, got: None)
    assert looked_at(hooked, x) == ()
    odd = nn.Linear(2, 2)
    odd.args = object()  # type: ignore[assignment]
    assert looked_at(Stage(odd, torch.tanh), x) == (1,)


class Noisy(torch.autograd.Function):
    """Draws in the backward pass."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient + torch.randn_like(gradient)


def test_backward_passes_that_draw_are_not_divided() -> None:
    x = torch.randn(3, 2, requires_grad=True)
    assert looked_at(Stage(torch.tanh, Noisy.apply), x) == ()


# -- jobs ---------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.integration
def test_a_straggler_comes_and_goes(tmp_path: Path, reference: Reference) -> None:
    """Its shadow computes a part of its stage as long as it is slow; results are those of a job without one."""
    go, slow = tmp_path / "go", tmp_path / "slow"

    def takes(times: float) -> None:
        (tmp_path / "new").write_text(f"1 {times}")
        (tmp_path / "new").rename(slow)

    def helped() -> bool:
        return 1 in [rank for rank, _, _ in job.plan()["lent"]]

    command = ["--stages", "3", "--pause-s", "0.01", "--straggler", str(slow), *slow_until(go, 0.01)]
    with RunningJob(tmp_path, 3, command, write_config(tmp_path, AUTO)) as job:
        job.wait_for("a step", lambda: bool(job.events("step")))
        takes(4)
        job.wait_for("it is helped", helped)
        since = len(job.events("step"))
        job.wait_for("steps", lambda: len(job.events("step")) > since + 3)
        takes(1)
        job.wait_for("it computes its stage again", lambda: not helped())
        go.touch()
        result = job.finish()
    assert_same(result, reference(3, 1, 6, *result.length), [])
    assert not result.events("replica_mismatch") and not result.events("member_lost")


@pytest.mark.integration
def test_a_job_grows_beyond_its_stages(tmp_path: Path, reference: Reference) -> None:
    """Two members that join take halves of the stages; one of them is lost."""
    go = tmp_path / "go"
    command = ["--stages", "2", *slow_until(go)]
    with RunningJob(tmp_path, 2, command, write_config(tmp_path, AUTO)) as job:
        job.wait_for("a step", lambda: bool(job.events("step")))
        joiners = []
        for count in (3, 4):
            joiners.append(job.join())
            job.wait_for("it is admitted", lambda count=count: len(job.events("member_joined")) == count)  # type: ignore[misc]
        job.wait_for("all compute", lambda: len(job.plan()["lent"]) == 2)
        parts = job.plan()
        assert sorted((rank, end - begin) for rank, begin, end in parts["lent"]) == [(0, 1), (1, 1)]
        computing = {*parts["owners"], *parts["shadows"]}
        assert len(computing) == 4
        epoch = parts["epoch"]
        job.wait_for("it is entered", lambda: sum(e["epoch"] == epoch for e in job.events("reconfigured")) == 4)
        job.wait_for("steps", lambda: sum(e["epoch"] == epoch for e in job.events("step")) > 3)
        os.killpg(joiners[0].pid, signal.SIGKILL)
        joiners[0].wait(30)
        job.wait_for("its loss", lambda: len(job.events("member_lost")) == 1)
        job.wait_for(
            "its replicas are elsewhere", lambda: job.plan()["epoch"] > epoch + 1 and all(job.plan()["shadows"])
        )
        go.touch()
        result = job.finish()
    assert_same(result, reference(2, 1, 6, *result.length), [], joined=1)
    assert not result.events("replica_mismatch")


@pytest.mark.exhaustive
@pytest.mark.integration
def test_members_may_hold_only_so_much(tmp_path: Path, reference: Reference) -> None:
    """Two members have room for both stages, but not for what passes keep besides; one that joins holds one of them."""
    state = [16 * parameters for parameters in (2 * 272, 2 * 272 + 170)]
    limited = {"topology": {"memory_limit_mb": sum(state) / 2**20}, "redundancy": {"verify_every": 2}}
    go = tmp_path / "go"
    command = ["--stages", "2", *slow_until(go)]

    def short() -> list[list[list[int]]]:
        return [event["roles"] for event in job.events("memory_short")]

    with RunningJob(tmp_path, 2, command, write_config(tmp_path, limited)) as job:
        job.wait_for("replicas are given up", lambda: short() == [[[0, 0], [0, 1]]])
        job.join()
        job.wait_for("one is there again", lambda: short()[1:] == [[[0, 1]]])
        report = json.loads(run_plan(job))
        go.touch()
        result = job.finish()
    assert [plan["shadows"][0] is None for plan in result.events("plan")[1:]][:2] == [False, True]
    held = {each["member"]: (each["limit"], each["held"]) for each in report["memory"]}
    assert len(held) == 3 and all(0 < bytes_ <= limit == sum(state) for limit, bytes_ in held.values())
    assert any("no replica of (0,1)" in reason for reason in report["reasons"])
    assert_same(result, reference(2, 1, 6, *result.length), [], joined=1)


@pytest.mark.integration
def test_devices_bound_what_members_hold(tmp_path: Path, reference: Reference) -> None:
    """Without a setting. Each member has a device with room for one stage, and not for a replica of the other one."""
    go, room = tmp_path / "go", 12600
    command = ["--stages", "2", *slow_until(go), "--device-bytes", str(room * 10 // 9)]
    with RunningJob(tmp_path, 2, command, write_config(tmp_path, {"redundancy": {"verify_every": 2}})) as job:
        job.wait_for("a step", lambda: bool(job.events("step")))
        report = json.loads(run_plan(job))
        go.touch()
        result = job.finish()
    assert [(event["roles"], event["members"]) for event in result.events("memory_short")] == [([[0, 0], [0, 1]], [])]
    assert [each["limit"] for each in report["memory"]] == [room] * 2
    held = [each["held"] for each in report["memory"]]
    assert max(held) <= room < sum(held), held
    assert_same(result, reference(2, 1, 6, *result.length), [])


def run_plan(job: RunningJob) -> str:
    command = [bamboo_command(), "plan", "--job", job.name, "--json"]
    return subprocess.run(command, env=job.env, capture_output=True, check=True, timeout=60, text=True).stdout
