"""The functions of Megatron-DeepSpeed that print and write, by their names and in their modules; no more of it."""

from .global_vars import get_args, get_tensorboard_writer, get_timers, set_global_variables
from .utils import is_last_rank, is_rank_0, print_rank_0, print_rank_last

__all__ = [
    "get_args",
    "get_tensorboard_writer",
    "get_timers",
    "is_last_rank",
    "is_rank_0",
    "print_rank_0",
    "print_rank_last",
    "set_global_variables",
]
