"""The arguments of a run: DeepSpeed finds its configuration among them, as a dictionary."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass
class NeoXArgs:
    """One object for everything, which also layers get."""

    deepspeed_config: dict[str, Any]
    deepspeed_extra_args: dict[str, Any]
    stages: int
    save: Path
    pos_emb: str
    tied: bool
    hidden_size: int = 16
    heads: int = 2
    sequence: int = 8
    vocabulary: int = 32
    lr: float = 0.01
    min_lr: float = 0.001
    warmup_iters: int = 3
    decay_iters: int = 50
    eval_iters: int = 2
    keep_last_n_checkpoints: int = 1
    iteration: int = 0
    local_rank: int = -1

    def __post_init__(self) -> None:
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.deepspeed_config = {**self.deepspeed_config, **self.deepspeed_extra_args}
