"""What replicas cannot have is refused, and what they must have they get."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.jobs import SUPPORT, Reference, run_bamboo, slow_rank, write_config
from tests.support.precisions import FP32_ZERO
from tests.support.surviving import fault, survive

pytestmark = pytest.mark.claim(
    "guides/exactness.md",
    "guides/scripts.md",
    "reference/guarantees.md",
    "reference/limits.md",
    "reference/settings.md",
)


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


@pytest.mark.exhaustive
@pytest.mark.integration
def test_a_backward_pass_frees_its_part_of_the_budget(tmp_path: Path) -> None:
    redundancy = {"mode": "eager-frc-eager-brc", "sync_every": 0, "memory_budget_mb": 0.0001}
    config = write_config(tmp_path, {"redundancy": redundancy, "topology": {"blocks": 1}}, 6)
    result = run_bamboo(tmp_path, 2, ["--stages", "2", "--steps", "6", *slow_rank(tmp_path, 1)], config)
    assert result.exit_code == 0, result.output[-4000:]
    # The first stage's member has memory for one forward pass of the last stage, and time for both passes of it before
    # each gradient that it receives: from some step on, when it knows for how long it waits.
    assert max(event["frc_done"] for event in result.events("step")) >= 6


@pytest.mark.integration
def test_redundant_passes_without_memory(tmp_path: Path, reference: Reference) -> None:
    """The loss comes in the same iteration; what the passes have changed of the layers' buffers is undone.

    So is what a rehearsal has changed that lacks memory in a step before.
    """
    # By then the first stage has waited for three gradients, long enough for a redundant forward before each of them.
    faults = [fault(1, 2, "BackwardPass", 5)]
    bamboo = {"redundancy": {"verify_every": 2, "check_exact": 2, "sync_every": 0}, "topology": {"blocks": 1}}
    arguments = ("--steps", "5", "--norm", "--exhaust-at", "1", "2")
    result = survive(tmp_path, reference, faults, 3, 1, arguments, bamboo=bamboo, pace=slow_rank(tmp_path, 1))
    assert "the rehearsal of role (0,1) has exhausted the memory, and is left out: no memory is left" in result.output
    assert "Not rehearsed (there is too little memory, see above): stage 0 of pipeline 0, stage 1" in result.output
    told = {(e["step"], *e["role"], e["dropped"]) for e in result.events("redundancy_exhausted")}
    assert (2, 0, 1, 2) in told
