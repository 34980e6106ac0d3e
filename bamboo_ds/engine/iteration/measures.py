"""What a member measures of its passes: how long they take, how long it is idle, what they keep in memory."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ..context.shared import EngineContext
from .block_times import BlockTimes
from .bubbles import IdleTimes
from .stage_memory import PassBytes


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
