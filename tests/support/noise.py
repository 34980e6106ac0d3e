"""A model of noise whose weights are frozen but for small adapters, and its data: targets depend on the noise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from deepspeed import comm as dist
from torch import nn

HIDDEN = 16


class InitialLayer(nn.Module):
    """(noisy latents, time) to activations and modulation; trains nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.img_in, self.time_in = nn.Linear(HIDDEN, HIDDEN), nn.Linear(1, HIDDEN)
        self.requires_grad_(False)

    def forward(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        latents, time = inputs
        train = torch.is_grad_enabled()
        return self.img_in(latents).requires_grad_(train), self.time_in(time).requires_grad_(train)


class TransformerLayer(nn.Module):
    """A frozen linear layer with an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN).requires_grad_(False)
        self.lora_A, self.lora_B = nn.Linear(HIDDEN, 2, bias=False), nn.Linear(2, HIDDEN)

    def forward(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        x, vec = inputs
        return x + torch.tanh(self.linear(x) + self.lora_B(self.lora_A(x)) + vec), vec * 1.0


class FinalLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, vec = inputs
        return self.out(x * (1 + vec))


def loss_of(output: torch.Tensor, label: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    target, mask = label
    loss = (output.float() - target).square()
    return (loss * mask.unsqueeze(-1) if mask.numel() else loss).mean()


class PipelineDataLoader:
    """Micro-batches of which each end of the pipeline gets its part, and zeros for the other."""

    def __init__(self, engine: Any, size: int, pieces: int, batches: int, seed: int) -> None:
        self.engine, self.size, self.pieces, self.batches, self.seed = engine, size, pieces, batches, seed
        self.epoch, self._drawn = 1, 0

    def reset(self) -> None:
        self.epoch, self._drawn = 1, 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        assert self.engine.is_first_stage() or self.engine.is_last_stage()
        grid = self.engine.grid
        number = self._drawn % (self.batches * self.pieces) * grid.get_data_parallel_world_size()
        generator = torch.Generator().manual_seed(self.seed + number + grid.get_data_parallel_rank())
        latents, noise = (torch.randn(self.size, HIDDEN, generator=generator) for _ in range(2))
        time = torch.rand(self.size, 1, generator=generator)
        self._drawn += 1
        self.epoch = 1 + self._drawn // (self.batches * self.pieces)
        features = (1 - time) * latents + time * noise, time
        label = noise - latents, torch.tensor([])
        if not self.engine.is_first_stage():
            features = torch.zeros_like(features[0]), torch.zeros_like(time)
        if not self.engine.is_last_stage():
            label = torch.zeros_like(label[0]), torch.tensor([])
        return features, label

    def sync_epoch(self) -> None:
        found: list[Any] = [None] * dist.get_world_size()
        torch.distributed.all_gather_object(found, self.epoch)
        self.epoch = max(found)
