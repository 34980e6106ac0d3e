"""A job whose epoch ends while code of its script runs inside an operation; runs with and without bamboo.

Wherever it calls :meth:`Place.reach` the script calls collectives of a group of one rank, as Megatron-DeepSpeed does
for every micro-batch. A fault of ``--faults`` names such a place in ``at``, which of its calls in a step in
``micro_batch``, and in ``by`` the rank whose process is there: that one kills the process of ``rank``, waits until its
own epoch has ended, and goes on with the place.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from faults import _due, mark
from job_script import begin, dump, options, steps
from torch import nn

import bamboo_ds

HIDDEN = 16


class Place:
    """Where code of the script is; of the process."""

    engine: Any = None
    group: Any = None
    evaluating = False
    counts: Counter[str] = Counter()
    faults: list[dict[str, Any]] = []
    folder = Path()

    @classmethod
    def reach(cls, name: str) -> None:
        """Code of the script runs at the place ``name``."""
        at = f"eval {name}" if cls.evaluating else name
        count = cls.counts[at]
        cls.counts[at] += 1
        for fault in cls.faults:
            here = fault["at"] == at and fault["micro_batch"] == count and cls.engine is not None
            if here and not (cls.folder / mark(fault)).exists() and _due(cls.engine, fault):
                cls._lose(fault)
        tensor = torch.ones(2)
        dist.all_reduce(tensor, group=cls.group)
        dist.broadcast(tensor, int(os.environ["RANK"]), group=cls.group)
        dist.barrier(group=cls.group)
        torch.distributed.monitored_barrier(cls.group)
        gathered = [torch.zeros(2)]
        dist.all_gather(gathered, tensor, group=cls.group)
        assert torch.equal(gathered[0], torch.ones(2)), gathered

    @classmethod
    def _lose(cls, fault: dict[str, Any]) -> None:
        from bamboo_ds.worker.job import current_job

        (cls.folder / mark(fault)).touch()
        session, deadline = current_job().session, time.monotonic() + 60
        os.kill(int((cls.folder / f"pid-{fault['rank']}").read_text()), signal.SIGKILL)
        while session.aborted is None:
            assert time.monotonic() < deadline, "the epoch goes on without the process that was killed"
            time.sleep(0.005)


class _Reached(torch.autograd.Function):
    """The identity, whose backward pass is a place."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        Place.reach("backward")
        return gradient


class Layer(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Place.reach("layer")
        time.sleep(0.001)
        return _Reached.apply(torch.tanh(super().forward(x)))  # type: ignore[no-untyped-call]


class Momentum(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        Place.reach("optimizer")
        return super().step(closure)


class Halving(torch.optim.lr_scheduler.StepLR):
    def step(self, epoch: Any = None) -> None:
        if self.last_epoch >= 0:  # not in its constructor
            Place.reach("scheduler")
        super().step(epoch)


def loss_of(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    Place.reach("loss")
    return nn.functional.mse_loss(outputs, labels)


def draw(seed: int) -> Iterator[Any]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        batch = [torch.randn(4, HIDDEN, generator=generator) for _ in range(2)]
        Place.reach("iterator")
        yield tuple(batch)


def process(batch: Any) -> Any:
    inputs, labels = (each * 2 for each in batch)
    Place.reach("batch_fn")
    return inputs, labels


@bamboo_ds.on_stage_built
def install(module: Any, stage: int) -> None:
    for layer in module.forward_funcs:
        layer.register_forward_hook(lambda *_: Place.reach("hook"))


@bamboo_ds.on_plan_change
def changed(view: Any) -> None:
    Place.reach("listener")


def main() -> None:
    arguments = options().parse_args()
    begin()
    rank = int(os.environ["RANK"])
    Place.folder = arguments.out
    Place.faults = [fault for fault in json.loads(arguments.faults) if fault["by"] == rank]
    pid = arguments.out / f"pid-{rank}"
    pid.with_suffix(".new").write_text(str(os.getpid()))
    pid.with_suffix(".new").rename(pid)
    groups = [dist.new_group([each]) for each in range(dist.get_world_size())]
    Place.group = groups[rank]
    layers = [LayerSpec(Layer, HIDDEN, HIDDEN) for _ in range(2 * arguments.stages)]
    net = PipelineModule(layers, num_stages=arguments.stages, loss_fn=loss_of)
    optimizer = Momentum(net.parameters(), lr=0.1, momentum=0.9)
    engine, *_ = deepspeed.initialize(
        args=arguments, model=net, optimizer=optimizer, lr_scheduler=lambda each: Halving(each, 3)
    )
    engine.set_batch_fn(process)
    Place.engine = engine
    data, held_out = draw(1), draw(2)
    losses, evaluations = [], []
    for step in steps(arguments):
        Place.counts.clear()
        losses.append(engine.train_batch(data).item())
        if step % 2:
            Place.evaluating = True
            evaluations.append(engine.eval_batch(held_out).item())
            Place.evaluating = False
        bamboo_ds.for_each_stage(engine, lambda _: Place.reach("visit"))
    dump(engine, arguments, {"losses": losses, "evaluations": evaluations})


if __name__ == "__main__":
    main()
