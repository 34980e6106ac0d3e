"""Batches of one operation (an iteration or an evaluation), drawn once and kept until it commits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime.dataloader import RepeatingLoader
from torch.utils._pytree import tree_map_only
from torch.utils.data import DistributedSampler

from ..comm.transport import Lane, Payload, Transport
from ..errors import ProtocolError, UnsupportedError
from ..state import join, split

PARTS = ("inputs", "labels")

#: Makes a context in which the script's own code runs.
ForScript = Callable[[], AbstractContextManager[object]]


def as_payload(part: str, value: Any) -> Payload:
    """A part of a batch in a form that a lane carries.

    Raises:
        UnsupportedError: it is neither ``None``, a tensor, nor a list or tuple of tensors.
    """
    if value is None or torch.is_tensor(value):
        return value
    if isinstance(value, (list, tuple)) and all(torch.is_tensor(x) for x in value):
        return tuple(value)
    raise UnsupportedError(
        f"the {part} of a batch are a {type(value).__name__}: with redundancy they must be None, a tensor, or a tuple "
        "of tensors, since other members may need them"
    )


def as_message(batch: Any) -> tuple[torch.Tensor, ...]:
    """What has tensors in it, such as a whole batch, in a form that a lane carries; see :func:`from_message`.

    Raises:
        UnsupportedError: there is something in it other than tensors, numbers, text, lists, tuples and dictionaries.
    """
    text, tensors = split(batch)
    return (torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8), *tensors)


def from_message(payload: Payload) -> Any:
    """What :func:`as_message` was given."""
    assert isinstance(payload, tuple)
    return join(payload[0].cpu().numpy().tobytes().decode(), payload[1:])


def _copied(batch: Any) -> Any:
    """``batch`` with tensors of its own."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), batch)


class _ResumedSampler(DistributedSampler):  # type: ignore[type-arg]
    """The sampler that DeepSpeed makes for a pipeline, without the first samples of its first pass."""

    def __init__(self, dataset: Any, pipelines: int, pipeline: int, skipped: int) -> None:
        super().__init__(dataset, num_replicas=pipelines, rank=pipeline, shuffle=False)
        self._skipped = skipped

    def __iter__(self) -> Iterator[int]:
        indices = list(super().__iter__())[self._skipped :]
        self._skipped = 0
        return iter(indices)


@dataclass
class _Stream:
    """An open loader of one pipeline and the number of the batch that it gives next."""

    loader: Iterator[Any]
    position: int


