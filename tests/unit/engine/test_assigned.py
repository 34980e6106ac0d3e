"""What scripts assign after ``deepspeed.initialize``, on all copies of a stage."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from bamboo_ds.engine.context.records import Progress
from bamboo_ds.engine.iteration.committing import Commits
from bamboo_ds.engine.operations.training import Training
from bamboo_ds.engine.replicas.construction import Construction, Kept
from bamboo_ds.engine.replicas.refusals import check_optimizer, check_optimizer_hooks
from bamboo_ds.engine.replicas.replica import build_stage_module, capture, restore
from bamboo_ds.engine.script.assigned import ENGINE, MODULE, agree, describe, differing, fingerprint
from bamboo_ds.engine.script.changes import Adjustable, Adjusted
from bamboo_ds.engine.stage.layers import Layers
from bamboo_ds.engine.stage.runtime import BOUND_ATTRIBUTES, StageRuntime
from bamboo_ds.engine.stage.schedulers import Pristine, settings_of, take_step
from bamboo_ds.engine.stage.wrappers import stage_optimizer
from bamboo_ds.errors import ConfigError, Isolated, UnsupportedError
from bamboo_ds.topology import Role
from tests.support.docs import states

pytestmark = pytest.mark.claim("reference/guarantees.md")


# -- tables ---------------------------------------------------------------------------------------------------


def assigned_in(what: Any, owner: str) -> set[str]:
    """Attributes of ``owner`` that the source of ``what`` assigns."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(what)))
    stored = (each for each in ast.walk(tree) if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store))
    return {each.attr for each in stored if ast.unparse(each.value) == owner}


def test_every_attribute_has_a_treatment() -> None:
    """Those that are bound to a role, and those of a ``PipelineModule``, with what DeepSpeed's engine sets there."""
    assert set(ENGINE) == set(BOUND_ATTRIBUTES)
    of_modules = assigned_in(PipelineModule, "self") | assigned_in(PipelineEngine, "self.module")
    assert len(of_modules) > 20
    assert of_modules <= set(MODULE), "classify these in engine/assigned.py and docs/state.md"
    assert all(each.kind in ("followed", "own") or each.cure for each in (*ENGINE.values(), *MODULE.values()))


def test_the_list_is_that_of_the_code() -> None:
    kinds = {"replicated": "followed", "refused": "refused", "own": "own"}
    found: dict[str, dict[str, str]] = {"engine": {}, "PipelineModule": {}}
    for line in states():
        head, _, names = line.state.partition(": ")
        for place, known in found.items():
            if names and head in (f"of the {place}", f"of the `{place}`"):
                known.update(dict.fromkeys(re.findall("`([^`]+)`", names), kinds[line.treatment]))
    assert found["engine"] == {name: each.kind for name, each in ENGINE.items()}
    assert found["PipelineModule"] == {name: each.kind for name, each in MODULE.items()}


# -- the means ------------------------------------------------------------------------------------------------


