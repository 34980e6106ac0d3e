"""Tensors and other things that layers keep as plain attributes."""

from __future__ import annotations

import logging
import math
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from bamboo_ds.engine.checkpoints.kept import load_kept, save_kept
from bamboo_ds.engine.data.batches import as_message, from_message
from bamboo_ds.engine.replicas.refusals import check_hooks, check_optimizer, check_optimizer_hooks, hooks_of
from bamboo_ds.engine.script.changes import Weights
from bamboo_ds.engine.stage.attributes import PlainTensors, holds_tensors
from bamboo_ds.engine.stage.layers import Layers, merged
from bamboo_ds.engine.stage.tracing import checksum

pytestmark = pytest.mark.claim("reference/guarantees.md")


class Odd:
    """Has no truth value, does not compare, cannot be hashed."""

    def __bool__(self) -> bool:
        raise ValueError("neither true nor false")

    def __eq__(self, other: object) -> bool:
        raise ValueError("cannot be compared")

    __hash__ = None  # type: ignore[assignment]

    def __len__(self) -> int:
        raise ValueError("has no length")


#: Values of attributes, by names.
KINDS: dict[str, Any] = {
    "tensor": torch.arange(8.0),
    "array": numpy.arange(4),
    "number_of_numpy": numpy.float32(0.5),
    "odd": Odd(),
    "odd_hooks": Odd(),
    "tensor_hooks": torch.ones(3),
    "mixed": [torch.ones(2), Odd()],
    "table": {"cos": torch.ones(2), 3: (numpy.ones(2), None)},
    "kind": SimpleNamespace,
    "function": len,
    "not_a_number": math.nan,
    "empty": torch.empty(0),
    "sparse": torch.eye(3).to_sparse(),
    "elsewhere": torch.ones(2, device="meta"),
}


