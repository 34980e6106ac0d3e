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
from .profile import Layer

#: The first iterations allocate memory and choose kernels.
WARM_UP = 2


@dataclass(frozen=True)
class Told:
    """The members' measurements of a stage.

    Attributes:
        blocks: seconds of its blocks, in their order; empty where they are not measured.
        kept: bytes that passes of an iteration keep.
        output: bytes that it hands on for a micro-batch.
    """

    blocks: tuple[float, ...]
    kept: int
    output: int


@dataclass(frozen=True)
class _Times:
    """Medians of a stage, in seconds."""

    forward: float
    backward: float
    update: float


def layers_of(
    counts: Sequence[int], parameters: Sequence[int], told: Mapping[int, Told], spans: Iterable[Span], retains: bool
) -> tuple[list[Layer], int]:
    """The layers of a job that was measured, and the micro-batches of a pipeline.

    Args:
        counts: of layers, by stage.
        parameters: trainable ones, by layer.
        told: by stage.
        spans: of its members.
        retains: boundary tensors are kept on the device until the commit: it is the host, and losses can be taken over.

    Raises:
        ConfigError: the spans do not have enough of it.
    """
    times, micro_batches = _times(spans, len(counts))
    found: list[Layer] = []
    for stage, count in enumerate(counts):
        mine = parameters[len(found) : len(found) + count]
        output, kept = _bytes(told, stage, len(counts), micro_batches, retains)
        shares, whole, taken = _shares(told[stage].blocks, count), sum(mine), times[stage]
        found += [
            Layer(
                forward_s=taken.forward * share,
                backward_s=taken.backward * share,
                update_s=taken.update * own / whole if whole else 0.0,
                parameters=own,
                boundary_bytes=output,
                kept_bytes=max(0, round(kept / count - output)),
            )
            for own, share in zip(mine, shares, strict=True)
        ]
    return found, micro_batches


def _times(spans: Iterable[Span], stages: int) -> tuple[list[_Times], int]:
    """The times of each stage, and the number of micro-batches of a pipeline."""
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


def _bytes(told: Mapping[int, Told], stage: int, stages: int, micro_batches: int, retains: bool) -> tuple[int, float]:
    """Bytes of a micro-batch: the output of a layer of the stage, and what all its layers keep."""
    before = told[stage - 1].output if stage else 0
    under_way = min(micro_batches, stages - stage)
    boundary = before + told[stage].output
    kept = (told[stage].kept - (micro_batches if retains else under_way) * boundary) / under_way
    return told[stage].output or before, kept  # the last stage's layers but the loss are like what it gets
