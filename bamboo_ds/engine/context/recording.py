"""The main thread's work, for timelines: to the agent, by :mod:`bamboo_ds.observe.span_pipe`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from deepspeed.runtime.pipe.schedule import PipeInstruction

from ...observe.span_pipe import SpanWriter
from ...observe.spans import PASSES, Kind, Span
from ...topology import Role
from ..stage.deepspeed_adapter import DeepSpeedAdapter
from ..stage.runtime import RuntimeBinding
from .channels import Channels
from .records import Progress

_BY_NAME = {kind.value: kind for kind in Kind}


class Recording:
    """Records spans while it is on. Its methods belong to the main thread.

    Args:
        spans: takes them; ``None`` to record nothing.
        mode: ``observe.timeline``.
    """

    def __init__(
        self, ds: DeepSpeedAdapter, binding: RuntimeBinding, progress: Progress, spans: SpanWriter | None, mode: str
    ) -> None:
        self._ds, self._binding, self._progress = ds, binding, progress
        self._spans = spans if mode != "off" else None
        self._step = 0  # the iteration under way, or the last one
        if spans is not None:
            spans.all = mode == "all"

    def execute(self, instruction: PipeInstruction, channels: Channels) -> None:
        """Executes an instruction over ``channels``."""
        spans, kind = self._spans, _BY_NAME.get(type(instruction).__name__)
        if spans is None or kind is None:
            self._ds.execute(instruction, channels)
            return
        cut, begin = True, time.monotonic()
        try:
            self._ds.execute(instruction, channels)
            cut = False
        finally:
            end, arguments = time.monotonic(), instruction.kwargs
            current, m = self._binding.current, arguments.get("buffer_id")
            role, part, again = arguments.get("role") or current.role, 0, False
            if kind in PASSES:
                part = current.share.part.begin
                redone = self._progress.operation.redone.get((role, part))
                again = redone is not None and m < redone[kind is Kind.BACKWARD]
            spans.write(Span(kind, self._step, begin, end, (role.pipeline, role.stage), part, m, again, cut))

    @contextmanager
    def span(self, kind: Kind, role: Role | None = None, micro_batch: int | None = None) -> Iterator[None]:
        """The body is a span."""
        if self._spans is None:
            yield
            return
        cut, begin = True, time.monotonic()
        try:
            yield
            cut = False
        finally:
            end, place = time.monotonic(), None if role is None else (role.pipeline, role.stage)
            self._spans.write(Span(kind, self._step, begin, end, place, micro_batch=micro_batch, cut=cut))

    @contextmanager
    def iteration(self) -> Iterator[None]:
        """The body is an iteration, from its begin to the boundary after it."""
        if self._spans is None:
            yield
            return
        self._step, begin = self._progress.steps + 1, time.monotonic()
        yield
        self._spans.write(Span(Kind.ITERATION, self._step, begin, time.monotonic()))
