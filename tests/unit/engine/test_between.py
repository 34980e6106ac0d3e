"""What scripts keep where no copy of a stage gets it, and do to their stages between two steps: followed, or told."""

from __future__ import annotations

import argparse
import collections
import functools
import random
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from bamboo_ds.engine.iteration.exchanged import exchange, pairs_of
from bamboo_ds.engine.iteration.facts import lacks
from bamboo_ds.engine.stage.beside import beside_layers, beside_steps, contents_of, newer
from bamboo_ds.engine.stage.tracing import sum_of_bits
from bamboo_ds.errors import UnsupportedError

pytestmark = pytest.mark.claim("state.md", "guides/exactness.md", "guides/scripts.md", "reference/guarantees.md")


class Holder:
    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


def test_what_is_kept_is_told_apart() -> None:
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    names = {id(p): f"parameter {n}" for n, p in enumerate(parameters)}
    pairs = [
        (lambda: {"a": [1, 2.0]}, lambda: {"a": [1, 2.5]}),
        (lambda: collections.deque([1]), lambda: collections.deque([2])),
        (lambda: Holder(x=torch.ones(2)), lambda: Holder(x=torch.zeros(2))),
        (lambda: Holder(x=Holder(y={1})), lambda: Holder(x=Holder(y={2}))),
        (lambda: {id(parameters[0]): 1}, lambda: {id(parameters[1]): 1}),
        (lambda: numpy.ones(2), lambda: numpy.zeros(2)),
        (lambda: random.Random(1), lambda: random.Random(2)),
        (lambda: torch.Generator().manual_seed(1), lambda: torch.Generator().manual_seed(2)),
        (lambda: functools.partial(max, 1), lambda: functools.partial(max, 2)),
        (lambda: (lambda x: lambda: x)(1), lambda: (lambda x: lambda: x)(2)),
    ]
    for one, other in pairs:
        assert contents_of(one(), names) == contents_of(one(), names)
        assert contents_of(one(), names).digest != contents_of(other(), names).digest
    assert contents_of(Holder(x=[torch.ones(1)]), names).tensors and not contents_of([parameters[0], 1], names).tensors
    one, other, shared = [1, torch.ones(1)], [1, torch.ones(1)], {"b": 2, "a": 1}
    assert contents_of([one, one], names) == contents_of([one, other], names), "copies may share less"
    assert contents_of(shared, names) == contents_of(dict(reversed(shared.items())), names)
    ring: dict[str, Any] = {}
    ring["self"] = ring
    assert contents_of(ring, names) == contents_of(ring, names)


def test_only_what_has_changed_or_has_tensors_is_compared() -> None:
    net = nn.ModuleDict({"layer": nn.Linear(2, 2)})
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.clock, optimizer.gathered, optimizer.count = Holder(name="rank 1"), Holder(seen=[]), 0
    runtime: Any = SimpleNamespace(module=net, attributes={"basic_optimizer": optimizer, "lr_scheduler": None})
    began = beside_steps(runtime) | beside_layers(runtime)
    optimizer.count = 3  # numbers travel
    assert not newer(beside_steps(runtime), began)
    optimizer.gathered.seen.append(1.0)
    optimizer.buffers = [torch.ones(2)]
    assert {name.split("'")[1] for name in newer(beside_steps(runtime), began)} == {"gathered", "buffers"}
    wrapper = Holder(optimizer=optimizer, sums=[torch.ones(2)])  # as DeepSpeed's, which schedulers of Megatron have
    scheduler = Holder(optimizer=wrapper, seen=collections.deque(), state_dict=lambda: {"step": 3})
    runtime.attributes.update(optimizer=wrapper, lr_scheduler=scheduler)
    began |= beside_steps(runtime) | beside_layers(runtime)
    wrapper.sums[0].add_(1)
    assert not any("scheduler" in name for name in newer(beside_steps(runtime) | beside_layers(runtime), began))
    scheduler.seen.append(1.0)
    assert [name.split("'")[1] for name in newer(beside_layers(runtime), began)] == ["seen"]
    scheduler.seen.clear()
    layer: Any = net["layer"]
    layer.seen, layer.cache, layer.number = ["text"], torch.ones(2), 4  # tensors and numbers travel
    assert [name.split("'")[1] for name in newer(beside_layers(runtime), began)] == ["seen"]


