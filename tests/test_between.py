"""What scripts keep where no copy of a stage gets it, and do to their stages between two steps: followed, or told."""

from __future__ import annotations

import collections
import functools
import json
import random
import re
from pathlib import Path
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

from .support.jobs import SUPPORT, Result, run_bamboo, write_config
from .support.surviving import Reference, fault, survive

pytestmark = pytest.mark.claim("state.md", "guides/exactness.md", "guides/scripts.md", "reference/guarantees.md")

SCRIPT = SUPPORT / "train_between.py"
CONFIG: dict[str, Any] = {"optimizer": None, "scheduler": None, "gradient_clipping": 0.0}
CHECKED = {"redundancy": {"check_exact": None}}


def run(folder: Path, way: str, *more: str, bamboo: dict[str, Any] | None = None, stages: int = 3) -> Result:
    config = write_config(folder, CHECKED if bamboo is None else bamboo, 4, **CONFIG)
    options = ["--stages", str(stages), "--steps", "8", "--way", way, *more]
    return run_bamboo(folder, stages, options, config, SCRIPT)


# -- what is kept beside the state ----------------------------------------------------------------------------


@pytest.mark.integration
@pytest.mark.parametrize(
    ("way", "steps", "named"),
    [
        ("by-id", 1, r"Inexact: .* step 2, .* its replica is not what its owner has: parameter \d\.weight"),
        ("lookahead", 2, r"Inexact: .* step 3, .* made after the first step lacks .* 'slow' of the optimizer \(Lookah"),
        ("gathering", 2, r"Inexact: .* step 3, .* lacks .*: attribute 'statistics' of the optimizer \(Gathering\)"),
        (
            "queued",
            0,
            r"UnsupportedError: optimizer Queued keeps in its state .*\['history'\] is a deque",
        ),
        ("wrapping", 0, r"UnsupportedError: optimizer Wrapping has never called the constructor of torch"),
    ],
)
def test_what_does_not_travel_is_named_in_the_first_steps(tmp_path: Path, way: str, steps: int, named: str) -> None:
    """Before any loss, and with exit code 1: no restart could do better."""
    result = run(tmp_path, way)
    assert result.exit_code == 1
    assert any(re.search(named, line) for line in result.output.splitlines()), result.output[-4000:]
    assert len(result.events("step")) <= steps + 1 and not result.events("restart")


@pytest.mark.integration
def test_what_layers_gather_is_told_and_no_error(tmp_path: Path) -> None:
    """Their results are compared; a list of what was seen makes no difference."""
    result = run(tmp_path, "listing")
    assert result.exit_code == 0, result.output[-4000:]
    assert re.search("do not get has changed: .*attribute 'seen' of layer", result.output), result.output[-4000:]
    assert result.events("exact_checked")


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
    """As in Megatron's: that of the rank differs, and one changes on all ranks alike."""

    def told(rank: int, samples: int, seen: int) -> dict[str, Any]:
        net = nn.ModuleDict({"layer": nn.Linear(2, 2)})
        net["layer"].options = Holder(rank=rank, samples=samples, seen=[seen])  # type: ignore[assignment]
        none = {"basic_optimizer": None, "lr_scheduler": None}
        return beside_layers(SimpleNamespace(module=net, attributes=none))  # type: ignore[arg-type]

    began, mine = told(0, 0, 0), told(1, 8, 0)
    assert not lacks(newer(told(0, 8, 0), began), mine)
    (found,) = lacks(newer(told(0, 8, 1), began), mine)
    assert found == "attribute 'options.seen' of layer layer (Linear)"


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


# -- weights for evaluations ----------------------------------------------------------------------------------


@pytest.mark.integration
@pytest.mark.parametrize("how", ["data", "copy", "state"])
def test_weights_that_are_exchanged_for_evaluations_are_refused_in_the_first(tmp_path: Path, how: str) -> None:
    result = run(tmp_path, f"ema-{how}", "--evaluate-every", "4")
    assert result.exit_code == 1 and len(result.events("step")) == 4
    assert "UnsupportedError: the script evaluates with weights that it has put into stage 0" in result.output
    assert "bamboo_ds.evaluating_with(engine, 'ema')" in result.output and not result.events("restart")


@pytest.mark.integration
def test_no_evaluation_is_of_a_mixture(tmp_path: Path) -> None:
    """Where a difference is to be told alone, the evaluation after a loss ends the job and gives no number."""
    block = {"redundancy": {"on_mismatch": "warn", "check_exact": 0}}
    faults = [fault(1, 5, "BackwardPass", 1)]
    result = run(tmp_path, "ema-data", "--evaluate-every", "4", "--faults", json.dumps(faults), bamboo=block)
    assert len(result.faults()) == 1 and result.exit_code == 1
    assert "no process does so for the stages of ranks 1, which are lost: the evaluation would be one of a mixture" in (
        result.output
    )
    assert "No copy of a stage has them" in result.output, "it is told in the first evaluation"
    assert len(result.events("step")) == 8 and not result.events("restart")


