"""What replicas cannot have is refused, and what they must have they get."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import bamboo_ds
from bamboo_ds import stages
from bamboo_ds.engine.iteration.recomputing import default_budget
from bamboo_ds.engine.iteration.replication import Mismatches
from bamboo_ds.engine.operations.script_calls import ScriptCalls
from bamboo_ds.engine.replicas.refusals import (
    check_gradients,
    check_layers,
    check_named_optimizer,
    check_optimizer,
    check_optimizer_hooks,
    check_step,
    compiled_in,
    hooks_of,
    refuse_compiled,
    refuse_hooks,
    registered,
)
from bamboo_ds.engine.stage.answers import Refusal, stepping_alone
from bamboo_ds.engine.stage.optimizers import FusedHalfOptimizer
from bamboo_ds.errors import ConfigError, FatalLoss, ReplicaDiffers, UnsupportedError
from bamboo_ds.topology import Layout, Role, initial_plan, with_redundancy

from .support.jobs import SUPPORT, Reference, run_bamboo, write_config
from .support.precisions import FP32_ZERO
from .support.surviving import fault, survive

pytestmark = pytest.mark.claim(
    "guides/exactness.md",
    "guides/scripts.md",
    "reference/guarantees.md",
    "reference/limits.md",
    "reference/settings.md",
)


# -- hooks ------------------------------------------------------------------------------------------------


def clamp(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.data.clamp_(-LIMIT, LIMIT)


LIMIT = 0.5
WHOLE = nn.Linear(2, 2)


data = nn.Linear(2, 2)


def clamp_data(passed: torch.optim.Optimizer, *_: Any) -> None:
    passed.param_groups[0]["params"][0].data.clamp_(max=1)


def clamp_whole(*_: Any) -> None:
    for parameter in WHOLE.parameters():
        parameter.data.clamp_(-LIMIT, LIMIT)


class Average:
    """An object of a script with copies of parameters."""

    def __init__(self, parameters: Any) -> None:
        self.copies = [p.detach().clone() for p in parameters]

    def update(self, *_: Any) -> None: ...


def test_hooks_of_optimizers_may_use_what_they_are_passed() -> None:
    linear = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
    limit = torch.tensor(0.5)
    optimizer.register_step_post_hook(clamp)
    optimizer.register_step_pre_hook(lambda passed, *_: passed.param_groups[0]["params"][0].clamp_(max=limit))
    optimizer.register_step_post_hook(clamp_data)  # an attribute, which has the name of a variable
    check_optimizer_hooks(optimizer)
    hooks: dict[str, Callable[..., None]] = {
        "Linear": lambda *_: linear.weight.data.clamp_(max=1),
        "SGD": lambda *_: optimizer.zero_grad(),
        "Parameter": functools.partial(clamp, linear.weight),
        "Tensor": Average(linear.parameters()).update,
    }
    hooks["Linear "] = clamp_whole
    for used, hook in hooks.items():
        handle = optimizer.register_step_post_hook(hook)
        name = "clamp" if used == "Parameter" else hook.__qualname__
        with pytest.raises(UnsupportedError, match=f"the hook .* of optimizer SGD uses a {used.strip()} ") as refused:
            check_optimizer_hooks(optimizer)
        assert name in str(refused.value)
        handle.remove()


def test_hooks_of_layers_are_named() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))
    before = hooks_of(net)
    refuse_hooks(hooks_of(net) - before)
    net[0].weight.register_hook(lambda gradient: gradient)
    net[0].weight.register_post_accumulate_grad_hook(clamp_whole)
    net[1].register_forward_hook(clamp_whole)
    net.register_full_backward_hook(clamp_whole)
    with pytest.raises(UnsupportedError, match="on_stage_built") as refused:
        refuse_hooks(hooks_of(net) - before)
    for named in (
        "<lambda> (backward_hooks of parameter '0.weight')",
        "clamp_whole (post_accumulate_grad_hooks of parameter '0.weight')",
        "clamp_whole (forward_hooks of module '1')",
        "clamp_whole (backward_hooks of the PipelineModule)",
    ):
        assert named in str(refused.value)


def test_hooks_that_come_later_are_told_from_earlier_ones() -> None:
    net = nn.Linear(2, 2)
    net.register_forward_hook(clamp_whole)
    before = registered()
    assert not hooks_of(net, before)
    for register in (net.register_forward_hook, net.weight.register_hook):
        handle = register(lambda *_: None)
        assert registered() > before and sum(hooks_of(net, before).values()) == 1
        handle.remove()
    assert not hooks_of(net, before) and len(hooks_of(net)) == 1


def test_layers_that_are_compiled_where_they_are() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert compiled_in(net) == frozenset()
    net[1]._compiled_call_impl = net[1]._call_impl
    assert compiled_in(net) == {"1"}
    refuse_compiled(compiled_in(net) - {"1"})
    with pytest.raises(UnsupportedError, match=r"compiled 1 of its stage.* engine's compile\(\)"):
        refuse_compiled(compiled_in(net))


def test_optimizers_whose_copies_would_differ() -> None:
    kinds = {
        name: type(name, (torch.optim.SGD,), {"__module__": "deepspeed.ops.adam"})
        for name in ("FusedAdam", "DeepSpeedCPUAdam", "FusedLamb")
    }
    for name, kind in kinds.items():
        optimizer = type("Own", (kind,), {})(nn.Linear(2, 2).parameters(), lr=0.1)
        check_optimizer(optimizer, copied=False)
        with nullcontext() if name == "FusedLamb" else pytest.raises(UnsupportedError, match=f"{name} .*torch_adam"):
            check_optimizer(optimizer, copied=True)
    for block, refused in (({}, True), ({"params": {"torch_adam": True}}, False), ({"params": {"lr": 1}}, True)):
        for kind in ("Adam", "AdamW", "SGD"):
            config = {"optimizer": {"type": kind, **block}}
            check_named_optimizer(config, copied=False)
            with pytest.raises(UnsupportedError, match="torch_adam") if refused and kind != "SGD" else nullcontext():
                check_named_optimizer(config, copied=True)
    check_named_optimizer({}, copied=True)
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # it marks the step
    check_optimizer(optimizer, copied=True)
    optimizer.step = types.MethodType(lambda self, closure=None: None, optimizer)  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=r"`step` of its own into its optimizer SGD.*subclass"):
            check_step(optimizer)
        torch.optim.lr_scheduler.StepLR(optimizer, 1)


def test_installers_are_called_in_turn_and_given_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "_installers", [])
    monkeypatch.setattr(stages, "_begun", False)
    calls: list[Any] = []

    @bamboo_ds.on_stage_built
    def install(module: Any, stage: int) -> None:
        calls.append((module, stage))

    bamboo_ds.on_stage_built(lambda module, stage: calls.append(stage))
    stages.built("module", 2)
    assert calls == [("module", 2), 2]
    with pytest.raises(ConfigError, match="call it before"):
        bamboo_ds.on_stage_built(install)


@pytest.mark.integration
def test_hooks_and_frozen_parameters_are_those_of_the_lost_stage(tmp_path: Path, reference: Reference) -> None:
    """Hooks on all copies; the loss comes in the iteration before which the script has frozen parameters."""
    faults = [fault(1, 3, "BackwardPass", 2)]
    result = survive(tmp_path, reference, faults, 3, 1, ("--steps", "7", "--hooks", "--freeze-at", "3"))
    assert result.events("replica_verified") and not result.events("replica_mismatch")


@pytest.mark.exhaustive
@pytest.mark.integration
def test_copies_of_partitions_have_what_was_frozen_since(tmp_path: Path, reference: Reference) -> None:
    """What DeepSpeed has partitioned stays partitioned; the check makes each replica anew after the first step."""
    faults = [fault(1, 4, "BackwardPass", 2)]
    arguments = ("--steps", "7", "--freeze-at", "0")
    survive(tmp_path, reference, faults, 3, 1, arguments, checked=True, **FP32_ZERO)


def test_what_cannot_be_frozen_exactly() -> None:
    """With fp16 it is refused; where another script is lost that would do the same, the job starts again."""
    layout = Layout(1, 3)
    plan = with_redundancy(initial_plan(["m0", "m1", "m2"]), layout, True)
    needed: list[bool] = []
    channel = SimpleNamespace(need_every_rank=lambda: needed.append(True))
    job = SimpleNamespace(newest_checkpoint=lambda plan: None)
    away = replace(plan, members=plan.members[:2], homes=plan.homes[:2], owners=("m0", "m1", "m1"), lost=("m2",))
    for plan_now, optimizer, kind, reason in (
        (away, SimpleNamespace(), FatalLoss, r"freezes parameters, or makes them trainable, in stage 2 of pipeline 0"),
        (plan, FusedHalfOptimizer.__new__(FusedHalfOptimizer), UnsupportedError, "with fp16"),
    ):
        local: Any = SimpleNamespace(role=Role(0, 1), owned=True, optimizer=optimizer)
        calls = ScriptCalls.__new__(ScriptCalls)
        calls.context = SimpleNamespace(  # type: ignore[assignment]
            binding=SimpleNamespace(local=local, runtimes={local.role: local}),
            epoch=SimpleNamespace(plan=plan_now, job=job, channel=channel),
            progress=SimpleNamespace(behind=False),
        )
        with pytest.raises(kind, match=reason):
            calls._follow_freezing()
    assert needed == [True], "a restart has a worker for every rank"


BATTERY = """
import sys
sys.path.insert(0, SUPPORT)
import argparse, functools
import deepspeed, torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn
from train import iterator

