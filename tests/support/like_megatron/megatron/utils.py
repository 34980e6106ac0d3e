"""Who prints, and a norm that is summed up over all stages."""

from __future__ import annotations

import torch

from .core import mpu


def is_rank_0() -> bool:
    return torch.distributed.get_rank() == 0


def print_rank_0(message: str) -> None:
    if torch.distributed.get_rank() == 0:
        print(message, flush=True)


def is_last_rank() -> bool:
    return torch.distributed.get_rank() == torch.distributed.get_world_size() - 1


def print_rank_last(message: str) -> None:
    if is_last_rank():
        print(message, flush=True)


def calc_params_l2_norm(model: torch.nn.Module) -> float:
    square = torch.stack([p.detach().square().sum() for p in model.parameters()]).sum()
    torch.distributed.all_reduce(square, group=mpu.get_model_parallel_group())
    return float(square) ** 0.5
