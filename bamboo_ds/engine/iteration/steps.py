"""Optimizer steps: of the roles that this member owns, of their replicas, and of the script's own role elsewhere."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...comm.attachment import Answer
from ...errors import ProtocolError
from ..context.shared import InContext
from ..replicas.building import StageBuilder
from ..replicas.replica import checksums, combined, shared_checksum
from ..stage.answers import Answers, ClipAnswers, Refusal, stepping_alone
from ..stage.chunks import ChunkedStep
from ..stage.commit import clipping_factor, global_norm
from ..stage.rng import Drawing
from ..stage.runtime import StageRuntime
from ..stage.schedulers import take_step
from .generators import RoleGenerators


@dataclass(eq=False)
class Steps(InContext):
    """Steps with DeepSpeed's own optimizers. Each runs alone: its collectives are answered from the commit."""

    generators: RoleGenerators
    builder: StageBuilder

    def step_owned(self, lr_kwargs: Any = None) -> None:
        """The step of the bound role, with DeepSpeed's reports."""
        runtime = self.binding.current
        self._apply_reduced(runtime)
        self.ds.optimizer_step(lr_kwargs)
        self._note_checksum(runtime)

    def step_replica(self, runtime: StageRuntime) -> None:
        """The step of a replica."""
        if not self.builder.parks:  # any more
            self.builder.move(runtime, parked=False)
        with self.binding.bound(runtime), self.builder.at_home(runtime):
            self._apply_reduced(runtime)
            self.ds.quiet_step()
            self._note_checksum(runtime)

    def take_model_step(self, lr_kwargs: Any) -> None:
        """DeepSpeed takes the step of the bound role."""
        runtime = self.binding.current
        inner = runtime.optimizer.inner
        chunks = ChunkedStep(inner) if runtime.parked and inner is not None else None
        alone = stepping_alone(inner, partial(self.groups.acting_for, runtime.role), chunks)
        rounding = runtime.optimizer.rounding_as_on(self.ds.device) if runtime.parked else nullcontext()
        with self._answering(runtime), alone, rounding, self.generators.keyed(Drawing.STEP, runtime):
            self.ds.take_model_step(lr_kwargs)
        runtime.stale = self.layout.sharded

    def clip_gradients(self) -> None:
        """DeepSpeed's clipping in fp32, with the norm that the commit agreed on instead of collectives.

        The factor is computed on the host, which knows the norm: a device gets it with each multiplication.
        """
        norm = global_norm(self.layout, self.progress.operation.agreed.squares[0])
        factor = clipping_factor(norm, float(self.ds.gradient_clipping()))
        for parameter in self.ds.module.parameters():
            if parameter.grad is not None:
                parameter.grad.data.mul_(factor)

    def clipping(self) -> AbstractContextManager[None]:
        """In the body a function of the script's clips the bound role: its sums are those that the commit agreed on."""
        role = self.binding.current.role
        answers = ClipAnswers(self.layout, role, self.progress.operation.agreed.squares[0])
        return self.groups.acting_for(role, answers)

    def _answering(self, runtime: StageRuntime) -> AbstractContextManager[None]:
        """In the body this process is the rank of ``runtime``; what its optimizer reduces is what the commit knows."""
        answer: Answer
        if runtime.optimizer.wraps:
            found, rank = self.progress.operation.agreed, self.layout.rank(runtime.role)
            answer = Answers(self.layout, rank, found.overflow, found.squares, runtime.optimizer.sums)
        else:
            answer = Refusal.in_steps(runtime.optimizer.inner)
        return self.groups.acting_for(runtime.role, answer)

    def _apply_reduced(self, runtime: StageRuntime) -> None:
        """Give the bound runtime the gradients that its optimizer step needs, and what its owner's layers keep."""
        if runtime.results.reduced is None:
            raise ProtocolError(f"role {runtime.role} is to step without reduced gradients")
        device = runtime.device(self.ds.device)
        runtime.optimizer.apply([gradient.to(device) for gradient in runtime.results.reduced])
        if runtime.results.layers is not None:
            runtime.layers.restore(runtime.results.layers)
        runtime.layers.tensors.settle()

    def _note_checksum(self, runtime: StageRuntime) -> None:
        runtime.verification.checksum = runtime.verification.shared = None
        every = self.settings.redundancy.verify_every if self.mode.replicas else 0
        if every and self.ds.global_steps % every == 0:
            self.binding.refresh()
            runtime.verification.tensors = checksums(runtime)
            runtime.verification.checksum = combined(runtime.verification.tensors)
            if self.settings.redundancy.on_mismatch == "evict" and self.layout.alike:
                runtime.verification.shared = shared_checksum(runtime, runtime.verification.tensors)

    # -- the script's own role ----------------------------------------------------------------------------

    def skipped(self) -> bool:
        """Whether the optimizers leave out the step of the committed iteration."""
        return self.binding.local.optimizer.skips and self.progress.operation.agreed.skipped()

    def advance_local(self) -> None:
        """Count an iteration on the local runtime if its role is computed by others."""
        if self.binding.local.role not in self.binding.runtimes:
            self.count_local(self.skipped())

    def count_local(self, skipped: bool) -> None:
        """Count a step that others have done for the script's role."""
        with self.binding.bound(self.binding.local):
            self.ds.note_step(skipped)
            if not skipped and self.ds.lr_scheduler is not None:
                take_step(self.ds.lr_scheduler, self.ds.train_batch_size())
