"""Stage runtimes: all that an engine needs to compute one role.

DeepSpeed's engine computes one stage and keeps that stage's state in its own attributes. A member of a
bamboo job holds several roles, its own and the replica of another. Each has a :class:`StageRuntime`; the engine
*binds* one at a time by exchanging the attributes named below, and then DeepSpeed's own methods compute it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from ...devices.accelerators import HOST
from ...topology import Role
from .blocks import StageBlocks
from .layers import Layers
from .optimizers import StageOptimizer
from .schedulers import Pristine
from .work import Part, Results, Share, Verification

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
        owned: whether this member owns the role; else it holds the role's replica.
        blocks: number of blocks of the stage.
        optimizer: carries out and copies its steps.
        layers: what the stage's layers keep besides their parameters.
        pristine: what the learning-rate scheduler was made of, if the script has brought it.
        attributes: values of ``BOUND_ATTRIBUTES`` while the runtime is not bound.
        share: what this member computes of the stage in this iteration.
        results: what passes have given in this iteration.
        verification: whether a replica equals its owner.
        trained: which parameters are trainable, where the script has changed that since the last iteration.
        stale: the stage's other roles have stepped, and their shards of the parameters are not here yet.
        pending: the step of the last iteration, where a replica has yet to take it; see :meth:`catch_up`.
        parked: a replica's tensors are in host memory, whatever device this member computes on: until it computes.
    """

    role: Role
    owned: bool
    blocks: int = 1
    attributes: dict[str, Any] = field(default_factory=dict)
    optimizer: StageOptimizer = field(init=False)
    layers: Layers = field(init=False)
    pristine: Pristine | None = field(default=None, init=False)
    share: Share = field(init=False)
    results: Results = field(default_factory=Results, init=False)
    verification: Verification = field(default_factory=Verification, init=False)
    trained: list[bool] | None = field(default=None, init=False)
    stale: bool = field(default=False, init=False)
    pending: Callable[[StageRuntime], None] | None = field(default=None, init=False)
    parked: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.share = Share(self.blocks, {})

    def device(self, own: torch.device) -> torch.device:
        """The device of its tensors, on a member whose device is ``own``."""
        return HOST if self.parked else own

    @property
    def usable(self) -> bool:
        """Whether what is here is the state of the role."""
        return self.owned or self.verification.valid

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
        """Makes those parameters trainable that :meth:`trains` said are so elsewhere, and no others."""
        self.catch_up()  # a step goes by what was trainable in its iteration
        for parameter, trains in zip(self.module.parameters(), trained, strict=False):
            parameter.requires_grad = trains
            if not trains:
                parameter.grad = None  # of redundant passes that did not know of it

    def catch_up(self) -> None:
        """Takes the step that is pending, if there is one: before what is here counts as the role's state."""
        step, self.pending = self.pending, None
        if step is not None:
            step(self)

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

    @cached_property
    def stage(self) -> StageBlocks:
        """The stage's blocks."""
        return StageBlocks(self.module, self.blocks)

    def at_ends(self, part: Part, stages: int) -> tuple[bool, bool]:
        """Whether ``part`` begins and whether it ends a pipeline of so many stages."""
        first, last = self.role.stage == 0, self.role.stage == stages - 1
        return first and part.begin == 0, last and part.end == self.blocks

    def begin_iteration(self) -> None:
        """Forgets everything of the iteration before. The runtime must not be bound."""
        buffers = self.attributes["pipe_buffers"]
        for name in buffers:
            buffers[name] = [None] * len(buffers[name])
        self.share, self.results = Share(self.blocks, buffers), Results()
        self.attributes.update(total_loss=None, total_additional_losses=None, grad_layer=None, fwd_outputs=[])

    def begin_again(self) -> None:
        """Forgets all passes of this iteration. The runtime must not be bound."""
        before = self.share
        self.begin_iteration()
        self.share.divide(before.ranges)
        self.share.helps = before.helps
        self.optimizer.clear()
        self.optimizer.abandon_pass()
        if before.first_layers is not None:
            self.layers.restore(before.first_layers)

    def forget_passes(self) -> None:
        """The same of a replica, which keeps what its owner has sent of the iteration."""
        results = self.results
        self.begin_again()
        self.results = replace(results, tied={})


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
        """Makes ``runtime`` the one that the engine computes."""
        if runtime is not self.current:
            self._save(self.current)
            self.current = runtime
            self._engine.__dict__.update(runtime.attributes)
            self._engine._modules["module"] = runtime.attributes["module"]
        return runtime

    def refresh(self) -> None:
        """Brings the current runtime's saved attributes up to date."""
        self._save(self.current)

    def reload(self) -> None:
        """Brings the engine up to date with the current runtime's saved attributes."""
        self._engine.__dict__.update(self.current.attributes)
        self._engine._modules["module"] = self.current.attributes["module"]

    def drop(self, role: Role) -> None:
        """Forgets a runtime. That of the local role stays bound, but is none of them any more."""
        runtime = self.runtimes.pop(role)
        if runtime is not self.local:
            runtime.optimizer.release()
            return
        self.refresh()
        runtime.owned = runtime.verification.valid = False
        runtime.begin_iteration()
        runtime.optimizer.clear()
        self.reload()

    def begin_iteration(self) -> None:
        """Forgets the iteration before on all runtimes."""
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
        return [runtime for runtime in self.replicas() if runtime.share.helps]

    def replicas(self) -> list[StageRuntime]:
        """Runtimes that are replicas, by (stage, pipeline)."""
        return sorted((r for r in self.runtimes.values() if not r.owned), key=lambda r: (r.role.stage, r.role.pipeline))
