"""What a step depends on besides parameters and gradients (``docs/state.md``), where no other file tests it."""

from __future__ import annotations

import functools
import json
import random
import threading
import types
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.activation_checkpointing import checkpointing
from torch import nn

from bamboo_ds.engine.context.history import History
from bamboo_ds.engine.context.records import Progress
from bamboo_ds.engine.joining.replay import Replay
from bamboo_ds.engine.replicas.replica import build_stage_module, check_structure, structure_of, with_own_parts
from bamboo_ds.engine.script.changes import Weights
from bamboo_ds.engine.script.flags import FLAGS, compare_flags, flags_here, uncertain
from bamboo_ds.engine.stage.layers import Layers
from bamboo_ds.engine.stage.references import Rebinding
from bamboo_ds.engine.stage.rng import keyed_attributes
from bamboo_ds.errors import ConfigError, UnsupportedError

pytestmark = pytest.mark.claim("guides/exactness.md", "reference/guarantees.md", "reference/limits.md")

CPU = torch.device("cpu")

# -- settings of processes ----------------------------------------------------------------------------------


def test_every_setting_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_float32_matmul_precision(
        "highest"
    )  # the default; torch tells a default that was set from one that was not
    before = flags_here(CPU)
    compare_flags({"m0": before, "m1": flags_here(CPU)}, "m0")
    changes: dict[str, tuple[Any, Any, Any]] = {
        "torch.set_default_dtype": (torch.set_default_dtype, torch.float64, torch.float32),
        "torch.set_float32_matmul_precision": (torch.set_float32_matmul_precision, "medium", "highest"),
        "torch.use_deterministic_algorithms": (torch.use_deterministic_algorithms, True, False),
        "torch.set_flush_denormal": (torch.set_flush_denormal, True, False),
        "torch.set_num_threads (OMP_NUM_THREADS)": (torch.set_num_threads, torch.get_num_threads() + 1, None),
        "torch.backends.cuda.enable_math_sdp": (torch.backends.cuda.enable_math_sdp, False, True),
    }
    for name, (change, to, back) in changes.items():
        back = torch.get_num_threads() if back is None else back
        change(to)
        try:
            after = flags_here(CPU)
        finally:
            change(back)
        assert after[name] != before[name], name
        with pytest.raises(ConfigError, match="different settings") as refused:
            compare_flags({"m0": before, "m1": after}, "m0")
        assert f"{name} is {before[name]} on m0 and {after[name]} on m1" in str(refused.value)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.setattr(checkpointing, "CPU_CHECKPOINT", True)
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    hook = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        after = flags_here(CPU)
    finally:
        hook.remove()
    monkeypatch.undo()
    assert {name for name in before if before[name] != after[name]} == {
        "torch.backends.cudnn.benchmark",
        "deepspeed.checkpointing.configure: CPU_CHECKPOINT",
        "MKL_CBWR",
        "torch.nn.modules.module._global_forward_hooks",
    }
    assert flags_here(CPU) == before


def test_members_with_other_kernels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    models = iter((("A100", 108), ("A100", 108), ("H100", 132)))

    def properties(device: torch.device) -> SimpleNamespace:
        name, count = next(models)
        return SimpleNamespace(name=name, multi_processor_count=count)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    gpu = torch.device("cuda")
    first, alike, other = (flags_here(gpu) for _ in range(3))
    compare_flags({"m0": first, "m1": alike}, "m0")
    with pytest.raises(
        ConfigError, match=r"model is A100 on m0 and H100 on m1; .*multiprocessors is 108 .*of one kind"
    ):
        compare_flags({"m0": first, "m1": other}, "m0")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch, "__version__", "2.12.0")
    with pytest.raises(
        ConfigError, match=r"version of torch is .* on m0 and 2\.12\.0 on m1; the version of CUDA .*12\.8 on"
    ):
        compare_flags({"m0": flags_here(CPU) | first, "m1": first | flags_here(CPU)}, "m0")


