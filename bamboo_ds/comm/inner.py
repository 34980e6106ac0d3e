"""The process groups of torch that do the work inside one epoch."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from ..errors import UnsupportedError

#: Kinds of inner groups.
GLOO = "gloo"
NCCL = "nccl"


def kind_for(device: torch.device) -> str:
    """Which kind of inner group serves tensors on ``device``."""
    if device.type == "cpu":
        return GLOO
    if device.type == "cuda":
        # gloo stages CUDA tensors through host memory: slow, but right, where NCCL is missing.
        return NCCL if dist.is_nccl_available() else GLOO
    raise UnsupportedError(f"bamboo process groups carry cpu and cuda tensors, not {device.type}")


def create_inner(
    kind: str, store: dist.Store, rank: int, size: int, timeout: timedelta, gloo_device: Any
) -> Any:
    """Create an inner group. Collective over its ``size`` members; gloo blocks until all have come.

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


def abort_inner(kind: str, group: Any) -> None:
    """Abort ``group``'s communicators, from any thread. gloo has none: its sockets are shut down instead."""
    if kind == NCCL:
        group.abort()
