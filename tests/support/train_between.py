"""A job whose script keeps state where it likes, and does things to its stage between two steps; see ``WAYS``.

Runs with and without bamboo.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from job_script import begin, dump, initialize, options, steps
from torch import nn

import bamboo_ds

HIDDEN = 16


class ById(torch.optim.SGD):
    """Momenta in a dictionary by ``id``."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.05)
        self.momenta: dict[int, Any] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            momentum = self.momenta.setdefault(id(p), torch.zeros_like(p))
            p.sub_(momentum.mul_(0.9).add_(p.grad), alpha=0.05)


class Lookahead(torch.optim.SGD):
    """Slow weights in a list, which make no difference before the sixth step."""

    def __init__(self, parameters: Any) -> None:
        parameters = list(parameters)
        super().__init__(parameters, lr=0.05)
        self.slow, self.count = [p.detach().clone() for p in parameters], 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.count += 1
        if self.count % 6 == 0:
            for p, slow in zip((p for g in self.param_groups for p in g["params"]), self.slow, strict=True):
                p.copy_(slow.lerp_(p, 0.5))


class Statistics:
    """An object that gathers something."""

    def __init__(self) -> None:
        self.seen: list[float] = []


class Gathering(torch.optim.SGD):
    """An object of statistics, on which the eighth step depends."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.05)
        self.statistics = Statistics()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        self.statistics.seen.append(sum(float(g.abs().sum()) for g in gradients))
        if len(self.statistics.seen) > 7:
            for g in gradients:
                g.mul_(self.statistics.seen[0] / self.statistics.seen[-1])
        super().step(closure)


class Queued(torch.optim.SGD):
    """State that holds a queue."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.05)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            queue = self.state[p].setdefault("history", deque(maxlen=3))
            queue.append(p.grad.clone())
            p.sub_(torch.stack(list(queue)).mean(0), alpha=0.05)


class Wrapping(torch.optim.Optimizer):
    """Around another one, without the constructor of torch's class."""

    def __init__(self, parameters: Any) -> None:
        self.inner = torch.optim.SGD(parameters, lr=0.05)
        self.param_groups, self.defaults, self.state = self.inner.param_groups, self.inner.defaults, self.inner.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


class Averaging(torch.optim.SGD):
    """Averages of weights in the state."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.05, momentum=0.9)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p].setdefault("ema", p.detach().clone()).lerp_(p, 0.1)


def plain(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


WAYS: dict[str, Callable[[Any], Any]] = {
    "by-id": ById,
    "lookahead": Lookahead,
    "gathering": Gathering,
    "queued": Queued,
    "wrapping": Wrapping,
    "averaging": Averaging,
    "remembering": plain,
    "listing": plain,
    **{f"ema-{how}": plain for how in ("data", "copy", "state")},
    "freeze": plain,
    "freeze-visit": plain,
    "clamp": plain,
}


class Layer(nn.Linear):
    def __init__(self, way: str) -> None:
        super().__init__(HIDDEN, HIDDEN)
        self.way, self.seen = way, [""]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.002)
        if self.way == "listing" and self.training:
            self.seen.append("forward")
        return torch.tanh(super().forward(x))


class Averages:
    """Averages that the script keeps itself, and puts in the place of weights."""

    def __init__(self, engine: Any, how: str) -> None:
        self.engine, self.how = engine, how
        self.kept = {n: p.detach().clone() for n, p in engine.module.named_parameters()}

    def update(self) -> None:
        for name, parameter in self.engine.module.named_parameters():
            self.kept[name].lerp_(parameter.detach(), 0.1)

    def exchange(self) -> None:
        for name, parameter in self.engine.module.named_parameters():
            old = parameter.detach().clone()
            if self.how == "data":
                parameter.data.copy_(self.kept[name])
            elif self.how == "state":
                parameter.data = self.kept[name].clone()
            else:
                with torch.no_grad():
                    parameter.copy_(self.kept[name])
            self.kept[name] = old


def draw(seed: int) -> Iterator[Any]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield tuple(torch.randn(4, HIDDEN, generator=generator) for _ in range(2))


def freeze(engine: Any, frozen: bool) -> None:
    for name, parameter in engine.module.named_parameters():
        if name.endswith("bias"):
            parameter.requires_grad_(not frozen)


def main() -> None:
    parser = options()
    parser.add_argument("--way", choices=WAYS, required=True)
    parser.add_argument("--evaluate-every", type=int, default=0)
    parser.add_argument("--freeze-at", type=int, default=-1)
    parser.add_argument("--save-at", type=int, default=-1)
    arguments = parser.parse_args()
    begin(7 + int(os.environ["RANK"]))  # stages begin with weights of their own
    way = arguments.way
    layers = [LayerSpec(Layer, way) for _ in range(2 * arguments.stages)]
    net = PipelineModule(layers, num_stages=arguments.stages, loss_fn=nn.functional.mse_loss)
    engine, *_ = initialize(arguments, model=net, optimizer=WAYS[way](net.parameters()))
    data, held_out = draw(1), draw(2)
    averages = Averages(engine, way.removeprefix("ema-")) if way.startswith("ema-") else None
    losses, evaluations = [], []
    for step in steps(arguments):
        if step == arguments.freeze_at:
            if way == "freeze-visit":
                bamboo_ds.for_each_stage(engine, lambda each: freeze(each, True))
            else:
                freeze(engine, True)
        losses.append(engine.train_batch(data).item())
        if way == "clamp" and step < arguments.steps - 1:  # copies get it with the next step
            with torch.no_grad():
                for parameter in engine.module.parameters():
                    parameter.clamp_(-0.2, 0.2)
        if averages is not None:
            averages.update()
        if step == arguments.save_at:
            engine.save_checkpoint(str(arguments.out / "saved"))
        if arguments.evaluate_every and (step + 1) % arguments.evaluate_every == 0:
            if averages is not None:
                averages.exchange()
            using = bamboo_ds.evaluating_with(engine, "ema") if way == "averaging" else contextlib.nullcontext()
            with using:
                evaluations.append(engine.eval_batch(held_out).item())
            if averages is not None:
                averages.exchange()
    dump(engine, arguments, {"losses": losses, "evaluations": evaluations})


if __name__ == "__main__":
    main()
