"""The vector that the commit all-reduce sums, and what the iteration's end needs of it.

Every slot but the counters is contributed by exactly one member and is zero elsewhere, so that the sum is exact.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ...errors import ProtocolError
from ...topology import Layout, Role


@dataclass(frozen=True)
class Form:
    """The form of an iteration's vector; equal on all members.

    Attributes:
        losses: number of losses of a pipeline.
        norms: number of norms in an optimizer step.
        accounted: micro-batches of a pipeline for which there are checksums; 0 without them.
        votes: checksums of states are told, to be compared with those of other pipelines.
    """

    losses: int = 1
    norms: int = 1
    accounted: int = 0
    votes: bool = False


@dataclass(frozen=True)
class Measured:
    """Facts of a role's reduced gradients for the commit.

    Attributes:
        overflow: they contain infinities or NaN, where DeepSpeed looks for these.
        squares: sum of squares that the role contributes to each norm of the step.
    """

    overflow: bool
    squares: tuple[float, ...]


@dataclass(frozen=True)
class Contribution:
    """The contribution of one member.

    Attributes:
        losses: mean loss of the pipelines whose last stage it owns, followed by their additional losses.
        measured: of the reduced gradients of each role it owns.
        redundant: redundant forward passes that its replicas hold.
        mismatches: roles whose replica failed its check here.
        consumed: checksum of each micro-batch that the first and last stages it owns have consumed, if there are any.
        drawn: checksum of what the iterator at an end of a pipeline has given, if it speaks for that end.
        own: the epoch, if a checkpoint of the job's own is due after this iteration, from the member that leads; else
            0.
        writes: it could take none, since an earlier checkpoint is being written.
        held: checksum of the state of each role that it owns (``True``) or shadows, where these are to be compared.
    """

    losses: Mapping[int, Sequence[float]]
    measured: Mapping[Role, Measured]
    redundant: int = 0
    mismatches: Sequence[Role] = ()
    consumed: Mapping[Role, Sequence[int]] = field(default_factory=dict)
    drawn: Mapping[Role, int] = field(default_factory=dict)
    own: int = 0
    writes: bool = False
    held: Mapping[tuple[Role, bool], int] = field(default_factory=dict)


@dataclass(frozen=True)
class Committed:
    """The sum over all members: losses by pipeline, squares by norm and rank, mismatches.

    ``consumed`` has one entry per pipeline: the checksums of its inputs, then those of its labels, by micro-batch.
    ``overflow``: some role's gradients overflowed. ``alike``: see :func:`alike`. ``own``: the epoch whose members take
    a checkpoint of the job's own after the iteration, if that is so; else 0. ``held``: see :class:`Contribution`.
    """

    losses: tuple[tuple[float, ...], ...]
    squares: tuple[tuple[float, ...], ...]
    redundant: int
    mismatches: tuple[Role, ...]
    consumed: tuple[tuple[int, ...], ...] = ()
    overflow: bool = False
    alike: bool | None = None
    own: int = 0
    held: Mapping[tuple[Role, bool], int] = field(default_factory=dict)

    def skipped(self) -> bool:
        """Whether an optimizer that leaves out a step on overflow has done so: a norm may overflow by itself."""
        return self.overflow or not all(math.isfinite(x) for norm in self.squares for x in norm)


def encode_drawn(layout: Layout, drawn: Mapping[Role, int]) -> torch.Tensor:
    """Checksums of what iterators have given, as float64, by pipeline and end; 0 where nothing was drawn for an end."""
    vector = torch.zeros(2 * layout.pipelines, dtype=torch.float64)
    for role, checksum in drawn.items():
        for end in ends_of(layout, role):
            vector[2 * role.pipeline + end] = checksum + 1  # CRC-32 is exact in a float64
    return vector


def ends_of(layout: Layout, role: Role) -> list[int]:
    """The ends of its pipeline that the role is, 0 the first and 1 the last: a stage alone is both."""
    return [end for end, stage in enumerate((0, layout.stages - 1)) if role.stage == stage]


def alike(drawn: Sequence[float]) -> bool | None:
    """Whether the ends of each pipeline have given the same, by the sum of :func:`encode_drawn`.

    ``None`` if of no pipeline both have given something.
    """
    both = [pair for pair in zip(drawn[::2], drawn[1::2], strict=True) if all(pair)]
    return all(first == last for first, last in both) if both else None


def encode(layout: Layout, form: Form, mine: Contribution) -> torch.Tensor:
    """The float64 vector of ``mine``."""
    parts = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in _shapes(layout, form).items()}
    for pipeline, losses in mine.losses.items():
        if len(losses) != form.losses:
            raise ProtocolError(
                f"pipeline {pipeline} reports {len(losses)} losses, {form.losses} were expected: "
                "get_additional_losses() must name the same losses on all stages"
            )
        parts["losses"][pipeline] = torch.tensor(losses, dtype=torch.float64)
    for role, measured in mine.measured.items():
        if len(measured.squares) != form.norms:
            raise ProtocolError(
                f"the optimizer of role {role} computes {len(measured.squares)} norms, that of others {form.norms}: "
                "all stages must have the same number of parameter groups"
            )
        parts["squares"][:, layout.rank(role)] = torch.tensor(measured.squares, dtype=torch.float64)
        parts["overflow"][layout.rank(role)] = measured.overflow
    for role in mine.mismatches:
        parts["mismatches"][layout.rank(role)] = 1
    for role, checksums in mine.consumed.items():
        ends = ends_of(layout, role)
        if len(checksums) != len(ends) * form.accounted:
            expected = len(ends) * form.accounted
            raise ProtocolError(f"role {role} accounts for {len(checksums)} micro-batches, expected {expected}")
        parts["consumed"][role.pipeline, ends] = torch.tensor(checksums, dtype=torch.float64).view(len(ends), -1)
    parts["drawn"] = encode_drawn(layout, mine.drawn)
    parts["redundant"][0] = mine.redundant
    for (role, owned), checksum in mine.held.items() if form.votes else ():
        parts["held"][int(owned), layout.rank(role)] = checksum + 1  # CRC-32 is exact in a float64
    parts["own"] = torch.tensor([mine.own, mine.writes], dtype=torch.float64)
    return torch.cat([part.reshape(-1) for part in parts.values()])


def _shapes(layout: Layout, form: Form) -> dict[str, tuple[int, ...]]:
    """The shapes of an iteration's vector, in order."""
    return {
        "losses": (layout.pipelines, form.losses),
        "squares": (form.norms, layout.size),
        "overflow": (layout.size,),
        "mismatches": (layout.size,),
        "consumed": (layout.pipelines, 2, form.accounted),  # inputs, labels
        "drawn": (2 * layout.pipelines,),
        "redundant": (1,),
        "own": (2,),
        "held": (2 if form.votes else 0, layout.size),  # replicas, owners
    }


