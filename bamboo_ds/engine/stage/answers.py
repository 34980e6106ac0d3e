"""Answers in the place of the collectives in an optimizer's step."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist

from ...bare import bare
from ...comm.attachment import Answer
from ...comm.calls.collectives import alone
from ...comm.calls.table import COLLECTIVES
from ...errors import ProtocolError, UnsupportedError
from ...topology import Layout, Role
from ...topology.roles import groups_like
from .commit import in_ring_order, norms_of_copies, squares_of_copies


class Answers:
    """Answers the collectives of an optimizer's step.

    All roles take part in each of them in the same way, so a sum over some ranks is the sum of what the commit knows of
    these ranks. A norm may be summed along several axes one after the other.

    Args:
        layout: the logical world.
        rank: that of the role whose optimizer steps.
        overflow: whether any role's gradients overflowed.
        squares: per norm, the contribution of every rank.
        sums: reductions of each norm, along different axes.
    """

    def __init__(
        self, layout: Layout, rank: int, overflow: bool, squares: Sequence[Sequence[float]], sums: int
    ) -> None:
        self._layout, self._rank, self._overflow, self._sums = layout, rank, overflow, sums
        self._norms = [[torch.tensor(x, dtype=torch.float32) for x in each] for each in squares]
        self._done = 0

    def __call__(self, ranks: tuple[int, ...], operation: str, arguments: tuple[Any, ...]) -> None:
        """Takes the place of ``operation`` on a group of ``ranks``."""
        if operation != "allreduce":
            return  # all-gathers of parameters; the shards are exchanged after the step
        (tensor,), options = arguments
        if options.reduceOp == dist.ReduceOp.MAX:
            bare(tensor).fill_(float(self._overflow))
            return
        norm = self._done // self._sums
        numbers = bare(tensor).numel()
        if numbers != 1 or norm >= len(self._norms):
            raise ProtocolError(
                f"the optimizer's step reduces {numbers} numbers over ranks {list(ranks)}, which is not foreseen"
            )
        self._done += 1
        values, sums = self._norms[norm], dict[tuple[int, ...], torch.Tensor]()
        groups = groups_like(self._layout, ranks)
        for group in groups:
            if group not in sums:
                sums[group] = in_ring_order([values[each] for each in group])
        self._norms[norm] = [sums[group] for group in groups]
        bare(tensor).fill_(float(sums[groups[self._rank]]))


class Recorder:
    """Notes what an optimizer's norms would reduce; nothing is reduced.

    Attributes:
        values: in the order of the calls.
    """

    def __init__(self) -> None:
        self.values: list[float] = []

    def __call__(self, ranks: tuple[int, ...], operation: str, arguments: tuple[Any, ...]) -> None:
        """Takes the place of ``operation`` on a group of ``ranks``."""
        self.values.append(float(arguments[0][0]))


class ClipAnswers:
    """Answers the sums of a function that a script has put in the place of DeepSpeed's clipping in fp32.

    It may add up what DeepSpeed's does: squares over each copy of the model, then the norms over the copies. Both are
    known of all roles from the commit. What it contributes itself is compared, up to rounding: a replica may be in
    another memory than its owner.

    Args:
        layout: the logical world.
        role: whose gradients are clipped.
        squares: the contribution of every rank to the norm.
    """

    #: How far a contribution may be from the one that the commit knows.
    _ROUNDING = 1e-3

    def __init__(self, layout: Layout, role: Role, squares: Sequence[float]) -> None:
        totals, norms, copy = squares_of_copies(layout, squares), norms_of_copies(layout, squares), layout.copy_of(role)
        stages = layout.size // layout.copies
        self._sums = [
            (stages, squares[layout.rank(role)], float(totals[copy])),
            (layout.copies, float(norms[copy]), float(in_ring_order(norms))),
        ]

    def __call__(self, ranks: tuple[int, ...], operation: str, arguments: tuple[Any, ...]) -> None:
        """Takes the place of ``operation`` on a group of ``ranks``."""
        (tensor,), options = arguments
        if (
            operation == "allreduce"
            and options.reduceOp == dist.ReduceOp.SUM
            and bare(tensor).numel() == 1
            and self._sums
        ):
            members, own, total = self._sums.pop(0)
            near = math.isclose(float(tensor), own, rel_tol=self._ROUNDING) or not math.isfinite(own)
            if near and len(ranks) == members:
                bare(tensor).fill_(total)
                return
        raise UnsupportedError(
            "the function that the script has put in the place of DeepSpeed's clip_fp32_gradients calls a collective, "
            f"{operation} over ranks {list(ranks)}, of other values than DeepSpeed's. Replicas clip alone, also after "
            "a loss: clip by the norm that DeepSpeed clips by, or by what the stage's own gradients tell"
        )


@dataclass(frozen=True)
class Refusal:
    """Refuses the collectives of code of the script that runs for one stage after the other, alone.

    In a group of one rank they need no other member, and are computed.

    Attributes:
        who: calls them, for errors.
        cure: why not, and what to do instead.
    """

    who: str
    cure: str

    @classmethod
    def in_steps(cls, optimizer: torch.optim.Optimizer) -> Refusal:
        """The refusal of collectives that ``optimizer`` or a scheduler makes itself: the commit knows none of them."""
        return cls(
            f"optimizer {type(optimizer).__name__} (or its hook, or its scheduler), in its step,",
            "replicas step alone, also after a loss, and cannot take part: use an optimizer whose step needs only the "
            "averaged gradients, and make collectives of your own between iterations",
        )

    def __call__(self, ranks: tuple[int, ...], operation: str, arguments: tuple[Any, ...]) -> None:
        """Takes the place of ``operation`` on a group of ``ranks``."""
        if len(ranks) > 1:
            raise UnsupportedError(f"{self.who} calls a collective, {operation} over ranks {list(ranks)}: {self.cure}")
        alone(COLLECTIVES[operation], arguments, 0, 1)


@contextmanager
def stepping_alone(
    optimizer: torch.optim.Optimizer,
    answering: Callable[[Answer], AbstractContextManager[None]],
    by: Callable[[], None] | None = None,
) -> Iterator[None]:
    """In the body the ``step`` of a torch optimizer that DeepSpeed's optimizer calls has its collectives refused.

    Args:
        optimizer: the one inside.
        answering: gives a context in which collectives have another answer.
        by: what takes the step instead of the optimizer.
    """
    step: Callable[..., Any] = by or optimizer.step
    own = vars(optimizer).get("step")

    @functools.wraps(optimizer.step)
    def refusing(*args: Any, **kwargs: Any) -> Any:
        with answering(Refusal.in_steps(optimizer)):
            return step(*args, **kwargs)

    optimizer.step = refusing  # type: ignore[method-assign]
    try:
        yield
    finally:
        del optimizer.step
        if own is not None:
            optimizer.step = own  # type: ignore[method-assign]


def ignore(ranks: tuple[int, ...], operation: str, arguments: tuple[Any, ...]) -> None:
    """Answers nothing: an optimizer is built without its peers."""