class Layer(nn.Linear):
    def __init__(self, sparse=False):
        super().__init__(16, 16)
        if sparse:
            self.table = nn.Embedding(4, 16, sparse=True)

    def forward(self, x):
        return super().forward(x) + (0 if self.training else torch.rand(()))

class Summing(torch.optim.SGD):
    def step(self, *arguments):
        super().step(*arguments)
        if SUMS:
            torch.distributed.all_reduce(torch.ones(1))

SUMS = []
parser = argparse.ArgumentParser()
parser.add_argument("--deepspeed_config")
parser.add_argument("--out")
arguments = parser.parse_args()
torch.manual_seed(1)
deepspeed.init_distributed()

def build(sparse=False):
    layers = [LayerSpec(Layer, sparse), LayerSpec(Layer, sparse)]
    return PipelineModule(layers, num_stages=2, loss_fn=nn.CrossEntropyLoss())

def begin(net):
    optimizer = functools.partial(Summing, lr=0.1)
    parameters = list(net.parameters())
    return deepspeed.initialize(args=arguments, model=net, model_parameters=parameters, optimizer=optimizer)[0]

def refused(what, function, *args):
    try:
        function(*args)
    except bamboo_ds.errors.UnsupportedError as error:
        print(f"{what} REFUSED {error}", flush=True)
    else:
        raise AssertionError(what)

