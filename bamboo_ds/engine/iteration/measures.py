"""What a member measures of its passes: how long they take, how long it is idle, what they keep in memory."""

from __future__ import annotations

import os
from collections import defaultdict, deque
from collections.abc import Hashable
from dataclasses import dataclass

from ..context.shared import EngineContext
from .block_times import BlockTimes
from .stage_memory import PassBytes

#: A pass may exceed the expected idle time by this share and this many seconds: clocks are not exact, and a bubble is
#: often exactly as long as a pass.
TOLERANCE_SHARE = 0.05
TOLERANCE_S = 0.0005

#: How many of the latest measurements count; the shortest decides.
_MEMORY = 5
#: Weight of the newest duration of a pass.
_SMOOTHING = 0.3


class IdleTimes:
    """Idle time by place in the schedule and duration by kind of pass, in seconds.

    The pipeline repeats itself: a receive at the same place of the schedule waits about as long in every iteration. So
    the time from the start of a wait to the arrival of its message is remembered per place, and a redundant pass starts
    only if it is expected to end before the message comes. What has not been measured counts as no idle time.
    """

    def __init__(self) -> None:
        self._idle: dict[Hashable, deque[float]] = defaultdict(lambda: deque(maxlen=_MEMORY))
        self._durations: dict[Hashable, float] = {}

    def observe(self, place: Hashable, seconds: float) -> None:
        """The wait at ``place`` would have lasted ``seconds`` (0: the message was there already)."""
        self._idle[place].append(max(0.0, seconds))

    def expected(self, place: Hashable) -> float:
        """Idle time to count on at ``place``."""
        seen = self._idle.get(place)
        return min(seen) if seen else 0.0

    def record(self, kind: Hashable, seconds: float) -> None:
        """A pass of ``kind`` took ``seconds``."""
        before = self._durations.get(kind)
        self._durations[kind] = seconds if before is None else before + _SMOOTHING * (seconds - before)

    def duration(self, kind: Hashable, fallback: Hashable = None) -> float | None:
        """How long a pass of ``kind`` takes; that of ``fallback`` if none was measured yet."""
        return self._durations.get(kind, self._durations.get(fallback))

    def fits(self, place: Hashable, elapsed: float, duration: float | None) -> bool:
        """Whether a pass of ``duration`` started now ends before the awaited message is expected."""
        if duration is None:
            return False
        return elapsed + duration <= self.expected(place) * (1 + TOLERANCE_SHARE) + TOLERANCE_S

    def forget(self) -> None:
        """Forget the idle times: the schedule has changed. Durations stay."""
        self._idle.clear()


@dataclass(frozen=True)
class Measures:
    """What is measured.

    Attributes:
        idle: seconds without work, and of passes.
        times: seconds of the blocks of stages, for their division.
        kept: bytes that passes keep, for the limit on memory.
    """

    idle: IdleTimes
    times: BlockTimes
    kept: PassBytes

    @classmethod
    def of(cls, context: EngineContext) -> Measures:
        """What is measured of the engine of ``context``."""
        # Passes on other devices than CPUs go on after they have returned, unless launches wait for their kernels.
        waits = context.ds.device.type == "cpu" or os.environ.get("CUDA_LAUNCH_BLOCKING") == "1"
        times = BlockTimes(bool(context.layout.blocks) and waits)
        return cls(IdleTimes(), times, PassBytes(context, context.settings.topology.memory_limit is not None))
