"""The run of a collective on the members that take part in it.

Where every rank of a group has a process of its own, torch's inner group of these processes runs a collective as it is
called, but for reductions whose order is not that of the group (:mod:`.ordered`). Where a member stands for several
ranks, or for one that is lost, an :class:`Adapter` runs it. A member that is alone computes it by itself
(:func:`alone`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch

from ...bare import bare
from ...errors import UnsupportedError
from ..c10d import dist, registry
from ..epoch import Epoch
from ..inner import BEHIND, GLOO, Pending, kind_for
from ..work import CompletedWork, Several
from .order import Order, combination, combined, matters, order_of, reduced, ring
from .ordered import Ordered
from .participants import Participants
from .table import Collective, Gathered, Scattered, Tensors


def start(
    epoch: Epoch,
    key: str,
    among: Participants,
    collective: Collective,
    arguments: tuple[Any, ...],
    rank: int,
    timeout: timedelta,
    on_host: bool = False,
) -> Any:
    """Begins a collective in ``epoch``; returns its work.

    Args:
        key: of the inner group.
        arguments: tensors and options, which it may change.
        rank: that of the caller in the group.
        timeout: of building the inner group, and of a wait that says none.
        on_host: it runs through host memory, wherever its tensors are.
    """
    if len(among.members) == 1 or epoch.member not in among.members:
        # A member that owns none of the ranks (a standby) has no part in it: the others do not wait for it.
        return alone(collective, arguments, rank, len(among.of_rank), each=not among.by_role)
    device = collective.device(arguments)
    kind = GLOO if device is None or on_host else kind_for(device)
    if collective.reduces and not (among.by_role or among.complete):
        key = f"{key}/shares"  # what is begun when it is waited for must not meet what is begun when it is called
    inner = epoch.groups.get(key, among.members, kind, timeout, device)

    def pending(work: Any, finish: Callable[[], None] | None = None) -> Any:
        return epoch.groups.work(work, collective.name, among.members, finish, kind, timeout, device)

    def follow(work: Any) -> None:
        handle = pending(work)
        handle.deferred = True
        handle.wait()

    with epoch.life.calling(collective.name):
        if not among.complete:
            adapter = Adapter(inner, among, epoch.member, rank, lambda work: pending(work).wait(), order_of(kind))
            return pending(*adapter.start(collective, arguments))
        if collective.reduces and kind in BEHIND:
            *tensors, options = arguments
            if any(matters(options.reduceOp, each.dtype, len(among.members)) for each in collective.written(arguments)):
                ordered = Ordered(inner, len(among.members), among.members.index(epoch.member), follow)
                forms = collective.forms(len(among.members), *tensors)
                return pending(*ordered.start(collective.shape, forms, options))
        return pending(_issue(inner, collective, arguments))


def _issue(inner: Any, collective: Collective, arguments: tuple[Any, ...]) -> Any:
    if collective.single is None or hasattr(inner, collective.name):
        return getattr(inner, collective.name)(*arguments)
    single, (outputs, inputs, options) = getattr(inner, collective.single), arguments
    return Several([(single(*pair, options), None) for pair in zip(outputs, inputs, strict=True)])


def alone(
    collective: Collective, arguments: tuple[Any, ...], rank: int, size: int, each: bool = False
) -> CompletedWork:
    """Computes a collective of a group whose ``size`` ranks are all this process.

    Every rank gets what the caller (``rank``) passes.

    Args:
        each: every rank contributes what the caller passes to a reduction, so that a sum is ``size`` times that. Else
            it is the contribution of all of them, and stays as it is.
    """
    *tensors, options = arguments
    shares, written = collective.forms(size, *tensors), collective.written(arguments)
    if collective.shape in ("allgather", "gather"):
        for row, tensor in shares:
            for output in row:
                _copy(output, tensor)
    elif collective.shape in ("reduce_scatter", "scatter"):
        for output, row in shares:
            if row:
                _copy(output, row[rank])
    elif collective.shape == "alltoall":
        for output in shares[0]:
            _copy(output, shares[1][rank])
    if each and collective.reduces and getattr(options, "rootRank", rank) == rank:
        for tensor in written:  # equal shares, in whatever order
            _copy(tensor, combined([bare(tensor)] * size, range(size), options.reduceOp))
    return CompletedWork(written)


class Adapter:
    """Translates collectives over the ranks of a group to collectives of the members that take part.

    A member calls each collective once, whatever the number of its roles. In reductions of the engine its contribution
    counts once: it has summed its roles' shares before. Elsewhere it stands for each rank that the member is host of.

    Args:
        inner: group with one rank for each of ``among.members``.
        among: the members that take part.
        member: this one.
        rank: the rank of the group for which results are meant.
        settle: waits for a work of ``inner``.
        order: that of its reductions.
    """

    def __init__(
        self,
        inner: Any,
        among: Participants,
        member: str,
        rank: int,
        settle: Callable[[Any], Any] = lambda work: work.wait(),
        order: Order = ring,
    ) -> None:
        self._inner, self._among, self._rank, self._settle, self._order = inner, among, rank, settle, order
        self._hosts = [among.members.index(host) for host in among.hosts]
        self._me = among.members.index(member)

    def start(self, collective: Collective, arguments: tuple[Any, ...]) -> Pending:
        """Begins a collective; returns its work, and what is to be done once after that."""
        *tensors, options = arguments
        run: Callable[[Any, Any], Pending] = getattr(self, f"_{collective.shape}")
        return run(collective.forms(len(self._hosts), *tensors), options)

    # -- reductions --------------------------------------------------------------------------------------
    def _allreduce(self, tensors: Tensors, options: Any, name: str = "allreduce") -> Pending:
        if self._among.by_role:
            divide = self._averaging(options, tensors)
            return getattr(self._inner, name)(tensors, options), divide
        return self._by_rank(tensors, options)

    def _allreduce_coalesced(self, tensors: Tensors, options: Any) -> Pending:
        return self._allreduce(tensors, options, "allreduce_coalesced")

    def _reduce(self, tensors: Tensors, options: Any) -> Pending:
        if self._among.by_role:
            divide, root = self._averaging(options, tensors), self._hosts[options.rootRank]
            options.rootRank = root
            return self._inner.reduce(tensors, options), divide if root == self._me else None
        return self._by_rank(tensors, options, options.rootRank == self._rank)

    def _reduce_scatter(self, shares: Scattered, options: Any) -> Pending:
        """Reduces everything, keeps our share."""
        pending = [self._reduce_share(output, row, options) for output, row in shares]

        def finish() -> None:
            for _, share in pending:
                share()

        return Several([(work, None) for work, _ in pending]), finish

    def _reduce_share(self, output: torch.Tensor, row: Tensors, options: Any) -> tuple[Any, Callable[[], None]]:
        whole = torch.cat([bare(share).reshape(-1) for share in row])
        work, reduce = self._allreduce([whole], _options(registry.AllreduceOptions(), options))

        def finish() -> None:
            if reduce is not None:
                reduce()
            start = sum(bare(share).numel() for share in row[: self._rank])
            _copy(output, whole[start : start + bare(output).numel()])

        return work, finish

    def _averaging(self, options: Any, tensors: Tensors) -> Callable[[], None] | None:
        """Asks for the sum of the members' contributions in place of their average; returns what divides the sum."""
        if options.reduceOp != dist.ReduceOp.AVG:
            return None
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)

        def divide() -> None:
            for tensor in tensors:
                bare(tensor).div_(len(self._hosts))

        return divide

    def _by_rank(self, tensors: Tensors, options: Any, wanted: bool = True) -> Pending:
        """Reduces the ranks' shares, as their hosts pass them, in the order that all ranks' own processes would have.

        The caller that waits does all of it, piece by piece, so that large tensors need no room for all shares of them.

        Args:
            wanted: this member is to get the result.

        Raises:
            UnsupportedError: the operator has no such order, or a tensor is sparse.
        """
        combination(options.reduceOp)
        if any(tensor.layout is not torch.strided for tensor in tensors):
            raise UnsupportedError(
                "reductions of sparse tensors are not supported while ranks of their group are lost or have several "
                "processes: reduce dense ones (tensor.to_dense())"
            )

        def reduce() -> None:
            flat = torch.cat([bare(tensor).reshape(-1) for tensor in tensors])
            gather = lambda begin, end: self._shares(flat[begin:end])  # noqa: E731
            total = reduced(flat, len(self._hosts), options.reduceOp, self._order, gather)
            if wanted:
                for tensor, result in zip(tensors, total.split([each.numel() for each in tensors]), strict=True):
                    _copy(bare(tensor), result)

        return Several([]), reduce

    def _shares(self, piece: torch.Tensor) -> Tensors:
        """The shares of all ranks."""
        gathered = self._room_for(piece)
        self._settle(self._inner.allgather([gathered], [piece], registry.AllgatherOptions()))
        return [gathered[host] for host in self._hosts]

    # -- distribution ------------------------------------------------------------------------------------
    def _broadcast(self, tensors: Tensors, options: Any) -> Pending:
        options.rootRank = self._hosts[options.rootRank]
        return self._inner.broadcast(tensors, options), None

    def _scatter(self, shares: Scattered, options: Any) -> Pending:
        """Broadcasts everything, keeps our share: the root cannot know for which of its roles an owner calls.

        Nothing comes from a root that has no process.
        """
        if self._among.of_rank[options.rootRank] is None:
            return Several([]), None
        root, ((output, row),) = self._hosts[options.rootRank], shares
        if root == self._me:
            whole = torch.stack([bare(share).reshape(output.shape) for share in row])
        else:
            whole = bare(output).new_empty((len(self._hosts), *output.shape))
        broadcast = _options(registry.BroadcastOptions(), options)
        broadcast.rootRank = root
        return self._inner.broadcast([whole], broadcast), lambda: _copy(output, whole[self._rank])

    # -- collection --------------------------------------------------------------------------------------
    def _allgather(self, shares: Gathered, options: Any) -> Pending:
        """Every rank's output is its host's input."""
        return _together(self._gather_all(row, tensor, options) for row, tensor in shares)

    def _gather_all(self, row: Tensors, tensor: torch.Tensor, options: Any) -> Pending:
        gathered = self._room_for(tensor)
        return self._inner.allgather([gathered], [tensor], options), lambda: self._spread(row, gathered)

    def _gather(self, shares: Gathered, options: Any) -> Pending:
        ((row, tensor),) = shares
        if not self._among.by_role:  # several members may run as the root: the one that has passed outputs gets them
            return self._gather_all(row, tensor, _options(registry.AllgatherOptions(), options))
        options.rootRank = self._hosts[options.rootRank]
        gathered = self._room_for(tensor) if row else []
        work = self._inner.gather([gathered] if row else [], [tensor], options)
        return work, lambda: self._spread(row, gathered)

    def _room_for(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [torch.empty_like(tensor) for _ in self._among.members]

    def _spread(self, row: Tensors, gathered: Tensors) -> None:
        for output, host in zip(row, self._hosts, strict=bool(row)):  # only the root of a gather has outputs
            _copy(output, gathered[host])

    # -- exchange ----------------------------------------------------------------------------------------
    def _alltoall(self, shares: tuple[Tensors, Tensors], options: Any) -> Pending:
        """Output j is what the host of rank j sends to our rank. All shares must have one size."""
        outputs, inputs = shares
        if len({bare(share).numel() for share in (*inputs, *outputs)}) != 1:
            raise UnsupportedError(
                "all_to_all with shares of different sizes is not supported while roles of the group share a member"
            )
        whole = torch.stack([bare(share).reshape(-1) for share in inputs])
        everyone = self._room_for(whole)

        def finish() -> None:
            for output, host in zip(outputs, self._hosts, strict=True):
                _copy(output, everyone[host][self._rank])

        return self._inner.allgather([everyone], [whole], _options(registry.AllgatherOptions(), options)), finish

    def _barrier(self, shares: None, options: Any) -> Pending:
        return self._inner.barrier(options), None


def _together(pending: Iterable[Pending]) -> Pending:
    works = list(pending)
    return works[0] if len(works) == 1 else (Several(works), None)


def _copy(output: torch.Tensor, value: torch.Tensor) -> None:
    bare(output).copy_(value.view_as(output))


def _options(target: Any, source: Any) -> Any:
    """``target`` with timeout and operator of ``source``."""
    target.timeout = source.timeout
    if hasattr(target, "reduceOp") and hasattr(source, "reduceOp"):
        target.reduceOp = source.reduceOp
    return target
