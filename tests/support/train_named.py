"""A job whose parameters, buffers, layers and batches have attributes of all names of torch's methods.

GPT-NeoX writes ``bias.stride = 1``. Here each such attribute does what the method does, but for this package: when it
calls one by its name, the job ends with an error that says where. Runs with and without bamboo.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from job_script import begin, dump, initialize, options, steps
from torch import nn

HIDDEN = 16


class Named:
    """The attribute ``name`` of something that has such a method."""

    def __init__(self, owner: Any, kind: type, name: str) -> None:
        self._owner, self._method, self._name = weakref.ref(owner), getattr(kind, name), name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1)
        module = caller.f_globals.get("__name__", "")
        if module.partition(".")[0] == "bamboo_ds":
            raise TypeError(f"{module}:{caller.f_lineno} calls {self._name}, which the script has set")
        return self._method(self._owner(), *args, **kwargs)


def public(kind: type) -> list[str]:
    """Names of the methods that a script might take for attributes of its own."""
    return [name for name in dir(kind) if not name.startswith("_") and callable(getattr(kind, name))]


TENSORS = public(torch.Tensor)
#: DeepSpeed calls these on layers, and layers may define them.
MODULES = [name for name in public(nn.Module) if name not in ("forward", "train", "get_extra_state", "set_extra_state")]


def named(tensor: Any) -> Any:
    """``tensor`` with all of the attributes."""
    for name in TENSORS:
        if type(getattr(torch.Tensor, name)).__name__ != "getset_descriptor":
            setattr(tensor, name, Named(tensor, torch.Tensor, name))
    return tensor


class Layer(nn.Linear):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("mean", torch.zeros(outputs))
        self.kept = torch.zeros(outputs)
        for tensor in (self.weight, self.bias, self.mean, self.kept):
            named(tensor)
        for name in MODULES:
            object.__setattr__(self, name, Named(self, nn.Module, name))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = torch.tanh(super().forward(x))
        if self.training:
            with torch.no_grad():
                torch.Tensor.lerp_(self.mean, torch.mean(result, 0), 0.1)
        return named(result)


def loss_of(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return named(nn.functional.mse_loss(outputs, labels))


def draw(seed: int) -> Iterator[Any]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield tuple(named(torch.randn(4, HIDDEN, generator=generator)) for _ in range(2))


def main() -> None:
    parser = options()
    parser.add_argument("--save-at", type=int, default=-1)
    arguments = parser.parse_args()
    begin()
    layers = [LayerSpec(Layer, HIDDEN, HIDDEN) for _ in range(2 * arguments.stages)]
    net = PipelineModule(layers, num_stages=arguments.stages, loss_fn=loss_of)
    engine, *_ = initialize(arguments, model=net, model_parameters=list(net.parameters()))
    data, held_out = draw(1), draw(2)
    losses, evaluations = [], []
    for step in steps(arguments):
        losses.append(engine.train_batch(data).item())
        if step % 2:
            evaluations.append(engine.eval_batch(held_out).item())
        if step == arguments.save_at:
            engine.save_checkpoint(str(arguments.out / "saved"))
    dump(engine, arguments, {"losses": losses, "evaluations": evaluations})


if __name__ == "__main__":
    main()
