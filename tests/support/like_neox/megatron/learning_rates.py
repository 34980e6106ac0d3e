"""A scheduler that is no object of torch's."""

from __future__ import annotations

from typing import Any

import torch

from . import print_rank_0


class AnnealingLR:
    """Linear warm-up, then linear decay; sets the rate of all groups of the optimizer that it has."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, start_lr: float, min_lr: float, warmup_iter: int, end_iter: int
    ) -> None:
        self.optimizer, self.start_lr, self.min_lr = optimizer, start_lr, min_lr
        self.warmup_iter, self.end_iter, self.num_iters = warmup_iter, end_iter, 0
        self.step(0)
        print_rank_0("> learning rate decay style: linear")

    def get_lr(self) -> float:
        if self.num_iters <= self.warmup_iter:
            return self.start_lr * max(1, self.num_iters) / self.warmup_iter
        left = (self.end_iter - self.num_iters) / (self.end_iter - self.warmup_iter)
        return max(self.min_lr, self.start_lr * left)

    def step(self, step_num: int | None = None) -> None:
        self.num_iters = self.num_iters + 1 if step_num is None else step_num
        for group in self.optimizer.param_groups:
            group["lr"] = self.get_lr()

    def state_dict(self) -> dict[str, Any]:
        return {"start_lr": self.start_lr, "num_iters": self.num_iters, "end_iter": self.end_iter}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start_lr, self.end_iter = state["start_lr"], state["end_iter"]
        self.step(state["num_iters"])