def test_what_may_give_other_bits_is_named_by_device_and_settings() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    usual = {**flags_here(cpu), "CUBLAS_WORKSPACE_CONFIG": "None", "torch.backends.cudnn.benchmark": "True"}
    assert not uncertain(cpu, usual)
    named = "; ".join(uncertain(gpu, usual))
    for each in (
        "torch.use_deterministic_algorithms(True); ",
        "torch.backends.cuda.enable_flash_sdp(False)",
        "torch.backends.cuda.enable_mem_efficient_sdp(False)",
        "torch.backends.cudnn.benchmark = False",
        "torch.backends.cudnn.deterministic = True",
        "CUBLAS_WORKSPACE_CONFIG=:4096:8",
    ):
        assert each in named, each
    exact = {
        **usual,
        "torch.use_deterministic_algorithms": "True",
        "torch.backends.cudnn.benchmark": "False",
        "CUBLAS_WORKSPACE_CONFIG": ":16:8",
    }
    assert not uncertain(gpu, exact)
    assert "without warn_only" in uncertain(gpu, {**exact, "torch.use_deterministic_algorithms(warn_only)": "True"})[0]


def test_a_member_that_joins_compares_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {
        FLAGS: json.dumps({"torch.set_default_dtype": "torch.float32"}),
        History.key(0): History().answer(History.key(0)),
    }
    monkeypatch.setattr(Replay, "_told", lambda self, key, sources=(): answers[key])
    context: Any = SimpleNamespace(
        job=SimpleNamespace(replaying=False, channel=SimpleNamespace(rank=0)),
        binding=SimpleNamespace(drop=lambda role: None, local=SimpleNamespace(role=None)),
        history=History(),
        progress=Progress(seed=1),
    )
    nothing: Any = None
    member = Replay(context, nothing, nothing, nothing)
    member.join({"torch.set_default_dtype": "torch.float32"})
    assert context.progress.script.joining and context.job.replaying
    with pytest.raises(ConfigError, match=r"dtype is torch.float32 on the job and torch.float64 on this member"):
        member.join({"torch.set_default_dtype": "torch.float64"})


# -- layers -------------------------------------------------------------------------------------------------


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def double(net: Any) -> None:
    nn.utils.parametrize.register_parametrization(net[0], "weight", Doubled())


def share(net: Any) -> None:
    net[1].weight = net[0].weight


def replace(net: Any) -> None:
    net[1].forward = types.MethodType(lambda layer, x: x, net[1])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (double, "0 is ParametrizedLinear, in the copy Linear; only the owner has parameter 0.parametrizations"),
        (share, "only the copy has parameter 1.weight"),
        (replace, "1 is Linear, its forward is one of the script's, in the copy Linear"),
    ],
)
def test_layers_that_were_changed_after_they_were_built_are_refused(change: Any, named: str) -> None:
    owner, copy = (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2))

    def state() -> dict[str, Any]:
        return {"structure": structure_of(owner), "names": [name for name, _ in owner.named_parameters()]}

    check_structure(copy, state())
    change(owner)
    with pytest.raises(UnsupportedError, match="on_stage_built") as refused:
        check_structure(copy, state())
    assert named in str(refused.value)
    change(copy)
    check_structure(copy, state())


class Around(nn.Module):
    def __init__(self, inner: nn.Module, scale: torch.Tensor, settings: dict[str, int]) -> None:
        super().__init__()
        self.inner, self.scale, self.settings = inner, scale, settings


def test_copies_of_a_stage_have_parts_of_their_own() -> None:
    shared, settings = nn.Linear(2, 2), {"width": 2}
    shared.weight.original_name = "head.weight"  # type: ignore[attr-defined]
    given = [LayerSpec(Around, shared, scale=nn.Parameter(torch.ones(1)), settings=settings) for _ in range(2)]
    copies: dict[int, Any] = {}
    first, second = (with_own_parts(spec, copies).build() for spec in given)
    assert first.inner is second.inner and first.inner is not shared and first.inner.weight.equal(shared.weight)
    assert first.inner.weight.original_name == "head.weight", "what a script calls a parameter in its files"
    assert first.scale is not second.scale and first.scale is not given[0].module_kwargs["scale"]
    assert first.settings is settings and given[0].module_args == (shared,)
    plain = LayerSpec(nn.Linear, 2, 2)
    assert with_own_parts(plain, copies) is plain and with_own_parts(shared, {}) is not shared
    assert with_own_parts(torch.tanh, copies) is torch.tanh


