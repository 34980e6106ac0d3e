"""The classes that handle DeepSpeed's optimizers."""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from .deepspeed_adapter import DeepSpeedAdapter
from .groups import RoleGroups
from .optimizers import FusedHalfOptimizer, NoOptimizer, PlainOptimizer, StageOptimizer, UnfusedHalfOptimizer
from .runtime import StageRuntime
from .sharded import Bf16Optimizer, ShardedOptimizer, ZeroOptimizer

_KINDS: dict[type, type[StageOptimizer]] = {
    BF16_Optimizer: Bf16Optimizer,
    DeepSpeedZeroOptimizer: ZeroOptimizer,
    FP16_Optimizer: FusedHalfOptimizer,
    FP16_UnfusedOptimizer: UnfusedHalfOptimizer,
}


def stage_optimizer(ds: DeepSpeedAdapter, groups: RoleGroups, runtime: StageRuntime) -> StageOptimizer:
    """The object that carries out and copies the steps of ``runtime``."""
    if runtime.attributes["basic_optimizer"] is None:
        return NoOptimizer(ds, groups, runtime)
    return _KINDS.get(type(runtime.attributes["optimizer"]), PlainOptimizer)(ds, groups, runtime)


def is_sharded(wrapper: Any) -> bool:
    """Whether an optimizer is one that partitions its state over the pipelines."""
    return issubclass(_KINDS.get(type(wrapper), PlainOptimizer), ShardedOptimizer)
