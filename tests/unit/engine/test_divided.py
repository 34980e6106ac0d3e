"""Stages that owner and shadow compute together, so that no member has much more to do than another."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bamboo_ds.engine.stage.blocks import CutSearch, StageBlocks, bounds, cuttable
from bamboo_ds.errors import UnsupportedError

pytestmark = pytest.mark.claim("guides/even-shares.md")


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