class Dataset:
    """Batches of every pipeline from the ``training_data`` that all members have.

    What batch k of pipeline d contains depends on k and d only, so any member can read it.

    Args:
        data: the dataset.
        pipelines: their number.
        batch_size: samples of a micro-batch.
        loader: makes DeepSpeed's loader with a sampler.
    """

    def __init__(self, data: Any, pipelines: int, batch_size: int, loader: Callable[[Any], Any]) -> None:
        self._data, self._pipelines, self._batch_size, self._loader = data, pipelines, batch_size, loader
        self._streams: dict[int, _Stream] = {}
        self._batches_per_pass: int | None = None

    def adopt(self, pipeline: int, loader: Iterator[Any]) -> None:
        """Use a loader that exists already and has given nothing yet."""
        self._streams[pipeline] = _Stream(loader, 0)

    def batch(self, pipeline: int, position: int) -> Any:
        """Batch ``position`` of ``pipeline``, counted from the start of training; best asked for in order."""
        stream = self._streams.get(pipeline)
        if stream is None or stream.position != position:
            stream = self._streams[pipeline] = _Stream(self._open(pipeline, position), position)
        stream.position += 1
        return next(stream.loader)

    def indices(self, pipeline: int, position: int) -> tuple[int, list[int]]:
        """Which pass over the dataset batch ``position`` belongs to, and the indices of its samples.

        Where the pipelines do not divide the dataset, the sampler completes a pass with its first samples.
        """
        if self._batches_per_pass is None:
            self._batches_per_pass = len(self._loader(_ResumedSampler(self._data, self._pipelines, pipeline, 0)))
        number, batch = divmod(position, self._batches_per_pass)
        share = -(-len(self._data) // self._pipelines)
        ordinals = range(batch * self._batch_size, min((batch + 1) * self._batch_size, share))
        return number, [(pipeline + k * self._pipelines) % len(self._data) for k in ordinals]

    @property
    def size(self) -> int:
        """Number of samples."""
        return len(self._data)

    def _open(self, pipeline: int, position: int) -> Iterator[Any]:
        with torch.random.fork_rng(devices=[]):  # a loader draws a seed for its workers
            passes = self._loader(_ResumedSampler(self._data, self._pipelines, pipeline, 0))
            skipped = position % len(passes) * self._batch_size
            return iter(RepeatingLoader(self._loader(_ResumedSampler(self._data, self._pipelines, pipeline, skipped))))


class PipelineBatches:
    """The micro-batches of one pipeline in the current operation.

    A *source* has an iterator and draws from it; any other member that computes or shadows an end of the pipeline
    receives what it needs from a source. What was drawn or received is kept until :meth:`end`, so a takeover never
    draws again: each sample is consumed once.

    Args:
        for_script: iterators and what processes their batches run in it.
    """

    def __init__(self, for_script: ForScript = nullcontext) -> None:
        self._for_script = for_script
        self._iterator: Iterator[Any] | None = None
        self._shared = self._whole = False
        self._process: Callable[[Any], Any] | None = None
        self._drawn: list[Any] = []
        self._received: dict[str, list[Payload]] = {part: [] for part in PARTS}
        self._transport: Transport | None = None
        self._serving: dict[Lane, tuple[str, int]] = {}
        self._sources: dict[str, Lane] = {}

    def set_source(
        self,
        iterator: Iterator[Any] | None,
        process: Callable[[Any], Any] | None,
        shared: bool = False,
        whole: bool = False,
    ) -> None:
        """Where batches come from in the current operation.

        Args:
            iterator: of this pipeline; ``None``: this member is no source.
            process: applied to each batch.
            shared: every member that needs batches has such an iterator, so none serves others.
            whole: batches have no known parts yet, and are sent as they are.
        """
        self._iterator, self._process, self._shared, self._whole = iterator, process, shared, whole

    @property
    def received(self) -> dict[str, int]:
        """How many inputs and labels this member has received in this operation."""
        return {part: len(values) for part, values in self._received.items()}

    def connect(
        self,
        transport: Transport,
        serving: Mapping[Lane, tuple[str, int]],
        sources: Mapping[str, Lane],
    ) -> None:
        """Use the lanes of a new epoch.

        Args:
            transport: the epoch's.
            serving: lanes on which this member, a source, sends a part, and the first that each needs.
            sources: the lanes on which this member receives each part.
        """
        self._transport, self._serving, self._sources = transport, dict(serving), dict(sources)
        self._serve()

    def batch(self, micro_batch: int, inputs: bool, labels: bool) -> Any:
        """Batch ``micro_batch``: a source's own, or the parts asked for (all of it where batches are sent as they are).

        Draws or receives what is missing.

        Raises:
            StopIteration: the iterator is exhausted.
            EpochChanged: while a part was awaited.
        """
        if self._iterator is not None:
            self._draw(micro_batch + 1)
            return self._drawn[micro_batch]
        if self._whole:
            return from_message(self._part("inputs" if inputs else "labels", micro_batch))
        wanted = {"inputs": inputs, "labels": labels}
        return tuple(self._part(part, micro_batch) if wanted[part] else None for part in PARTS)

    def _draw(self, count: int) -> None:
        while len(self._drawn) < count:
            assert self._iterator is not None
            with self._for_script():
                batch = next(self._iterator)
                if self._process is not None:
                    batch = self._process(batch)
            # The iterator may fill the same tensors again: DeepSpeed copies what it loads, too.
            self._drawn.append(_copied(batch))
            self._serve()

    def _part(self, part: str, micro_batch: int) -> Payload:
        values = self._received[part]
        while len(values) <= micro_batch:
            lane = self._sources.get(part)
            if lane is None or self._transport is None:
                raise ProtocolError(f"nobody sends the {part} of micro-batch {micro_batch} to this member")
            values.append(self._transport.recv(lane, len(values)))
        return values[micro_batch]

    def ready(self, micro_batch: int, part: str) -> bool:
        """Whether :meth:`batch` would not wait for another member for this part."""
        if self._iterator is not None or len(self._received[part]) > micro_batch:
            return True
        lane = self._sources.get(part)
        if lane is None or self._transport is None or len(self._received[part]) < micro_batch:
            return False
        return self._transport.ready(lane)

    def draw_ahead(self, micro_batches: int) -> None:
        """Draw everything that others need now."""
        if self._iterator is not None and self._serving and not self._shared:
            self._draw(micro_batches)

    def complete(self, micro_batches: int) -> None:
        """A source draws what it has not needed, so that all sources consume the same number of batches."""
        if self._iterator is not None and (self._drawn or not self._shared):
            self._draw(micro_batches)

    def end(self, micro_batches: int) -> None:
        """The operation has committed: take in what was not needed and forget everything.

        It has arrived already: its sender drained its sends before it entered the commit.
        """
        if self._iterator is None:
            for part in self._sources:
                self._part(part, micro_batches - 1)
        self.drop()

    def drop(self) -> None:
        """Forget everything of the current operation."""
        self._drawn.clear()
        for values in self._received.values():
            values.clear()
        self._serving = {lane: (part, 0) for lane, (part, _) in self._serving.items()}

    def _serve(self) -> None:
        if self._shared:
            return
        for lane, (part, sent) in self._serving.items():
            for m in range(sent, len(self._drawn)):
                assert self._transport is not None
                batch = self._drawn[m]
                message = as_message(batch) if self._whole else as_payload(part, batch[PARTS.index(part)])
                self._transport.send(lane, m, message)
            self._serving[lane] = part, max(sent, len(self._drawn))


class Batches:
    """The micro-batches of all pipelines that this member has to do with, in the current operation.

    Args:
        slices: tensor slices, each with a pipeline of its own. With several batches are sent as they are drawn.
        for_script: see :class:`PipelineBatches`.
    """

    def __init__(self, slices: int = 1, for_script: ForScript = nullcontext) -> None:
        self._slices, self._for_script = slices, for_script
        self._pipelines: dict[int, PipelineBatches] = {}
        self._shared = False
        self._sources: Callable[[int], tuple[Iterator[Any] | None, bool]] = lambda pipeline: (None, False)
        self._process: Callable[[Any], Any] | None = None

    @property
    def shared(self) -> bool:
        """Whether everybody reads batches from the dataset."""
        return self._shared

    def __getitem__(self, pipeline: int) -> PipelineBatches:
        batches = self._pipelines.get(pipeline)
        if batches is None:
            batches = self._pipelines[pipeline] = PipelineBatches(self._for_script)
            self._set_source(pipeline)
        return batches

    def _set_source(self, pipeline: int) -> None:
        iterator, shared = self._sources(pipeline)
        process = self._process if self._slices == 1 else None
        self._pipelines[pipeline].set_source(iterator, process, shared, self._slices > 1)

    def use_iterator(self, pipeline: int, iterator: Iterator[Any] | None, process: Callable[[Any], Any] | None) -> None:
        """In this operation batches come from the script's iterators, this member's being for ``pipeline``."""
        self._sources = lambda d: (iterator if d == pipeline else None, False)
        self._shared = False
        self._begin(process)
        if iterator is not None:
            self[pipeline]  # drawn from in any case, to keep pace with the other sources

    def use_dataset(self, dataset: Dataset, position: int, process: Callable[[Any], Any] | None) -> None:
        """In this operation everybody reads batches, from number ``position`` of each pipeline on."""

        def read(pipeline: int) -> Iterator[Any]:
            at = position
            while True:
                yield dataset.batch(pipeline // self._slices, at)
                at += 1

        self._sources = lambda pipeline: (read(pipeline), True)
        self._shared = True
        self._begin(process)

    def _begin(self, process: Callable[[Any], Any] | None) -> None:
        self._process = process
        for pipeline in self._pipelines:
            self._set_source(pipeline)

    @property
    def received(self) -> dict[str, dict[str, int]]:
        """How much of each part of each pipeline (by its number as text) has been received in this operation."""
        return {str(pipeline): batches.received for pipeline, batches in self._pipelines.items()}

    def connect(
        self,
        transport: Transport,
        serving: Iterable[tuple[int, Lane, str, int]],
        sources: Iterable[tuple[int, Lane, str]],
    ) -> None:
        """Use the lanes of a new epoch, see :meth:`PipelineBatches.connect`.

        Args:
            transport: the epoch's.
            serving: pipeline, lane, part and first micro-batch wanted, where this member serves others.
            sources: pipeline, lane and part, where it is served.
        """
        outgoing: dict[int, dict[Lane, tuple[str, int]]] = {}
        incoming: dict[int, dict[str, Lane]] = {}
        for pipeline, lane, part, first in serving:
            outgoing.setdefault(pipeline, {})[lane] = part, first
        for pipeline, lane, part in sources:
            incoming.setdefault(pipeline, {})[part] = lane
        for pipeline in sorted({*self._pipelines, *outgoing, *incoming}):
            self[pipeline].connect(transport, outgoing.get(pipeline, {}), incoming.get(pipeline, {}))

    def draw_ahead(self, micro_batches: int, eager: Callable[[int], bool]) -> None:
        """See :meth:`PipelineBatches.draw_ahead`; ``eager``: of which pipelines."""
        for pipeline, batches in self._pipelines.items():
            if eager(pipeline):
                batches.draw_ahead(micro_batches)

    def complete(self, micro_batches: int) -> None:
        """See :meth:`PipelineBatches.complete`."""
        for batches in self._pipelines.values():
            batches.complete(micro_batches)

    def end(self, micro_batches: int) -> None:
        """See :meth:`PipelineBatches.end`."""
        for batches in self._pipelines.values():
            batches.end(micro_batches)

    def drop(self) -> None:
        """See :meth:`PipelineBatches.drop`."""
        for batches in self._pipelines.values():
            batches.drop()
