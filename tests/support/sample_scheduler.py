"""A learning-rate scheduler with the ways of Megatron's ``OptimizerParamScheduler``."""

from __future__ import annotations

from typing import Any

import torch

#: What the script has counted so far; Megatron's scheduler asks the global arguments.
PROGRESS = {"tokens": 0}


class SampleScheduler:
    """Counts samples; sets learning rate and weight decay of the groups. A state that it loads is added to its own."""

    def __init__(self, optimizer: torch.optim.Optimizer, samples: int) -> None:
        self.optimizer, self.samples = optimizer, samples
        self.num_samples = self.num_tokens = 0
        self.step(0)

    def step(self, increment: int) -> None:
        self.num_samples += increment
        self.num_tokens = PROGRESS["tokens"]
        done = min(1.0, self.num_samples / self.samples)
        for group in self.optimizer.param_groups:
            group["lr"] = 0.01 * (1.0 - 0.5 * done) / (1.0 + self.num_tokens / 1000)
            group["weight_decay"] = 0.1 * done * group.get("wd_mult", 1.0)

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self.samples, "num_samples": self.num_samples, "num_tokens": self.num_tokens}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        print(" > using checkpoint value for samples", flush=True)  # as Megatron's does, for each of its values
        self.samples = state["samples"]
        self.step(state["num_samples"])
