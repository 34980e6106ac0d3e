"""Optimizer steps: of the roles that this member owns, of their replicas, and of the script's own role elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ...comm.attachment import Answer
from ...errors import ProtocolError
from ..context.shared import InContext
from ..replicas.building import StageBuilder
from ..replicas.replica import checksums, combined, shared_checksum
from ..stage.answers import Answers, ClipAnswers, Refusal, stepping_alone
from ..stage.chunks import ChunkedStep
from ..stage.commit import Committed, clipping_factor, global_norm
from ..stage.rng import Drawing
from ..stage.runtime import StageRuntime
from ..stage.schedulers import SchedulerPosition, take_step
from ..stage.work import Results
from .generators import RoleGenerators


@dataclass(frozen=True)
class StepInputs:
    """The inputs of a role's step: what held in its iteration, from which others may have gone on.

    Attributes:
        results: reduced gradients, and what the owner's layers keep.
        committed: what the commit has agreed on.
        settings: see :meth:`~..stage.deepspeed_adapter.DeepSpeedAdapter.step_settings`.
        trained: which parameters are trainable, if that has changed.
        positions: gives those of this member's own scheduler before and after the step, where the role's has the same.
    """

    results: Results
    committed: Committed
    settings: Mapping[str, Any]
    trained: Sequence[bool] = ()
    positions: Callable[[], tuple[SchedulerPosition, SchedulerPosition] | None] = lambda: None


@dataclass(eq=False)
class Steps(InContext):
    """Steps with DeepSpeed's own optimizers. Each runs alone: its collectives are answered from the commit."""

    generators: RoleGenerators
    builder: StageBuilder
    #: Of the step that is taken.
    _committed: Committed = field(init=False)

    def inputs(self, results: Results) -> StepInputs:
        """The inputs of a step of the iteration that was just committed and has given ``results``."""
        return StepInputs(results, self.progress.operation.agreed, self.ds.step_settings())

    def step_owned(self) -> None:
        """Takes the step of the bound role, which this member owns."""
        self.apply_step(self.binding.current, self.inputs(self.binding.current.results))

    def apply_step(self, runtime: StageRuntime, inputs: StepInputs) -> None:
        """Takes the step of ``runtime``, where its tensors are; an owner's with DeepSpeed's reports.

        Raises:
            ProtocolError: there are no reduced gradients.
        """
        positions = inputs.positions()
        if positions is not None:
            positions[0].assure(runtime)
        if inputs.trained:
            runtime.train_only(inputs.trained)
        # A script may evaluate in inference mode meanwhile.
        with torch.inference_mode(False), self.ds.with_step_settings(inputs.settings):
            if not self.builder.parks:  # any more
                self.builder.move(runtime, parked=False)
                self.builder.make_room()
            with self.binding.bound(runtime), self.builder.at_home(runtime):
                self._committed = inputs.committed  # what is before may take steps of its own
                self._apply_results(runtime, inputs.results)
                if runtime.owned:
                    self.ds.optimizer_step()
                else:
                    self.ds.quiet_step()
                self._note_checksum(runtime)
        if positions is not None:
            positions[1].assure(runtime)

    def take_model_step(self, lr_kwargs: Any) -> None:
        """DeepSpeed takes the step of the bound role."""
        runtime = self.binding.current
        inner = runtime.optimizer.inner
        chunked = (runtime.parked or runtime.optimizer.resting) and inner is not None
        chunks = ChunkedStep(inner) if chunked else None
        alone = stepping_alone(inner, partial(self.groups.acting_for, runtime.role), chunks)
        rounding = runtime.optimizer.rounding_as_on(self.ds.device) if runtime.parked else nullcontext()
        drawing = self.generators.keyed(Drawing.STEP, runtime)
        with self._answering(runtime), alone, rounding, drawing, runtime.optimizer.awake():
            self.ds.take_model_step(lr_kwargs)
        runtime.stale = self.layout.sharded

    def clip_gradients(self) -> None:
        """DeepSpeed's clipping in fp32, with the norm that the commit agreed on instead of collectives.

        The factor is computed on the host, which knows the norm: a device gets it with each multiplication.
        """
        norm = global_norm(self.layout, self._committed.squares[0])
        factor = clipping_factor(norm, float(self.ds.gradient_clipping()))
        for parameter in self.ds.module.parameters():
            if parameter.grad is not None:
                parameter.grad.data.mul_(factor)

    def clipping(self) -> AbstractContextManager[None]:
        """In the body a function of the script's clips the bound role: its sums are those that the commit agreed on."""
        role = self.binding.current.role
        answers = ClipAnswers(self.layout, role, self._committed.squares[0])
        return self.groups.acting_for(role, answers)

    def _answering(self, runtime: StageRuntime) -> AbstractContextManager[None]:
        """In the body this process is the rank of ``runtime``; what its optimizer reduces is what the commit knows."""
        answer: Answer
        if runtime.optimizer.wraps:
            found, rank = self._committed, self.layout.rank(runtime.role)
            answer = Answers(self.layout, rank, found.overflow, found.squares, runtime.optimizer.sums)
        else:
            answer = Refusal.in_steps(runtime.optimizer.inner)
        return self.groups.acting_for(runtime.role, answer)

    def _apply_results(self, runtime: StageRuntime, results: Results) -> None:
        """Gives the bound runtime the gradients that its optimizer step needs, and what its owner's layers keep."""
        if results.reduced is None:
            raise ProtocolError(f"role {runtime.role} is to step without reduced gradients")
        device = runtime.device(self.ds.device)
        runtime.optimizer.apply([gradient.to(device) for gradient in results.reduced])
        if results.layers is not None:
            runtime.layers.restore(results.layers)
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
        """Counts an iteration on the local runtime if its role is computed by others."""
        if self.binding.local.role not in self.binding.runtimes:
            self.count_local(self.skipped())

    def count_local(self, skipped: bool) -> None:
        """Counts a step that others have done for the script's role."""
        with self.binding.bound(self.binding.local):
            self.ds.note_step(skipped)
            if not skipped and self.ds.lr_scheduler is not None:
                take_step(self.ds.lr_scheduler, self.ds.train_batch_size())
