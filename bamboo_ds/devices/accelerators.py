"""The device that this process computes on, by DeepSpeed's accelerator: of any kind that DeepSpeed knows.

DeepSpeed is imported by the first question, and not before: a process that trains has it by then.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

#: Host memory.
HOST = torch.device("cpu")
#: Devices whose page-locked memory torch keeps for the next one who asks; for others its question ends the process.
_CACHING = frozenset({"cuda", "xpu"})


def accelerator() -> Any:
    """DeepSpeed's accelerator: streams, generators, memory, names and communication of this process's devices."""
    from deepspeed.accelerator import get_accelerator

    found = get_accelerator()
    return found.of_device if type(found) is _HostInOneThread else found


class _HostInOneThread:
    """The accelerator of host memory for the thread that makes it, for all others that of the device."""

    def __init__(self, of_device: Any) -> None:
        self.of_device, self._thread = of_device, threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        here = threading.get_ident() == self._thread
        return getattr(_of_host() if here else self.of_device, name)


@cache
def _of_host() -> Any:
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    return CPU_Accelerator()


@contextmanager
def on_host() -> Iterator[None]:
    """In the body DeepSpeed's own code makes its tensors in host memory, as in a process without another device.

    That holds for the calling thread, and not for this package, which goes on computing on the device; see
    :func:`accelerator`.
    """
    from deepspeed.accelerator import get_accelerator, real_accelerator

    before = get_accelerator()
    if type(before) is _HostInOneThread:
        yield
        return
    real_accelerator.ds_accelerator = _HostInOneThread(before)
    try:
        yield
    finally:
        real_accelerator.ds_accelerator = before


def current() -> torch.device:
    """The device that the calling thread computes on; :data:`HOST` where there is no other."""
    return torch.device(accelerator().current_device_name())


def numbered(device: torch.device) -> torch.device:
    """``device`` with its number: without one it means that of the calling thread."""
    return device if device.type == HOST.type or device.index is not None else current()


def page_locked(nbytes: int) -> torch.Tensor:
    """Host memory (``uint8``, one dimension) with any content that devices read and write by themselves.

    As DeepSpeed pins memory. Torch's allocator, which that uses by default, takes powers of two.
    """
    own = accelerator()
    if hasattr(own, "pin_empty"):
        return own.pin_empty(nbytes, dtype=torch.uint8)
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)  # before that, DeepSpeed could only copy into it


def event(**options: bool) -> Any:
    """An event of the device. A thread that waits for it sleeps meanwhile, where the device's events can do that."""
    return accelerator().Event(**options, **({"blocking": True} if _events_sleep() else {}))


@cache
def _events_sleep() -> bool:
    try:
        accelerator().Event(blocking=True)
    except TypeError:  # torch's own for XPUs have no such option
        return False
    return True


def release_page_locked() -> None:
    """Gives back what torch's allocator keeps of page-locked memory that is not in use any more."""
    if accelerator().device_name() not in _CACHING:
        return
    for module, name in ((torch.accelerator, "empty_host_cache"), (torch._C, "_host_emptyCache")):
        if hasattr(module, name):  # by torch's version; the second one where torch is built for CUDA
            getattr(module, name)()
            return


def name_on_host(device: torch.device, environ: Mapping[str, str]) -> str:
    """The name of the device on its host, equal in all processes, whichever devices they may see.

    Args:
        device: not host memory.
        environ: where the variables may be that say which devices the process sees.
    """
    number = numbered(device).index
    for name in accelerator().visible_devices_envs():
        visible = [each.strip() for each in environ.get(name, "").split(",") if each.strip()]
        if number < len(visible):
            return f"{device.type} {visible[number]}"
    return f"{device.type} {number}"


def room(device: torch.device, sharing: int) -> int:
    """Bytes that this process may still allocate on ``device``, besides what it and all others hold there.

    What the allocator has cached counts.

    Args:
        device: not host memory.
        sharing: processes that divide the device, and what is free of it, among themselves.
    """
    own, number = accelerator(), numbered(device).index
    held = own.memory_allocated(number)
    cached = own.memory_reserved(number) - held
    return max(0, min(own.total_memory(number) // sharing - held, _free(number) // sharing + cached))


def _free(number: int | None) -> int:
    """Bytes of a device that no process holds.

    DeepSpeed asks a library for them that may not be installed, and that some names in ``CUDA_VISIBLE_DEVICES`` make
    fail, or leaves others out: torch's answer comes first.
    """
    ask = getattr(torch.get_device_module(accelerator().device_name()), "mem_get_info", None)
    return int(accelerator().available_memory(number) if ask is None else ask(number)[0])
