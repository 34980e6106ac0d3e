"""Collectives of a member that is alone: it owns all roles of the group, or it is detached or replays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .c10d import dist
from .work import CompletedWork

Tensors = list[torch.Tensor]


class LocalGroup:
    """What a group of ``size`` logical ranks computes when all of them are this process.

    Every rank gets what the caller (``rank``) passes. It is a member's whole contribution to a reduction, which
    therefore leaves it as it is.

    Args:
        rank: position of the caller.
        size: number of ranks.
        each: every rank contributes what the caller passes, so that a sum is ``size`` times that: for a caller without
            peers, whose script wants to see a group of that size.
    """

    def __init__(self, rank: int, size: int, each: bool = False) -> None:
        self._rank = rank
        self._size = size
        self._each = each

    def broadcast(self, tensors: Tensors, opts: Any = None) -> CompletedWork:
        """Leave ``tensors`` as they are."""
        return CompletedWork(tensors)

    def allreduce(self, tensors: Tensors, opts: Any = None) -> CompletedWork:
        """Leave ``tensors`` as they are, or multiply for a sum."""
        self._reduce(tensors, opts)
        return CompletedWork(tensors)

    allreduce_coalesced = reduce = allreduce

    def _reduce(self, tensors: Sequence[torch.Tensor], opts: Any) -> None:
        if self._each and opts is not None and opts.reduceOp == dist.ReduceOp.SUM:
            for tensor in tensors:
                tensor.detach().mul_(self._size)

    def barrier(self, opts: Any = None) -> CompletedWork:
        """Return at once."""
        return CompletedWork()

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> CompletedWork:
        """Copy each input to all its outputs."""
        for row, tensor in zip(outputs, inputs, strict=True):
            self._fill(row, tensor)
        return CompletedWork([tensor for row in outputs for tensor in row])

    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> CompletedWork:
        """As :meth:`allgather`; ``outputs`` has one row per rank."""
        return self.allgather([list(column) for column in zip(*outputs, strict=True)], inputs)

    def _fill(self, row: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        for output in row:
            output.copy_(tensor.view_as(output))

    def _allgather_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> CompletedWork:
        """Repeat ``tensor`` in ``output``."""
        self._fill(output.view(self._size, -1).unbind(), tensor.reshape(-1))
        return CompletedWork([output])

    def allgather_into_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> CompletedWork:
        """As :meth:`_allgather_base`, for each pair."""
        for output, tensor in zip(outputs, inputs, strict=True):
            self._allgather_base(output, tensor)
        return CompletedWork(outputs)

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> CompletedWork:
        """Copy the input to all outputs, if there are any."""
        for row, tensor in zip(outputs, inputs, strict=False):
            self._fill(row, tensor)
        return CompletedWork([tensor for row in outputs for tensor in row])

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> CompletedWork:
        """Copy our part of the inputs, if there are any."""
        for output, row in zip(outputs, inputs, strict=False):
            output.copy_(row[self._rank])
        return CompletedWork(outputs)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> CompletedWork:
        """Copy our part of the inputs."""
        for output, row in zip(outputs, inputs, strict=True):
            output.copy_(row[self._rank])
        self._reduce(outputs, opts)
        return CompletedWork(outputs)

    def _reduce_scatter_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> CompletedWork:
        """Copy our part of ``tensor``."""
        output.copy_(tensor.reshape(self._size, -1)[self._rank].view_as(output))
        self._reduce([output], opts)
        return CompletedWork([output])

    def reduce_scatter_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> CompletedWork:
        """As :meth:`_reduce_scatter_base`, for each pair."""
        for output, tensor in zip(outputs, inputs, strict=True):
            self._reduce_scatter_base(output, tensor, opts)
        return CompletedWork(outputs)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> CompletedWork:
        """Every rank sends us what we send to ourselves."""
        self._fill(outputs, inputs[self._rank])
        return CompletedWork(outputs)

    def alltoall_base(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> CompletedWork:
        """As :meth:`alltoall`, on the rows of one tensor."""
        sent = tensor.split(list(input_splits) or [tensor.size(0) // self._size] * self._size)
        received = output.split(list(output_splits) or [output.size(0) // self._size] * self._size)
        self._fill(received, sent[self._rank])
        return CompletedWork([output])
