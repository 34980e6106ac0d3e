"""Reductions in the order of the ranks, among processes of one rank each, on groups that only move shares.

Each rank gets every rank's share of one part, combines these in the order of the ranks, and gives the result to all::

    rank 0   a0 a1 a2 --+-- all-to-all --> a0 b0 c0 --> a0+b0+c0 --+-- all-gather --> sum 0, sum 1, sum 2
    rank 1   b0 b1 b2 --+                  a1 b1 c1 --> a1+b1+c1 --+
    rank 2   c0 c1 c2 --+                  a2 b2 c2 --> a2+b2+c2 --+

These are the bytes of a ring. All of it is begun at once: the current stream of the device does one after the other,
and the host waits for none. So an asynchronous reduction does not overlap with what that stream is given after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from ...bare import bare
from ...devices.accelerators import HOST, accelerator
from ...errors import UnsupportedError
from ..c10d import registry
from ..inner import Pending
from ..work import Several
from .order import by_rank, combined


class Ordered:
    """The reductions of one group. Each method begins one; called by all ranks alike.

    Args:
        inner: torch's group, of ``size`` ranks.
        rank: this process's in it.
        follow: makes the current stream wait for a work of ``inner``.
    """

    def __init__(self, inner: Any, size: int, rank: int, follow: Callable[[Any], None]) -> None:
        self._inner, self._size, self._rank, self._follow = inner, size, rank, follow
        self._works: list[Any] = []

    def start(self, shape: str, forms: Any, options: Any) -> Pending:
        """Begins a reduction.

        Args:
            shape: one of those that reduce, of :data:`.table.Shape`.
            forms: its tensors, in the form of that shape.
            options: torch's.

        Raises:
            EpochChanged, PeerLost: as a wait.
            UnsupportedError: a tensor is sparse.
        """
        operator, timeout = options.reduceOp, options.timeout
        if shape == "reduce_scatter":
            for output, row in forms:
                self._scatter(output, row, operator, timeout)
            written = [output for output, _ in forms]
        else:
            written = list(forms)
            self._reduce(written, operator, timeout, getattr(options, "rootRank", self._rank) == self._rank)
        return _Followed(self._works, written), None

    def _reduce(self, tensors: Sequence[torch.Tensor], operator: Any, timeout: timedelta, wanted: bool) -> None:
        if any(tensor.layout is not torch.strided for tensor in tensors):
            raise UnsupportedError("reductions of sparse tensors are not supported: reduce dense ones")
        whole = tensors[0].detach()
        in_place = wanted and len(tensors) == 1 and whole.is_contiguous()
        flat = whole.view(-1) if in_place else torch.cat([bare(tensor).reshape(-1) for tensor in tensors])
        for begin, end, ranks in by_rank(self._size, flat.numel(), flat.element_size()):
            length = -(-(end - begin) // self._size)
            given = flat.new_zeros(length * self._size)
            given[: end - begin] = flat[begin:end]
            part = self._exchange(given, [length] * self._size, operator, ranks, timeout)
            gather = registry.AllgatherOptions()
            gather.timeout = timeout
            self._do(self._inner._allgather_base(given, part, gather))
            flat[begin:end] = given[: end - begin]
        if wanted and not in_place:
            for tensor, result in zip(tensors, flat.split([bare(tensor).numel() for tensor in tensors]), strict=True):
                bare(tensor).copy_(result.view_as(tensor))

    def _scatter(self, output: torch.Tensor, row: Sequence[torch.Tensor], operator: Any, timeout: timedelta) -> None:
        given = torch.cat([bare(share).reshape(-1) for share in row])
        sizes = [bare(share).numel() for share in row]
        part = self._exchange(given, sizes, operator, range(self._size), timeout)
        bare(output).copy_(part.view_as(output))

    def _exchange(
        self, given: torch.Tensor, sizes: list[int], operator: Any, ranks: Sequence[int], timeout: timedelta
    ) -> torch.Tensor:
        """This rank's part of the reduction of ``given``, whose parts have ``sizes``."""
        mine = sizes[self._rank]
        shares, exchange = given.new_empty(mine * self._size), registry.AllToAllOptions()
        exchange.timeout = timeout
        self._do(self._inner.alltoall_base(shares, given, [mine] * self._size, sizes, exchange))
        return combined(shares.view(self._size, mine).unbind(), ranks, operator)

    def _do(self, work: Any) -> None:
        self._works.append(work)
        self._follow(work)


class _Followed(Several):
    """Works that the stream on which they were begun has been made to wait for, and what it does after the last one."""

    def __init__(self, works: Sequence[Any], written: list[torch.Tensor]) -> None:
        super().__init__([(work, None) for work in works], written)
        devices = {tensor.device for tensor in written if tensor.device.type != HOST.type}
        self._marks = [accelerator().current_stream(device.index).record_event() for device in devices]

    def wait(self, *timeout: Any) -> bool:
        """Lets the current stream wait, which may be another one."""
        super().wait(*timeout)
        for mark in self._marks:
            accelerator().current_stream().wait_event(mark)
        return True

    def is_completed(self) -> bool:
        """Whether the device is through with all of it."""
        return super().is_completed() and all(mark.query() for mark in self._marks)
