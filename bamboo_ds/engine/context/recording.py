"""What the main thread does, for timelines: into memory that the agent reads (:mod:`bamboo_ds.observe.ring`)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed.runtime.pipe.schedule import PipeInstruction

from ...observe.ring import CUT, NUMBERS, REDONE, SpanRing
from ...observe.spans import Kind
from ...topology import Role
from ..stage.deepspeed_adapter import DeepSpeedAdapter
from ..stage.runtime import RuntimeBinding
from .records import Progress

#: Iterations that are kept with a disturbed one: so many before it, and one after it.
BEFORE = 2
_BY_NAME = {kind.value: number for kind, number in NUMBERS.items()}
_FORWARD, _BACKWARD = NUMBERS[Kind.FORWARD], NUMBERS[Kind.BACKWARD]


class Recording:
    """Records spans while it is on. Its methods belong to the main thread.

    With ``observe.timeline`` on ``losses`` the agent is told to keep the spans of the iterations around each
    disturbed one when all of them are there, so that it writes nothing while members recover.

    Args:
        ring: the memory; ``None``: nothing is recorded.
        mode: ``observe.timeline``.
    """

    def __init__(
        self, ds: DeepSpeedAdapter, binding: RuntimeBinding, progress: Progress, ring: SpanRing | None, mode: str
    ) -> None:
        self._ds, self._binding, self._progress = ds, binding, progress
        self._ring = ring if mode != "off" else None
        self._losses_only = mode == "losses"
        self._begins: deque[int] = deque([0], maxlen=BEFORE + 1)  # first records of iterations
        self._open: int | None = None  # the first record that is to be kept
        self._kept = 0, 0  # what the agent was told to keep last
        self._disturbed = False
        self._step = 0  # the iteration under way, or the last one
        if ring is not None:
            ring.switch(mode)

    def execute(self, instruction: PipeInstruction) -> None:
        """Execute an instruction."""
        ring, kind = self._ring, _BY_NAME.get(type(instruction).__name__)
        if ring is None or kind is None:
            self._ds.execute(instruction)
            return
        marks, begin = CUT, time.monotonic()
        try:
            self._ds.execute(instruction)
            marks = 0
        finally:
            end, told = time.monotonic(), instruction.kwargs
            current, m = self._binding.current, told.get("buffer_id")
            role, part = told.get("role") or current.role, 0
            if kind in (_FORWARD, _BACKWARD):
                part = current.share.part.begin
                redone = self._progress.redone.get((role, part))
                if redone is not None and m < redone[kind == _BACKWARD]:
                    marks |= REDONE
            ring.record(kind, self._step, begin, end, (role.pipeline, role.stage), part, m, marks)

    @contextmanager
    def span(self, kind: Kind, role: Role | None = None, micro_batch: int | None = None) -> Iterator[None]:
        """The body is a span."""
        if self._ring is None:
            yield
            return
        marks, begin = CUT, time.monotonic()
        try:
            yield
            marks = 0
        finally:
            place: Any = role and (role.pipeline, role.stage)
            self._ring.record(NUMBERS[kind], self._step, begin, time.monotonic(), place, 0, micro_batch, marks)

    @contextmanager
    def iteration(self) -> Iterator[None]:
        """The body is an iteration, from its begin to the boundary after it."""
        ring = self._ring
        if ring is None:
            yield
            return
        self._begins.append(ring.written)
        self._step, begin = self._progress.steps + 1, time.monotonic()
        yield
        ring.record(NUMBERS[Kind.ITERATION], self._step, begin, time.monotonic())
        if self._open is not None and not self._disturbed:
            self._kept = self._open, ring.written
            ring.keep(*self._kept)
            self._open = None
        self._disturbed = False

    def disturbed(self) -> None:
        """A loss, or a change of plan: keep what has been recorded lately, and what follows."""
        if self._ring is None or not self._losses_only:
            return
        self._disturbed = True
        if self._open is None:
            begin, end = self._kept
            self._open = self._begins[0] if self._ring.done >= end else begin  # the agent has not come to it yet
            self._ring.keep(self._open, self._open)
