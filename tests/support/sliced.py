"""Layers that are cut into tensor slices, as Megatron does it: their group is a global of the process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from samples import HIDDEN
from torch import distributed as dist
from torch import nn


class State:
    """Megatron's ``parallel_state``, as far as tensor slices go."""

    group: Any = None
    rank = 0
    size = 1
    #: Called before a layer communicates in a forward or backward pass.
    before: Callable[[str], None] = staticmethod(lambda _: None)


def initialise(slices: int) -> None:
    """Make the groups of all slices; must be called on all ranks."""
    for first in range(0, dist.get_world_size(), slices):
        ranks = list(range(first, first + slices))
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            State.group, State.rank, State.size = group, dist.get_rank() - first, slices


class _Copy(torch.autograd.Function):
    """To all slices: identity; gradients are summed."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> torch.Tensor:
        total = gradients[0].clone()
        State.before("~backward")
        dist.all_reduce(total, group=State.group)
        return total


class _Reduce(torch.autograd.Function):
    """From all slices: sum; gradients go to all."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        total = x.clone()
        State.before("~forward")
        dist.all_reduce(total, group=State.group)
        return total

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0].clone()


def cut(parameter: torch.Tensor, axis: int, mark: str) -> nn.Parameter:
    """This slice's part of a parameter, marked as such."""
    part = nn.Parameter(parameter.detach().chunk(State.size, dim=axis)[State.rank].clone())
    setattr(part, mark, True)
    return part


class ColumnParallelLinear(nn.Module):
    """Each slice has some of the outputs."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        whole = nn.Linear(inputs, outputs)
        self.weight, self.bias = cut(whole.weight, 0, "tensor_model_parallel"), cut(whole.bias, 0, "model_parallel")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(_Copy.apply(x), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """Each slice has some of the inputs; all have the bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        whole = nn.Linear(inputs, outputs)
        self.weight, self.bias = (
            cut(whole.weight, 1, "tensor_model_parallel"),
            nn.Parameter(whole.bias.detach().clone()),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Reduce.apply(nn.functional.linear(x, self.weight)) + self.bias


class ParallelBlock(nn.Module):
    """Normalisation, two linear layers, dropout inside (of slices) and outside (of the whole), residual.

    With ``counting`` it has a buffer that every forward pass changes.
    """

    def __init__(self, dropout: float = 0.0, counting: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up, self.down = ColumnParallelLinear(HIDDEN, 4 * HIDDEN), RowParallelLinear(4 * HIDDEN, HIDDEN)
        self.dropout = nn.Dropout(dropout)
        if counting:
            self.register_buffer("mean", torch.zeros(HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.up.weight.dtype)
        y = self.down(nn.functional.gelu(self.up(self.norm(x))))
        if "mean" in self._buffers and self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(y.detach().mean(0).to(self.mean.dtype), alpha=0.1)
        return x + self.dropout(y)


def named(batches: Iterator[Any]) -> Iterator[dict[str, torch.Tensor]]:
    """Batches as dictionaries, as Megatron's datasets give them."""
    for inputs, labels in batches:
        yield {"inputs": inputs, "labels": labels}


def batch_fn(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The first slice has read the batch, the others get it from that one."""
    size = torch.zeros(1, dtype=torch.long)
    if State.rank == 0:
        size[0] = len(batch["labels"])
    source = dist.get_process_group_ranks(State.group)[0]
    dist.broadcast(size, source, group=State.group)
    inputs, labels = torch.zeros(int(size), HIDDEN), torch.zeros(int(size), dtype=torch.long)
    if State.rank == 0:
        inputs, labels = batch["inputs"], batch["labels"]
    dist.broadcast(inputs, source, group=State.group)
    dist.broadcast(labels, source, group=State.group)
    return inputs, labels
