"""A job whose script evaluates before it has an optimizer, and assigns loss functions, schedulers and numbers later.

train_assigning.py --deepspeed_config FILE --out FOLDER --stages P [--steps N]
"""

from __future__ import annotations

from typing import Any

if __name__ == "__main__":
    import lean_torch  # noqa: F401  before torch

import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from job_script import begin, dump, initialize, options, state_of, steps
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LinearLR
from train import CLASSES, HIDDEN, iterator


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
    arguments = options(steps=6, slow_s=0.1).parse_args()
    begin()
    layers = [*(LayerSpec(nn.Linear, HIDDEN, HIDDEN) for _ in range(2 * arguments.stages - 1))]
    layers.append(LayerSpec(nn.Linear, HIDDEN, CLASSES))
    loss = nn.functional.cross_entropy
    net = Net(layers, num_stages=arguments.stages, loss_fn=loss, partition_method="uniform")
    engine, *_ = initialize(arguments, model=net)
    ends = engine.is_first_stage() or engine.is_last_stage()
    source, held_out = (iterator() if ends else None for _ in range(2))
    evaluations = [float(engine.eval_batch(held_out))]
    engine._configure_optimizer(lambda ps: Scaled(ps, lr=0.1, momentum=0.9), list(net.parameters()))
    losses: list[float] = []
    for done in steps(arguments):
        assign(engine, done)
        losses.append(float(engine.train_batch(data_iter=source)))
    evaluations.append(float(engine.eval_batch(held_out)))
    dump(engine, arguments, {"losses": losses, "evaluations": evaluations}, state_of)


if __name__ == "__main__":
    main()
