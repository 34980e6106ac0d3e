"""The check of a job's first steps: what passes it, what it finds, and that a job goes on as if it were not there."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass, LoadMicroBatch, RecvActivation, RecvGrad
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bamboo_ds.cli.demo import train as demo_train
from bamboo_ds.config import parse_block
from bamboo_ds.control.agent.command import worker_environment
from bamboo_ds.engine.context.lanes import RehearsalLanes, Stream
from bamboo_ds.engine.iteration.exactness import ExactChecks
from bamboo_ds.engine.iteration.facts import as_text, differences, only_rounded
from bamboo_ds.engine.stage.optimizers import PlainOptimizer
from bamboo_ds.engine.stage.tracing import Traces, content_checksum, owner_of, tensors_in
from bamboo_ds.errors import ConfigError, Inexact
from bamboo_ds.job_settings import JobSettings
from bamboo_ds.schedule import ResendActivation, ResendGrad, UseRole, rehearsal_passes, rehearsal_sends
from bamboo_ds.topology import Layout, Role, initial_plan, with_redundancy
from bamboo_ds.variables import checked_steps

from .support.faults import mark
from .support.jobs import SUPPORT, RunningJob, run_bamboo, write_config
from .support.settings import agent
from .support.sliced_jobs import SLICES
from .support.surviving import Reference, fault, survive

pytestmark = pytest.mark.claim("guides/exactness.md")

ROOT = Path(__file__).parents[1]
INEXACT = SUPPORT / "train_inexact.py"
CHECK = {"redundancy": {"check_exact": 3}}


def inexact(folder: Path, reaction: str, *culprits: str, faults: Sequence[dict[str, Any]] = (), steps: int = 4) -> Any:
    block = {"redundancy": {"check_exact": 3, "on_mismatch": reaction}}
    config = write_config(folder, block, 4, optimizer=None, scheduler=None)
    stages = len(culprits)
    options = ["--stages", str(stages), "--culprits", ",".join(culprits), "--steps", str(steps)]
    return run_bamboo(folder, stages, [*options, "--faults", json.dumps(faults)], config, INEXACT)


# -- jobs ---------------------------------------------------------------------------------------------------


@pytest.mark.integration
def test_the_demo_passes_with_a_ready_configuration(tmp_path: Path) -> None:
    config, script = ROOT / "configs" / "pipeline_tuned.json", Path(demo_train.__file__)
    with RunningJob(tmp_path, 4, ["--steps", "4"], config, script, options=["--check-exact", "3"]) as job:
        result = job.finish()
    assert result.exit_code == 0, result.output[-4000:]
    (event,) = result.events("exact_checked")
    assert (event["step"], event["steps"], event["stages"], event["not_rehearsed"]) == (3, 3, 4, [])
    said = "bamboo: the first 3 steps are exact: 4 stages computed again by their shadows in 1 of them"
    assert result.output.count(said) == 1 and f"{event['tensors']} tensors" in result.output
    assert not result.events("exact_mismatch")


@pytest.mark.integration
def test_each_culprit_is_named(tmp_path: Path) -> None:
    """One in each stage; none hides another, since a shadow computes from what the owner has been given."""
    result = inexact(tmp_path, "warn", "data", "backward", "global", "list")
    assert result.exit_code == 0, result.output[-4000:]
    assert len(result.events("step")) == 4
    found: dict[int, tuple[int, str, str]] = {}
    for event in result.events("exact_mismatch"):
        found.setdefault(event["role"][1], (event["step"], event["found"], event["tensors"][0]))
    assert found[0][:2] == (2, "replica") and found[0][2].startswith("parameter 0.linear.weight (by up to 0.0")
    assert found[1] == (2, "rehearsal", "gradient that layer 4 (Rounded) gives back in micro-batch 0")
    assert found[2] == (2, "rehearsal", "output of layer 7 (Counted) in micro-batch 0")
    assert found[3] == (2, "rehearsal", "output of layer 10 (Listed) in micro-batch 0")
    assert "step 3, stage 3 of pipeline 0: its shadow computes something else than its owner" in result.output
    assert "the check of the first 3 steps has found differences" in result.output
    assert not result.events("exact_checked")


@pytest.mark.integration
@pytest.mark.parametrize(
    ("culprits", "steps", "named"),
    [
        (("generator", "time"), 2, r"step 3, .* output of layer (1 \(Noisy\)|4 \(Timed\)) in micro-batch 0"),
        (("step", "step"), 1, r"step 1, .* its replica is not .* parameter [03]\.linear\.weight \(by up to 0\.001\)"),
    ],
    ids=["passes", "steps"],
)
def test_a_difference_ends_the_job(tmp_path: Path, culprits: tuple[str, ...], steps: int, named: str) -> None:
    """What passes differ in is found before the step."""
    result = inexact(tmp_path, "stop", *culprits)
    assert result.exit_code == 1
    assert re.search(f"Inexact: the check of the first steps: {named}", result.output), result.output[-4000:]
    assert len(result.events("step")) == steps


@pytest.mark.integration
def test_a_loss_in_a_rehearsal(tmp_path: Path, reference: Reference) -> None:
    """Its shadow goes on from what it has rehearsed; the check begins again and has a result in the end."""
    faults = [fault(1, 2, "ResendGrad", 1)]  # nothing is sent again but in a rehearsal, or after a loss
    result = survive(tmp_path, reference, faults, 3, arguments=("--steps", "16"), bamboo=CHECK)
    (event,) = result.events("exact_checked")
    first = event["step"] - 2
    assert first > 3 and f"bamboo: steps {first} to {event['step']} are exact" in result.output
    assert not result.events("exact_mismatch")


@pytest.mark.exhaustive
@pytest.mark.integration
@pytest.mark.parametrize(
    ("step", "culprits"),
    [
        pytest.param(0, ("global",) * 3, id="first"),
        pytest.param(1, ("global",) * 3, id="second"),
        pytest.param(1, ("none", "global", "none", "none"), id="one-stage"),
    ],
)
def test_a_loss_before_the_check_is_over_hides_nothing(tmp_path: Path, step: int, culprits: tuple[str, ...]) -> None:
    """What was taken over without the count of the script is computed otherwise; the check that begins again tells."""
    faults = [fault(1, step, "OptimizerStep")]
    result = inexact(tmp_path, "stop", *culprits, faults=faults, steps=30)
    assert result.exit_code == 1 and (tmp_path / mark(faults[0])).exists()
    named = (
        rf"Inexact: .*\(a member was lost in step {step + 2}, before the check was over: .*output of layer \d \(Counted"
    )
    assert re.search(named, result.output), result.output[-4000:]
    assert len(result.events("step")) < 30


@pytest.mark.exhaustive
@pytest.mark.integration
def test_where_nobody_is_left_to_check_it_is_told(tmp_path: Path) -> None:
    faults = [fault(1, 1, "OptimizerStep")]
    result = inexact(tmp_path, "stop", "global", "global", faults=faults, steps=6)
    assert result.exit_code == 0, result.output[-4000:]
    assert (tmp_path / mark(faults[0])).exists() and not result.events("exact_checked")
    assert result.output.count("nobody is left to check with: whether this script keeps something that replicas") == 1


@pytest.mark.exhaustive
@pytest.mark.integration
def test_tensor_slices_are_not_rehearsed_and_it_says_so(tmp_path: Path) -> None:
    config = write_config(tmp_path, CHECK, 2)
    result = run_bamboo(tmp_path, 4, ["--stages", "2", *SLICES, "--steps", "3"], config)
    assert result.exit_code == 0, result.output[-4000:]
    (event,) = result.events("exact_checked")
    assert event["stages"] == 0 and len(event["not_rehearsed"]) == 4 and event["tensors"] > 100
    assert "Not rehearsed (tensor slices): stage 0 of pipeline 0" in result.output


# -- parts --------------------------------------------------------------------------------------------------


@given(st.integers(1, 5), st.integers(1, 6), st.data())
def test_a_rehearsal_does_what_is_missing(stages: int, micro_batches: int, data: st.DataObject) -> None:
    """In each stage, from any number of redundant passes; what it receives its neighbours send, in order."""
    layout = Layout(1, stages + 1)
    plan = with_redundancy(initial_plan([f"m{n}" for n in range(layout.size)]), layout, True)
    lanes = RehearsalLanes(plan)
    assert lanes.roles == list(layout.roles) and lanes.reported == list(layout.roles)
    assert len({lane.tag for lane in lanes.all()}) == len(lanes.all())
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
        for instruction in rehearsal_sends(plan, member, lanes.roles, micro_batches):
            if isinstance(instruction, UseRole):
                current = instruction.role
                assert plan.owner(current) == member
                continue
            assert current is not None
            stream = {ResendActivation: Stream.ACTIVATION, ResendGrad: Stream.GRADIENT}[type(instruction)]
            to = Role(0, current.stage + (1 if stream is Stream.ACTIVATION else -1))
            assert lanes[stream, to].source == member and lanes[stream, to].destination == plan.shadow(to)
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
        epoch = SimpleNamespace(layout=Layout(1, 2), channel=SimpleNamespace(event=lambda *_, **__: None))
        ds, progress = SimpleNamespace(device=torch.device(device)), SimpleNamespace(steps=1)
        redundancy = SimpleNamespace(bears=False, check_exact=3 if asked else None)
        settings = SimpleNamespace(redundancy=redundancy)
        context: Any = SimpleNamespace(ds=ds, epoch=epoch, progress=progress, settings=settings)
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