class Whole(PipelineModule):
    """What a script makes of it; built without collectives."""

    def __init__(self, layers: list[Any]) -> None:
        nn.Module.__init__(self)
        self.head, self.scale, self.calls = nn.Linear(2, 2), nn.Parameter(torch.ones(1)), 0
        self.loss_fn, self.own = self.loss, {"loss": functools.partial(self.loss, factor=2), "name": "x"}
        self.by_variable = lambda x, factor=3: self.loss(x, factor)
        self.of_head = self.head.forward
        self.stage_id, self.parts, self._layer_specs = 0, [0, 1, 3], [*layers, self.embed]
        self._local_start, self._local_stop, self.seed_layers, self.seed_fn = 0, 1, False, None
        self.activation_checkpoint_interval = 0
        self.forward_funcs, self.fwd_map, self.tied_modules, self.tied_weight_attrs = [], {}, nn.ModuleDict(), {}
        self._build()

    def loss(self, x: torch.Tensor, factor: int = 1) -> torch.Tensor:
        self.calls += factor
        return self.scale * x

    def embed(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)


class Given(nn.Module):
    """Draws numbers when it is built, and uses a function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function, self.drawn = function, [random.random(), numpy.random.rand(), torch.rand(1).item()]


class Locked(nn.Module):
    """Has what cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.inner.guard = threading.Lock()  # type: ignore[assignment]


class Here(nn.Module):
    """Can only be built in some processes."""

    def __init__(self) -> None:
        super().__init__()
        if Here.refuses:
            raise KeyError("tables")

    refuses = False


def test_what_no_copy_can_have_is_named() -> None:
    """With its layer and attribute, instead of a traceback of torch's or of Python's."""
    net = Whole([nn.Linear(2, 2), Locked()])
    with pytest.raises(
        UnsupportedError, match=r"^layer 1 \(Locked\) cannot be .*attribute inner\.guard, a lock .*pickle"
    ):
        build_stage_module(net, 1, CPU)
    net = Whole([nn.Linear(2, 2), LayerSpec(Around, Locked(), torch.ones(1), {})])
    with pytest.raises(
        UnsupportedError, match=r"^an argument of layer 1 \(Around\) \(Locked\) cannot .* inner\.guard, a "
    ):
        build_stage_module(net, 1, CPU)
    net = Whole([nn.Linear(2, 2), LayerSpec(Here)])
    net.extra_part = Locked()
    with pytest.raises(UnsupportedError, match=r"^part 'extra_part' of the PipelineModule \(Locked\) cannot be copied"):
        build_stage_module(net, 1, CPU)
    del net.extra_part
    build_stage_module(net, 1, CPU)
    Here.refuses = True
    with pytest.raises(
        UnsupportedError, match=r"^layer 1 \(Here\) cannot be built again for a copy of stage 1 \(KeyErr"
    ):
        build_stage_module(net, 1, CPU)


class Sets(nn.Module):
    def get_extra_state(self) -> Any:
        return {"seen": {1, 2}}


def test_extra_state_that_cannot_be_sent_is_named() -> None:
    stage = nn.Sequential(nn.Sequential(Sets()))
    with pytest.raises(
        UnsupportedError, match=r"extra_state of layer 0\.0 \(Sets\) gives, state\['seen'\] is a set, which"
    ):
        Layers(stage).extra()


def test_a_copy_of_a_stage_has_methods_of_its_own() -> None:
    net = Whole([LayerSpec(nn.Linear, 2, 2), LayerSpec(Given, torch.tanh)])
    net._layer_specs[1] = LayerSpec(Given, net.loss)
    random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
    expected = [random.random(), numpy.random.rand(), torch.rand(1).item()]
    random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
    other = build_stage_module(net, 1, CPU)
    assert [random.random(), numpy.random.rand(), torch.rand(1).item()] == expected
    assert other.loss_fn.__self__ is other and other.of_head.__self__ is other.head is not net.head
    assert other.forward_funcs[0].function.__self__ is other.forward_funcs[1].__self__ is other
    with torch.no_grad():
        other.scale.fill_(5)
    for factor, function in ((1, other.loss_fn), (2, other.own["loss"]), (3, other.by_variable)):
        other.calls = 0
        assert function(torch.ones(1)).item() == 5 and (other.calls, net.calls) == (factor, 0)
    assert net.by_variable(torch.ones(1)).item() == 1 and net.calls == 3 and other.own["name"] == "x"
    assert net.loss_fn.__self__ is net and net._layer_specs[1].module_args[0].__self__ is net