@pytest.mark.integration
def test_nor_is_one_of_two_stages_that_a_loss_interrupts(tmp_path: Path) -> None:
    """The survivor has no replica of its own stage any more, and goes by what it has seen before the loss."""
    block = {"redundancy": {"on_mismatch": "warn", "check_exact": 0}}
    faults = [fault(1, 4, ".iteration.passes.forward", 1, evaluating=True)]
    arguments = ("--evaluate-every", "4", "--faults", json.dumps(faults))
    result = run(tmp_path, "ema-data", *arguments, bamboo=block, stages=2)
    assert len(result.faults()) == 1 and result.exit_code == 1
    assert "which are lost: the evaluation would be one of a mixture" in result.output
    assert len(result.events("step")) == 4


@pytest.mark.integration
def test_changes_that_travel_are_evaluated_with(tmp_path: Path, reference: Reference) -> None:
    """A script that clamps its weights after each step; in this job nobody is lost."""
    arguments = ("--steps", "8", "--way", "clamp", "--evaluate-every", "2")
    survive(tmp_path, reference, [], 3, arguments=arguments, micro_batches=4, script=SCRIPT, **CONFIG)


@pytest.mark.integration
def test_evaluations_with_what_the_optimizer_keeps(tmp_path: Path, reference: Reference) -> None:
    """Losses before an evaluation and in the middle of one; the numbers are those of stock DeepSpeed."""
    faults = [fault(1, 2, "BackwardPass", 1), fault(2, 6, ".iteration.passes.forward", 1, evaluating=True)]
    arguments = ("--steps", "8", "--way", "averaging", "--evaluate-every", "2")
    survive(tmp_path, reference, faults, 3, arguments=arguments, micro_batches=4, script=SCRIPT, **CONFIG)


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


# -- freezing -------------------------------------------------------------------------------------------------


@pytest.mark.integration
def test_what_is_frozen_for_each_stage_is_frozen_on_all_copies(tmp_path: Path, reference: Reference) -> None:
    """After a loss, and before one that hits the iteration in which it takes effect."""
    faults = [fault(1, 2, "BackwardPass", 1), fault(0, 5, "BackwardPass", 2)]
    arguments = ("--steps", "8", "--way", "freeze-visit", "--freeze-at", "5")
    survive(tmp_path, reference, faults, 3, arguments=arguments, micro_batches=4, script=SCRIPT, **CONFIG)


@pytest.mark.integration
def test_what_is_frozen_for_each_stage_stays_so_after_a_restart(tmp_path: Path, reference: Reference) -> None:
    """The restart goes on from a checkpoint behind it, so that the function is not called again."""
    arguments = ("--freeze-at", "3", "--save-at", "4")
    faults = [fault(rank, 6, "BackwardPass", 1) for rank in (0, 1)]
    result = run(tmp_path, "freeze-visit", *arguments, "--faults", json.dumps(faults), bamboo={})
    assert len(result.faults()) == 2 and result.exit_code == 0, result.output[-4000:]
    (restart,) = result.events("restart")
    assert restart["step"] > 3, "it goes on from behind the freezing"
    undisturbed = reference(3, 1, 4, "--steps", "8", "--way", "freeze-visit", *arguments, script=SCRIPT, **CONFIG)
    found = [each["losses"] for each in (*result.ranks().values(), *result.joined())]
    assert found and all(each == undisturbed.ranks()[0]["losses"] for each in found)


@pytest.mark.integration
@pytest.mark.parametrize("loss", [2, 6])
def test_freezing_is_told_and_after_a_loss_starts_again(tmp_path: Path, reference: Reference, loss: int) -> None:
    """Replicas follow what is frozen before a loss; after it a worker for each rank is needed: a restart has one."""
    arguments = ("--steps", "8", "--way", "freeze", "--freeze-at", "4")
    faults = [fault(1, loss, "BackwardPass", 1)]
    if loss > 4:
        result = survive(tmp_path, reference, faults, 3, arguments=arguments, micro_batches=4, script=SCRIPT, **CONFIG)
        assert "the script has frozen parameters of its stage between two calls" in result.output
        return
    result = run(tmp_path, *arguments[3:4], *arguments[4:], "--faults", json.dumps(faults), bamboo={})
    assert len(result.faults()) == 1 and result.exit_code == 0, result.output[-4000:]
    assert len(result.events("restart")) == 1
    assert "no process runs as rank 1 now. What its script would do to its own stage between two calls" in result.output
    undisturbed = reference(3, 1, 4, *arguments, script=SCRIPT, **CONFIG)
    found = [each["losses"] for each in (*result.ranks().values(), *result.joined())]
    assert found and all(each == undisturbed.ranks()[0]["losses"] for each in found)