class Net(PipelineModule):  # type: ignore[misc]  # DeepSpeed is untyped
    """Two stages of one layer, built without collectives."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.loss_fn, self.stage_id, self.parts = self.loss, 0, [0, 1, 2]
        self._layer_specs = [LayerSpec(nn.Linear, 2, 2), LayerSpec(nn.Linear, 2, 2)]
        self._local_start, self._local_stop, self.seed_layers, self.seed_fn = 0, 1, False, None
        self.activation_checkpoint_interval, self.is_checkpointable_results_interval = 0, None
        self.is_checkpointable_results, self.checkpointable_layers, self.activation_checkpoint_func = [], None, None
        self.forward_funcs, self.fwd_map, self.tied_modules, self.tied_weight_attrs = [], {}, nn.ModuleDict(), {}
        self._build()

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Optimizer(torch.optim.SGD):
    scale = 1.0


def runtimes(lr: float = 0.1, other_lr: float = 0.1, wraps: bool = False) -> tuple[StageRuntime, StageRuntime]:
    """The local one, and the replica of another stage."""
    mine = Net()
    found = []
    modules = mine, build_stage_module(mine, 1, torch.device("cpu"))
    for stage, (module, rate) in enumerate(zip(modules, (lr, other_lr), strict=True)):
        runtime = StageRuntime(Role(0, stage), owned=not stage)
        basic = Optimizer(module.parameters(), lr=rate)
        wrapper: Any = basic
        if wraps:
            wrapper = SimpleNamespace(optimizer=basic, clip_grad=1.0, loss_scaler=SimpleNamespace(cur_scale=8.0))
        runtime.attributes = dict.fromkeys(BOUND_ATTRIBUTES)
        runtime.attributes.update(module=module, optimizer=wrapper, basic_optimizer=basic)
        runtime.attributes.update(global_steps=3, global_samples=12, skipped_steps=0)
        runtime.layers = Layers(module)
        found.append(runtime)
    return found[0], found[1]


def changed(mine: StageRuntime, before: Adjustable) -> Adjusted:
    found = Adjustable.of(mine).since(before)
    if found.replacement is not None:
        mine.pristine = found.replacement.pristine
    return found


# -- PipelineModule -------------------------------------------------------------------------------------------


def test_attributes_of_the_module_are_those_of_every_copy() -> None:
    mine, theirs = runtimes()
    net, other = mine.module, theirs.module
    before = Adjustable.of(mine)
    assert not changed(mine, before)
    net.loss_fn, net.own = functools.partial(net.loss), {"loss": net.loss}
    net.weight, net.values = 0.5, [1, 2]
    net.table = torch.arange(3)
    net.set_checkpoint_interval(1)
    net.micro_offset, net._compiled_call_impl = 5, net._call_impl
    found = changed(mine, before)
    found.check(theirs)
    found.give(theirs)
    assert other.loss_fn.func.__self__ is other and other.own["loss"].__self__ is other
    assert (other.weight, other.values, other.activation_checkpoint_interval) == (0.5, [1, 2], 1)
    assert other.is_checkpointable_results == [True] == net.is_checkpointable_results
    assert other.table.equal(net.table) and other.table is not net.table
    assert "_compiled_call_impl" not in vars(other)
    assert vars(other).get("micro_offset") != 5
    before = Adjustable.of(mine)
    net.loss_fn = nn.CrossEntropyLoss(weight=torch.ones(2))
    changed(mine, before).give(theirs)
    assert other.loss_fn is not net.loss_fn and other.loss_fn.weight.equal(torch.ones(2))
    assert "loss_fn.weight" in theirs.layers.buffers() and not theirs.layers.kept()
    late = build_stage_module(net, 1, torch.device("cpu"))
    assert late.loss_fn.weight.equal(torch.ones(2)) and late.weight == 0.5
    before = Adjustable.of(mine)
    net.weight = 0.5
    assert not changed(mine, before), "the same again"


REFUSED = [f"engine.{name}" for name, each in ENGINE.items() if each.cure]
REFUSED += [f"engine.module.{name}" for name, each in MODULE.items() if each.cure and name != "tied_modules"]


@pytest.mark.parametrize("path", REFUSED)
def test_what_copies_cannot_follow_is_refused_by_its_name(path: str) -> None:
    mine, _ = runtimes()
    before = Adjustable.of(mine)
    place, _, name = path.rpartition(".")
    if place == "engine":
        mine.attributes[name] = SimpleNamespace() if name != "module" else Net()
        if name == "basic_optimizer":
            mine.attributes[name] = Optimizer(mine.module.parameters(), lr=0.1)
    else:
        setattr(mine.module, name, [torch.tanh])
    with pytest.raises(UnsupportedError, match=rf"assigned {path} after deepspeed\.initialize, .*: \w+"):
        changed(mine, before)


def test_parts_with_parameters_and_layers_in_the_place_of_others_are_refused() -> None:
    mine, _ = runtimes()
    before = Adjustable.of(mine)
    mine.module.forward_funcs[0] = torch.tanh
    with pytest.raises(UnsupportedError, match=r"engine\.module\.forward_funcs"):
        changed(mine, before)
    mine, _ = runtimes()
    before = Adjustable.of(mine)
    mine.module.loss_fn = nn.Linear(2, 2)
    with pytest.raises(UnsupportedError, match=r"engine\.module\.loss_fn .*its parameters are in no optimizer"):
        changed(mine, before)


# -- optimizers and schedulers --------------------------------------------------------------------------------


def test_attributes_of_optimizers_are_those_of_every_copy() -> None:
    mine, theirs = runtimes(wraps=True)
    before = Adjustable.of(mine)
    basic, wrapper = mine.attributes["basic_optimizer"], mine.attributes["optimizer"]
    basic.scale, basic.table, basic.rule = 0.5, {"a": [1]}, torch.tanh
    wrapper.clip_grad, wrapper.loss_scaler.cur_scale = 0.25, 4.0
    basic.rule = assigned_in
    changed(mine, before).give(theirs)
    other, around = theirs.attributes["basic_optimizer"], theirs.attributes["optimizer"]
    assert (other.scale, other.table, other.rule) == (0.5, {"a": [1]}, assigned_in)
    assert (around.clip_grad, around.loss_scaler.cur_scale) == (0.25, 4.0)
    before = Adjustable.of(mine)
    basic.table["a"].append(2)
    changed(mine, before).give(theirs)
    assert other.table == {"a": [1, 2]} and other.table is not basic.table
    before = Adjustable.of(mine)
    basic.average = torch.zeros(2)
    with pytest.raises(UnsupportedError, match=r"engine\.basic_optimizer\.average .*numbers, text and functions only"):
        changed(mine, before)


def test_lists_and_dictionaries_of_groups_are_followed() -> None:
    mine, theirs = runtimes()
    group, other = (runtime.attributes["basic_optimizer"].param_groups[0] for runtime in (mine, theirs))
    before = Adjustable.of(mine)
    group["script"] = {"step": 3, "bounds": [0.5, (1, None)]}
    changed(mine, before).give(theirs)
    assert other["script"] == group["script"] and other["script"]["bounds"] is not group["script"]["bounds"]
    before = Adjustable.of(mine)
    group["script"]["bounds"].append("x")
    found = changed(mine, before)
    found.check(theirs)
    found.give(theirs)
    assert other["script"] == {"step": 3, "bounds": [0.5, (1, None), "x"]}
    assert not changed(mine, Adjustable.of(mine)), "the parameters are none of them"


def test_an_engine_without_an_optimizer() -> None:
    ds: Any = SimpleNamespace()
    mine, theirs = runtimes()
    for runtime in (mine, theirs):
        runtime.attributes.update(optimizer=None, basic_optimizer=None)
        runtime.optimizer = stage_optimizer(ds, ds, runtime)
        runtime.layers = Layers(runtime.module)
        check_optimizer(None, copied=True), check_optimizer_hooks(None)
    with torch.no_grad():
        theirs.module.get_parameter("1.weight").zero_()
    runtime = StageRuntime(Role(0, 1), owned=False)
    runtime.attributes = {**theirs.attributes, "module": build_stage_module(mine.module, 1, torch.device("cpu"))}
    runtime.layers, runtime.optimizer = Layers(runtime.module), stage_optimizer(ds, ds, runtime)
    restore(runtime, capture(theirs))
    assert not runtime.module.get_parameter("1.weight").any() and len(list(runtime.tensors())) == 2
    replay: Any = SimpleNamespace(recorded=lambda kind: pytest.fail("it is refused before"))
    context, nothing = SimpleNamespace(binding=SimpleNamespace(local=mine)), None
    training: Any = Training(context, nothing, nothing, replay, *[nothing] * 3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="must provide optimizer during init"):
        training.train_batch(None)


def rates(runtime: StageRuntime, steps: int) -> list[Any]:
    optimizer, found = runtime.attributes["basic_optimizer"], []
    for _ in range(steps):
        optimizer.step()
        take_step(runtime.attributes["lr_scheduler"], 4)
        found.append(settings_of(optimizer))
    return found


def test_a_scheduler_that_comes_late_or_is_moved_is_that_of_every_copy() -> None:
    mine, theirs = runtimes()
    own = mine.attributes
    before = Adjustable.of(mine)
    own["lr_scheduler"] = scheduler = LambdaLR(own["basic_optimizer"], lambda step: 1 / (1 + step))
    own["basic_optimizer"].step()
    scheduler.step()  # it has a state already
    found = changed(mine, before)
    found.check(theirs)
    found.give(theirs)
    assert found.replacement and mine.pristine is theirs.pristine
    assert theirs.attributes["lr_scheduler"].optimizer is theirs.attributes["basic_optimizer"]
    assert rates(mine, 2) == rates(theirs, 2)
    before = Adjustable.of(mine)
    own["basic_optimizer"].step()
    scheduler.step()
    changed(mine, before).give(theirs)
    assert rates(mine, 2) == rates(theirs, 2) and scheduler.last_epoch == theirs.attributes["lr_scheduler"].last_epoch
    before = Adjustable.of(mine)
    own["lr_scheduler"] = None
    changed(mine, before).give(theirs)
    assert theirs.attributes["lr_scheduler"] is None is theirs.pristine


class Asking:
    """A scheduler of the script's own, of the engine and DeepSpeed's optimizer."""

    def __init__(self, engine: Any, wrapper: Any) -> None:
        self.engine, self.wrapper, self.count = engine, wrapper, 0

    def step(self) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def test_what_a_scheduler_refers_to_is_of_its_copy() -> None:
    mine, theirs = runtimes(wraps=True)
    engine = SimpleNamespace(lock=(each for each in ()))  # nothing copies it
    before = Adjustable.of(mine)
    mine.attributes["lr_scheduler"] = Asking(engine, mine.attributes["optimizer"])
    Adjustable.of(mine).since(before, (engine,)).give(theirs)
    copied = theirs.attributes["lr_scheduler"]
    assert copied.engine is engine and copied.wrapper is theirs.attributes["optimizer"]
    mine.attributes["lr_scheduler"] = SimpleNamespace(step=print)
    with pytest.raises(AttributeError):
        Adjustable.of(mine)
    with pytest.raises(UnsupportedError, match="lacks step, state_dict or load_state_dict"):
        Pristine(SimpleNamespace(step=print), mine.attributes["basic_optimizer"])


def test_stages_that_learn_at_other_rates() -> None:
    mine, theirs = runtimes(0.1, 0.01)
    before = Adjustable.of(mine)
    mine.attributes["lr_scheduler"] = LambdaLR(mine.attributes["basic_optimizer"], lambda step: 1.0)
    with pytest.raises(UnsupportedError, match=r"the groups of role \(0,1\) had another 'lr'"):
        changed(mine, before).check(theirs)


def test_a_copy_from_before_the_scheduler_was_replaced() -> None:
    fetch: Any = SimpleNamespace()
    construction = Construction(Role(0, 1), ("owner", "key"), fetch)
    mine, _ = runtimes()
    old = mine.pristine = Pristine(Asking(None, None), None)
    assert construction.scheduled_by(mine.pristine) is old
    before = Adjustable.of(mine)
    mine.attributes["lr_scheduler"] = Asking(None, None)
    told = changed(mine, before)
    construction.kept.append(Kept(5, told.give, told.replacement))
    assert mine.pristine is not old and construction.scheduled_by(mine.pristine) is old
    construction.forget(5)
    assert construction.scheduled_by(mine.pristine) is mine.pristine


# -- members compare ------------------------------------------------------------------------------------------


def test_what_members_compare() -> None:
    one, other = {"engine.module.loss_fn": describe(assigned_in)}, {"engine.module.loss_fn": describe(rates)}
    prints = [fingerprint(each) for each in (one, dict(one), other, {})]
    assert prints[0] == prints[1] != prints[2] and prints[3] == 0
    for mine, alike in ((prints[:2], True), (prints[1:3], False), ([0, prints[0], 0], False), ([0, 0], True)):
        assert agree(len(mine), float(sum(mine)), float(sum(each**2 for each in mine))) is alike
    assert differing({"m0": one, "m1": {}}) == f"engine.module.loss_fn (m0: {describe(assigned_in)}, m1: nothing)"
    assert not differing({"m0": one, "m1": one})
    assert describe(functools.partial(rates, 1)) != describe(functools.partial(rates, 2))
    assert describe(nn.CrossEntropyLoss()) != describe(nn.MSELoss()) and describe([1, "x"]) == "[1, 'x']"
    assert describe(torch.ones(2)) != describe(torch.zeros(2)) and describe(Net().loss) == "Net.loss"


class Agreement:
    """Sums what this member gives with what others do."""

    def __init__(self, members: dict[str, tuple[bool, dict[str, str]]], mine: str) -> None:
        self.members, self.mine = members, mine

    def all_reduce(self, vector: torch.Tensor) -> torch.Tensor:
        prints = [fingerprint(assigned) for _, assigned in self.members.values()]
        total = vector.clone()
        total[-4:-2] = torch.tensor([sum(prints), sum(each**2 for each in prints)], dtype=torch.float64)
        return total

    def exchange(self, value: Any) -> dict[str, Any]:
        assert self.members[self.mine] == tuple(value)
        return dict(self.members)


@pytest.mark.parametrize(
    ("members", "error", "message"),
    [
        ({"m0": (False, {"a": "1"}), "m1": (False, {"a": "1"})}, None, ""),
        (
            {"m0": (False, {}), "m1": (False, {"a": "1"})},
            UnsupportedError,
            r"on every rank\): a \(m0: nothing, m1: 1\)",
        ),
        ({"m0": (True, {}), "m1": (False, {"a": "1"})}, Isolated, "came to the job later"),
        ({"m0": (False, {"a": "1"}), "m1": (True, {})}, None, ""),
        ({"m0": (True, {}), "m1": (True, {"a": "1"})}, UnsupportedError, "on every rank"),
    ],
    ids=["alike", "on one rank", "not on this one that joined", "not on one that joined", "all joined"],
)
def test_the_commit_compares(members: Any, error: Any, message: str) -> None:
    progress = Progress(seed=1)
    progress.script.assigned = members["m0"][1]
    channel = SimpleNamespace(joiner=members["m0"][0])
    job: Any = SimpleNamespace(await_fence=lambda: None, boundary=lambda busy: 1, channel=channel)
    plan = SimpleNamespace(members=("m0", "m1"), epoch=1)
    epoch: Any = SimpleNamespace(job=job, plan=plan, member="m0", owns=lambda role: True)
    epoch.agreement, epoch.drain = Agreement(members, "m0"), lambda: None
    epoch.session = SimpleNamespace(confirm=lambda operation: None)
    nothing: Any = SimpleNamespace(busy=False)
    context: Any = SimpleNamespace(job=job, epoch=epoch, progress=progress)
    own: Any = SimpleNamespace(saves=nothing)
    commits = Commits(context, nothing, own, nothing, {}, ())
    if error is None:
        commits.agree(torch.zeros(3, dtype=torch.float64))
    else:
        with pytest.raises(error, match=message):
            commits.agree(torch.zeros(3, dtype=torch.float64))
    assert (progress.vector is None) == (error is not None), "the commit of what was refused is none"


def test_a_lost_owner_had_assigned_something_else() -> None:
    progress = Progress(seed=1, sequence=4)
    epoch: Any = SimpleNamespace(owns=lambda role: True)
    nothing: Any = SimpleNamespace()
    context: Any = SimpleNamespace(epoch=epoch, progress=progress)
    own: Any = SimpleNamespace(saves=nothing)
    commits = Commits(context, nothing, own, nothing, {}, ())
    progress.script.told_assigned[Role(0, 1)] = 3, 17
    assert commits._fingerprint() == 0, "of an operation that is over"
    progress.script.told_assigned[Role(0, 1)] = 4, 17
    with pytest.raises(UnsupportedError, match=r"lost owner of role \(0,1\): the script has not assigned the same"):
        commits._fingerprint()
