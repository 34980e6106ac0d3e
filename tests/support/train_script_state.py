"""A job that keeps and changes state in many places, all of which a copy of a stage has to follow.

Every layer has a parameter for each of these places. All of them add 0 to what the layer computes, so that what goes
wrong in one place shows in its parameter alone. All steps are in one context of autocast.

train_script_state.py --deepspeed_config FILE --out FOLDER --stages P [--steps N] [--change-at STEP ...]
    [--evaluate-at STEP ...]
"""

from __future__ import annotations

import random
from typing import Any

if __name__ == "__main__":
    import lean_torch  # noqa: F401  before torch

import numpy
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from job_script import begin, dump, initialize, joined, options, steps
from torch import nn
from train import HIDDEN, iterator

#: ``backward``: random numbers there; ``generators``: those of generators that a layer has itself; ``step``: in the
#: optimizer; ``number``, ``extra``, ``cache``: attributes and extra state of layers; ``wide``: state of the optimizer
#: in a type of its own; ``count``, ``dictionary``: its attributes; ``rate``: a learning rate that is a tensor;
#: ``script``: what the script changes itself.
PLACES = ("backward", "generators", "step", "number", "extra", "cache", "wide", "count", "dictionary", "rate", "script")


class Noisy(torch.autograd.Function):
    """Adds random numbers to the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] + 0.1 * torch.randn_like(gradients[0])


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.places = nn.ParameterDict({place: nn.Parameter(torch.ones(HIDDEN)) for place in PLACES})
        self.calls = 0
        self.longest, self.table, self.sums = 0, None, (torch.zeros(1), [torch.zeros(1)])
        self.hidden = [0]
        self.of_torch, self.of_python = torch.Generator(), random.Random()
        self.of_numpy, self.old = numpy.random.default_rng(), numpy.random.RandomState()

    def noise(self) -> float:
        drawn = torch.rand((), generator=self.of_torch).item() + self.of_python.random()
        return float(drawn + self.of_numpy.random() + self.old.random())

    def get_extra_state(self) -> dict[str, torch.Tensor]:
        return {"calls": torch.tensor(self.hidden)}

    def set_extra_state(self, state: dict[str, torch.Tensor]) -> None:
        self.hidden = state["calls"].tolist()

    def cached(self, x: torch.Tensor) -> torch.Tensor:
        """From a table for the longest sequence so far; how long one is depends on the micro-batch."""
        length = 1 + int(1000 * x.detach().float().abs().sum().item()) % 97
        if length > self.longest:
            self.longest = length
            self.table = torch.linspace(1.0, 2.0, length)
        self.sums[0].add_(length)
        self.sums = self.sums[0], [self.sums[1][0] + self.table.mean() * length / self.longest]
        return self.sums[1][0] / (1 + self.sums[0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.hidden[0] += 1
        used = dict(self.places)
        used["backward"] = Noisy.apply(used["backward"])
        used["generators"] = used["generators"] * self.noise()
        used["number"] = used["number"] * self.calls
        used["extra"] = used["extra"] * self.hidden[0]
        used["cache"] = used["cache"] * self.cached(x)
        x = x + torch.tanh(self.linear(x))
        for each in used.values():
            x = x + (each - each.detach())
        return x


class Optimizer(torch.optim.Optimizer):
    """One rule per group."""

    def __init__(self, net: nn.Module) -> None:
        groups: dict[str, list[nn.Parameter]] = {"": [], **{place: [] for place in PLACES}}
        for name, parameter in net.named_parameters():
            groups[name.rpartition(".")[2] if "places" in name else ""].append(parameter)
        super().__init__([{"params": ps, "place": place} for place, ps in groups.items()], {"lr": 0.05})
        for group in self.param_groups:
            if group["place"] == "rate":
                group["lr"] = torch.tensor(0.05)
        self.count, self.dictionary = 0, {"count": 0}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        self.dictionary["count"] += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                change = parameter.grad
                if group["place"] == "step":
                    change = change + 0.1 * torch.randn_like(change)
                elif group["place"] == "wide":
                    state = self.state[parameter]
                    moment = state.setdefault("moment", torch.zeros_like(parameter, dtype=torch.float64))
                    change = moment.mul_(0.9).add_(change).float()
                elif group["place"] == "count":
                    change = change * self.count
                elif group["place"] == "dictionary":
                    change = change * self.dictionary["count"]
                parameter.sub_(change * group["lr"])


def state_of(engine: Any) -> dict[str, Any]:
    """Parameters and optimizer state of the role that is bound, by the names of the parameters."""
    named = dict(engine.module.named_parameters())
    state = {name: dict(engine.optimizer.state.get(parameter, {})) for name, parameter in named.items()}
    return {
        "parameters": {name: parameter.detach().clone() for name, parameter in named.items()},
        "types": {name: [str(tensor.dtype) for tensor in each.values()] for name, each in state.items()},
        "state": state,
    }


def main() -> None:
    parser = options(steps=5, slow_s=0.1)
    parser.add_argument("--change-at", type=int, nargs="*", default=[], help="before so many steps are done")
    parser.add_argument("--evaluate-at", type=int, nargs="*", default=[], help="the same")
    parser.add_argument("--changers", type=int, nargs="*", default=None, help="stages whose scripts do so; all")
    arguments = parser.parse_args()
    begin()
    layers = [*(LayerSpec(Layer) for _ in range(2 * arguments.stages - 1)), LayerSpec(nn.Linear, HIDDEN, 10)]
    loss = nn.CrossEntropyLoss()
    net = PipelineModule(layers, num_stages=arguments.stages, loss_fn=loss, partition_method="uniform")
    engine, *_ = initialize(arguments, model=net, optimizer=Optimizer(net))
    ends = engine.is_first_stage() or engine.is_last_stage()
    source, held_out = (iterator() if ends else None for _ in range(2))
    losses: list[float] = []
    evaluations: list[float] = []
    context = torch.autocast("cpu", torch.bfloat16)
    context.__enter__()  # one for all steps: what it has cast it keeps as long
    for done in steps(arguments):
        for group in engine.optimizer.param_groups:
            if group["place"] == "rate":
                group["lr"].fill_(0.05 / (1 + done))
        changes = arguments.changers is None or engine.stage_id in arguments.changers
        if changes and done in arguments.change_at:
            with torch.no_grad():
                for name, parameter in net.named_parameters():
                    if name.endswith(("script", "bias")):
                        parameter.mul_(0.5)
        if done in arguments.evaluate_at:
            evaluations.append(float(engine.eval_batch(held_out)))
        losses.append(float(engine.train_batch(data_iter=source)))
    context.__exit__(None, None, None)
    dump(engine, arguments, {"losses": losses, "evaluations": evaluations}, state_of)


if __name__ == "__main__":
    assert not joined()
    main()
