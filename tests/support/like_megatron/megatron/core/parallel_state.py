"""The groups of pipelines of the topology (pipe, data)."""

from __future__ import annotations

from typing import Any

import torch

_GROUP: Any = None
_STAGES = 0


def initialize_model_parallel(stages: int) -> None:
    global _GROUP, _STAGES
    _STAGES, world = stages, torch.distributed.get_world_size()
    for pipeline in range(world // stages):
        ranks = list(range(pipeline, world, world // stages))
        group = torch.distributed.new_group(ranks)
        if torch.distributed.get_rank() in ranks:
            _GROUP = group


def get_model_parallel_group() -> Any:
    return _GROUP


def is_pipeline_last_stage(ignore_virtual: bool = False) -> bool:
    return bool(torch.distributed.get_rank(_GROUP) == _STAGES - 1)
