"""The order in which a reduction combines the shares of ranks: the bits of a sum depend on it.

It is one for each kind of inner groups, whatever processes the ranks have, so that a reduction gives with several ranks
in a process what it gives with one in each:

* gloo's own, :func:`ring`, which depends on an element's place;
* :func:`by_rank` for groups that run behind the host. NCCL's own order is none to rely on: it depends on the algorithm
  that it chooses and on where the ranks are, for each communicator anew. Where bits depend on it (:func:`matters`)
  these groups only move shares, and :mod:`.ordered` combines them.

Each step of a combination is rounded to the type of the tensor, bf16 and fp16 as well, as gloo does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ...errors import UnsupportedError
from ..c10d import dist
from ..inner import BEHIND, kind_for

#: Bytes of a segment of gloo's ring all-reduce at most.
_SEGMENT = 1 << 20
#: Bytes of all shares of a tensor that are gathered at once at most; else one chunk after the other.
_AT_ONCE = 64 << 20

#: For a number of ranks, of a tensor's elements and of bytes of an element: begin and end of the chunks that are
#: combined in one order, and that order. The second rank in it adds its own to that of the first.
Order = Callable[[int, int, int], Iterator[tuple[int, int, list[int]]]]
#: The shares that all ranks have of the elements from a begin to an end.
Gather = Callable[[int, int], Sequence[torch.Tensor]]


def ring(count: int, elements: int, size: int) -> Iterator[tuple[int, int, list[int]]]:
    """The :data:`Order` of gloo's ring all-reduce."""
    segments = max(_quotient(elements * size, size * (_SEGMENT // size) * count), 2)  # of each rank
    length = segments * _quotient(_quotient(elements * size, segments * count), size)
    for number in range(count):
        begin, end = number * length, min((number + 1) * length, elements)
        if begin < end:
            yield begin, end, [(number - 1 - i) % count for i in range(count)]


def _quotient(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)


def by_rank(count: int, elements: int, size: int) -> Iterator[tuple[int, int, list[int]]]:
    """The :data:`Order` of the ranks, for every element; its chunks only spare memory."""
    length = max(1, _AT_ONCE // (size * count))
    for begin in range(0, elements, length):
        yield begin, min(begin + length, elements), list(range(count))


def order_of(kind: str) -> Order:
    """The order of reductions in inner groups of a ``kind``."""
    return by_rank if kind in BEHIND else ring


def order_for(device: torch.device) -> Order:
    """The order of reductions of tensors on ``device``."""
    return order_of(kind_for(device))


def matters(operator: Any, dtype: torch.dtype, count: int) -> bool:
    """Whether the bits of a reduction over ``count`` ranks depend on its order, or how a backend averages or compares.

    They do not where numbers are whole, or where two are added or multiplied. Operators that a backend alone has are
    left to it.
    """
    if not (dtype.is_floating_point or dtype.is_complex) or not any(operator == known for known, _ in _COMBINATIONS):
        return False
    return count > 2 or not any(operator == known for known in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT))


def reduced(mine: torch.Tensor, count: int, operator: Any, order: Order, gather: Gather) -> torch.Tensor:
    """The all-reduce of ``count`` ranks, to the last bit as with a process for each. Collective if ``gather``
    is.

    Args:
        mine: a tensor of one dimension like each rank's share.
        operator: torch's ``ReduceOp``; see :func:`combination`.
        gather: returns ``count`` shares of a part.

    Raises:
        UnsupportedError: of the operator.
    """
    total, whole = torch.empty_like(mine), None
    if 0 < mine.numel() * mine.element_size() * count <= _AT_ONCE:
        whole = gather(0, mine.numel())
    for begin, end, ranks in order(count, mine.numel(), mine.element_size()):
        shares = gather(begin, end) if whole is None else [share[begin:end] for share in whole]
        total[begin:end] = combined(shares, ranks, operator)
    return total


def combined(shares: Sequence[torch.Tensor], ranks: Sequence[int], operator: Any) -> torch.Tensor:
    """The ``shares`` combined by ``operator``, one after the other as ``ranks`` have it; they stay."""
    combine, average = combination(operator)
    first, *others = ranks
    total = shares[first]
    for rank in others:
        total = combine(shares[rank], total)
    if not average:
        return total
    exact = total.is_floating_point() or total.is_complex()
    return torch.div(total, len(shares), rounding_mode=None if exact else "trunc")


def combination(operator: Any) -> tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], bool]:
    """The combination of two shares by ``operator``, and whether the result of all is divided by their number.

    Raises:
        UnsupportedError: it is one that gloo does not have.
    """
    for known, combine in _COMBINATIONS:
        if operator == known:
            return combine, operator == dist.ReduceOp.AVG
    raise UnsupportedError(
        f"a reduction by {operator} is not supported while ranks of its group are lost or have several processes: "
        "use SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR or BXOR"
    )


# Of numbers that cannot be compared, and of zeros of both signs, gloo takes these.
def _least(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.where(b < a, b, a)


def _greatest(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.where(a < b, b, a)


_COMBINATIONS = (
    (dist.ReduceOp.SUM, torch.add),
    (dist.ReduceOp.AVG, torch.add),
    (dist.ReduceOp.PRODUCT, torch.mul),
    (dist.ReduceOp.MIN, _least),
    (dist.ReduceOp.MAX, _greatest),
    (dist.ReduceOp.BAND, torch.bitwise_and),
    (dist.ReduceOp.BOR, torch.bitwise_or),
    (dist.ReduceOp.BXOR, torch.bitwise_xor),
)