import bamboo_ds.errors
refused("sparse", begin, build(True))
hooked = build()
next(hooked.parameters()).register_hook(lambda gradient: gradient)
refused("parameter", begin, hooked)
net = build()
aggregate = deepspeed.PipelineEngine._aggregate_total_loss
deepspeed.PipelineEngine._aggregate_total_loss = lambda engine: 100 * aggregate(engine)
refused("aggregate", begin, net)
deepspeed.PipelineEngine._aggregate_total_loss = aggregate
engine = begin(net)
data = iterator()
handle = net.register_forward_hook(lambda *_: None)
refused("late", engine.train_batch, data)
handle.remove()
handle = engine.basic_optimizer.register_step_post_hook(lambda *_: net.zero_grad())
refused("optimizer", engine.train_batch, data)
handle.remove()
engine.train_batch(data)
state = torch.random.get_rng_state()
engine.eval_batch(data)
assert torch.equal(torch.random.get_rng_state(), state), "the script's random numbers"
for _ in range(5):
    engine.train_batch(data)
handle = net.register_forward_hook(lambda *_: None)
refused("hook", engine.train_batch, data)
handle.remove()
layer = net.forward_funcs[0]
layer._compiled_call_impl = layer._call_impl
refused("compiled", engine.train_batch, data)
layer._compiled_call_impl = None
before = layer.weight
layer.weight = nn.Parameter(before.detach().clone())
refused("replaced", engine.train_batch, data)
layer.weight = before
reduction = deepspeed.runtime.pipe.schedule.ReduceGrads
reduce, engine._INSTRUCTION_MAP[reduction] = engine._INSTRUCTION_MAP[reduction], lambda engine: None
refused("instruction", engine.train_batch, data)
engine._INSTRUCTION_MAP[reduction] = reduce
def merge(engine, back):
    weight = engine.module.forward_funcs[0].weight.data
    before = weight.clone()
    weight.add_(1)
    weight.copy_(before) if back else weight.sub_(1)
