"""Steps of optimizers chunk by chunk: `engine/stage/chunks.py`."""

from __future__ import annotations

import pytest
import torch
from deepspeed.ops.adam import FusedAdam
from torch.optim.optimizer import register_optimizer_step_pre_hook

from bamboo_ds.engine.stage.chunks import unchunked
from tests.support import far_device
from tests.support.on_device import on_the_device

STEPS = """
from bamboo_ds.devices.streams import use_accelerator
from bamboo_ds.engine.stage.chunks import ChunkedStep
use_accelerator()
torch.manual_seed(3)
sizes = [(), (7,), (3, 5), (40, 1000), (200000,), (65, 2)]

def settings(optimizer):
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]

def check(kind, **options):
    hosts = [torch.nn.Parameter(torch.randn(size)) for size in sizes]
    hosts[3].data = hosts[3].data.t().contiguous().t()  # such a one is not divided
    there = [torch.nn.Parameter(each.detach().to("far")) for each in hosts]
    mine, other = (
        kind([{"params": each[:4]}, {"params": each[4:], "lr": 0.02}], lr=0.01, **options) for each in (hosts, there)
    )
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 1, 0.9) for each in (mine, other)]
    step = ChunkedStep(mine, chunk=65536)
    for number in range(4):
        for p, q in zip(hosts, there):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.to("far")
        if number == 1:
            hosts[1].grad = there[1].grad = None
        before = far_device.counts()["allocated"]
        step()
        assert far_device.counts()["allocated"] == before
        other.step()
        for each in schedulers:
            each.step()
        assert settings(mine) == settings(other)
        for p, q in zip(hosts, there):
            assert torch.equal(p, q.cpu()), (kind, number, p.shape)
            assert mine.state[p].keys() == other.state[q].keys(), (kind, number)
            for name, value in mine.state[p].items():
                theirs = other.state[q][name]
                assert value.device.type == "cpu" and torch.equal(value, theirs.cpu()), (kind, number, p.shape, name)

check(torch.optim.Adam, weight_decay=0.1, amsgrad=True)
check(torch.optim.AdamW, foreach=False)
check(torch.optim.SGD)
check(torch.optim.SGD, momentum=0.9, nesterov=True)
check(torch.optim.Adagrad, initial_accumulator_value=0.1)
counts = far_device.counts()
assert counts["lost"] == counts["pageable"] == 0 and counts["late"] > 0
"""

RESTING = """
from bamboo_ds.devices.streams import use_accelerator
from bamboo_ds.engine.stage.chunks import ChunkedStep, RestingOptimizer
use_accelerator()
torch.manual_seed(3)
sizes = [(7,), (40, 1000), (200000,)]

class Mine(RestingOptimizer):
    _device = torch.device("far")
    _masters = ()  # of torch's own optimizers

    def __init__(self, inner, lists=()):
        self.inner, self._masters = inner, lists

def state_bytes(optimizer, kind):
    return sum(v.nbytes for state in optimizer.state.values() for v in state.values()
               if torch.is_tensor(v) and v.device.type == kind)

def check(masters):
    # With masters DeepSpeed's lists name the tensors that the optimizer steps.
    def made():
        waves = [torch.arange(torch.Size(size).numel()).sin().view(size) for size in sizes]
        return [torch.nn.Parameter(wave.to("far")) for wave in waves]

    mine, other = made(), made()
    inner, there = (torch.optim.AdamW(each, lr=0.01, weight_decay=0.1) for each in (mine, other))
    lists = [mine] if masters else []
    resting, step = Mine(inner, lists), ChunkedStep(inner, chunk=65536)
    for number in range(5):
        if number == 1:
            p = q = value = None
            before = far_device.counts()["allocated"]
            resting.rest()
            freed = before - far_device.counts()["allocated"]
            whole = 4 * sum(torch.Size(size).numel() for size in sizes)
            assert freed >= (2 + masters) * whole and not state_bytes(inner, "far"), (freed, whole)
        if number == 4:
            resting.rouse()
            assert not state_bytes(inner, "cpu") > 4 * len(sizes), "more than counts of steps"
        with resting.awake():
            assert all(p.device.type == "far" for p in mine)
            for p, q in zip(mine, other):
                p.grad = torch.randn(p.shape).to("far")
                q.grad = p.grad.clone()
            step() if 0 < number < 4 else inner.step()
        assert all(p.device.type == ("cpu" if masters and 0 < number < 4 else "far") for p in mine), number
        there.step()
        for p, q in zip(mine, other):
            assert torch.equal(p.cpu(), q.cpu()), number
            for name, value in inner.state[p].items():
                assert torch.equal(value.cpu(), there.state[q][name].cpu()), (number, name)

check(masters=False)
check(masters=True)
assert far_device.counts()["lost"] == 0
"""


@pytest.mark.integration
@pytest.mark.skipif(far_device.compiler() is None, reason="there is no C++ compiler")
def test_a_step_in_chunks_has_the_bits_of_one_on_the_device() -> None:
    on_the_device(STEPS, seed=5)


@pytest.mark.integration
@pytest.mark.skipif(far_device.compiler() is None, reason="there is no C++ compiler")
def test_what_rests_in_host_memory_is_stepped_with_the_same_bits() -> None:
    on_the_device(RESTING, seed=5)


@pytest.mark.integration
@pytest.mark.skipif(far_device.compiler() is None, reason="there is no C++ compiler")
def test_chunks_share_a_few_slabs() -> None:
    """However large a stage is. A chunk that cannot be copied ends the step."""
    on_the_device(
        """
from bamboo_ds.devices import accelerators, streams
from bamboo_ds.engine.stage import chunks
made = []
streams.page_locked = lambda size: made.append(size) or accelerators.page_locked(size)
streams.use_accelerator()
parameter = torch.nn.Parameter(torch.randn(400000))
optimizer = torch.optim.Adam([parameter])
step = chunks.ChunkedStep(optimizer, chunk=10000)
for _ in range(2):
    made.clear()
    parameter.grad = torch.ones_like(parameter)
    step()
    assert 3 <= len(made) <= 6, made

def fail(sources, targets, after=None):
    raise RuntimeError("nothing is copied")

chunks._copy = fail
with pytest.raises(RuntimeError, match="nothing is copied"):
    step()
""",
        seed=5,
    )


def test_other_optimizers_are_not_stepped_in_chunks() -> None:
    parameters = [torch.nn.Parameter(torch.ones(3))]
    assert unchunked(torch.optim.AdamW(parameters)) is None
    assert "Rprop is none of Adagrad, Adam" in str(unchunked(torch.optim.Rprop(parameters)))
    assert "fused" in str(unchunked(torch.optim.AdamW(parameters, fused=True)))

    class Mine(torch.optim.Adam):
        pass

    assert "Mine is none of" in str(unchunked(Mine(parameters)))
    fused = FusedAdam.__new__(FusedAdam)  # its constructor loads a kernel
    fused.param_groups = [{"params": parameters}]
    assert unchunked(fused) is None
    fused.param_groups[0]["params"] = parameters * 2
    assert "several parameters in a group" in str(unchunked(fused))
    other = torch.optim.Adam(parameters)
    other.step = lambda: None  # type: ignore[method-assign,assignment]
    assert "another step" in str(unchunked(other))
    hooked = torch.optim.Adam(parameters)
    hook = hooked.register_step_pre_hook(lambda *_: None)
    assert "hooks" in str(unchunked(hooked))
    hook.remove()
    assert unchunked(hooked) is None
    everywhere = register_optimizer_step_pre_hook(lambda *_: None)
    assert "hooks" in str(unchunked(hooked))
    everywhere.remove()
