"""What replicas cannot have is refused, and what they must have they get."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
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


def test_what_cannot_be_frozen_exactly() -> None:
    """With fp16 it is refused; where another script is lost that would do the same, the job starts again."""
    layout = Layout(1, 3)
    plan = with_redundancy(initial_plan(["m0", "m1", "m2"]), layout, True)
    needed: list[bool] = []
    channel = SimpleNamespace(need_every_rank=lambda: needed.append(True))
    job = SimpleNamespace(newest_checkpoint=lambda plan: None, channel=channel)
    away = replace(
        plan, members=plan.members[:2], script_ranks=plan.script_ranks[:2], owners=("m0", "m1", "m1"), lost=("m2",)
    )
    for plan_now, optimizer, kind, reason in (
        (away, SimpleNamespace(), FatalLoss, r"freezes parameters, or makes them trainable, in stage 2 of pipeline 0"),
        (plan, FusedHalfOptimizer.__new__(FusedHalfOptimizer), UnsupportedError, "with fp16"),
    ):
        local: Any = SimpleNamespace(role=Role(0, 1), owned=True, optimizer=optimizer)
        calls = ScriptCalls.__new__(ScriptCalls)
        calls.context = SimpleNamespace(  # type: ignore[assignment]
            binding=SimpleNamespace(local=local, runtimes={local.role: local}),
            job=job,
            epoch=SimpleNamespace(plan=plan_now, job=job),
            progress=SimpleNamespace(script=SimpleNamespace(behind=False)),
        )
        with pytest.raises(kind, match=reason):
            calls._follow_freezing()
    assert needed == [True], "a restart has a worker for every rank"


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


# -- memory -----------------------------------------------------------------------------------------------


def test_there_is_no_bound_in_host_memory() -> None:
    assert default_budget(torch.device("cpu"), 1) is None
