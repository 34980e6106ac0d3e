"""A job whose script evaluates before it has an optimizer, and assigns loss functions, schedulers and numbers later.

train_assigning.py --deepspeed_config FILE --out FOLDER --stages P [--steps N]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    import lean_torch  # before torch

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LinearLR
from train import CLASSES, HIDDEN, dump, end_of, iterator, state_of, wait_a_little


class Net(PipelineModule):  # type: ignore[misc]  # DeepSpeed is untyped
    """A loss function that is a method, of a number that the script sets."""

    def weighted(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.weight * nn.functional.cross_entropy(logits, labels)


class Smooth(nn.Module):
    """A loss function that is a module, with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.smoothing = 0.1
        self.register_buffer("weights", torch.linspace(0.5, 1.5, CLASSES))

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits, labels, weight=self.weights, label_smoothing=self.smoothing)


class Scaled(torch.optim.SGD):
    """Steps by an attribute that is no setting of a group."""

    scale = 1.0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(self.scale)
        super().step()


def assign(engine: Any, steps: int) -> None:
    """What the script assigns when so many steps are done."""
    if steps == 0:
        engine.module.loss_fn, engine.module.weight = engine.module.weighted, 2.0
        engine.lr_scheduler = LambdaLR(engine.optimizer, lambda step: 1 / (1 + step))
    elif steps == 2:
        engine.module.weight, engine.basic_optimizer.scale = 0.5, 0.75
        engine.module.set_checkpoint_interval(1)
        engine.lr_scheduler.step()
    elif steps == 4:
        engine.module.loss_fn = Smooth()
        engine.lr_scheduler = LinearLR(engine.optimizer, 0.5, total_iters=20)
        engine.lr_scheduler.step()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed_config", required=True)
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stages", type=int, required=True)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--slow-until", type=Path, default=None)
    parser.add_argument("--slow-s", type=float, default=0.1)
    parser.add_argument("--end-after", type=int, default=0)
    parser.add_argument("--faults", default="[]")
    arguments = parser.parse_args()
    arguments.model = "mlp"
    torch.manual_seed(7)
    lean_torch.install()
    deepspeed.init_distributed()
    rank = torch.distributed.get_rank()
    layers = [*(LayerSpec(nn.Linear, HIDDEN, HIDDEN) for _ in range(2 * arguments.stages - 1))]
    layers.append(LayerSpec(nn.Linear, HIDDEN, CLASSES))
    loss = nn.functional.cross_entropy
    net = Net(layers, num_stages=arguments.stages, loss_fn=loss, partition_method="uniform")
    engine, *_ = deepspeed.initialize(args=arguments, model=net)
    if arguments.faults != "[]":
        from faults import install

        install(engine, arguments.faults, str(arguments.out))
    ends = engine.is_first_stage() or engine.is_last_stage()
    source, held_out = (iterator(arguments, 0, 1, 4, None) if ends else None for _ in range(2))
    evaluations = [float(engine.eval_batch(held_out))]
    engine._configure_optimizer(lambda ps: Scaled(ps, lr=0.1, momentum=0.9), list(net.parameters()))
    losses: list[float] = []
    while len(losses) < end_of(arguments, len(losses)):
        if arguments.slow_until is not None:
            wait_a_little(arguments.slow_until, arguments.slow_s)
        assign(engine, len(losses))
        losses.append(float(engine.train_batch(data_iter=source)))
    evaluations.append(float(engine.eval_batch(held_out)))
    dump(engine, arguments.out, rank, {"losses": losses, "evaluations": evaluations}, state_of)


if __name__ == "__main__":
    main()
