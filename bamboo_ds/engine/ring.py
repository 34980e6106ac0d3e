"""Sums over ranks some of which are one member's: to the last bit as gloo's ring gives them.

Where each rank is another member the backend sums, in an order that depends on an element's place. A member with
several of them cannot add theirs before: of more than two ranks, or where sums are rounded for the reduction, that is
another sum. So all contributions travel, and every member adds them in the order of the ring.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist

#: Bytes of a segment of gloo's ring all-reduce at most.
_SEGMENT = 1 << 20


@dataclass(frozen=True)
class Shares:
    """Who contributes what to one reduction.

    Attributes:
        count: ranks that contribute: of the roles of a stage, one per copy of the model, or of those with tied weights.
        own: which of them are this member's, as it orders them.
    """

    count: int
    own: tuple[int, ...]


def shares_of(owners: Sequence[str], own: Sequence[int]) -> Shares | None:
    """The shares of ranks that ``owners`` have, of which ``own`` are this member's; ``None``: each is another's."""
    return Shares(len(owners), tuple(own)) if len(set(owners)) < len(owners) else None


def chunks(count: int, elements: int, size: int) -> Iterator[tuple[int, int, list[int]]]:
    """The parts of a tensor that gloo's ring sums in one order.

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


def all_reduce(flats: Sequence[torch.Tensor], shares: Shares, group: Any) -> torch.Tensor:
    """The sum of all ranks' contributions. Collective over the members of ``group``, which all have ``shares``.

    Args:
        flats: this member's contributions, in the order of ``shares.own``; of one dimension and of one type.
    """
    total = torch.empty_like(flats[0])
    for begin, end, order in chunks(shares.count, total.numel(), total.element_size()):
        rows = total.new_zeros((shares.count, end - begin))
        for number, flat in zip(shares.own, flats, strict=True):
            rows[number] = flat[begin:end]
        # Each row is of one member: as whole numbers what it has stays what it is, down to the sign of a zero.
        dist.all_reduce(rows.view(-1).view(torch.uint8), group=group)
        first, *others = order
        found = rows[first]
        for number in others:
            found = rows[number] + found
        total[begin:end] = found
    return total