bamboo_ds.for_each_stage(engine, lambda engine: merge(engine, True))
refused("visit", bamboo_ds.for_each_stage, engine, lambda engine: merge(engine, False))
SUMS.append(1)
engine.train_batch(data)
"""


@pytest.mark.integration
def test_a_job_says_what_it_refuses(tmp_path: Path) -> None:
    script = tmp_path / "battery.py"
    script.write_text(f"SUPPORT = {str(SUPPORT)!r}\n{BATTERY}")
    config = write_config(tmp_path, {}, 2, optimizer=None, scheduler=None)
    result = run_bamboo(tmp_path, 2, [], config, script)
    for expected in (
        "sparse REFUSED Embedding '0.table' has sparse gradients",
        "parameter REFUSED the script has registered hooks that other copies of this stage would not have: <lambda> (",
        "late REFUSED the script has registered hooks",
        "hook REFUSED the script has registered hooks",
        "compiled REFUSED the script has compiled ",
        "aggregate REFUSED the script has replaced PipelineEngine._aggregate_total_loss of DeepSpeed by <lambda> (",
        "instruction REFUSED the script has replaced PipelineEngine._INSTRUCTION_MAP[ReduceGrads] of DeepSpeed by ",
        "replaced REFUSED the script has put other parameters in the place of ",
        "visit REFUSED the function given to bamboo_ds.for_each_stage changes ",
        "optimizer REFUSED the hook <lambda> of optimizer Summing uses a PipelineModule",
        "optimizer Summing (or its hook, or its scheduler), in its step, calls a collective, allreduce over ranks [0,",
    ):
        assert expected in result.output, f"{expected}\n{result.output[-6000:]}"
    assert result.exit_code != 0
    assert len(result.events("step")) == 6


# -- gradients and steps ----------------------------------------------------------------------------------


def test_sparse_gradients() -> None:
    other = nn.Linear(2, 2)
    other.sparse = True
    check_layers(nn.Sequential(nn.Embedding(4, 2), other))
    net = nn.Sequential(nn.Embedding(4, 2), nn.EmbeddingBag(4, 2, sparse=True))
    with pytest.raises(UnsupportedError, match=r"EmbeddingBag '1' has sparse gradients.*sparse=False"):
        check_layers(net)
    torch.nn.functional.embedding(torch.tensor([1]), net[0].weight).sum().backward()
    check_gradients(net)
    net[0].weight.grad = None
    torch.nn.functional.embedding(torch.tensor([1]), net[0].weight, sparse=True).sum().backward()
    with pytest.raises(UnsupportedError, match=r"the gradients of 0\.weight are sparse"):
        check_gradients(net)


def test_only_the_optimizer_around_gets_answers() -> None:
    answers: list[Any] = []

    @contextmanager
    def answering(answer: Any) -> Iterator[None]:
        answers.append(answer)
        yield
        answers.pop()

    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append(answers[-1]))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # it marks the step
    marked = optimizer.step
    with stepping_alone(optimizer, answering):
        assert not answers
        optimizer.step()
        scheduler.step()
    assert optimizer.step is marked and not answers
    (refusal,) = seen
    assert isinstance(refusal, Refusal)
    with pytest.raises(UnsupportedError, match=r"optimizer SGD .* a collective, allreduce over ranks \[0, 1\]"):
        refusal((0, 1), "allreduce", ())


# -- replicas that differ ---------------------------------------------------------------------------------


def test_when_a_replica_is_not_mended() -> None:
    mismatches = Mismatches(every=10)
    role, other = Role(0, 1), Role(0, 0)
    assert not mismatches.note(role, 20)
    assert mismatches.has(role, 30) and not mismatches.has(other, 30)
    assert not mismatches.has(role, 40)  # it was equal in between
    assert not mismatches.note(role, 40)
    assert mismatches.note(role, 50)
    assert mismatches.note(role, 51)  # it is not mended, and says so in each commit
    mismatches.begin()
    assert not mismatches.has(role, 52)


def test_what_a_mismatch_says() -> None:
    error = ReplicaDiffers(0, 2, [f"parameter {n}" for n in range(12)], "SGD")
    assert error.role == (0, 2)
    for part in ("stage 2 of pipeline 0", "parameter 9 and 2 more", "(SGD)", "on_mismatch"):
        assert part in str(error)


@pytest.mark.integration
@pytest.mark.parametrize("reaction", ["stop", pytest.param("warn", marks=pytest.mark.exhaustive)])
def test_a_replica_that_differs_again(tmp_path: Path, reaction: str) -> None:
    config = write_config(tmp_path, {"redundancy": {"verify_every": 1, "on_mismatch": reaction}}, 2)
    arguments = ["--stages", "2", "--steps", "8", "--optimizer", "drifting"]
    result = run_bamboo(tmp_path, 2, arguments, config)
    assert "differs from its owner again after it was copied anew: parameter" in result.output, result.output[-4000:]
    steps, found = len(result.events("step")), result.events("replica_mismatch")
    assert found[0]["tensors"] == []
    if reaction == "stop":
        assert result.exit_code != 0 and steps < 8
        assert found[-1]["tensors"][0].startswith("parameter ")
    else:
        assert result.exit_code == 0 and steps == 8
        for role in ([0, 0], [0, 1]):
            first, second = [e["tensors"] for e in found if e["role"] == role]
            assert not first and len(second) == 1


# -- memory -----------------------------------------------------------------------------------------------


def test_there_is_no_bound_in_host_memory() -> None:
    assert default_budget(torch.device("cpu"), 1) is None


@pytest.mark.exhaustive
@pytest.mark.integration
def test_a_backward_pass_frees_its_part_of_the_budget(tmp_path: Path) -> None:
    redundancy = {"mode": "eager-frc-eager-brc", "placement": "fixed", "memory_budget_mb": 0.0001}
    config = write_config(tmp_path, {"redundancy": redundancy}, 6)
    result = run_bamboo(tmp_path, 2, ["--stages", "2", "--steps", "3"], config)
    assert result.exit_code == 0, result.output[-4000:]
    # The first stage's member runs both passes of the last stage before each gradient that it receives. In the first
    # step it has the labels from there, perhaps later.
    assert [event["frc_done"] >= 6 for event in result.events("step")][1:] == [True] * 2


@pytest.mark.integration
def test_redundant_passes_without_memory(tmp_path: Path, reference: Reference) -> None:
    """The loss comes in the same iteration; what the passes have changed of the layers' buffers is undone.

    So is what a rehearsal has changed that lacks memory in a step before.
    """
    # By then the first stage has received three gradients and tried a redundant forward before each of them.
    faults = [fault(1, 2, "BackwardPass", 5)]
    bamboo = {"redundancy": {"verify_every": 2, "placement": "fixed", "check_exact": 2}}
    arguments = ("--steps", "5", "--norm", "--exhaust-at", "1", "2")
    result = survive(tmp_path, reference, faults, 3, 1, arguments, bamboo=bamboo)
    assert "the rehearsal of role (0,1) has exhausted the memory, and is left out: no memory is left" in result.output
    assert "Not rehearsed (there is too little memory, see above): stage 0 of pipeline 0, stage 1" in result.output
    told = {(e["step"], *e["role"], e["dropped"]) for e in result.events("redundancy_exhausted")}
    assert (2, 0, 1, 2) in told
