"""The order in which gloo's ring all-reduce combines the shares of ranks, which depends on an element's place.

A reduction whose ranks have not each a process of their own gives, by this order, what it would give with one for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ...errors import UnsupportedError
from ..c10d import dist

#: Bytes of a segment of gloo's ring all-reduce at most.
_SEGMENT = 1 << 20
#: Bytes of all shares of a tensor that are gathered at once at most; else one chunk of the ring after the other.
_AT_ONCE = 64 << 20

#: The shares that all ranks have of a piece of a tensor, given this process's.
Gather = Callable[[torch.Tensor], Sequence[torch.Tensor]]


def chunks(count: int, elements: int, size: int) -> Iterator[tuple[int, int, list[int]]]:
    """The shares of a tensor that gloo's ring sums in one order.

    Args:
        count: of ranks.
        elements: of the tensor.
        size: bytes of an element.

    Returns:
        Begin and end of each, and the order of the ranks, the second of which adds its own to that of the first.
    """
    segments = max(_quotient(elements * size, size * (_SEGMENT // size) * count), 2)  # of each rank
    length = segments * _quotient(_quotient(elements * size, segments * count), size)
    for number in range(count):
        begin, end = number * length, min((number + 1) * length, elements)
        if begin < end:
            yield begin, end, [(number - 1 - i) % count for i in range(count)]


def _quotient(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)


def reduced(flat: torch.Tensor, count: int, operator: Any, gather: Gather) -> torch.Tensor:
    """What an all-reduce of ``count`` ranks gives, to the last bit as gloo's. Collective if ``gather`` is.

    Args:
        flat: this process's share, of one dimension.
        operator: torch's ``ReduceOp``; see :func:`combination`.
        gather: returns ``count`` shares of the piece of a tensor that it is called with.
    """
    combine, average = combination(operator)
    total, whole = torch.empty_like(flat), None
    if flat.numel() * flat.element_size() * count <= _AT_ONCE:
        whole = gather(flat)
    for begin, end, order in chunks(count, flat.numel(), flat.element_size()):
        shares = gather(flat[begin:end]) if whole is None else [share[begin:end] for share in whole]
        first, *others = order
        found = shares[first]
        for rank in others:
            found = combine(shares[rank], found)
        total[begin:end] = found
    return total.div_(count) if average else total


def combination(operator: Any) -> tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], bool]:
    """How ``operator`` combines two shares, and whether the result of all of them is divided by their number.

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
