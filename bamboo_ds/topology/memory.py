"""Bytes of state that a role costs its owner and its shadow: parameters, gradients, optimizer. Pure.

The measured figures of ``docs/benchmarks.md`` follow from these, which a test compares. Copies of gradients, which are
there for a while, what autograd keeps, boundary tensors, buffers and the allocator's own come on top.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

Precision = Literal["fp32", "fp16", "bf16"]

#: So many of the newest sums of gradients are kept: of which ones the neighbours have all gradients is known at a loss.
NEWEST_SUMS = 2
#: The name of an optimizer that keeps nothing.
WITHOUT_MOMENTUM = "SGD without momentum"
#: Bytes per parameter that optimizers keep, by the names that DeepSpeed or torch has for them, in lower case.
_OPTIMIZERS = {
    **dict.fromkeys(("adam", "adamw", "fusedadam", "deepspeedcpuadam", "cpuadam", "lamb", "fusedlamb"), 8),
    **dict.fromkeys(("adagrad", "deepspeedcpuadagrad", "rmsprop", "lion", "fusedlion", "deepspeedcpulion"), 4),
    "sgd": 4,
    WITHOUT_MOMENTUM.lower(): 0,
}
#: Classes of optimizers that compute each element by itself, by module and name; replicas of others are not parked.
ELEMENTWISE = frozenset(
    {
        *((f"torch.optim.{name.lower()}", name) for name in ("Adam", "AdamW", "SGD", "Adagrad")),
        ("deepspeed.ops.adam.fused_adam", "FusedAdam"),
        ("deepspeed.ops.lion.fused_lion", "FusedLion"),
    }
)
#: What is assumed of others.
_LIKE_ADAM = 8


def optimizer_name(name: str | None, groups: Iterable[Mapping[str, Any]]) -> str | None:
    """The name that the table has for an optimizer of class or type ``name`` with the settings ``groups``."""
    bare = str(name).lower() == "sgd" and not any(each.get("momentum") for each in groups)
    return WITHOUT_MOMENTUM if bare else name


@dataclass(frozen=True)
class StageMemory:
    """Bytes that a role of a stage takes.

    Attributes:
        own: state on its owner.
        replica: state on its shadow, never less.
        copied: what goes to a member that gets a copy.
        passes: what passes of an iteration keep at most; 0 before it has been measured. A shadow needs as much as an
            owner: it computes parts of the stage, and goes on with all of it after a loss.
        parked: copies that compute nothing can be in host memory. A shadow keeps the room for its replica free, for
            when it does; a copy that is being made needs none.
        clones: copies of the gradients that pipelines average, on the owner.
        sums: sums of gradients that a shadow holds; in host memory if the replica is, or the device has no room.
        redundant: what redundant forward passes of an iteration keep at most, with ``redundancy.mode: "auto"``; unknown
            before passes have been measured.
        resting: part of the state that an owner without room for it has in host memory between steps: masters, and the
            optimizer's own; 0 where it cannot.
        masters: part of that which is on the device for the step, and while a role is taken over.
        under_way: micro-batches whose passes :attr:`passes` is of: those that are under way in 1F1B.
    """

    own: int
    replica: int
    copied: int
    passes: int = 0
    parked: bool = False
    clones: int = 0
    sums: int = 0
    redundant: int | None = None
    resting: int = 0
    masters: int = 0
    under_way: int = 1

    @property
    def owned(self) -> int:
        """Bytes on the owner with all that comes on top of state."""
        return self.own + self.passes + self.clones

    @property
    def shadowed(self) -> int:
        """The same on the shadow: what it needs to go on after a loss. Before it passes and sums go by what is free."""
        return self.replica + self.passes + self.clones

    @property
    def ahead(self) -> int:
        """The same on the shadow before a loss, with a replica on its device."""
        return self.replica + self.sums + (self.redundant or 0)

    @property
    def lean(self) -> StageMemory:
        """The same where what can rest in host memory does."""
        return replace(self, own=self.own - self.resting, replica=self.replica - self.resting)

    def bounded(self, count: int) -> StageMemory:
        """The same with passes of ``count`` micro-batches under way at most."""
        return replace(self, passes=-(-self.passes * min(count, self.under_way) // self.under_way))


@dataclass(frozen=True)
class StateBytes:
    """The bytes that a job keeps per trainable parameter.

    Attributes:
        precision: of the model.
        optimizer: its name; ``None``: unknown, taken for one like Adam.
        zero: whether ZeRO-1 divides the optimizer's state among the pipelines.
        pipelines: their number.
        fp32_gradients: bf16 with gradients accumulated in fp32, DeepSpeed's default.
        eager_backwards: shadows run redundant backward passes.
        parked: see :class:`StageMemory`.
        syncs: owners send sums of gradients to shadows.
    """

    precision: Precision = "fp32"
    optimizer: str | None = None
    zero: bool = False
    pipelines: int = 1
    fp32_gradients: bool = True
    eager_backwards: bool = False
    parked: bool = False
    syncs: bool = False

    @property
    def known(self) -> bool:
        """Whether the optimizer's own state is known."""
        return self.optimizer is not None and self.optimizer.lower() in _OPTIMIZERS

    @property
    def elementwise(self) -> bool:
        """Whether, by its name, the optimizer is one of :data:`ELEMENTWISE`, under a configuration's name as well."""
        return (self.optimizer or "").lower() in {
            "lion",
            WITHOUT_MOMENTUM.lower(),
            *(n.lower() for _, n in ELEMENTWISE),
        }

    @property
    def frozen(self) -> float:
        """Bytes per parameter that is not trained, on its owner and on its shadow."""
        return 4 if self.precision == "fp32" else 2

    @property
    def owner(self) -> float:
        """Bytes per parameter of a role on its owner."""
        # With ZeRO-1 the shard's gradients in fp32 besides.
        return self.copied + self.gradient + (4 / self.pipelines if self.zero else 0)

    @property
    def gradient(self) -> int:
        """Bytes per parameter of sums of gradients."""
        return {"fp32": 4, "fp16": 2, "bf16": 4 if self.fp32_gradients else 2}[self.precision]

    @property
    def clones(self) -> int:
        """Bytes per parameter of copies of the gradients that pipelines average, on an owner."""
        return self.gradient * (self.pipelines > 1)

    @property
    def copied(self) -> float:
        """Bytes per parameter that are sent where a copy of a role is made: all but gradients."""
        return (4 if self.precision == "fp32" else 2) + sum(self._of_optimizer)

    @property
    def shadow(self) -> float:
        """Bytes per parameter of a role on its shadow: as much, and with ZeRO-1 the flat parameters once more.

        Of one that is parked: what it takes when it computes.
        """
        if self.parked:
            return self.owner
        return self.owner + (2 if self.zero else 0) + (4 if self.eager_backwards else 0)

    @property
    def sent(self) -> int:
        """Bytes per parameter of what goes to a shadow in an iteration, as far as either has it at once."""
        return self.gradient * (1 + (NEWEST_SUMS if self.syncs else 0))

    @property
    def masters(self) -> float:
        """Bytes per parameter of masters."""
        return self._of_optimizer[0]

    @property
    def resting(self) -> float:
        """Bytes per parameter of what can be in host memory between an owner's steps: masters, and the optimizer's."""
        return sum(self._of_optimizer) if self.parked else 0

    @property
    def _of_optimizer(self) -> tuple[float, float]:
        """Bytes per parameter of masters, and of what the optimizer keeps."""
        divided = self.pipelines if self.zero else 1
        masters = 0 if self.precision == "fp32" else 4
        return masters / divided, _OPTIMIZERS.get((self.optimizer or "").lower(), _LIKE_ADAM) / divided

    def of(self, parameters: int, frozen: int = 0) -> StageMemory:
        """The bytes of a stage with so many trainable parameters, and so many others."""
        fixed = frozen * self.frozen
        own, replica, copied = (round(parameters * each + fixed) for each in (self.owner, self.shadow, self.copied))
        return StageMemory(
            own,
            replica,
            copied,
            parked=self.parked,
            clones=self.clones * parameters,
            sums=NEWEST_SUMS * self.gradient * parameters if self.syncs else 0,
            resting=round(self.resting * parameters),
            masters=round(self.masters * parameters) if self.parked else 0,
        )
