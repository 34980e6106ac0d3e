"""Bytes of state that a role costs its owner and its shadow: parameters, gradients, optimizer. Pure.

The measured figures of ``docs/benchmarks.md`` follow from these, which a test compares. What autograd keeps, boundary
tensors, buffers and the allocator's own come on top.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .plan import Plan

Precision = Literal["fp32", "fp16", "bf16"]

#: The name of an optimizer that keeps nothing.
WITHOUT_MOMENTUM = "SGD without momentum"
#: Bytes per parameter that optimizers keep, by the names that DeepSpeed or torch has for them, in lower case.
_OPTIMIZERS = {
    **dict.fromkeys(("adam", "adamw", "fusedadam", "deepspeedcpuadam", "cpuadam", "lamb", "fusedlamb"), 8),
    **dict.fromkeys(("adagrad", "deepspeedcpuadagrad", "rmsprop", "lion", "fusedlion", "deepspeedcpulion"), 4),
    "sgd": 4,
    WITHOUT_MOMENTUM.lower(): 0,
}
#: What is assumed of others.
_LIKE_ADAM = 8


@dataclass(frozen=True)
class StateBytes:
    """What a job keeps per trainable parameter.

    Attributes:
        precision: of the model.
        optimizer: its name; ``None``: unknown, taken for one like Adam.
        zero: whether ZeRO-1 divides the optimizer's state among the pipelines.
        pipelines: their number.
        fp32_gradients: bf16 with gradients accumulated in fp32, DeepSpeed's default.
        eager_backwards: shadows run redundant backward passes.
    """

    precision: Precision = "fp32"
    optimizer: str | None = None
    zero: bool = False
    pipelines: int = 1
    fp32_gradients: bool = True
    eager_backwards: bool = False

    @property
    def known(self) -> bool:
        """Whether the optimizer's own state is known."""
        return self.optimizer is not None and self.optimizer.lower() in _OPTIMIZERS

    @property
    def frozen(self) -> float:
        """Bytes per parameter that is not trained, on its owner and on its shadow."""
        return 4 if self.precision == "fp32" else 2

    @property
    def owner(self) -> float:
        """Bytes per parameter of a role on its owner."""
        model, gradient, master = {"fp32": (4, 4, 0), "fp16": (2, 2, 4), "bf16": (2, 4, 4)}[self.precision]
        if self.precision == "bf16" and not self.fp32_gradients:
            gradient = 2
        own = master + _OPTIMIZERS.get((self.optimizer or "").lower(), _LIKE_ADAM)
        if not self.zero:
            return model + gradient + own
        # A shard of the optimizer's state, with the shard's gradients in fp32.
        return model + gradient + (own + 4) / self.pipelines

    @property
    def shadow(self) -> float:
        """Bytes per parameter of a role on its shadow: as much, and with ZeRO-1 the flat parameters once more."""
        return self.owner + (2 if self.zero else 0) + (4 if self.eager_backwards else 0)


def member_bytes(
    plan: Plan, parameters: Sequence[int], state: StateBytes, frozen: Sequence[int] = ()
) -> dict[str, tuple[float, float]]:
    """By member, bytes of the roles that it owns, and of those that it shadows.

    Args:
        parameters: trainable ones of every stage.
        frozen: the others of every stage; empty: there are none.
    """

    owned, shadowed = dict.fromkeys(plan.members, 0.0), dict.fromkeys(plan.members, 0.0)

    def add(to: dict[str, float], member: str | None, stage: int, each: float) -> None:
        if member in to:
            to[member] += parameters[stage] * each + (frozen[stage] * state.frozen if frozen else 0)

    for rank, owner in enumerate(plan.owners):
        add(owned, owner, rank // plan.world.pipelines, state.owner)
    for rank, shadow in enumerate(plan.shadows):
        add(shadowed, shadow, rank // plan.world.pipelines, state.shadow)
    return {member: (owned[member], shadowed[member]) for member in plan.members}
