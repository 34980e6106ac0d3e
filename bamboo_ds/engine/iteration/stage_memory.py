"""What stages take here, for the planner (:mod:`bamboo_ds.topology.room`): state by its numbers, passes as measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from ...topology import Layout, StageMemory
from ...topology.memory import StateBytes, optimizer_name
from ..context.shared import InContext
from ..stage.deepspeed_adapter import DeepSpeedAdapter
from ..stage.runtime import StageRuntime
from ..stage.tracing import tensors_in
from .recomputing import counting_saved_bytes


def local_stage(ds: DeepSpeedAdapter, layout: Layout, eager_backwards: bool) -> StageMemory:
    """What the stage takes that this member's script runs as, without its passes."""
    optimizer = ds.basic_optimizer
    state = StateBytes(
        precision=ds.precision,
        optimizer=None if optimizer is None else optimizer_name(type(optimizer).__name__, optimizer.param_groups),
        zero=ds.zero_stage == 1,
        pipelines=layout.copies,
        fp32_gradients=ds.accumulates_in_fp32,
        eager_backwards=eager_backwards,
    )
    counts = [0, 0]
    for parameter in ds.module.parameters():
        counts[not parameter.requires_grad] += parameter.numel()
    return state.of(*counts)


@dataclass(eq=False)
class PassBytes(InContext):
    """What passes of an iteration keep of the stages that this member owns, in bytes, at most.

    That is what autograd saves of the micro-batches that are on their way at the same time, and the tensors at the
    stage's boundaries of all micro-batches. It is counted once for each stage, in the last micro-batch of an iteration.

    Attributes:
        on: whether it is counted.
        outputs: by stage, bytes of what it hands on for a micro-batch.
    """

    on: bool
    outputs: dict[int, int] = field(default_factory=dict, init=False)
    _found: dict[int, int] = field(default_factory=dict, init=False)
    _told: int = field(default=0, init=False)

    @property
    def known(self) -> Mapping[int, int]:
        """By stage."""
        return self._found

    def is_news(self) -> bool:
        """Whether something has been found since the last call."""
        news = len(self._found) > self._told
        self._told = len(self._found)
        return news

    @contextmanager
    def watching(self, runtime: StageRuntime, micro_batch: int) -> Iterator[None]:
        """The body is a forward pass of ``runtime``, which is bound."""
        stage, count = runtime.role.stage, self.ds.micro_batches
        whole = runtime.owned and not runtime.share.divided
        if not self.on or stage in self._found or not whole or micro_batch != count - 1:
            yield
            return
        with counting_saved_bytes(runtime, micro_batch):
            yield
        buffers = self.ds.pipe_buffers
        boundary = _bytes_of(buffers["outputs"][micro_batch]) if stage < self.layout.stages - 1 else 0
        self.outputs[stage] = boundary
        if stage > 0:
            boundary += _bytes_of(buffers["inputs"][micro_batch])  # as many of their gradients
        under_way = min(count, self.layout.stages - stage)
        saved = runtime.share.part.saved.pop(micro_batch)
        self._found[stage] = under_way * saved + (count if self.context.retains else under_way) * boundary


def _bytes_of(value: object) -> int:
    return sum(tensor.nbytes for tensor in tensors_in(value))
