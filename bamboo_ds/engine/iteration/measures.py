"""Measurements of a member's passes: their durations, its idle time, the memory that they keep.

Of memory the planner (:mod:`bamboo_ds.topology.room`) is told: state by its numbers, passes as measured.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict, deque
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from ...bare import bare
from ...config import RedundancyMode
from ...control.registry.records import DeviceRecord
from ...devices import staging
from ...devices.accelerators import HOST, accelerator, numbered
from ...devices.staging import StreamMark, Streams
from ...topology import StageMemory
from ...topology.memory import StateBytes, optimizer_name
from ..context.shared import EngineContext, InContext
from ..stage.runtime import StageRuntime
from ..stage.tracing import tensors_in
from .block_times import BlockTimes
from .recomputing import counting_saved_bytes

#: A pass may exceed the expected idle time by this share and this many seconds: clocks are not exact, and a bubble is
#: often exactly as long as a pass.
TOLERANCE_SHARE = 0.05
TOLERANCE_S = 0.0005

#: As what the drawing of a batch is known.
DRAWING = "drawing"

#: How many of the latest measurements count; the shortest decides.
_MEMORY = 5
#: Weight of the newest duration of a pass.
_SMOOTHING = 0.3


class IdleTimes:
    """Idle time by place in the schedule and duration by kind of pass, in seconds.

    The pipeline repeats itself: a receive at the same place of the schedule waits about as long in every iteration. So
    the time from the start of a wait to the arrival of its message is remembered per place, and a redundant pass starts
    only if it is expected to end before the message comes. What has not been measured counts as no idle time.

    Args:
        streams: of a device that does passes behind the host, which has clocks of its own.
    """

    def __init__(self, streams: Streams | None = None) -> None:
        self._streams = streams
        self._idle: dict[Hashable, deque[float]] = defaultdict(lambda: deque(maxlen=_MEMORY))
        self._durations: dict[Hashable, float] = {}
        self._running: deque[tuple[Hashable, StreamMark, StreamMark]] = deque()  # passes, their begins and ends

    def observe(self, place: Hashable, seconds: float) -> None:
        """The wait at ``place`` would have lasted ``seconds`` (0: the message was there already)."""
        self._idle[place].append(max(0.0, seconds))

    def expected(self, place: Hashable) -> float:
        """Idle time to count on at ``place``."""
        seen = self._idle.get(place)
        return min(seen) if seen else 0.0

    @contextmanager
    def timing(self, kind: Hashable) -> Iterator[None]:
        """The body does a pass of ``kind``, or tells a device to; how long it takes may be known later."""
        if self._streams is None:
            before = time.perf_counter()
            yield
            self.record(kind, time.perf_counter() - before)
        else:
            self._collect()  # those that are not asked about must not be kept for ever
            begin = self._streams.mark()
            yield
            self._running.append((kind, begin, self._streams.mark()))

    def busy_until(self) -> StreamMark | None:
        """The time at which the device is through with all passes that it was told to do; ``None`` if it is."""
        self._collect()
        return self._running[-1][-1] if self._running else None

    def _collect(self) -> None:
        """Records the passes that the device is through with."""
        while self._running and self._running[0][-1].query():
            assert self._streams is not None
            kind, *marks = self._running.popleft()
            self.record(kind, self._streams.seconds(*marks))

    def record(self, kind: Hashable, seconds: float) -> None:
        """A pass of ``kind`` took ``seconds``."""
        before = self._durations.get(kind)
        self._durations[kind] = seconds if before is None else before + _SMOOTHING * (seconds - before)

    def duration(self, kind: Hashable, fallback: Hashable = None) -> float | None:
        """The duration of a pass of ``kind``; that of ``fallback`` if none was measured yet."""
        self._collect()
        return self._durations.get(kind, self._durations.get(fallback))

    def fits(self, place: Hashable, elapsed: float, duration: float | None) -> bool:
        """Whether a pass of ``duration`` started now ends before the awaited message is expected."""
        if duration is None:
            return False
        return elapsed + duration <= self.expected(place) * (1 + TOLERANCE_SHARE) + TOLERANCE_S

    def forget(self) -> None:
        """Forgets the idle times: the schedule has changed. Durations stay."""
        self._idle.clear()


def local_stage(context: EngineContext, parked: bool) -> StageMemory:
    """The memory of the stage that this member's script runs as, without its passes."""
    ds, layout, mode = context.ds, context.layout, context.mode
    optimizer = ds.basic_optimizer
    state = StateBytes(
        precision=ds.precision,
        optimizer=None if optimizer is None else optimizer_name(type(optimizer).__name__, optimizer.param_groups),
        zero=ds.zero_stage == 1,
        pipelines=layout.copies,
        fp32_gradients=ds.accumulates_in_fp32,
        eager_backwards=mode.eager_backward,
        parked=parked,
        syncs=mode.replicas and context.settings.redundancy.sync_every != 0,
    )
    counts = [0, 0]
    for parameter in ds.module.parameters():
        counts[not parameter.requires_grad] += bare(parameter).numel()
    return replace(state.of(*counts), under_way=min(ds.micro_batches, layout.stages - context.binding.local.role.stage))


