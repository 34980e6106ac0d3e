"""Activation checkpointing: recomputed and redundant passes draw the owner's random numbers, wherever they run."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from deepspeed.runtime.activation_checkpointing import checkpointing
from torch import nn

from bamboo_ds.engine.iteration.recomputing import begin_forward, counting_saved_bytes
from bamboo_ds.engine.stage.rng import Drawing, drawing_seed, keyed_generators, left_alone, seeded_layers
from bamboo_ds.topology import Role

pytestmark = pytest.mark.claim("reference/guarantees.md", "reference/settings.md")

CPU = torch.device("cpu")
CHECKPOINTS = {"reentrant": checkpointing.checkpoint, "non-reentrant": checkpointing.non_reentrant_checkpoint}


@pytest.fixture
def tracker() -> Iterator[Any]:
    """DeepSpeed's tracker with two states."""
    tracked = checkpointing.get_cuda_rng_tracker()
    tracked.add("model-parallel-rng", 1)
    tracked.add("other", 2)
    yield tracked
    tracked.reset()


def draws(tracker: Any) -> list[torch.Tensor]:
    """What a pass draws from every generator, twice from one of them."""
    found = [torch.rand(3)]
    for name in ("model-parallel-rng", "other", "model-parallel-rng"):
        with tracker.fork(name):
            found.append(torch.rand(3))
    found += [torch.tensor([random.random()]), torch.from_numpy(numpy.random.rand(2))]
    return found


def test_states_that_are_tracked_are_left_alone(tracker: Any) -> None:
    """Constructors of Megatron's and GPT-NeoX's layers draw from them, also those of copies."""
    before = {name: state.clone() for name, state in tracker.get_states().items()}
    with left_alone(torch.device("cpu")):
        draws(tracker)
        assert any(not torch.equal(state, before[name]) for name, state in tracker.get_states().items())
    assert all(torch.equal(state, before[name]) for name, state in tracker.get_states().items())


def test_a_pass_draws_the_same_wherever_it_runs(tracker: Any) -> None:
    torch.manual_seed(0)
    before, states = torch.get_rng_state(), tracker.get_states()
    others = random.getstate(), numpy.random.get_state()[1].tolist()  # type: ignore[union-attr]
    seed = drawing_seed(Drawing.FORWARD, 7, 3, Role(0, 1), 2)
    with keyed_generators(seed, CPU):
        first = draws(tracker)
    assert torch.equal(torch.get_rng_state(), before)
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == others  # type: ignore[union-attr]
    assert {name: state.tolist() for name, state in tracker.get_states().items()} == {
        name: state.tolist() for name, state in states.items()
    }
    draws(tracker)  # another member has drawn more
    with keyed_generators(seed, CPU):
        second = draws(tracker)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert len({tuple(values.tolist()) for values in first}) == len(first)
    with keyed_generators(drawing_seed(Drawing.FORWARD, 7, 3, Role(0, 1), 3), CPU):
        assert not any(torch.equal(a, b) for a, b in zip(first, draws(tracker), strict=True))


def test_seeds_of_64_bits() -> None:
    """A script that sets no seed has any of them; those that were possible before mean what they meant."""
    seeds = [drawing_seed(Drawing.FORWARD, seed, 3, Role(1, 2), 4) for seed in (7, 2**63, 2**64 - 1)]
    assert seeds[0] == 5899294260841486534 and len(set(seeds)) == 3
    for seed in seeds:
        with keyed_generators(seed, CPU):
            torch.rand(1)


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_recomputation_draws_the_masks_of_its_pass(tracker: Any, kind: str) -> None:
    masks = []

    def layer(x: torch.Tensor) -> torch.Tensor:
        with tracker.fork():
            mask = torch.rand_like(x) < 0.5
        masks.append(mask & (torch.rand_like(x) < 0.5))
        return (x * masks[-1]).square()

    x = torch.randn(64, requires_grad=True)
    with keyed_generators(5, CPU):
        y = CHECKPOINTS[kind](layer, x)
    with keyed_generators(6, CPU):  # passes between forward and backward
        CHECKPOINTS[kind](layer, torch.randn(64, requires_grad=True))
    y.sum().backward()
    assert len(masks) == 3 and torch.equal(masks[0], masks[2]) and not torch.equal(masks[0], masks[1])
    assert torch.equal(x.grad, 2 * x.detach() * masks[0])


def test_layers_that_seed_themselves_leave_other_generators_alone() -> None:
    module = SimpleNamespace(seed_layers=True, micro_offset=99)
    states = numpy.random.get_state()[1].tolist()
    with seeded_layers(module, 12):
        assert module.micro_offset == 12
        numpy.random.seed(1)
    assert numpy.random.get_state()[1].tolist() == states
    with seeded_layers(module):
        assert module.micro_offset == 12
    module.seed_layers = False
    with seeded_layers(module, 13):
        assert module.micro_offset == 12


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_inputs_of_checkpoints_count_as_saved(kind: str) -> None:
    linear = nn.Linear(8, 8)
    runtime: Any = SimpleNamespace(share=SimpleNamespace(part=SimpleNamespace(saved={})), module=linear)
    runtime.module.activation_checkpoint_func = CHECKPOINTS[kind]
    x = torch.randn(4, 8, requires_grad=True)
    with counting_saved_bytes(runtime, 0):
        hidden = linear.activation_checkpoint_func(lambda v: torch.tanh(linear(torch.tanh(linear(v)))), x)
    assert runtime.share.part.saved == {0: x.nbytes}
    assert linear.activation_checkpoint_func is CHECKPOINTS[kind]
    with counting_saved_bytes(runtime, 1):
        torch.tanh(hidden)
    assert runtime.share.part.saved == {0: x.nbytes, 1: x.nbytes}


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_more_forward_passes_than_contiguous_buffers(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(checkpointing, "PARTITION_ACTIVATIONS", True)
    monkeypatch.setattr(checkpointing, "CONTIGUOUS_CHECKPOINTING", True)
    monkeypatch.setattr(checkpointing, "num_layers", 2)
    inputs = [torch.randn(8, requires_grad=True) for _ in range(5)]
    outputs = []
    for x in inputs:
        begin_forward()
        y = x.clone()
        for _ in range(2):
            y = CHECKPOINTS[kind](lambda v: v.square(), y)
        outputs.append(y)
    for y in outputs:
        y.sum().backward()
    for x in inputs:
        torch.testing.assert_close(x.grad, 4 * x.detach() ** 3)
