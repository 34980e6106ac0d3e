"""Sums in the middle of iterations: jobs whose losses go on from them compute what undisturbed ones compute.

Which sums those are: :mod:`tests.unit.schedule.test_resume`; losses at every cut:
:mod:`tests.model.test_takeover_cuts`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from bamboo_ds.config import BambooConfig, parse_block
from bamboo_ds.config_parts import RedundancyMode
from bamboo_ds.engine.iteration.redundant import RedundantPasses
from bamboo_ds.engine.iteration.sums import PartialSums, Sums
from bamboo_ds.engine.stage.blocks import StageBlocks
from bamboo_ds.engine.stage.layers import Layers
from bamboo_ds.engine.stage.optimizers import PlainOptimizer
from bamboo_ds.engine.stage.sharded import ZeroOptimizer
from bamboo_ds.engine.stage.work import Part
from bamboo_ds.errors import ConfigError, ProtocolError
from bamboo_ds.schedule import NETWORK_SHARE, PartProgress, affordable, syncs
from bamboo_ds.topology import Layout, Role, initial_plan, with_redundancy
from tests.support.jobs import TRAIN
from tests.support.planning import plan_of
from tests.support.simulated_deepspeed import WIDTH, Stage

pytestmark = pytest.mark.claim("README.md", "guides/exactness.md", "reference/guarantees.md", "reference/settings.md")


@dataclass(frozen=True)
class Case:
    """A job; ``kept``: backward passes that its losses do not redo, at least."""

    faults: list[dict[str, Any]]
    kept: int
    mode: str = "lazy-frc-lazy-brc"
    every: int = 1
    stages: int = 4
    pipelines: int = 1
    options: tuple[str, ...] = ()
    own: bool = False
    script: Path = TRAIN
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def block(self) -> dict[str, Any]:
        """The ``"bamboo"`` block."""
        return {"redundancy": {"mode": self.mode, "sync_every": self.every, "verify_every": 1}}


def of(precision: dict[str, Any], *faults: dict[str, Any], pipelines: int = 2, stages: int = 2) -> Case:
    return Case(list(faults), 3, stages=stages, pipelines=pipelines, config=precision)


def test_how_often_sums_are_sent() -> None:
    """As long as sending takes, by powers of two; never where no number of micro-batches is enough."""
    every = [affordable(seconds, 16, 1.0, NETWORK_SHARE) for seconds in (0.0, 0.2, 0.5, 1.0, 2.0, 4.0, 5.0)]
    assert every == [1, 1, 2, 4, 8, 0, 0]
    assert affordable(0.0, 16, 0.001, NETWORK_SHARE) == 0, "what is sent at all takes some milliseconds"


@pytest.mark.parametrize("value", [-1, 1.5, "often"])
def test_what_is_no_number_of_micro_batches(value: Any) -> None:
    with pytest.raises(ConfigError, match=r'"bamboo.redundancy.sync_every" is'):
        parse_block({"redundancy": {"sync_every": value}})


def test_a_part_goes_to_another_place() -> None:
    part = Part(0, 1, {"inputs": list(range(6))})
    part.forwards, part.backwards = 5, 1
    for m in range(5):
        part.activations[m] = part.gradients[m] = torch.tensor(float(m))
        part.marks[m + 1] = {}
    part.given = {1: torch.tensor(1.0), 2: torch.tensor(2.0), 4: torch.tensor(4.0)}
    assert part.gradients_held == 3
    part.forget(PartProgress(0, 1, 5, 2, 2))
    assert part.progress() == PartProgress(0, 1, 5, 2, 2)
    assert part.buffers["inputs"] == [None, None, 2, 3, 4, None]
    assert list(part.activations) == [2, 3, 4] and not part.gradients and list(part.marks) == [3, 4, 5]
    assert part.gradients_held == 3
    part.use_given(3)
    assert list(part.given) == [2]
    with pytest.raises(ProtocolError, match=r"gradients of micro-batches \[3\] are gone"):
        part.use_given(4)
    part.forget(PartProgress())
    assert part.buffers["inputs"] == [None] * 6 and not part.activations and not part.marks


def test_sums_are_laid_out_as_autograd_has_them() -> None:
    """Norms add up in the order of memory."""
    convolution = torch.nn.Conv2d(3, 4, 2, dtype=torch.float32).to(memory_format=torch.channels_last)
    convolution(torch.randn(2, 3, 5, 5)).sum().backward()
    optimizer = PlainOptimizer.__new__(PlainOptimizer)
    parameters = list(convolution.parameters())
    grads = [parameter.grad for parameter in parameters]
    sums = optimizer.accumulated(parameters)
    optimizer.accumulate_on(parameters, [total.contiguous() for total in sums if total is not None])
    for parameter, before in zip(parameters, grads, strict=True):
        assert before is not None and parameter.grad is not None and parameter.grad is not before
        assert parameter.grad.stride() == before.stride() and torch.equal(parameter.grad, before)
    optimizer.accumulate_on(parameters, [None, None])
    assert optimizer.accumulated(parameters) == [None, None]


def test_sums_of_zero_are_not_rounded() -> None:
    """DeepSpeed adds up in another precision than it reduces in, and has rounded what it gives to the reduction."""
    optimizer, parameter = ZeroOptimizer.__new__(ZeroOptimizer), torch.nn.Parameter(torch.zeros(2).bfloat16())
    optimizer.wrapper = SimpleNamespace(
        use_grad_accum_attribute=True, get_gradient_for_reduction=lambda p: p.grad_accum.to(p.dtype)
    )
    total = torch.tensor([1.0, 1 / 3])
    optimizer.accumulate_on([parameter], [total.clone()])
    (found,) = optimizer.accumulated([parameter])
    assert found is not None and found.dtype == torch.float32 and torch.equal(found, total)


def test_what_redundant_passes_keep_is_bounded_after_sums() -> None:
    """Also where sums have come before the first of them."""
    part: Any = Part(0, 1, {})
    part.forget(PartProgress(0, 1, 2, 2, 2))
    replica: Any = SimpleNamespace(share=SimpleNamespace(part=part))
    context: Any = SimpleNamespace(
        binding=SimpleNamespace(replicas=lambda: [replica]),
        settings=BambooConfig.model_validate({"redundancy": {"memory_budget_mb": 1}}),
    )
    passes = RedundantPasses(context, *[None] * 6)  # type: ignore[arg-type]
    assert not passes._over_budget(replica)
    part.forwards, part.saved[2] = 3, 2**20
    assert passes._over_budget(replica)


def test_marks_are_made_for_those_who_could_go_on_from_sums() -> None:
    """A stage that has no shadow keeps none."""
    layout = Layout(1, 2)
    for redundant in (False, True):
        plan, part = initial_plan(["a", "b"]), Part(0, 1, {})
        share = SimpleNamespace(part=part, helps=False)
        layers = SimpleNamespace(capture=lambda whole: {})
        runtime = SimpleNamespace(
            role=Role(0, 0), owned=True, share=share, layers=layers, at_ends=lambda part, stages: (True, False)
        )
        context: Any = SimpleNamespace(
            binding=SimpleNamespace(current=runtime),
            ds=SimpleNamespace(micro_batches=4),
            epoch=SimpleNamespace(plan=with_redundancy(plan, layout, redundant)),
            layout=layout,
        )
        sums = PartialSums(context)
        sums.every, part.forwards = 1, 1
        sums.mark()
        assert list(part.marks) == [1] * redundant


def test_that_sums_cost_too_much_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """4 GB on a network of 3 GB per second, in iterations of 4.8 s: nothing, of 480 s: after two micro-batches."""
    channel = SimpleNamespace(source="a", destination="b", rate=3e9)
    runtime = SimpleNamespace(role=Role(0, 0), trainable=lambda: [SimpleNamespace(nbytes=4e9)])
    context: Any = SimpleNamespace(
        binding=SimpleNamespace(owned=lambda: [runtime]),
        ds=SimpleNamespace(micro_batches=32, device=torch.device("cuda")),
        epoch=SimpleNamespace(
            plan=SimpleNamespace(epoch=1),
            member="a",
            channels=SimpleNamespace(of=lambda stream, role: [channel]),
        ),
        mode=RedundancyMode.LAZY,
        settings=BambooConfig(),
    )
    sums = PartialSums(context)
    with caplog.at_level("INFO", "bamboo_ds"):
        sums.begin()
        assert sums.every == 0 and not caplog.records, "nothing is measured yet"
        for seconds, every in ((4.8, 0), (4.8, 0), (480.0, 1), (4.8, 0)):
            sums._micro_batch_s = seconds / 32
            sums.begin()
            assert sums.every == every
    (record,) = caplog.records
    assert "no sums are sent in the middle of iterations of 4.8 s, since they take 1.33 s of the" in record.message


def sending(channel: Any, accumulated: Any) -> tuple[PartialSums, Any]:
    """A member that is to send the sums of micro-batch 0 of its stage to member b."""
    part = Part(0, 1, {})
    part.marks[1] = {"layers": {}, "losses": {}}
    optimizer = SimpleNamespace(accumulated=accumulated)
    runtime = SimpleNamespace(role=Role(0, 0), share=SimpleNamespace(part=part), optimizer=optimizer)
    runtime.results = SimpleNamespace(consumed={})
    context: Any = SimpleNamespace(
        binding=SimpleNamespace(current=runtime),
        layout=SimpleNamespace(slices=1),
        progress=SimpleNamespace(sequence=5),
        mode=RedundancyMode.LAZY,
        settings=parse_block({"redundancy": {"sync_every": 1}}),
        epoch=SimpleNamespace(
            plan=SimpleNamespace(epoch=1),
            member="a",
            channels=SimpleNamespace(of=lambda stream, role: [channel]),
            session=SimpleNamespace(confirm=lambda what: None),
        ),
    )
    sums = PartialSums(context)
    sums.begin()
    sums.__dict__["_parameters"] = lambda runtime, part: []
    return sums, part


@pytest.mark.parametrize("leaving", [0, 1, 2, 5])
def test_sums_that_the_network_has_not_taken_are_not_added_to(leaving: int) -> None:
    """Else they would be as many as an iteration has, where passes of the other member keep the network busy."""
    sent: list[Any] = []
    channel = SimpleNamespace(source="a", leaving=lambda: leaving, send=lambda *message: sent.append(message))
    sums, part = sending(channel, lambda parameters: [])
    sums.send(0)
    assert len(sent) == (leaving < 2) and not part.marks


def test_sums_that_find_no_memory_are_not_sent_under_this_plan(caplog: pytest.LogCaptureFixture) -> None:
    def full(parameters: object) -> None:
        raise torch.OutOfMemoryError("there is none")

    sums, _ = sending(SimpleNamespace(source="a", leaving=lambda: 0), full)
    assert sums.every == 1
    sums.send(0)
    assert sums.every == 0 and "no sums of gradients are sent" in caplog.text
    sums.begin()
    assert sums.every == 0
    sums.epoch.plan.epoch = 2
    sums.begin()
    assert sums.every == 1


def test_a_part_goes_back_and_leaves_what_others_have_alone() -> None:
    """Graphs of the other part go on being used, and would find that what they have saved was written to."""
    stage = Stage(1, 2, False, seed=1, statistics=True)
    layers = Layers(stage)
    runtime: Any = SimpleNamespace(
        blocks=2, layers=layers, stage=StageBlocks(stage, 2), at_ends=lambda part, stages: (False, False)
    )
    first = layers.undo()
    stage(torch.ones(2, WIDTH))
    seen = [stage.get_buffer(f"{number}.seen") for number in range(2)]
    values, versions = [each.clone() for each in seen], [each._version for each in seen]
    sums = PartialSums.__new__(PartialSums)
    sums.context = cast(Any, SimpleNamespace(layout=SimpleNamespace(stages=3)))
    sums._put_back(runtime, Part(0, 1, {}), Sums(0, [], first, {}, {}))
    assert seen[0] == 0 and seen[1] == values[1] != 0
    assert seen[1]._version == versions[1]


def test_whose_sums_somebody_could_use() -> None:
    """Those of a role with a shadow, of one that is copied, and of slices, which go back to their own."""
    sliced, plain = Layout(2, 2, slices=2), Layout(1, 2)
    assert all(syncs(plan_of(sliced, redundant=False), role) for role in sliced.roles)
    assert all(syncs(plan_of(plain), role) for role in plain.roles)
    alone = plan_of(plain, redundant=False)
    assert not any(syncs(alone, role) for role in plain.roles)
    copied = replace(alone, builders=((1, "m0"),))
    assert [syncs(copied, role) for role in plain.roles] == [False, True]
