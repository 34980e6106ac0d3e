"""The device that this process computes on, by DeepSpeed's accelerator: of any kind that DeepSpeed knows.

DeepSpeed is imported by the first question, and not before: a process that trains has it by then.
"""

from __future__ import annotations

from typing import Any

import torch

#: Host memory.
HOST = torch.device("cpu")


def accelerator() -> Any:
    """DeepSpeed's accelerator: streams, generators, memory, names and communication of this process's devices."""
    from deepspeed.accelerator import get_accelerator

    return get_accelerator()


def current() -> torch.device:
    """The device that the calling thread computes on; :data:`HOST` where there is no other."""
    return torch.device(accelerator().current_device_name())


def numbered(device: torch.device) -> torch.device:
    """``device`` with its number: without one it means that of the calling thread."""
    return device if device.type == HOST.type or device.index is not None else current()


def room(device: torch.device) -> int:
    """Bytes that this process may still allocate on ``device``, besides what it and all others hold there.

    What the allocator has cached counts.
    """
    own, number = accelerator(), numbered(device).index
    held = own.memory_allocated(number)
    cached = own.memory_reserved(number) - held
    return max(0, min(own.total_memory(number) - held, _free(number) + cached))


def _free(number: int | None) -> int:
    """Bytes of a device that no process holds.

    DeepSpeed asks a library for them that may not be installed, and that some names in ``CUDA_VISIBLE_DEVICES`` make
    fail, or leaves others out: torch's answer comes first.
    """
    ask = getattr(torch.get_device_module(accelerator().device_name()), "mem_get_info", None)
    return int(accelerator().available_memory(number) if ask is None else ask(number)[0])
