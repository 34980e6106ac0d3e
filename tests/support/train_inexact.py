"""A job whose stages depend on what no copy of them follows, each on something else; see ``CULPRITS``.

train_inexact.py --deepspeed_config FILE --out FOLDER --culprits NAME,... [--steps N]

There are as many stages as culprits, of three layers each; the second one of stage s is culprit s.
"""

from __future__ import annotations

import time
from typing import Any

if __name__ == "__main__":
    import lean_torch  # noqa: F401  before torch

import numpy
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from job_script import begin, initialize, options
from torch import nn
from train import CLASSES, HIDDEN, Block, iterator

GENERATOR = torch.Generator().manual_seed(3)
COUNT = [0]


class Listed(nn.Module):
    """Counts in an attribute that is no number."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = [0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls[0] += 1
        return x * (1 + 1e-3 * self.calls[0])


class Counted(nn.Module):
    """Counts in a variable of the script."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        COUNT[0] += 1
        return x * (1 + 1e-3 * COUNT[0])


class Noisy(nn.Module):
    """Draws from a generator of the script."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1e-3 * torch.randn(x.shape, generator=GENERATOR)


class Timed(nn.Module):
    """Depends on the time."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1e-6 * (time.time_ns() % 1000003)


class Rounding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * float(1 + 1e-3 * numpy.random.rand())


class Rounded(nn.Module):
    """Draws NumPy's random numbers in its backward pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = Rounding.apply(x)
        return result


class Stepping(torch.optim.SGD):
    """Depends on a variable of the script."""

    def step(self, *arguments: Any) -> None:  # type: ignore[override]
        COUNT[0] += 1
        super().step(*arguments)
        with torch.no_grad():
            self.param_groups[0]["params"][0].add_(1e-3 * COUNT[0])


#: ``none``: nothing; ``data``: the script writes through ``.data`` after a step; ``step``: the optimizer of all stages.
CULPRITS: dict[str, Any] = {
    "none": nn.Identity,
    "list": Listed,
    "global": Counted,
    "generator": Noisy,
    "time": Timed,
    "backward": Rounded,
    "data": nn.Identity,
    "step": nn.Identity,
}


def main() -> None:
    parser = options()
    parser.add_argument("--culprits", required=True)
    arguments = parser.parse_args()
    begin()
    culprits = arguments.culprits.split(",")
    layers = [LayerSpec(each) for name in culprits for each in (Block, CULPRITS[name], Block)]
    loss, stages = nn.CrossEntropyLoss(), len(culprits)
    # Of equal length whatever they weigh; the head goes with the last stage.
    layers[-1] = LayerSpec(nn.Linear, HIDDEN, CLASSES)
    net = PipelineModule(layers, num_stages=stages, loss_fn=loss, partition_method="uniform")
    kind = Stepping if "step" in culprits else torch.optim.SGD
    engine, *_ = initialize(
        arguments, model=net, optimizer=kind([p for p in net.parameters() if p.requires_grad], lr=0.05)
    )
    stage = engine.stage_id
    source = iterator() if stage in (0, stages - 1) else None
    for _ in range(arguments.steps):
        engine.train_batch(data_iter=source)
        if culprits[stage] == "data":
            for parameter in net.parameters():
                parameter.data.mul_(0.9)


if __name__ == "__main__":
    main()
