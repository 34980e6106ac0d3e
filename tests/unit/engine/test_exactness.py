"""The check of a job's first steps: what passes it, what it finds, and that a job goes on as if it were not there."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass, LoadMicroBatch, RecvActivation, RecvGrad
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bamboo_ds.config import parse_block
from bamboo_ds.control.agent.command import worker_environment
from bamboo_ds.engine.context.channels import RehearsalChannels, Stream
from bamboo_ds.engine.iteration.exactness import ExactChecks
from bamboo_ds.engine.iteration.facts import as_text, differences, only_rounded
from bamboo_ds.engine.stage.optimizers import PlainOptimizer
from bamboo_ds.engine.stage.tracing import Traces, content_checksum, owner_of, tensors_in
from bamboo_ds.errors import ConfigError, Inexact
from bamboo_ds.job_settings import JobSettings
from bamboo_ds.schedule import ResendActivation, ResendGrad, UseRole, rehearsal_passes, rehearsal_sends
from bamboo_ds.topology import Layout, Role, initial_plan, with_redundancy
from bamboo_ds.variables import checked_steps
from tests.support.channels import Ends
from tests.support.settings import agent

pytestmark = pytest.mark.claim("guides/exactness.md")


# -- parts --------------------------------------------------------------------------------------------------


@given(st.integers(1, 5), st.integers(1, 6), st.data())
def test_a_rehearsal_does_what_is_missing(stages: int, micro_batches: int, data: st.DataObject) -> None:
    """In each stage, from any number of redundant passes; what it receives its neighbours send, in order."""
    layout = Layout(1, stages + 1)
    plan = with_redundancy(initial_plan([f"m{n}" for n in range(layout.size)]), layout, True)
    channels = RehearsalChannels(plan, Ends)
    assert channels.roles == list(layout.roles) and channels.reported == list(layout.roles)
    names = [channel.name for _, _, channel in channels]
    assert len({*names}) == len(names)
    role = data.draw(st.sampled_from(layout.roles))
    forwards = data.draw(st.integers(0, micro_batches))
    backwards = data.draw(st.integers(0, forwards))
    program = rehearsal_passes(layout, role, micro_batches, forwards, backwards)
    done: dict[type, list[int]] = {}
    for instruction in program:
        if not isinstance(instruction, UseRole):
            done.setdefault(type(instruction), []).append(instruction.buffer_id)
    missing = {ForwardPass: list(range(forwards, micro_batches)), BackwardPass: list(range(backwards, micro_batches))}
    first, last = role.stage == 0, role.stage == stages
    if not first:
        missing[RecvActivation] = missing[ForwardPass]
    if not last:
        missing[RecvGrad] = missing[BackwardPass]
    if first or last:
        missing[LoadMicroBatch] = missing[ForwardPass]
    assert done == {kind: which for kind, which in missing.items() if which}
    sent = {Stream.ACTIVATION: 0, Stream.GRADIENT: 0}
    for member in plan.members:
        current = None
        for instruction in rehearsal_sends(plan, member, channels.roles, micro_batches):
            if isinstance(instruction, UseRole):
                current = instruction.role
                assert plan.owner(current) == member
                continue
            assert current is not None
            stream = {ResendActivation: Stream.ACTIVATION, ResendGrad: Stream.GRADIENT}[type(instruction)]
            to = Role(0, current.stage + (1 if stream is Stream.ACTIVATION else -1))
            assert channels[stream, to].source == member and channels[stream, to].destination == plan.shadow(to)
            sent[stream] += 1
    assert set(sent.values()) == {stages * micro_batches}


def test_differences_are_named_in_order_and_to_the_bit() -> None:
    one, nan = torch.tensor([1.0, 2.0]), torch.tensor([math.nan])
    theirs = {"same": one, "nan": nan, "zero": torch.tensor(0.0), "far": one, "type": one, "count": "3", "trace": [1]}
    mine = {**theirs, "nan": nan.clone()}
    assert differences(mine, theirs) == []
    mine |= {
        "zero": torch.tensor(-0.0),
        "far": one + 0.25,
        "type": one.double(),
        "count": "4",
        "trace": [2],
        "own": "1",
    }
    assert differences(mine, theirs) == [
        "zero (by up to 0)",
        "far (by up to 0.25)",
        "type (torch.float64 (2,) instead of torch.float32 (2,))",
        "count (4 instead of 3)",
        "trace",
        "own (only the shadow has it)",
    ]
    assert differences({}, {"theirs": "1"}) == ["theirs (only the owner has it)"]
    named: Any = torch.tensor([1.5, 2.0])
    named.numel, named.cpu, named.detach = 1, "", None  # attributes of a script's
    assert differences({"far": named}, {"far": one}) == ["far (by up to 0.5)"]


def test_equal_objects_of_two_processes_are_one_text() -> None:
    """They have other addresses and hashes there."""
    first, second = SimpleNamespace(a=object()), SimpleNamespace(a=object())
    assert repr(first) != repr(second) and as_text(first) == as_text(second)
    assert as_text({"b", "a"}) == "{'a', 'b'}" and as_text(0.1) != as_text(0.1 + 2**-56)


def test_what_may_be_rounding_does_not_end_a_job_on_devices_that_round(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = {"output of a layer": [1], "gradient": torch.tensor([1.0, -2.0, 0.0]), "losses": torch.tensor([0.5])}
    rounded = {**theirs, "output of a layer": [2], "gradient": torch.tensor([1.0, -2.0, 0.1])}
    wrong = {**theirs, "losses": torch.tensor([0.6])}
    assert only_rounded(rounded, theirs) and not only_rounded(wrong, theirs)
    unknown = {**theirs, "output of a layer": [2]}, {**rounded, "count": "1"}, {**rounded, "losses": "0.5"}
    assert not any(only_rounded(mine, theirs) for mine in unknown)
    told: list[str] = []
    monkeypatch.setattr(
        "bamboo_ds.engine.iteration.conclusions.logger", SimpleNamespace(error=lambda _, e: told.append(str(e)))
    )
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: enabled)
    enabled = False

    def ends(mine: Any, device: str = "cuda", asked: bool = False, what: str = "rehearsal") -> bool:
        epoch = SimpleNamespace(layout=Layout(1, 2))
        job = SimpleNamespace(channel=SimpleNamespace(event=lambda *_, **__: None))
        ds, progress = SimpleNamespace(device=torch.device(device)), SimpleNamespace(steps=1)
        redundancy = SimpleNamespace(bears=False, check_exact=3 if asked else None)
        settings = SimpleNamespace(redundancy=redundancy)
        context: Any = SimpleNamespace(ds=ds, job=job, epoch=epoch, progress=progress, settings=settings)
        checks: Any = ExactChecks(context, None, None, None)  # type: ignore[arg-type]
        try:
            checks._compare(Role(0, 1), mine, theirs, what)
        except Inexact:
            return True
        return False

    assert not ends(theirs) and not told
    assert not ends(rounded) and len(told) == 1 and "is not deterministic" in told[0]
    assert ends(wrong) and ends(rounded, "cpu") and ends(rounded, asked=True) and ends(rounded, what="replica")
    enabled = True
    assert ends(rounded)


class Stage(nn.Module):
    """As much of a ``PipelineModule`` as is looked at."""

    def __init__(self, *layers: Any) -> None:
        super().__init__()
        self.forward_funcs, self._local_start, self._layer_specs = list(layers), 4, [None] * (4 + len(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.forward_funcs:
            x = layer(x)
        return x


def test_traces_name_layers_and_leave_no_hooks() -> None:
    stage, traces = Stage(nn.Linear(2, 2), torch.neg, nn.ReLU(inplace=True)), Traces()
    for _ in range(2):  # a pass that is done again counts once
        with traces.of("role", stage, 0):
            found = stage(torch.ones(1, 2))
        found.sum().backward()
    linear, relu = "output of layer 4 (Linear) in micro-batch 0", "output of layer 6 (ReLU) in micro-batch 0"
    assert {name: len(sums) for name, sums in traces.forward("role").items()} == {linear: 1, relu: 1}
    assert set(traces.backward("role")) == {
        "gradient that layer 5 (neg) gives back in micro-batch 0",
        "gradient that the loss function gives back in micro-batch 0",
    }
    assert not any(layer._forward_hooks for layer in stage.forward_funcs if isinstance(layer, nn.Module))
    hooked = stage.forward_funcs[0]
    hooked._compiled_call_impl = hooked._call_impl
    with traces.of("role", stage, 1):
        assert not hooked._forward_hooks, "it would be compiled again"
    traces.clear()
    assert not traces.forward("role") and not traces.backward("role")


def test_what_no_optimizer_steps_is_not_compared() -> None:
    stage, role = Stage(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)), Role(0, 0)
    for number, layer in enumerate(stage.forward_funcs, 4):
        stage.add_module(str(number), layer)
    known = stage.get_parameter("5.weight")

    class Sharded:
        def local(self) -> list[torch.Tensor]:
            return [torch.ones(2, 2)]

        def groups(self) -> list[list[nn.Parameter]]:
            return [[known]]

        def part(self, sums: list[torch.Tensor], parameter: nn.Parameter) -> torch.Tensor:
            return sums[[id(known)].index(id(parameter))]

    share = SimpleNamespace(part=SimpleNamespace(activations={0: torch.ones(2)}))
    runtime = SimpleNamespace(module=stage, optimizer=Sharded(), share=share)
    binding = SimpleNamespace(runtimes={role: runtime})
    epoch = SimpleNamespace(layout=SimpleNamespace(stages=2))
    context: Any = SimpleNamespace(ds=SimpleNamespace(micro_batches=1), binding=binding, epoch=epoch)
    checks = ExactChecks(context, None, None, None)  # type: ignore[arg-type]
    facts = checks._computed(role)
    assert [name for name in facts if name.startswith("gradient of ")] == ["gradient of 5.weight"]


def test_state_of_an_optimizer_is_compared_whatever_it_is() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = PlainOptimizer.__new__(PlainOptimizer)
    net = nn.ParameterDict({"w": parameter})
    optimizer.inner = torch.optim.SGD([parameter], lr=0.1)
    optimizer._runtime = SimpleNamespace(module=net)  # type: ignore[assignment]
    optimizer.inner.state[parameter] = {"step": 3, "Q": [torch.eye(2), None], "beta": 0.5, "m": torch.ones(2)}
    found = dict(optimizer.named_tensors())
    assert list(found) == ["state Q 0 of w", "state beta of w", "state m of w", "state step of w"]
    assert found["state step of w"].item() == 3 and found["state beta of w"].dtype == torch.float64


class Settings:
    """Arguments of a layer, as many models keep them."""


def test_a_parameter_belongs_to_the_layer_that_uses_it() -> None:
    first, second, tied = (nn.Linear(2, 2) for _ in range(3))
    first.args = Settings()
    stage = Stage(first, functools.partial(tied.forward, tied), second)
    for number, layer in ((4, first), (6, second)):
        stage.add_module(str(number), layer)
    stage.tied_modules = nn.ModuleDict({"embedding": tied})
    names = ("4.weight", "6.weight", "tied_modules.embedding.weight", "other")
    assert [owner_of(stage, name) for name in names] == [4, 6, 5, -1]


def test_the_number_of_steps_comes_from_the_block_the_option_or_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    usual, without = parse_block({}), parse_block({"redundancy": {"mode": "none"}})
    assert usual.redundancy.steps_to_check() == 3
    assert without.redundancy.steps_to_check() == 0
    for steps in (0, 5):
        told = usual.overridden({"redundancy.check_exact": steps})
        assert told.redundancy.steps_to_check() == steps
    with pytest.raises(ConfigError, match=r'--check-exact, BAMBOO_CHECK_EXACT\) is 2, and .*mode" is "none"'):
        JobSettings.resolve(without, {"check_exact": 2})
    with pytest.raises(ConfigError, match="BAMBOO_CHECK_EXACT is '-1': set it to the number of steps"):
        checked_steps({"BAMBOO_CHECK_EXACT": "-1"})
    assert checked_steps({}) is None and checked_steps({"BAMBOO_CHECK_EXACT": "4"}) == 4
    monkeypatch.setenv("BAMBOO_CHECK_EXACT", "7")  # of another job that this process is in
    for told in (None, 0, 4):
        settings = replace(agent(), settings=JobSettings.resolve(parse_block({}), {"check_exact": told}))
        environment = worker_environment(settings, "m")
        assert "BAMBOO_CHECK_EXACT" not in environment
        known = JobSettings.model_validate_json(environment["BAMBOO_SETTINGS"])
        assert known.of_script(parse_block({"redundancy": {"check_exact": told}})).redundancy.check_exact == told


def test_containers_of_layers_may_be_classes_of_their_own() -> None:
    class Outputs(tuple[Any, ...]):
        pass

    class Kept(dict[str, Any]):
        pass

    one, other = torch.ones(1), torch.ones(2)
    assert tensors_in([Outputs((one, 3)), Kept(hidden=other)]) == [one, other]


@pytest.mark.parametrize("size", [262_143, 262_144, 262_145, 1_000_003])
def test_a_checksum_sees_each_bit_and_the_order(size: int) -> None:
    """Also of contents so large that their rows are folded first, whole rows or not, and of another dtype."""
    contents = torch.randn(size, generator=torch.Generator().manual_seed(1))
    found = {content_checksum(contents)}
    for place in (0, 1, size // 2, size - 1):
        other = contents.clone()
        other.view(torch.int32)[place] ^= 1 << place % 32
        found.add(content_checksum(other))
    row = 1 << 15
    swapped = contents.clone()
    swapped[:row], swapped[row : 2 * row] = contents[row : 2 * row], contents[:row]
    found.add(content_checksum(swapped))
    assert len(found) == 6
    assert content_checksum(contents.view(torch.int32)) == content_checksum(contents) == content_checksum(contents, 0)
    assert content_checksum(contents, 1) != content_checksum(contents)
