"""The process groups of torch that do the work inside one epoch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from ..errors import UnsupportedError
from .c10d import Store, dist

#: Kinds of inner groups.
GLOO = "gloo"
NCCL = "nccl"
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


def create_inner(kind: str, store: Store, rank: int, size: int, timeout: timedelta, gloo_device: Any) -> Any:
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


class Several:
    """Several works of torch, with their finishing touches, as one."""

    def __init__(self, pending: Sequence[Pending]) -> None:
        self._pending = list(pending)

    def wait(self, *timeout: Any) -> bool:
        """Wait for all, in order."""
        while self._pending:
            work, finish = self._pending[0]
            work.wait(*timeout)
            if finish is not None:
                finish()
            self._pending.pop(0)
        return True

    def is_completed(self) -> bool:
        """Whether all are completed."""
        return all(work.is_completed() for work, _ in self._pending)

    def is_success(self) -> bool:
        """Whether all succeeded."""
        return all(work.is_success() for work, _ in self._pending)

    def exception(self) -> Exception | None:
        """The first error."""
        return next((error for work, _ in self._pending if (error := work.exception()) is not None), None)

    def result(self) -> list[torch.Tensor]:
        """Not kept."""
        return []

    def get_future(self) -> Any:
        """Not available."""
        raise RuntimeError("coalesced collectives have no future in gloo")