def test_options_of_a_script_in_its_layers_are_compared_one_by_one() -> None:
    """As in GPT-NeoX's: that of the rank differs, and one changes on all ranks alike."""

    def told(rank: int, samples: int, seen: int) -> dict[str, Any]:
        net = nn.ModuleDict({"layer": nn.Linear(2, 2)})
        net["layer"].options = Holder(rank=rank, samples=samples, seen=[seen])  # type: ignore[assignment]
        none = {"basic_optimizer": None, "lr_scheduler": None}
        return beside_layers(SimpleNamespace(module=net, attributes=none))  # type: ignore[arg-type]

    began, mine = told(0, 0, 0), told(1, 8, 0)
    assert not lacks(newer(told(0, 8, 0), began), mine)
    (found,) = lacks(newer(told(0, 8, 1), began), mine)
    assert found == "attribute 'options.seen' of layer layer (Linear)"


def test_options_that_layers_take_in_their_first_pass_are_no_state() -> None:
    """As Megatron's do."""

    def told(*options: argparse.Namespace) -> dict[str, Any]:
        net = nn.ModuleDict({"layer": nn.Linear(2, 2)})
        for each in options:
            net["layer"].options = each  # type: ignore[assignment]
        none = {"basic_optimizer": None, "lr_scheduler": None}
        return beside_layers(SimpleNamespace(module=net, attributes=none))  # type: ignore[arg-type]

    began, mine = told(), told(argparse.Namespace(rank=1, layers=[4]))
    assert not lacks(newer(told(argparse.Namespace(rank=0, layers=[4])), began), mine)


@pytest.mark.parametrize("kind", [collections.OrderedDict, collections.Counter, collections.UserDict, list])
def test_what_containers_of_layers_have_in_them_is_compared(kind: Any) -> None:
    """Also those that have attributes, or could have some."""
    net = nn.ModuleDict({"layer": nn.Linear(2, 2)})
    runtime: Any = SimpleNamespace(module=net, attributes={"basic_optimizer": None, "lr_scheduler": None})
    layer: Any = net["layer"]
    layer.kept = kind()
    began = beside_layers(runtime)
    layer.kept = kind([5]) if kind is list else kind({"text": 5})
    assert len(newer(beside_layers(runtime), began)) == 1


def test_what_the_optimizer_does_not_keep_is_named() -> None:
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(UnsupportedError, match="state of optimizer SGD has no 'ema' of the shape, type"):
        pairs_of(optimizer, dict(net.named_parameters()), "ema")
    for p in net.parameters():
        optimizer.state[p]["ema"] = torch.full_like(p, 7.0)
    before, pairs = (
        [p.detach().clone() for p in net.parameters()],
        pairs_of(optimizer, dict(net.named_parameters()), "ema"),
    )
    version = net.weight._version
    exchange(pairs)
    assert all(bool((p == 7).all()) for p in net.parameters()) and net.weight._version == version
    exchange(pairs)
    assert all(map(torch.equal, before, net.parameters()))


def test_a_sum_of_bits_sees_changes_of_any_type() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.int8):
        tensor = torch.arange(6).to(dtype).reshape(2, 3)
        before = sum_of_bits([tensor, tensor.t()])
        assert sum_of_bits([tensor.clone(), tensor.t().clone()]) == before
        assert sum_of_bits([tensor.flip(0), tensor.t()]) != before, "other places are another sum"
        tensor[1, 1] += 1
        assert sum_of_bits([tensor, tensor.t()]) != before
    large = torch.randn(3000)
    assert len({sum_of_bits([each]) for each in (large, large.flip(0), large.roll(1024), large.clone())}) == 3
    assert sum_of_bits([]) == sum_of_bits([])
