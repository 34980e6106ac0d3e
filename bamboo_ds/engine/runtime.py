"""Stage runtimes: all that an engine needs to compute one role.

DeepSpeed's engine computes one stage and keeps that stage's state in its own attributes. A member of a
bamboo job holds several roles, its own and the replica of another. Each has a :class:`StageRuntime`; the engine
*binds* one at a time by exchanging the attributes named below, and then DeepSpeed's own methods compute it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ..comm.transport import Payload
from ..state import Tree
from ..topology import Role
from .commit import Measured
from .layers import Layers
from .optimizers import StageOptimizer

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


@dataclass
class StageRuntime:
    """One role on this member: as its owner, or as its shadow.

    Attributes:
        role: the role.
        owned: whether this member computes the role; else it holds the role's replica.
        partial_pass: whether a loss has interrupted a pass that had changed something already.
        optimizer: carries out and copies its steps.
        layers: what the stage's layers keep besides their parameters.
        attributes: values of ``BOUND_ATTRIBUTES`` while the runtime is not bound.
        forwards: forward passes finished in this iteration (redundant ones for a replica).
        backwards: backward passes accumulated in this iteration.
        activations: outputs sent to the next stage in this iteration, by micro-batch, detached. Kept until
            commit: they are what the next stage's new owner needs.
        gradients: gradients of the inputs, sent to the previous stage, by micro-batch.
        micro_losses: loss of each micro-batch between its forward and its backward (last stage).
        tied: gradients of tied weights, summed over the stages that hold them, by place in the list of trainable
            parameters.
        reduced: what the optimizer step needs of the gradients after the data-parallel reduction; ``None`` until then.
        measured: what the commit has to know of them.
        consumed: checksum of each micro-batch that a first or last stage has loaded, if there is a ledger. It travels
            with the reduced gradients that the micro-batch has contributed to.
        reduced_loss: the pipeline's mean loss (and additional losses) of this iteration, if this runtime holds
            the last stage and all of its forwards are done or its replica was received.
        received_layers: what the layers keep, which came with a replica's reduced gradients; applied at the step.
        trained: which parameters are trainable, where the script has changed that since the last iteration.
        checksum: of the state after the last step, if that step was one to verify.
        parts: checksums of the single tensors, which ``checksum`` is made of.
        stale: the stage's other roles have stepped, and their shards of the parameters are not here yet.
        valid: whether a replica equals its owner; false between a failed check and the copy that mends it.
        saved: bytes that autograd has saved for redundant forwards of this iteration, by micro-batch, until their
            backwards.
        first_layers: what the layers kept before the first forward of this iteration, where passes may have to be done
            again from the first one on.
    """

    role: Role
    owned: bool
    partial_pass: bool = False
    attributes: dict[str, Any] = field(default_factory=dict)
    optimizer: StageOptimizer = field(init=False)
    layers: Layers = field(init=False)
    forwards: int = 0
    backwards: int = 0
    activations: dict[int, Payload] = field(default_factory=dict)
    gradients: dict[int, Payload] = field(default_factory=dict)
    micro_losses: dict[int, torch.Tensor] = field(default_factory=dict)
    consumed: dict[int, int] = field(default_factory=dict)
    tied: dict[int, torch.Tensor] = field(default_factory=dict)
    reduced: list[torch.Tensor] | None = None
    measured: Measured | None = None
    reduced_loss: torch.Tensor | None = None
    received_layers: Tree | None = None
    trained: list[bool] | None = None
    checksum: int | None = None
    parts: list[int] = field(default_factory=list)
    stale: bool = False
    valid: bool = True
    saved: dict[int, int] = field(default_factory=dict)
    first_layers: Tree | None = None

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

    def begin_iteration(self) -> None:
        """Forget everything of the iteration before. The runtime must not be bound."""
        self.partial_pass = False
        self.forwards = self.backwards = 0
        self.activations.clear()
        self.gradients.clear()
        self.micro_losses.clear()
        self.consumed.clear()
        self.tied.clear()
        self.reduced = None
        self.measured = None
        self.reduced_loss = None
        self.received_layers = None
        self.saved.clear()
        self.first_layers = None
        buffers = self.attributes["pipe_buffers"]
        for name in buffers:
            buffers[name] = [None] * len(buffers[name])
        self.attributes.update(total_loss=None, total_additional_losses=None, grad_layer=None, fwd_outputs=[])

    def begin_again(self) -> None:
        """Forget all passes of this iteration. The runtime must not be bound."""
        layers = self.first_layers
        self.begin_iteration()
        self.optimizer.clear()
        self.optimizer.abandon_pass()
        if layers is not None:
            self.layers.restore(layers)


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
        yield
        self.use(before)

    def owned(self) -> list[StageRuntime]:
        """Runtimes that this member owns, by (stage, pipeline)."""
        return sorted((r for r in self.runtimes.values() if r.owned), key=lambda r: (r.role.stage, r.role.pipeline))

    def replicas(self) -> list[StageRuntime]:
        """Runtimes that are replicas, by (stage, pipeline)."""
        return sorted((r for r in self.runtimes.values() if not r.owned), key=lambda r: (r.role.stage, r.role.pipeline))
