"""Means over ranks, and timers that print on rank 0."""

from __future__ import annotations

import time

import torch


def reduce_losses(losses: list[torch.Tensor]) -> torch.Tensor:
    """The mean of each loss over all ranks, which all have the same."""
    reduced = torch.cat([loss.detach().clone().view(1) for loss in losses])
    torch.distributed.all_reduce(reduced)
    return reduced / torch.distributed.get_world_size()


def count_parameters(model: torch.nn.Module) -> int:
    """Of all stages."""
    count = torch.tensor([sum(p.numel() for p in model.parameters())])
    torch.distributed.all_reduce(count)
    return int(count)


class Timers:
    """Seconds by name."""

    def __init__(self) -> None:
        self._began: dict[str, float] = {}
        self._took: dict[str, float] = {}

    def start(self, name: str) -> None:
        self._began[name] = time.monotonic()

    def stop(self, name: str) -> None:
        self._took[name] = self._took.get(name, 0.0) + time.monotonic() - self._began.pop(name)

    def log(self, names: list[str], normalizer: float = 1.0) -> None:
        if torch.distributed.get_rank() == 0:
            print("time", *(f"{name}: {self._took.pop(name, 0.0) / normalizer:.3f}" for name in names), flush=True)