def test_functions_that_do_not_lead_to_the_stage_stay_as_they_are() -> None:
    net, other = nn.Linear(2, 2), nn.Linear(2, 2)
    cycle: list[Any] = [1]
    cycle.append(cycle)

    def plain(x: torch.Tensor) -> Any:
        return cycle

    given = (plain, functools.partial(plain, 2), [plain], {"a": plain}, LayerSpec(nn.Linear, 2, 2), cycle)
    rebinding = Rebinding({id(net): other})
    assert all(rebinding.of(each) is each for each in given)
    tied = TiedLayerSpec("key", nn.Linear, 2, 2, forward_fn=lambda layer, x: net(x))
    own = rebinding.of(tied)
    assert own is not tied and own.forward_fn.__closure__[0].cell_contents is other and own.key == "key"


class Late(nn.Module):
    """Makes parts in its first pass."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = self.plain = self.cache = None

    def forward(self, kind: str) -> None:
        if kind == "plain":
            self.plain = nn.ReLU()
        elif kind == "generator":
            self.generator = torch.Generator()  # type: ignore[assignment]
        else:
            self.cache = nn.BatchNorm1d(2, affine=False)  # type: ignore[assignment]


@pytest.mark.parametrize(("kind", "named"), [("plain", ""), ("generator", "0.generator"), ("cache", "0.cache")])
def test_what_layers_make_in_their_first_pass(kind: str, named: str) -> None:
    net = nn.Sequential(Late())
    layers = Layers(net)
    layers.capture()
    net(kind)
    with pytest.raises(UnsupportedError, match=f"{named} in a pass.*constructors") if named else nullcontext():
        assert not any(layers.capture()["numbers"].values())
    assert set(layers.buffers()) == {name for name, _ in net.named_buffers()}


class Drawing(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.of_torch, self.of_python = torch.Generator().manual_seed(seed), random.Random(seed)
        self.of_numpy, self.old = numpy.random.default_rng(seed), numpy.random.RandomState(seed)

    def draw(self) -> list[float]:
        drawn = torch.rand((), generator=self.of_torch).item()
        return [drawn, self.of_python.random(), float(self.of_numpy.random()), self.old.random_sample()]


def test_generators_of_layers_draw_the_same_wherever_they_run() -> None:
    owner, replica = (nn.Sequential(Drawing(seed), Drawing(seed)) for seed in (1, 2))
    drawn: dict[str, list[list[float]]] = {}
    for name, net in (("owner", owner), ("replica", replica)):
        generators = Layers(net).generators
        assert [n for n, _ in generators[:2]] == ["0.of_torch", "0.of_python"] and len(generators) == 8
        untouched = Drawing(1 if name == "owner" else 2).draw()
        for seed in (7, 8):
            with keyed_attributes(generators, seed):
                drawn.setdefault(name, []).extend(layer.draw() for layer in net)
        assert [layer.draw() for layer in net] == [untouched] * 2
    assert drawn["owner"] == drawn["replica"]
    numbers = [number for each in drawn["owner"] for number in each]
    assert len(set(numbers)) == len(numbers) == 16


def test_gradients_that_a_script_adds_are_refused() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[0](torch.ones(2)).sum().backward()
    weights = Weights(Layers(net))
    weights.check_gradients()
    net[1].zero_grad()
    net[1].weight.grad = torch.zeros(2, 2)
    weights.check_gradients()
    net[1](torch.ones(2)).sum().backward()
    with pytest.raises(UnsupportedError, match=r"gradients of 1\.weight, 1\.bias between two calls"):
        weights.check_gradients()
    net[1].zero_grad()
    net[0](torch.ones(2)).sum().backward()
    with pytest.raises(UnsupportedError, match=r"gradients of 0\.weight, 0\.bias between"):
        weights.check_gradients()
    net.zero_grad()
    weights.check_gradients()
