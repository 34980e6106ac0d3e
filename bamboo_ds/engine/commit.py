"""The vector that the commit all-reduce sums, and what the iteration's end needs of it.

Every slot but the counters is contributed by exactly one member and is zero elsewhere, so that the sum is exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..errors import ProtocolError
from ..topology import Layout, Role


@dataclass(frozen=True)
class Contribution:
    """What one member adds.

    Attributes:
        losses: mean loss of the pipelines whose last stage it owns, followed by their additional losses.
        squares: sum of squares of the gradients that count for the norm, of each role it owns.
        redundant: redundant forward passes that its replicas hold.
        mismatches: roles whose replica failed its check here.
    """

    losses: Mapping[int, Sequence[float]]
    squares: Mapping[Role, float]
    redundant: int = 0
    mismatches: Sequence[Role] = ()


@dataclass(frozen=True)
class Committed:
    """The sum over all members: losses by pipeline, squares and mismatches by rank."""

    losses: tuple[tuple[float, ...], ...]
    squares: tuple[float, ...]
    redundant: int
    mismatches: tuple[Role, ...]


def encode(layout: Layout, values: int, mine: Contribution) -> torch.Tensor:
    """The float64 vector of ``mine``; ``values`` is the number of losses per pipeline."""
    vector = torch.zeros(layout.pipelines * values + 2 * layout.size + 1, dtype=torch.float64)
    for pipeline, losses in mine.losses.items():
        if len(losses) != values:
            raise ProtocolError(
                f"pipeline {pipeline} reports {len(losses)} losses, {values} were expected: get_additional_losses() "
                "must name the same losses on all stages"
            )
        vector[pipeline * values : (pipeline + 1) * values] = torch.tensor(losses, dtype=torch.float64)
    base = layout.pipelines * values
    for role, square in mine.squares.items():
        vector[base + layout.rank(role)] = square
    for role in mine.mismatches:
        vector[base + layout.size + layout.rank(role)] = 1
    vector[-1] = mine.redundant
    return vector


def decode(layout: Layout, values: int, vector: Sequence[float]) -> Committed:
    """The inverse of :func:`encode` on the sum."""
    base = layout.pipelines * values
    if len(vector) != base + 2 * layout.size + 1:
        raise ProtocolError(f"commit vector of {len(vector)} numbers, expected {base + 2 * layout.size + 1}")
    flags = vector[base + layout.size : base + 2 * layout.size]
    return Committed(
        losses=tuple(tuple(vector[d * values : (d + 1) * values]) for d in range(layout.pipelines)),
        squares=tuple(vector[base : base + layout.size]),
        redundant=int(vector[-1]),
        mismatches=tuple(layout.role(rank) for rank, flag in enumerate(flags) if flag),
    )


def mean_over_pipelines(values: Sequence[float]) -> torch.Tensor:
    """Mean of one loss over the pipelines in fp32, as DeepSpeed's sum over data-parallel ranks gives it."""
    total = torch.tensor(values[0], dtype=torch.float32)
    for value in values[1:]:
        total += torch.tensor(value, dtype=torch.float32)
    return total / len(values) if len(values) > 1 else total


def global_norm(layout: Layout, squares: Sequence[float]) -> torch.Tensor:
    """Norm of all gradients in fp32, as DeepSpeed's ``clip_grad_norm_`` computes it.

    It sums over the stages of each pipeline, takes the root, and averages over the pipelines.
    """
    norm = torch.zeros(1, dtype=torch.float32)
    for pipeline in range(layout.pipelines):
        total = torch.zeros(1, dtype=torch.float32)
        for stage in range(layout.stages):
            total += torch.tensor(squares[layout.rank(Role(pipeline, stage))], dtype=torch.float32)
        norm += total.pow(0.5) * 1.0 / float(layout.pipelines)
    return norm
