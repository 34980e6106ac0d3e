"""A profile, from what a running job has measured of its model.

Its members' timelines have the seconds of passes and optimizer steps of whole stages; what they tell the leader has the
shares of the blocks in them, and the bytes that passes keep and hand on. What nobody measures layer by layer is shared
evenly: the layers of a block take equal times, those of a stage keep equal bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from ..errors import ConfigError
from ..observe.spans import PASSES, Kind, Span
from ..simulate.profile import Layer, Profile
from ..topology.memory import Precision

#: The first iterations allocate memory and choose kernels.
WARM_UP = 2


@dataclass(frozen=True)
class Told:
    """What members have told of a stage.

    Attributes:
        blocks: seconds of its blocks, in their order; empty where they are not measured.
        kept: bytes that passes of an iteration keep.
        output: bytes that it hands on for a micro-batch.
    """

    blocks: tuple[float, ...]
    kept: int
    output: int


@dataclass(frozen=True)
class Job:
    """A job that was measured.

    Attributes:
        name, source, device: of the profile.
        pipelines: data-parallel ones.
        layers: their number, by stage.
        parameters: trainable ones, by layer.
        precision, optimizer: of the model.
        zero: pipelines divide the optimizer's state among themselves.
        samples: of an iteration.
        told: by stage.
        retains: boundary tensors are kept until the commit, as they are where there are replicas.
    """

    name: str
    source: str
    device: str
    pipelines: int
    layers: tuple[int, ...]
    parameters: tuple[int, ...]
    precision: Precision
    optimizer: str | None
    zero: bool
    samples: int
    told: Mapping[int, Told]
    retains: bool


@dataclass(frozen=True)
class _Times:
    """Medians of a stage, in seconds."""

    forward: float
    backward: float
    update: float


def profile_of(job: Job, spans: Iterable[Span]) -> Profile:
    """The profile of a job.

    Args:
        job: what is known of it.
        spans: of its members.

    Raises:
        ConfigError: the spans do not have enough of it.
    """
    stages = len(job.layers)
    times, micro_batches = _times(spans, stages)
    size, rest = divmod(job.samples, micro_batches * job.pipelines)
    if rest or not size:
        raise ConfigError(
            f"{job.name}: {job.samples} samples of an iteration are not those of {micro_batches} equal micro-batches of"
            f" {job.pipelines} pipelines: write a profile by hand, and give it with --profile"
        )
    layers: list[Layer] = []
    begin = 0
    for stage, count in enumerate(job.layers):
        parameters = job.parameters[begin : begin + count]
        begin += count
        layers += _layers(
            times[stage], parameters, _shares(job.told[stage].blocks, count), *_bytes(job, stage, micro_batches)
        )
    return Profile(
        name=job.name,
        source=job.source,
        device=job.device,
        layers=tuple(layers),
        micro_batch=size,
        global_batch=job.samples,
        stages=stages,
        precision=job.precision,
        zero=job.zero,
        optimizer=job.optimizer or "adam",
    )


def _times(spans: Iterable[Span], stages: int) -> tuple[list[_Times], int]:
    """Of each stage, and the number of micro-batches of a pipeline."""
    found: dict[tuple[int, Kind], list[float]] = defaultdict(list)
    counts: dict[tuple[tuple[int, int], int], int] = defaultdict(int)
    for span in spans:
        if span.role is None or span.step <= WARM_UP or span.cut or span.redone or span.part:
            continue
        if span.kind in PASSES or span.kind is Kind.STEP:
            found[span.role[1], span.kind].append(span.end - span.begin)
        if span.kind is Kind.FORWARD:
            counts[span.role, span.step] += 1
    missing = sorted({s for s in range(stages) for kind in (*PASSES, Kind.STEP) if not found[s, kind]})
    if missing:
        raise ConfigError(f"nothing was measured of stages {', '.join(map(str, missing))}: raise --steps")
    kinds = Kind.FORWARD, Kind.BACKWARD, Kind.STEP
    return [_Times(*(median(found[stage, kind]) for kind in kinds)) for stage in range(stages)], max(counts.values())


def _shares(blocks: Sequence[float], layers: int) -> list[float]:
    """Shares of the layers of a stage in the time of its passes."""
    if not blocks or not sum(blocks):
        return [1 / layers] * layers
    bounds = [number * layers // len(blocks) for number in range(len(blocks) + 1)]
    whole = sum(blocks)
    return [
        seconds / whole / (bounds[number + 1] - bounds[number])
        for number, seconds in enumerate(blocks)
        for _ in range(bounds[number + 1] - bounds[number])
    ]


def _bytes(job: Job, stage: int, micro_batches: int) -> tuple[int, int]:
    """Of a layer of the stage: its output, and what it keeps besides that, for a micro-batch."""
    told, stages = job.told[stage], len(job.layers)
    before = job.told[stage - 1].output if stage else 0
    under_way = min(micro_batches, stages - stage)
    boundary = before + told.output
    saved = (told.kept - (micro_batches if job.retains else under_way) * boundary) / under_way
    output = told.output or before  # of the last stage all but the loss is like what it gets
    return output, max(0, round(saved / job.layers[stage] - output))


def _layers(times: _Times, parameters: Sequence[int], shares: Sequence[float], output: int, kept: int) -> list[Layer]:
    whole = sum(parameters)
    return [
        Layer(
            forward_s=times.forward * share,
            backward_s=times.backward * share,
            update_s=times.update * count / whole if whole else 0.0,
            parameters=count,
            boundary_bytes=output,
            kept_bytes=kept,
        )
        for count, share in zip(parameters, shares, strict=True)
    ]
