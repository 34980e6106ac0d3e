"""Collectives of a group some of whose roles share an owner.

The inner group has one rank per *member*; a member calls each collective once, whatever the number of its
roles. Its contribution counts once in reductions (it has summed its roles' parts before) and stands for each
of its roles elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import UnsupportedError
from .c10d import dist, registry
from .inner import Pending, Several

Tensors = list[torch.Tensor]


class Cohosted:
    """Translates collectives over logical ranks to collectives of ``inner``.

    Args:
        inner: group with one rank per distinct owner.
        hosts: inner rank of each logical rank's owner.
        rank: the logical rank for which results are meant.
    """

    def __init__(self, inner: Any, hosts: Sequence[int], rank: int) -> None:
        self._inner = inner
        self._hosts = tuple(hosts)
        self._members = max(hosts) + 1
        self._rank = rank

    # -- reductions --------------------------------------------------------------------------------------
    def _reducing(self, options: Any, tensors: Tensors) -> Callable[[], None] | None:
        """Averages are over the logical ranks: sum, then divide."""
        if options.reduceOp != dist.ReduceOp.AVG:
            return None
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)

        def divide() -> None:
            for tensor in tensors:
                tensor.div_(len(self._hosts))

        return divide

    def allreduce(self, tensors: Tensors, opts: Any) -> Pending:
        """Reduce over the owners."""
        finish = self._reducing(opts, tensors)
        return self._inner.allreduce(tensors, opts), finish

    def allreduce_coalesced(self, tensors: Tensors, opts: Any) -> Pending:
        """Reduce over the owners."""
        finish = self._reducing(opts, tensors)
        return self._inner.allreduce_coalesced(tensors, opts), finish

    def reduce(self, tensors: Tensors, opts: Any) -> Pending:
        """Reduce over the owners."""
        root = self._hosts[opts.rootRank]
        finish = self._reducing(opts, tensors) if root == self._hosts[self._rank] else None
        opts.rootRank = root
        return self._inner.reduce(tensors, opts), finish

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> Pending:
        """Reduce everything, keep our part."""
        whole = [torch.cat([part.reshape(-1) for part in row]) for row in inputs]
        work, divide = self.allreduce(whole, _options(registry.AllreduceOptions(), opts))

        def finish() -> None:
            if divide is not None:
                divide()
            for output, row, reduced in zip(outputs, inputs, whole, strict=True):
                start = sum(part.numel() for part in row[: self._rank])
                output.copy_(reduced[start : start + output.numel()].view_as(output))

        return work, finish

    def _reduce_scatter_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> Pending:
        """Reduce everything, keep our part."""
        return self.reduce_scatter([output], [list(tensor.reshape(len(self._hosts), -1).unbind())], opts)

    def reduce_scatter_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> Pending:
        """Reduce everything, keep our parts."""
        works = []
        for output, tensor in zip(outputs, inputs, strict=True):
            options = _options(registry.ReduceScatterOptions(), opts)
            works.append(self._reduce_scatter_base(output, tensor, options))
        return Several(works), None

    # -- distribution ------------------------------------------------------------------------------------
    def broadcast(self, tensors: Tensors, opts: Any) -> Pending:
        """From the root's owner."""
        opts.rootRank = self._hosts[opts.rootRank]
        return self._inner.broadcast(tensors, opts), None

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> Pending:
        """Broadcast everything, keep our part: the root cannot know for which of its roles an owner calls."""
        root = self._hosts[opts.rootRank]
        output = outputs[0]
        if root == self._hosts[self._rank]:
            whole = torch.stack([part.reshape(output.shape) for part in inputs[0]])
        else:
            whole = output.new_empty((len(self._hosts), *output.shape))
        options = registry.BroadcastOptions()
        options.rootRank = root
        options.timeout = opts.timeout
        return self._inner.broadcast([whole], options), lambda: _copy(output, whole[self._rank])

    # -- collection --------------------------------------------------------------------------------------
    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> Pending:
        """Every role's output is its owner's input."""
        gathered = [[torch.empty_like(tensor) for _ in range(self._members)] for tensor in inputs]

        def finish() -> None:
            for row, parts in zip(outputs, gathered, strict=True):
                for output, host in zip(row, self._hosts, strict=True):
                    _copy(output, parts[host])

        return self._inner.allgather(gathered, inputs, opts), finish

    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> Pending:
        """Every role's output is its owner's input. ``outputs`` has one row per rank."""
        works = []
        for index, tensor in enumerate(inputs):
            options = _options(registry.AllgatherOptions(), opts)
            works.append(self.allgather([[row[index] for row in outputs]], [tensor], options))
        return Several(works), None

    def _allgather_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> Pending:
        """Every role's part of the output is its owner's input."""
        parts = output.view(len(self._hosts), -1)
        return self.allgather([list(parts.unbind())], [tensor.reshape(-1)], opts)

    def allgather_into_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> Pending:
        """Every role's part of the outputs is its owner's input."""
        works = []
        for output, tensor in zip(outputs, inputs, strict=True):
            works.append(self._allgather_base(output, tensor, _options(registry.AllgatherOptions(), opts)))
        return Several(works), None

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> Pending:
        """Every role's output, at the root's owner, is its owner's input."""
        opts.rootRank = self._hosts[opts.rootRank]
        gathered = [[torch.empty_like(inputs[0]) for _ in range(self._members)]] if outputs else []

        def finish() -> None:
            for row, parts in zip(outputs, gathered, strict=True):
                for output, host in zip(row, self._hosts, strict=True):
                    _copy(output, parts[host])

        return self._inner.gather(gathered, inputs, opts), finish

    # -- exchange ----------------------------------------------------------------------------------------
    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any) -> Pending:
        """Output j is what the owner of rank j sends to our rank. All parts must have one size."""
        if len({part.numel() for part in (*inputs, *outputs)}) != 1:
            raise UnsupportedError(
                "all_to_all with parts of different sizes is not supported while roles of the group share a member"
            )
        whole = torch.stack([part.reshape(-1) for part in inputs])
        everyone = [torch.empty_like(whole) for _ in range(self._members)]

        def finish() -> None:
            for output, host in zip(outputs, self._hosts, strict=True):
                _copy(output, everyone[host][self._rank])

        return self._inner.allgather([everyone], [whole], _options(registry.AllgatherOptions(), opts)), finish

    def alltoall_base(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any,
    ) -> Pending:
        """As :meth:`alltoall`, on the rows of one tensor."""
        size = len(self._hosts)
        sent = tensor.split(list(input_splits) or [tensor.size(0) // size] * size)
        received = output.split(list(output_splits) or [output.size(0) // size] * size)
        return self.alltoall(list(received), list(sent), opts)

    def barrier(self, opts: Any) -> Pending:
        """Wait for all owners."""
        return self._inner.barrier(opts), None


def _copy(output: torch.Tensor, value: torch.Tensor) -> None:
    output.copy_(value.view_as(output))


def _options(target: Any, source: Any) -> Any:
    """``target`` with timeout and operator of ``source``."""
    target.timeout = source.timeout
    if hasattr(target, "reduceOp") and hasattr(source, "reduceOp"):
        target.reduceOp = source.reduceOp
    return target
