"""Where Megatron keeps its groups."""

from . import parallel_state as mpu

__all__ = ["mpu"]
