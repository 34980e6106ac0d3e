"""The process groups of torch that do the work inside one epoch."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from ..errors import UnsupportedError
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
    """From now on groups of CUDA tensors are of ``kind``, on all members: gloo takes them through host memory."""
    global _cuda_kind
    _cuda_kind = kind


def kind_for(device: torch.device) -> str:
    """Which kind of inner group serves tensors on ``device``."""
    if device.type == "cpu":
        return GLOO
    if device.type == "cuda":
        # torch asks for the group of CUDA tensors also on a machine without a GPU.
        return _cuda_kind if dist.is_nccl_available() and torch.cuda.is_available() else GLOO
    raise UnsupportedError(f"bamboo process groups carry cpu and cuda tensors, not {device.type}")


def runs_behind(device: torch.device) -> bool:
    """Whether collectives with tensors on ``device`` run behind the host; see :data:`BEHIND`."""
    return kind_for(device) in BEHIND


def gpus_run_behind() -> bool:
    """The same of this process's GPUs, if it has any."""
    return runs_behind(torch.device("cuda"))


def connect(group: Any, size: int, device: torch.device) -> None:
    """Make the communicator of a new group that runs behind the host. Collective over its ``size`` members; blocks.

    Torch makes it in the group's first collective on ``device``, and NCCL what connects each two ranks in the first
    exchange of all with all.
    """
    ones = torch.ones(size, device=device)
    group.allreduce([ones]).wait()
    if size > 2:
        group.alltoall_base(torch.empty_like(ones), ones, [], []).wait()
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def create_inner(kind: str, store: Store, rank: int, size: int, timeout: timedelta, gloo_device: Any) -> Any:
    """Create an inner group. Collective over its ``size`` members; gloo blocks until all have come, NCCL does not.

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
