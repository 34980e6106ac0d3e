"""Stage runtimes: all that an engine needs to compute one role.

DeepSpeed's engine computes one stage and keeps that stage's state in its own attributes. A member of a
bamboo job holds several roles, its own and the replica of another. Each has a :class:`StageRuntime`; the engine
*binds* one at a time by exchanging the attributes named below, and then DeepSpeed's own methods compute it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from ...comm.transport import Payload
from ...schedule import PartProgress
from ...state import Tree
from ...topology import Role
from .blocks import CutSearch, StageBlocks
from .commit import Measured
from .layers import Layers
from .optimizers import StageOptimizer
from .schedulers import Pristine

#: Engine attributes that belong to a role rather than to the process (DeepSpeed 0.19).
BOUND_ATTRIBUTES = (
    # The stage itself.
    "module",
    "optimizer",
    "basic_optimizer",
    "lr_scheduler",
    "param_names",
    "data_parallel_group",
    "seq_data_parallel_group",
    "module_forward_pre_hook",
    "module_forward_post_hook",
    # Its place in the topology.
    "stage_id",
    "prev_stage",
    "next_stage",
    "global_rank",
    "grid",
    "mpu",
    # Pipeline buffers.
    "pipe_buffers",
    "num_pipe_buffers",
    "grad_layer",
    # Losses of the current iteration.
    "loss",
    "total_loss",
    "total_additional_losses",
    "fwd_outputs",
    "losses",
    # Counters; swapping them avoids counting a step once per role.
    "global_steps",
    "global_samples",
    "skipped_steps",
    "micro_steps",
    # Which files of a checkpoint the role writes.
    "save_non_zero_checkpoint",
    "save_zero_checkpoint",
    "checkpoint_mp_rank",
)


@dataclass(eq=False)
class Part:
    """What this member has done of a part of a stage in the current iteration; of all of it, mostly.

    Attributes:
        begin: its first block.
        end: the first block behind it.
        buffers: DeepSpeed's, by kind and micro-batch.
        forwards: forward passes finished (redundant ones for a replica).
        backwards: backward passes accumulated.
        activations: outputs sent to the next part or stage, by micro-batch, detached. Kept until commit: they are what
            its new owner needs.
        gradients: gradients of the inputs, sent to the part or stage before, by micro-batch.
        micro_losses: loss of each micro-batch between its forward and its backward (last stage).
        saved: bytes that autograd has saved for redundant forwards of this iteration, by micro-batch, until their
            backwards.
    """

    begin: int
    end: int
    buffers: dict[str, list[Any]]
    forwards: int = 0
    backwards: int = 0
    activations: dict[int, Payload] = field(default_factory=dict)
    gradients: dict[int, Payload] = field(default_factory=dict)
    micro_losses: dict[int, torch.Tensor] = field(default_factory=dict)
    saved: dict[int, int] = field(default_factory=dict)

    @property
    def begun(self) -> bool:
        """Whether a pass is done."""
        return self.forwards > 0

    def progress(self) -> PartProgress:
        """The passes that are finished."""
        return PartProgress(self.begin, self.forwards, self.backwards)


@dataclass(frozen=True)
class PartSums:
    """What the shadow of a role has computed of it, for the owner.

    Attributes:
        gradients: of trainable parameters, by ``id``.
        losses: mean losses of the pipeline, if the part ends it.
    """

    gradients: dict[int, torch.Tensor]
    losses: torch.Tensor | None


@dataclass
class StageRuntime:
    """One role on this member: as its owner, or as its shadow.

    Attributes:
        role: the role.
        owned: whether this member owns the role; else it holds the role's replica.
        blocks: number of blocks of the stage.
        cuts: blocks before which the stage may be divided; ``None`` before this member has computed all of it.
        search: what finds that out in the current iteration.
        helps: whether this member computes a part of the role as its shadow.
        parts: what this member computes of the stage in this iteration, in the order of the layers; of a replica that
            it computes nothing of for its owner: what it computes redundantly.
        part: the one that passes act on.
        partial_pass: whether a loss has interrupted a pass that had changed something already.
        optimizer: carries out and copies its steps.
        layers: what the stage's layers keep besides their parameters.
        pristine: what the learning-rate scheduler was made of, if the script has brought it.
        attributes: values of ``BOUND_ATTRIBUTES`` while the runtime is not bound.
        received_part: what the shadow has computed of an owned role, which is not in this member's own sums.
        tied: gradients of tied weights, summed over the stages that hold them, by place in the list of trainable
            parameters.
        reduced: what the optimizer step needs of the gradients after the data-parallel reduction; ``None`` until then.
        measured: what the commit has to know of them.
        consumed: checksum of each micro-batch that a first or last stage has loaded, if the job wants them. It travels
            with the reduced gradients that the micro-batch has contributed to.
        reduced_loss: the pipeline's mean loss (and additional losses) of this iteration, if this runtime holds
            the last stage and all of its forwards are done or its replica was received.
        received_layers: what the layers keep, which came with a replica's reduced gradients; applied at the step.
        trained: which parameters are trainable, where the script has changed that since the last iteration.
        checksum: of the state after the last step, if that step was one to verify.
        tensor_checksums: of the single tensors, which ``checksum`` is made of.
        stale: the stage's other roles have stepped, and their shards of the parameters are not here yet.
        valid: whether a replica equals its owner; false between a failed check and the copy that mends it.
        first_layers: what the layers kept before the first forward of this iteration, where passes may have to be done
            again from the first one on.
    """

    role: Role
    owned: bool
    blocks: int = 1
    helps: bool = False
    cuts: tuple[int, ...] | None = None
    search: CutSearch | None = None
    parts: list[Part] = field(default_factory=lambda: [Part(0, 1, {})])
    part: Part = field(init=False)
    partial_pass: bool = False
    attributes: dict[str, Any] = field(default_factory=dict)
    optimizer: StageOptimizer = field(init=False)
    layers: Layers = field(init=False)
    pristine: Pristine | None = None
    received_part: PartSums | None = None
    consumed: dict[int, int] = field(default_factory=dict)
    tied: dict[int, torch.Tensor] = field(default_factory=dict)
    reduced: list[torch.Tensor] | None = None
    measured: Measured | None = None
    reduced_loss: torch.Tensor | None = None
    received_layers: Tree | None = None
    trained: list[bool] | None = None
    checksum: int | None = None
    tensor_checksums: list[int] = field(default_factory=list)
    stale: bool = False
    valid: bool = True
    first_layers: Tree | None = None

    def __post_init__(self) -> None:
        self.part = self.parts[0]

    @property
    def module(self) -> torch.nn.Module:
        """The stage's module; also while the runtime is bound."""
        return self.attributes["module"]

    def trainable(self) -> list[torch.nn.Parameter]:
        """The stage's trainable parameters, in the order in which DeepSpeed reduces their gradients."""
        return [p for p in self.module.parameters() if p.requires_grad]

    def trains(self) -> list[bool]:
        """Whether each of the stage's parameters is trainable, in the module's order."""
        return [p.requires_grad for p in self.module.parameters()]

    def train_only(self, trained: Sequence[bool]) -> None:
        """Make those parameters trainable that :meth:`trains` said are so elsewhere, and no others."""
        for parameter, trains in zip(self.module.parameters(), trained, strict=False):
            parameter.requires_grad_(trains)
            if not trains:
                parameter.grad = None  # of redundant passes that did not know of it

    def checksums(self) -> list[int]:
        """``consumed`` in the order of the micro-batches, all of which a first or last stage has loaded."""
        return [self.consumed[m] for m in range(len(self.consumed))]

    def tensors(self) -> Iterator[torch.Tensor]:
        """Parameters, then buffers, then tensors of the optimizer state in a fixed order."""
        return (tensor for _, tensor in self.named_tensors())

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The same, each with what it is."""
        for name, parameter in self.module.named_parameters():
            yield f"parameter {name}", parameter
        # A replica may have them in another order, if layers make them when they need them.
        for name, buffer in sorted(self.module.named_buffers(), key=lambda named: named[0]):
            yield f"buffer {name}", buffer
        yield from self.optimizer.named_tensors()

    def choose(self, begin: int) -> Part:
        """Passes act on the part that begins with block ``begin`` from now on; on the first one, if there is none."""
        self.part = next((part for part in self.parts if part.begin == begin), self.parts[0])
        return self.part

    @cached_property
    def stage(self) -> StageBlocks:
        """The stage's blocks."""
        return StageBlocks(self.module, self.blocks)

    def at_ends(self, part: Part, stages: int) -> tuple[bool, bool]:
        """Whether ``part`` begins and whether it ends a pipeline of so many stages."""
        first, last = self.role.stage == 0, self.role.stage == stages - 1
        return first and part.begin == 0, last and part.end == self.blocks

    @property
    def divided(self) -> bool:
        """Whether the stage is not computed as one here."""
        return len(self.parts) > 1 or not self.covers(0, self.blocks)

    @property
    def spent(self) -> bool:
        """Whether passes of this iteration cannot be forgotten: what the layers kept before them is not known."""
        return self.begun and self.first_layers is None

    @property
    def begun(self) -> bool:
        """Whether a pass of this iteration is done."""
        return any(part.begun for part in self.parts)

    def covers(self, begin: int, end: int) -> bool:
        """Whether a part consists of these blocks."""
        return any((part.begin, part.end) == (begin, end) for part in self.parts)

    def divide(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Compute these blocks. Parts that are there stay as they are; gradients of others must not be in the sums."""
        buffers = next(iter(self.parts)).buffers
        found = []
        for begin, end in ranges:
            same = next((part for part in self.parts if (part.begin, part.end) == (begin, end)), None)
            found.append(same or Part(begin, end, {name: [None] * len(buffers[name]) for name in buffers}))
        self.parts = found
        self.part = found[0]

    def begin_iteration(self) -> None:
        """Forget everything of the iteration before. The runtime must not be bound."""
        self.partial_pass = self.helps = False
        self.parts = [Part(0, self.blocks, self.attributes["pipe_buffers"])]
        self.part = self.parts[0]
        self.received_part = None
        self.consumed.clear()
        self.tied.clear()
        self.reduced = None
        self.measured = None
        self.reduced_loss = None
        self.received_layers = None
        self.first_layers = None
        buffers = self.attributes["pipe_buffers"]
        for name in buffers:
            buffers[name] = [None] * len(buffers[name])
        self.attributes.update(total_loss=None, total_additional_losses=None, grad_layer=None, fwd_outputs=[])

    def begin_again(self) -> None:
        """Forget all passes of this iteration. The runtime must not be bound."""
        layers, ranges, helps = self.first_layers, [(part.begin, part.end) for part in self.parts], self.helps
        self.begin_iteration()
        self.divide(ranges)
        self.helps = helps
        self.optimizer.clear()
        self.optimizer.abandon_pass()
        if layers is not None:
            self.layers.restore(layers)

    def forget_passes(self) -> None:
        """The same of a replica, which keeps what its owner has sent of the iteration."""
        names = ("reduced", "measured", "reduced_loss", "received_layers")
        kept, consumed = {name: getattr(self, name) for name in names}, dict(self.consumed)
        self.begin_again()
        vars(self).update(kept)
        self.consumed.update(consumed)


class RuntimeBinding:
    """Binds one of several runtimes to an engine's attributes (a few microseconds a switch).

    Args:
        engine: DeepSpeed's.
        local: the runtime of the role that this member's script runs as, which the engine was built for.

    Attributes:
        current: the runtime that is bound.
        local: bound between operations. Its role may be one that others own now; then it only carries the counters
            that the script looks at.
        runtimes: those of the roles that this member owns or shadows.
    """

    def __init__(self, engine: torch.nn.Module, local: StageRuntime) -> None:
        self._engine = engine
        self.current = self.local = local
        self.runtimes: dict[Role, StageRuntime] = {local.role: local}
        self._save(local)
        local.begin_iteration()

    def _save(self, runtime: StageRuntime) -> None:
        values = self._engine.__dict__
        runtime.attributes = {name: values.get(name) for name in BOUND_ATTRIBUTES}

    def use(self, runtime: StageRuntime) -> StageRuntime:
        """Make ``runtime`` the one that the engine computes."""
        if runtime is not self.current:
            self._save(self.current)
            self.current = runtime
            self._engine.__dict__.update(runtime.attributes)
            self._engine._modules["module"] = runtime.attributes["module"]
        return runtime

    def refresh(self) -> None:
        """Bring the current runtime's saved attributes up to date."""
        self._save(self.current)

    def reload(self) -> None:
        """Bring the engine up to date with the current runtime's saved attributes."""
        self._engine.__dict__.update(self.current.attributes)
        self._engine._modules["module"] = self.current.attributes["module"]

    def drop(self, role: Role) -> None:
        """Forget a runtime. That of the local role stays bound, but is none of them any more."""
        runtime = self.runtimes.pop(role)
        if runtime is not self.local:
            runtime.optimizer.release()
            return
        self.refresh()
        runtime.owned = runtime.valid = False
        runtime.begin_iteration()
        runtime.optimizer.clear()
        self.reload()

    def begin_iteration(self) -> None:
        """Forget the iteration before on all runtimes."""
        self.refresh()
        for runtime in self.runtimes.values():
            runtime.begin_iteration()
        self.reload()

    @contextmanager
    def bound(self, runtime: StageRuntime) -> Iterator[None]:
        """``runtime`` is bound in the body, and what was bound before it afterwards."""
        before = self.current
        self.use(runtime)
        try:
            yield
        finally:  # also where an optimizer raises: a script may go on to save what it has
            self.use(before)

    def for_script(self) -> AbstractContextManager[None]:
        """In the body the script's own code runs, and sees the engine as between two of its calls."""
        return self.bound(self.local)

    def owned(self) -> list[StageRuntime]:
        """Runtimes that this member owns, by (stage, pipeline)."""
        return sorted((r for r in self.runtimes.values() if r.owned), key=lambda r: (r.role.stage, r.role.pipeline))

    def helped(self) -> list[StageRuntime]:
        """Replicas a part of which this member computes for their owners, by (stage, pipeline)."""
        return [runtime for runtime in self.replicas() if runtime.helps]

    def replicas(self) -> list[StageRuntime]:
        """Runtimes that are replicas, by (stage, pipeline)."""
        return sorted((r for r in self.runtimes.values() if not r.owned), key=lambda r: (r.role.stage, r.role.pipeline))
