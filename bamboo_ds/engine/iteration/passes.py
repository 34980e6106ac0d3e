"""Forward and backward passes of the role that is bound. DeepSpeed's own methods compute."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ...bare import bare
from ...comm.wire.payloads import Payload
from ...errors import ProtocolError
from ...topology import LONG_S, Role
from ..context.shared import InContext
from ..data.batches import PARTS, as_payload
from ..data.supply import BatchSupply
from ..stage.rng import Drawing, seeded_layers
from ..stage.runtime import StageRuntime
from ..stage.tracing import payload_checksum, tensors_in
from .exactness import ExactChecks
from .generators import RoleGenerators
from .measures import DRAWING, Measures
from .recomputing import begin_forward
from .slices import SlicedPasses
from .sums import PartialSums

#: Number of a stage that is neither a pipeline's first nor its last one.
_INNER = -1


@dataclass(eq=False)
class Passes(InContext):
    """Runs passes. What they give stays with the runtime until the iteration commits; :mod:`.boundaries` sends it."""

    supply: BatchSupply
    slices: SlicedPasses
    generators: RoleGenerators
    checks: ExactChecks
    measures: Measures
    sums: PartialSums
    #: What is loaded.
    _batch: Any = field(default=None, init=False)

    def use_role(self, role: Role, part: int = 0) -> None:
        """Binds the runtime of ``role``; passes act on the part of it that begins with block ``part``."""
        runtime = self.binding.use(self.binding.runtimes[role])
        self.ds.pipe_buffers = runtime.share.choose(part).buffers

    @contextmanager
    def _in_part(self, runtime: StageRuntime) -> Iterator[None]:
        """In the body DeepSpeed takes the current part of the bound ``runtime`` for a stage."""
        if not runtime.share.divided:
            yield
            return
        before = self.ds.stage_id, self.ds.num_stages
        first, last = runtime.at_ends(runtime.share.part, self.layout.stages)
        self.ds.num_stages = max(2, self.layout.stages)
        self.ds.stage_id = 0 if first else self.ds.num_stages - 1 if last else _INNER
        try:
            yield
        finally:
            self.ds.stage_id, self.ds.num_stages = before

    def load(self, buffer_id: int) -> None:
        """Loads what the bound role needs of a micro-batch: inputs at the first stage, labels at the last one.

        The script's iterator is drawn from before a part of a stage is taken for one.
        """
        runtime = self.binding.current
        first, last = self._at_ends(runtime)
        batches = self.supply[runtime.role.pipeline]
        before, begin = batches.drawn, time.perf_counter()
        drawn = batches.batch(buffer_id, first, last)
        if batches.drawn == before + 1:
            self.measures.idle.record(DRAWING, time.perf_counter() - begin)
        batch = self._batch = self.slices.processed(drawn)
        if self.progress.checksums and not self.progress.operation.evaluating:
            for end, (part, here) in enumerate(zip(PARTS, (first, last), strict=True)):
                if here:  # of a stage that is both ends, the labels' come behind the inputs'
                    number = buffer_id + (self.ds.micro_batches if end and runtime.role.stage == 0 else 0)
                    runtime.results.consumed[number] = payload_checksum(as_payload(part, batch[end]))
        with self._in_part(runtime):
            self.ds.load_micro_batch(buffer_id)
        self._batch = None

    def next_batch(self) -> Any:
        """The batch that DeepSpeed asks for while it loads."""
        return self._batch

    def forward(self, buffer_id: int) -> None:
        """The forward pass of a micro-batch; passes of a role come in the order of its micro-batches."""
        runtime = self.binding.current
        part = runtime.share.part
        if self.progress.operation.evaluating:
            with (
                self.slices.among(),
                self.generators.keyed(Drawing.EVALUATION, runtime, buffer_id),
                seeded_layers(self.ds.module, self.progress.consumed + buffer_id),
            ):
                self.ds.forward_pass(buffer_id)
            return
        if buffer_id != part.forwards:
            raise ProtocolError(f"forward {buffer_id} of role {runtime.role} comes after {part.forwards} forwards")
        begin_forward()
        self._note_layers(runtime)
        with (
            self.measures.idle.timing((runtime.role, "forward")),
            self.slices.in_pass(keeps=any((runtime.share.first_layers or {}).values())),
            self.generators.keyed(Drawing.FORWARD, runtime, buffer_id),
            seeded_layers(self.ds.module, self.progress.consumed + buffer_id),
            self.checks.watching(runtime, buffer_id),
            runtime.stage.computing(
                part.begin,
                part.end,
                self.generators.blocks(runtime, buffer_id),
                runtime.stage.search.note if runtime.stage.search is not None and buffer_id == 0 else None,
                partial(self.measures.times.forward, runtime.role) if self.measures.times.on else None,
            ),
            self._in_part(runtime),
            self.measures.kept.watching(runtime, buffer_id),
        ):
            self.ds.forward_pass(buffer_id)
        if self._at_ends(runtime)[1]:
            # Redundant forwards run ahead of their backwards, so each micro-batch keeps its own loss.
            part.micro_losses[buffer_id] = self.ds.loss
        else:
            part.activations[buffer_id] = _detached(self.ds.pipe_buffers["outputs"][buffer_id])
        part.forwards += 1
        self.sums.mark()

    def backward(self, buffer_id: int) -> None:
        """The backward pass of a micro-batch, whose gradients go into the role's sums."""
        runtime = self.binding.current
        part, (first, last) = runtime.share.part, self._at_ends(runtime)
        if buffer_id != part.backwards:
            raise ProtocolError(f"backward {buffer_id} of role {runtime.role} comes after {part.backwards} backwards")
        if last:
            self.ds.loss = part.micro_losses.pop(buffer_id)
        with (
            self.measures.idle.timing((runtime.role, "backward")),
            self.slices.in_pass(keeps=True),
            self.generators.keyed(Drawing.BACKWARD, runtime, buffer_id),
            seeded_layers(self.ds.module),
            self._in_part(runtime),
            runtime.stage.search.backward(self.ds.device) if runtime.stage.search is not None else nullcontext(),
        ):
            if last or not runtime.share.divided or _differentiable(self.ds.pipe_buffers["outputs"][buffer_id]):
                began = time.perf_counter()
                self.ds.backward_pass(buffer_id)
                if self.measures.times.on:
                    self.measures.times.backward(runtime.role, part.begin, part.end, time.perf_counter() - began)
        if last:
            self.ds.loss = bare(self.ds.loss)
        buffers = self.ds.pipe_buffers
        # DeepSpeed frees the outputs of inner stages only.
        buffers["outputs"][buffer_id] = None
        inputs, buffers["inputs"][buffer_id] = buffers["inputs"][buffer_id], None
        if not first:
            part.gradients[buffer_id] = _input_gradients(inputs)
        part.backwards += 1
        part.saved.pop(buffer_id, None)

    def _at_ends(self, runtime: StageRuntime) -> tuple[bool, bool]:
        return runtime.at_ends(runtime.share.part, self.layout.stages)

    def _note_layers(self, runtime: StageRuntime) -> None:
        """Keeps, in the first pass of an iteration, what later passes change of what the layers keep.

        Those of slices, of replicas, of parts and of roles just taken over may be done again from the first one on. So
        may those of others, where the stage is copied in the middle of a long iteration: if they keep little.
        """
        again = self.layout.slices > 1 or not runtime.owned or runtime.share.divided
        again = again or runtime.role in self.progress.operation.taken_over
        copied = self.mode.replicas and self.measures.times.iteration_s >= LONG_S
        if runtime.share.first_layers is None and (again or (copied and runtime.layers.keep_little())):
            runtime.share.first_layers = runtime.layers.undo()


def _detached(value: Any) -> Payload:
    """A tensor or a tuple of tensors without its graph."""
    return bare(value) if torch.is_tensor(value) else tuple(bare(t) for t in value)


def _differentiable(outputs: Any) -> bool:
    """Whether there is anything to do in a backward pass from ``outputs``; not, where all layers are frozen."""
    return any(tensor.requires_grad for tensor in tensors_in(outputs))


def _input_gradients(inputs: Any) -> Payload:
    tensors = (inputs,) if torch.is_tensor(inputs) else inputs
    floating = [t for t in tensors if bare(t).is_floating_point()]
    gradients = tuple(t.grad for t in floating if t.grad is not None)
    if len(gradients) < len(floating):
        raise RuntimeError(
            "a stage's floating-point input has no gradient after the backward pass: every floating-point tensor "
            "that a stage returns must be used by the next one"
        )
    return gradients[0] if torch.is_tensor(inputs) else gradients
