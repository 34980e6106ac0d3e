"""The process groups of torch that do the work inside one epoch."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from ..devices.accelerators import HOST, accelerator
from .c10d import Store, dist

#: Kinds of inner groups.
GLOO = "gloo"
NCCL = "nccl"
#: Kinds whose collectives run behind the host: ``wait`` returns at once and lets the device's stream wait. An abort
#: ends such a collective without an error, and leaves what it has written so far.
BEHIND = frozenset({NCCL})
#: A work of torch and what to do once, after it succeeded.
Pending = tuple[Any, Callable[[], None] | None]

_cuda_kind = NCCL


def use_for_cuda(kind: str) -> None:
    """Makes groups of CUDA tensors ones of ``kind`` from now on, everywhere: gloo takes them through host memory."""
    global _cuda_kind
    _cuda_kind = kind


def kind_for(device: torch.device) -> str:
    """The kind of inner group that serves tensors on ``device``.

    That of devices for which DeepSpeed communicates by NCCL is NCCL, unless :func:`use_for_cuda` says otherwise. All
    others are served by gloo, those of devices through host memory.
    """
    if device.type == HOST.type or not dist.is_nccl_available():
        return GLOO
    own = accelerator()
    # torch asks for the group of CUDA tensors also on a machine without a GPU.
    served = own.device_name() == device.type and own.communication_backend_name() == NCCL and own.is_available()
    return _cuda_kind if served else GLOO


def own_kind() -> str:
    """The same of tensors on the device that this process computes on."""
    return kind_for(torch.device(accelerator().device_name())) if dist.is_nccl_available() else GLOO


def runs_behind(device: torch.device) -> bool:
    """Whether collectives with tensors on ``device`` run behind the host; see :data:`BEHIND`."""
    return kind_for(device) in BEHIND


def connect(group: Any, size: int, device: torch.device) -> None:
    """Makes the communicator of a new group that runs behind the host. Collective over its ``size`` members; blocks.

    Torch makes it in the group's first collective on ``device``, which has a number, and NCCL what connects each two
    ranks in the first exchange of all with all.
    """
    ones = torch.ones(size, device=device)
    group.allreduce([ones]).wait()
    group.alltoall_base(torch.empty_like(ones), ones, [], []).wait()
    if device.type != HOST.type:
        accelerator().current_stream(device.index).synchronize()


def create_inner(kind: str, store: Store, rank: int, size: int, timeout: timedelta, gloo_device: Any) -> Any:
    """Creates an inner group. Collective over its ``size`` members; gloo blocks until all have come, NCCL does not.

    Args:
        kind: :data:`GLOO` or :data:`NCCL`.
        store: rendezvous store, with a prefix that no other group has.
        rank, size: position of this member and number of members.
        timeout: default timeout of operations, and of the rendezvous.
        gloo_device: the epoch's ``ProcessGroupGloo`` device, bound to the advertised address.
    """
    if kind == GLOO:
        gloo_options = dist.ProcessGroupGloo._Options()
        gloo_options._devices = [gloo_device]
        gloo_options._timeout = timeout
        return dist.ProcessGroupGloo(store, rank, size, gloo_options)
    nccl_options = dist.ProcessGroupNCCL.Options()
    nccl_options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, nccl_options)