class Rotary(nn.Module):
    """A cache for the longest sequence so far, as rotary embeddings keep it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.constant = torch.arange(1000.0)
        self.longest, self.table, self.pair, self.steps = 0, None, None, torch.zeros(1)

    def forward(self, length: int) -> None:
        self.steps += 1
        if length > self.longest:
            self.longest = length
            self.table = torch.arange(float(length)).cos().requires_grad_() * 2
            self.pair = self.table, {"sin": numpy.arange(length)}


def copies(count: int = 2) -> list[tuple[Any, Layers]]:
    nets = [nn.ModuleList([Rotary(), nn.Linear(2, 2)]) for _ in range(count)]
    return [(net[0], Layers(net)) for net in nets]


def test_attributes_of_every_kind() -> None:
    """Whatever layers and optimizers have, it is not asked for more than its type."""
    net = nn.ModuleList([nn.Linear(2, 2)])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for name, value in KINDS.items():
        setattr(net[0], name, value)
        setattr(optimizer, name, value)
    assert not hooks_of(net)
    module: Any = net
    check_hooks(module)
    check_optimizer_hooks(optimizer)
    check_optimizer(optimizer, True)
    layers = Layers(net)
    weights = Weights(layers)
    assert not weights.changed() and not layers.kept()
    layers.restore(from_message(as_message(layers.capture(whole=True))))
    layers.restore(layers.undo())
    layers.tensors.settle()
    assert not layers.capture()["tensors"]
    travels = {name for name, value in KINDS.items() if holds_tensors(value)}
    assert travels == {"tensor", "array", "tensor_hooks", "table", "empty"}
    assert set(layers.tensors.now()["0"]) == travels


def test_copies_of_a_stage_get_what_has_changed() -> None:
    (layer, mine), (other, theirs) = copies()
    assert mine.capture()["tensors"] == {}, "constants are what the copies have, too"
    other(9)  # by redundant passes
    for length in (3, 5, 4):
        layer(length)
        found = mine.capture()
        theirs.restore(from_message(as_message(found)))
        for each in (mine, theirs):
            each.tensors.settle()
        assert set(found["tensors"]["0"]) == ({"table", "pair", "steps"} if length != 4 else {"steps"})
        assert other.longest == layer.longest == len(other.table) and torch.equal(other.table, layer.table)
        assert other.table is other.pair[0] and other.table is not layer.table and not other.table.requires_grad
        assert numpy.array_equal(other.pair[1]["sin"], layer.pair[1]["sin"]) and torch.equal(other.steps, layer.steps)
    other.table.zero_()
    assert layer.table[0] == 2, "nothing is shared"


def test_what_another_copy_has_not_made_goes() -> None:
    (_, mine), (other, theirs) = copies()
    other(9)
    other.late = torch.ones(1)
    theirs.restore(mine.capture())
    assert (other.longest, other.table, other.pair) == (0, None, None) and not hasattr(other, "late")


def test_a_whole_state_leaves_constants_where_they_are() -> None:
    (layer, mine), (other, theirs) = copies()
    layer(3)
    mine.tensors.settle()
    constant = other.constant
    theirs.restore(from_message(as_message(mine.capture(whole=True))))
    assert other.constant is constant and torch.equal(other.table, layer.table)
    layer.constant[0] = 1
    theirs.restore(from_message(as_message(mine.capture(whole=True))))
    assert other.constant[0] == 1 and constant[0] == 0


def test_passes_are_undone() -> None:
    ((layer, layers),) = copies(1)
    layer(3)
    before = layers.undo()
    for length in (7, 8):  # the second attempt is undone as well
        layer(length)
        layers.restore(before)
        assert layer.longest == len(layer.table) == 3 and layer.steps.item() == 1
    assert set(layers.capture()["tensors"]["0"]) >= {"table", "pair", "steps"}


def test_what_a_script_changes_is_noticed() -> None:
    ((layer, layers),) = copies(1)
    for change, name in (
        (lambda: layer.constant.mul_(2), "0.constant"),
        (lambda: setattr(layer, "constant", torch.ones(3)), "0.constant"),
        (lambda: setattr(layer, "own", [torch.ones(1)]), "0.own"),
        (lambda: layer.own.append(2), "0.own"),
    ):
        weights = Weights(layers)
        assert weights.changed() == []
        change()
        assert weights.changed() == [name]
    assert layers.kept() == ["0.constant", "0.own"], "another pipeline may have others"


def test_a_restart_gets_them(tmp_path: Any) -> None:
    def role() -> Any:
        ((layer, layers),) = copies(1)
        inner = torch.optim.SGD(layer.parameters(), lr=0.1)
        return SimpleNamespace(layers=layers, layer=layer, optimizer=SimpleNamespace(inner=inner))

    one, other = role(), role()
    save_kept(one, tmp_path, 1, torch.save)
    assert not list(tmp_path.iterdir()), "constants are made anew"
    one.layer(5)
    save_kept(one, tmp_path, 1, torch.save)
    load_kept(other, tmp_path, 1)
    assert other.layer.longest == 5 and torch.equal(other.layer.table, one.layer.table)
    assert checksum(other.layer.constant) == checksum(one.layer.constant)


def test_parts_of_a_divided_stage_keep_their_own() -> None:
    nets = [nn.ModuleList([Rotary(), Rotary()]) for _ in range(2)]
    owner, shadow = map(Layers, nets)
    nets[0][0](3)
    nets[1][1](4)
    owner.restore(merged(owner.capture(), from_message(as_message(shadow.capture())), ["1"]))
    assert [layer.longest for layer in nets[0]] == [3, 4] and len(nets[0][1].table) == 4


def test_what_torch_computes_before_each_pass_is_not_sent() -> None:
    net = nn.ModuleList([nn.utils.weight_norm(nn.Linear(2, 2)), nn.LSTM(2, 2)])
    layers = Layers(net)
    net[0](torch.ones(1, 2))
    net[1](torch.ones(1, 1, 2))
    assert layers.tensors.now() == {}


def test_what_no_copy_gets_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    ((layer, layers),) = copies(1)
    layer(3)
    layers.capture()
    assert not caplog.records
    layer.table = SimpleNamespace(keys=torch.ones(1))
    with caplog.at_level(logging.WARNING):
        layers.capture()
        layers.capture()
    (record,) = caplog.records
    assert "attribute 'table' of layer '0', None at first, has become a SimpleNamespace" in record.getMessage()


def test_containers_of_many_values_are_not_looked_at() -> None:
    assert holds_tensors([torch.ones(1)] * 60) and not holds_tensors([torch.ones(1)] * 70)
    loop: list[Any] = [torch.ones(1)]
    loop.append(loop)
    assert not holds_tensors(loop) and not holds_tensors({Odd: torch.ones(1)})
    inference = torch.inference_mode()(torch.ones)(2)
    tensors = PlainTensors(lambda: [("0", {"inference": inference}, ["inference"])])
    assert not tensors.changed()
