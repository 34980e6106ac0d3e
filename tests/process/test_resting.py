"""Room that roles take which come to a member whose optimizers rest in host memory."""

from __future__ import annotations

import pytest

from tests.support import far_device
from tests.support.on_device import on_the_device

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(far_device.compiler() is None, reason="there is no C++ compiler"),
]


def test_wrappers_that_are_made_for_copies_make_no_state() -> None:
    """The state comes from the owner. That of the wrapper's own first step would be on the device in any case."""
    on_the_device("""
from contextlib import nullcontext
from types import SimpleNamespace
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16 import unfused_optimizer
from bamboo_ds.engine.stage.clones import unstepped

unfused_optimizer.dist = SimpleNamespace(get_rank=lambda: 0)  # there is no group
COUNT = 100_000

def made(kind, way):
    parameter = torch.nn.Parameter(torch.ones(COUNT).half().to("far"))
    inner = torch.optim.AdamW([parameter])
    before = far_device.counts()["allocated"]
    torch.ops.far.forget_peak()
    with way(inner):
        wrapper = kind(inner, dynamic_loss_scale=True)
    return wrapper, (far_device.counts()["peak"] - before) / COUNT

for kind in (FP16_Optimizer, unfused_optimizer.FP16_UnfusedOptimizer):
    wrapper, usual = made(kind, lambda optimizer: nullcontext())
    assert len(wrapper.optimizer.state) == 1
    wrapper, few = made(kind, unstepped)
    assert not wrapper.optimizer.state and few <= usual - 8, (kind, few, usual)
    assert "step" not in vars(wrapper.optimizer)
""")


def test_roles_are_cloned_in_host_memory() -> None:
    """On a member that is tight: what is loaded from the copies goes to the device by itself, and optimizers rest."""
    on_the_device("""
from types import SimpleNamespace
from bamboo_ds.config import BambooConfig, RedundancyMode
from bamboo_ds.devices.streams import use_accelerator
from bamboo_ds.engine.replicas import building
from bamboo_ds.topology import Role
use_accelerator()
state = {"tensors": [torch.arange(5.0).to("far"), torch.ones(2)]}
building.capture = lambda runtime: state
source = SimpleNamespace(role=Role(0, 1), pristine=None, results=SimpleNamespace(reduced=None))

def kinds(tight):
    local = SimpleNamespace(optimizer=SimpleNamespace(inner=None, masters=list))
    context = SimpleNamespace(
        binding=SimpleNamespace(refresh=lambda: None, local=local, runtimes={}),
        epoch=SimpleNamespace(member="m0", plan=SimpleNamespace(tight=tight)),
        settings=BambooConfig(),
        mode=RedundancyMode.LAZY,
    )
    builder = building.StageBuilder(context)
    builder.build = lambda role, given, pristine: given["tensors"]
    found = builder.clone(source, Role(1, 1))
    assert all(torch.equal(a.cpu(), b.cpu()) and a is not b for a, b in zip(found, state["tensors"]))
    assert all(a.data_ptr() != b.data_ptr() for a, b in zip(found, state["tensors"]))
    return [tensor.device.type for tensor in found]

assert kinds(()) == ["far", "cpu"] and kinds((("m1", 0),)) == ["far", "cpu"]
assert kinds((("m1", 0), ("m0", 2))) == ["cpu", "cpu"]
""")


def test_what_cannot_come_back_goes_on_resting() -> None:
    on_the_device("""
from bamboo_ds.devices.streams import use_accelerator
from bamboo_ds.engine.stage.chunks import ChunkedStep, RestingOptimizer
use_accelerator()
mine, other = (torch.nn.Parameter(torch.arange(1000.0).to("far")) for _ in range(2))
inner, there = (torch.optim.AdamW([each], lr=0.01) for each in (mine, other))

class Mine(RestingOptimizer):
    _device = torch.device("far")

resting = Mine()
resting.inner = inner
for number in range(4):
    for each in (mine, other):
        each.grad = torch.full((1000,), 0.5 + number).to("far")
    there.step()
    if number == 1:
        resting.rest()
    if number == 2:  # there is room for one of two tensors
        torch.ops.far.limit(far_device.counts()["allocated"] + 6000)
        with pytest.raises(torch.OutOfMemoryError):
            resting.rouse()
        torch.ops.far.limit(1 << 40)
        assert resting.resting
    with resting.awake():
        ChunkedStep(inner)() if resting.resting else inner.step()
    if number == 2:
        assert {inner.state[mine][name].device.type for name in ("exp_avg", "exp_avg_sq")} == {"cpu"}
        resting.rouse()
        assert not resting.resting
    assert torch.equal(mine.cpu(), other.cpu()), number
""")


def test_what_is_loaded_rests_before_the_next_role_is_loaded() -> None:
    """Torch brings the state of fp32 parameters to their device."""
    on_the_device("""
from contextlib import nullcontext
from types import SimpleNamespace
from bamboo_ds.engine.joining.loading import Loader
from bamboo_ds.engine.stage.chunks import RestingOptimizer
from bamboo_ds.topology import Layout, Role

class Mine(RestingOptimizer):
    _device = torch.device("far")

def runtime_of(stage):
    parameter = torch.nn.Parameter(torch.ones(1000).to("far"))
    inner = torch.optim.AdamW([parameter])
    parameter.grad = torch.ones_like(parameter)
    inner.step()
    parameter.grad, mine = None, Mine()
    mine.inner = inner
    return SimpleNamespace(role=Role(0, stage), pristine=None, optimizer=mine)

runtimes = [runtime_of(stage) for stage in range(3)]
for runtime in runtimes[1:]:
    runtime.optimizer.rest()
local, begin = runtimes[0], far_device.counts()["allocated"]

def load(folder, tag):
    assert far_device.counts()["allocated"] == begin, "of the roles before nothing is there any more"
    inner = context.binding.current.optimizer.inner
    saved = inner.state_dict()
    saved["state"] = {0: {name: value.cpu() + 1 for name, value in saved["state"][0].items()}}
    inner.load_state_dict(saved)
    return folder, {}

def use(runtime):
    context.binding.current = runtime

context = SimpleNamespace(
    binding=SimpleNamespace(local=local, owned=lambda: runtimes, use=use),
    ds=SimpleNamespace(basic_optimizer=None, loading=lambda state: None, load_checkpoint=load),
    groups=SimpleNamespace(acting_for=lambda role, answer: nullcontext()),
    layout=Layout(1, 3),
    progress=SimpleNamespace(script=SimpleNamespace(changed=set())),
)
loader = Loader(context, SimpleNamespace(copy_state=lambda roles: None), None)
loader._check = lambda *_: None
loader.load("folder", None, None)
for runtime in runtimes:
    (state,) = runtime.optimizer.inner.state.values()
    kinds = {state[name].device.type for name in ("exp_avg", "exp_avg_sq")}
    assert kinds == {"far" if runtime is local else "cpu"} and int(state["step"]) == 2, (runtime.role, kinds)
""")