def decode(layout: Layout, form: Form, vector: Sequence[float]) -> Committed:
    """The inverse of :func:`encode` on the sum."""
    shapes = _shapes(layout, form)
    sizes = [math.prod(shape) for shape in shapes.values()]
    if len(vector) != sum(sizes):
        raise ProtocolError(f"commit vector of {len(vector)} numbers, expected {sum(sizes)}")
    flat = torch.tensor(vector, dtype=torch.float64).split(sizes)
    parts = {name: part.reshape(shape) for part, (name, shape) in zip(flat, shapes.items(), strict=True)}
    own, writers = map(int, parts["own"].tolist())
    consumed = parts["consumed"].reshape(layout.pipelines, 2 * form.accounted).tolist()
    return Committed(
        losses=tuple(map(tuple, parts["losses"].tolist())),
        squares=tuple(map(tuple, parts["squares"].tolist())),
        redundant=int(parts["redundant"]),
        mismatches=tuple(layout.role(rank) for rank, flag in enumerate(parts["mismatches"].tolist()) if flag),
        consumed=tuple(tuple(map(int, each)) for each in consumed) if form.accounted else (),
        overflow=bool(parts["overflow"].any()),
        alike=alike(parts["drawn"].tolist()),
        own=0 if writers else own,
        held={
            (layout.role(rank), bool(owned)): int(checksum) - 1
            for owned, sums in enumerate(parts["held"].tolist())
            for rank, checksum in enumerate(sums)
            if checksum
        },
    )


def in_ring_order(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of scalars of successive ranks, to the last bit as gloo's ring all-reduce gives it."""
    total = values[-1].clone()
    for value in reversed(values[:-1]):
        total = value + total
    return total


def mean_over_pipelines(values: Sequence[float]) -> torch.Tensor:
    """Mean of one loss over the pipelines in fp32, as DeepSpeed's sum over data-parallel ranks gives it."""
    total = in_ring_order([torch.tensor(value, dtype=torch.float32) for value in values])
    return total / len(values) if len(values) > 1 else total


def mean_over_copies(layout: Layout, role: Role, values: Sequence[float]) -> torch.Tensor:
    """The same of one loss by pipeline, over the copies of the model, of the slice that ``role`` belongs to."""
    return mean_over_pipelines(values[layout.slice_of(role) :: layout.slices])


def squares_of_copies(layout: Layout, squares: Sequence[float]) -> list[torch.Tensor]:
    """Sums of squares in fp32 over the stages and slices of each copy of the model, as DeepSpeed's ``clip_grad_norm_``
    adds them up."""
    parts: list[list[float]] = [[] for _ in range(layout.copies)]
    for role, square in zip(layout.roles, squares, strict=True):
        parts[layout.copy_of(role)].append(square)
    return [in_ring_order([torch.tensor([square], dtype=torch.float32) for square in part]) for part in parts]


def norms_of_copies(layout: Layout, squares: Sequence[float]) -> list[torch.Tensor]:
    """The contribution of each copy of the model to the mean of the norms over the copies."""
    return [total.pow(0.5) * 1.0 / float(layout.copies) for total in squares_of_copies(layout, squares)]


def global_norm(layout: Layout, squares: Sequence[float]) -> torch.Tensor:
    """Norm of all gradients in fp32, as DeepSpeed's ``clip_grad_norm_`` computes it: the mean over the copies."""
    return in_ring_order(norms_of_copies(layout, squares))


def clipping_factor(norm: torch.Tensor, limit: float) -> torch.Tensor:
    """The factor of gradients in DeepSpeed's ``clip_grad_norm_``: a quotient of two numbers in fp32."""
    return torch.clamp(torch.tensor(limit, dtype=torch.float32) / (norm.reshape(()) + 1e-6), max=1.0)
