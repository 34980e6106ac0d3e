"""Replaces functions of other packages, each once."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

#: Attribute of what is replaced already.
MARK = "_bamboo_patched"
#: Modules that define what Megatron prints and writes with, in versions of Megatron-DeepSpeed, GPT-NeoX and Megatron's
#: core.
MEGATRON = (
    "megatron",
    "megatron.utils",
    "megatron.logging",
    "megatron.global_vars",
    "megatron.training",
    "megatron.timers",
    "megatron.mpu.initialize",
    "megatron.core.timers",
    "megatron.core.parallel_state",
)


def patch(module: ModuleType | type, name: str, wrap: Callable[[Any], Any]) -> None:
    """Replaces what a module or a class defines as ``name`` by what ``wrap`` makes of it, unless that is done."""
    original = vars(module)[name]
    if not hasattr(original, MARK):
        wrapped = wrap(original)
        setattr(wrapped, MARK, True)
        setattr(module, name, wrapped)


def is_patched(value: Any) -> bool:
    """Whether :func:`patch` has put ``value`` in the place of something."""
    return hasattr(value, MARK)