def device_of(context: EngineContext) -> DeviceRecord | None:
    """The device that this member computes on, as it is now that its engine is built; ``None`` for host memory."""
    name, device = context.epoch.device_name, context.ds.device
    if name is None:
        return None
    own, number = accelerator(), numbered(device).index
    stage = sum(tensor.nbytes for tensor in context.binding.local.tensors() if tensor.device.type == device.type)
    besides = max(0, own.memory_allocated(number) - stage)
    return DeviceRecord(name=name, total=own.total_memory(number), besides=besides)


@dataclass(eq=False)
class PassBytes(InContext):
    """The bytes that passes of an iteration keep of the stages that this member owns, at most.

    That is what autograd saves of the micro-batches that are on their way at the same time, and the tensors at the
    stage's boundaries: where members compute in host memory those of all micro-batches, since what they keep for a
    takeover is there, too. It is counted once for each stage, in the last micro-batch of an iteration.

    Attributes:
        on: whether it is counted.
        outputs: by stage, bytes of what it hands on for a micro-batch.
        redundant: by stage, bytes that redundant forward passes of all micro-batches keep, where members choose by them
            whether they run any.
    """

    on: bool
    outputs: dict[int, int] = field(default_factory=dict, init=False)
    redundant: dict[int, int] = field(default_factory=dict, init=False)
    _found: dict[int, int] = field(default_factory=dict, init=False)
    _told: int = field(default=0, init=False)

    @property
    def known(self) -> Mapping[int, int]:
        """The bytes by stage."""
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
        kept_here = self.context.retains and self.ds.device.type == HOST.type
        self._found[stage] = under_way * saved + (count if kept_here else under_way) * boundary
        if self.mode is RedundancyMode.AUTO and self.ds.device.type != HOST.type:
            budget = self.settings.redundancy.memory_budget_mb
            most = count * (saved + boundary)
            self.redundant[stage] = most if budget is None else min(most, round(budget * 2**20))


def _bytes_of(value: object) -> int:
    return sum(tensor.nbytes for tensor in tensors_in(value))


@dataclass(frozen=True)
class Measures:
    """The measurements of a member.

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
        """The measurements of the engine of ``context``."""
        # Passes on other devices than CPUs go on after they have returned, unless launches wait for their kernels.
        waits = context.ds.device.type == HOST.type or os.environ.get("CUDA_LAUNCH_BLOCKING") == "1"
        times = BlockTimes(bool(context.layout.blocks) and waits)
        limited = context.settings.topology.memory_limit is not None or context.ds.device.type != HOST.type
        device = staging.current()
        return cls(IdleTimes(None if device is None else device.streams), times, PassBytes(context, limited))
