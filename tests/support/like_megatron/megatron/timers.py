"""Timers, whose times all ranks gather and the last one prints."""

from __future__ import annotations

import torch


class Timers:
    def log(self, names: list[str], rank: int | None = None, normalizer: float = 1.0) -> None:
        times = torch.zeros(torch.distributed.get_world_size())
        torch.distributed.all_gather_into_tensor(times, torch.ones(1))
        if rank is None:
            rank = torch.distributed.get_world_size() - 1
        if rank == torch.distributed.get_rank():
            print(f"timers: {' '.join(names)} of {len(times)} ranks", flush=True)
