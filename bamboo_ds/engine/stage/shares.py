"""Sums over ranks some of which are one member's: to the last bit those of a member for each rank.

Where each rank is another member the backend sums, in an order of its own (:mod:`bamboo_ds.comm.calls.order`). A member
with several of them cannot add theirs before: of more than two ranks, or where sums are rounded for the reduction, that
is another sum. So all contributions travel, and every member adds them in that order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import ReduceOp

from ...comm.calls.order import order_for, reduced


@dataclass(frozen=True)
class Shares:
    """The contributors to one reduction.

    Attributes:
        count: ranks that contribute: of the roles of a stage, one per copy of the model, or of those with tied weights.
        own: which of them are this member's, as it orders them.
    """

    count: int
    own: tuple[int, ...]


def shares_of(owners: Sequence[str], own: Sequence[int]) -> Shares | None:
    """The shares of ranks that ``owners`` have, of which ``own`` are this member's; ``None`` if each is another's."""
    return Shares(len(owners), tuple(own)) if len(set(owners)) < len(owners) else None


def all_reduce(flats: Sequence[torch.Tensor], shares: Shares, group: Any) -> torch.Tensor:
    """The sum of all ranks' contributions. Collective over the members of ``group``, which all have ``shares``.

    Args:
        flats: this member's contributions, in the order of ``shares.own``; of one dimension and of one type.
    """

    def gather(begin: int, end: int) -> Sequence[torch.Tensor]:
        rows = flats[0].new_zeros((shares.count, end - begin))
        for number, flat in zip(shares.own, flats, strict=True):
            rows[number] = flat[begin:end]
        # Each row is of one member: as whole numbers what it has stays what it is, down to the sign of a zero.
        dist.all_reduce(rows.view(-1).view(torch.uint8), group=group)
        return rows.unbind()

    return reduced(flats[0], shares.count, ReduceOp.SUM, order_for(flats[0].device), gather)
