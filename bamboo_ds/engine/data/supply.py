"""The supply of batches to an operation, and the account of what iterations have consumed."""

from __future__ import annotations

import itertools
import logging
import struct
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ...comm.attachment import DRAW
from ...comm.channel import Channel
from ...errors import EpochChanged, UnsupportedError
from ...observe.event_base import Consumed
from ...topology import Role, batch_sources, hungry
from ..context.channels import BATCH_PARTS, RehearsalChannels, Stream
from ..context.history import Kind
from ..context.shared import EngineContext, InContext
from .batches import PARTS, PipelineBatches, Served, Source
from .dataset import Dataset

logger = logging.getLogger("bamboo_ds")


@dataclass(eq=False)
class Needs:
    """The report to the leader on iterators, so that it keeps members that draw from them, or has new ones started.

    Args:
        report: tells the leader of this member's engine.
        iterators: batches come from the script's iterators.
        apart: both ends of each pipeline need a member with theirs.
    """

    report: Callable[[bool, bool], None]
    iterators: bool
    apart: bool = False

    def tell(self, iterators: bool | None = None, apart: bool | None = None) -> None:
        """Tells what has changed."""
        before = self.iterators, self.apart
        self.iterators = self.iterators if iterators is None else iterators
        self.apart = self.apart if apart is None else apart
        if (self.iterators, self.apart) != before:
            self.tell_all()

    def tell_all(self) -> None:
        """Tells everything, whether it has changed or not."""
        self.report(self.iterators, self.apart)


@dataclass(eq=False)
class BatchSupply(InContext):
    """Supplies batches to the roles of this member, and through it to others.

    Inputs come from the iterator at the first stage and labels from that at the last one, as in DeepSpeed. Every
    operation compares what both give. Once that was the same in all operations of a kind (iterations, evaluations), and
    as long as it is, either iterator serves for both.

    Attributes:
        shared: in the operation under way all members read batches from the dataset.
        apart: the ends of a pipeline are in it.
    """

    dataset: Dataset | None
    dataset_iterator: Any
    needs: Needs
    shared: bool = field(default=False, init=False)
    apart: bool = field(default=False, init=False)
    _pipelines: dict[int, PipelineBatches] = field(default_factory=dict, init=False)
    _source_of: Callable[[int], Source] = field(default_factory=lambda: lambda _: Source(), init=False)
    _feeding: frozenset[int] = field(default=frozenset(), init=False)

    # -- sources ------------------------------------------------------------------------------------------

    def use_training(self) -> None:
        """The next operation is an iteration."""
        if self.dataset is not None and self.ds.data_iterator is self.dataset_iterator:
            dataset, begin, process = self.dataset, self.progress.consumed, self.ds.batch_fn

            def read(pipeline: int) -> Iterator[Any]:
                return (dataset.batch(pipeline // self.layout.slices, at) for at in itertools.count(begin))

            self._begin(lambda pipeline: Source(read(pipeline), process, shared=True), shared=True, apart=False)
        else:
            self.use_iterator("train", self.ds.data_iterator)

    def use_iterator(self, kind: Kind, iterator: Any) -> None:
        """In the next operation, one of ``kind``, batches come from the script's ``iterator``.

        Of several slices mostly the first one has an iterator, and ``batch_fn`` gives the others what it has read.
        """
        role, alike = self.binding.local.role, self.history.alike(kind)
        if alike is None and self.layout.slices > 1:
            # Mostly slices other than the first have no iterators at all, which a worker that joins could not show.
            alike = self.history.alike("train")
        apart = alike is not True
        if self.epoch.member not in batch_sources(self.epoch.plan, role.pipeline):
            iterator = None
        elif iterator is None:
            makes = self.epoch.layout.slices > 1 or self.ds.batch_fn is not None
            iterator = itertools.repeat(None) if makes else _none(self.epoch.layout.rank(role))
        at = role.stage == 0, role.stage == self.epoch.layout.stages - 1
        own = tuple(part for part, here in zip(PARTS, at, strict=True) if here or not apart)
        source = Source(iterator, self.ds.batch_fn, own)
        self._begin(lambda pipeline: source if pipeline == role.pipeline else Source(), shared=False, apart=apart)
        if iterator is not None:
            self[role.pipeline]  # drawn from in any case, to keep pace with the other sources

    def _begin(self, source_of: Callable[[int], Source], shared: bool, apart: bool) -> None:
        self._source_of, self.shared, self.apart = source_of, shared, apart
        for pipeline in self._pipelines:
            self._set_source(pipeline)

    def _set_source(self, pipeline: int) -> None:
        source, whole = self._source_of(pipeline), self.layout.slices > 1
        process = None if whole else source.process  # slices process batches when they load them
        self._pipelines[pipeline].set_source(replace(source, process=process, whole=whole), self.apart)

    def __getitem__(self, pipeline: int) -> PipelineBatches:
        """The micro-batches of a pipeline in the operation under way."""
        if pipeline not in self._pipelines:
            self._pipelines[pipeline] = PipelineBatches(partial(reading, self.context))
            self._set_source(pipeline)
        return self._pipelines[pipeline]

    def hungry(self) -> list[int]:
        """Ranks whose iterators the operation under way needs, and that no member runs as; with others that serve."""
        lacking = [] if self.shared else hungry(self.epoch.plan, self.apart)
        return [rank for group in lacking for rank in group]

    def note_ends(self, kind: Kind, alike: bool | None) -> None:
        """An operation of ``kind``, which is yet to be added to the history, has compared the ends of pipelines."""
        first = alike is False and self.history.alike(kind) is not False
        self.needs.tell(apart=self.history.differs or alike is False)
        if not first:
            return
        what = "train_batch" if kind == "train" else "eval_batch"
        logger.warning(
            "the iterators that the first and the last stage give to %s differ. As in DeepSpeed, inputs are taken from "
            "the first stage and labels from the last one, so that each of them must be drawn from. When the process "
            "of an end is lost, training waits until a worker that draws its batches has run the script up to there",
            what,
        )
        if self.epoch.leads:
            self.job.channel.event("iterators_differ", epoch=self.epoch.plan.epoch, step=self.progress.steps, call=what)

    def skip(self, iterator: Any, count: int) -> None:
        """Draws what the others drew from their iterators in an operation that is replayed."""
        at_end = self.binding.local.role.stage in (0, self.epoch.layout.stages - 1)
        if at_end and iterator is not None and iterator is not self.dataset_iterator:
            with reading(self.context):
                for _ in range(count):
                    batch = next(iterator)
                    if self.ds.batch_fn is not None and self.layout.slices == 1:
                        self.ds.batch_fn(batch)  # it may draw random numbers, too

    # -- channels --------------------------------------------------------------------------------------------

    def connect(self, received: Mapping[str, Mapping[str, Mapping[str, int]]]) -> None:
        """Uses the channels of a new epoch, given what each member has received of this operation."""
        member, plan = self.epoch.member, self.epoch.plan
        serving: dict[int, dict[Channel, Served]] = defaultdict(dict)
        sources: dict[int, dict[str, Channel]] = defaultdict(dict)
        feeding = set()
        for stream, role, channel in self.epoch.channels:
            part = BATCH_PARTS.get(stream)
            if part is None:
                continue
            if channel.source == member:
                has = received.get(channel.destination, {}).get(str(role.pipeline), {})
                apart = channel.destination in batch_sources(plan, role.pipeline)
                serving[role.pipeline][channel] = Served(part, has.get(part, 0), apart)
                waits = stream is Stream.INPUTS or plan.lending(role) is not None
                if part == "inputs" and (waits or not apart):
                    feeding.add(role.pipeline)
            if channel.destination == member:
                sources[role.pipeline][part] = channel
        self._feeding = frozenset(feeding)
        for pipeline in sorted({*self._pipelines, *serving, *sources}):
            self[pipeline].connect(serving[pipeline], sources[pipeline])

    @property
    def received(self) -> dict[str, dict[str, int]]:
        """The amount of each part of each pipeline (by its number as text) received in this operation."""
        return {str(pipeline): batches.received for pipeline, batches in self._pipelines.items()}

    def draw_ahead(self, micro_batches: int) -> None:
        """Draws now what others could otherwise wait for in vain: inputs, and all where no pass here draws in time."""
        runtimes, stages = self.binding.runtimes, self.epoch.layout.stages

        def eager(pipeline: int) -> bool:
            ends = [runtimes[role] for stage in (0, stages - 1) if (role := Role(pipeline, stage)) in runtimes]
            # One that was taken over with its reduced gradients does no passes any more.
            passing = [end for end in ends if (end.owned or end.share.helps) and end.results.reduced is None]
            own = [name in self[pipeline].own for name in PARTS]
            at = [end.at_ends(part, stages) for end in passing for part in end.share.parts]
            draws = any(drawn and here for each in at for drawn, here in zip(own, each, strict=True))
            return pipeline in self._feeding or not draws

        for pipeline, batches in self._pipelines.items():
            if eager(pipeline):
                batches.draw_ahead(micro_batches)

    def lacking(self, micro_batches: int) -> PipelineBatches | None:
        """Batches of a pipeline, some of which this member has yet to draw."""
        return next((batches for batches in self._pipelines.values() if batches.lacks(micro_batches)), None)

    def complete(self, micro_batches: int) -> None:
        """See :meth:`~.batches.PipelineBatches.complete`."""
        for batches in self._pipelines.values():
            batches.complete(micro_batches)

    def drop(self) -> None:
        """Forgets all batches of the operation."""
        for batches in self._pipelines.values():
            batches.drop()

    def share(self, channels: RehearsalChannels) -> None:
        """Gives shadows of ends what these have loaded for the rehearsal of a takeover, where they do not load it."""
        micro_batches = range(self.ds.micro_batches)
        for role in channels.roles:
            for stream in (Stream.INPUTS, Stream.LABELS):
                channel, batches, part = channels.get((stream, role)), self[role.pipeline], BATCH_PARTS[stream]
                if channel is not None and channel.source == self.epoch.member:
                    for m in micro_batches:
                        channel.send(m, batches.told(part, m))
                if channel is not None and channel.destination == self.epoch.member:
                    batches.take(part, [channel.recv(m) for m in micro_batches])

    def collect_leftovers(self, micro_batches: int, gradients: bool) -> None:
        """Takes in labels (and gradients for shadows) that were not needed; their senders drained before the commit."""
        try:
            for batches in self._pipelines.values():
                batches.end(micro_batches)
            for stream, _, channel in self.epoch.channels if gradients else ():
                if stream is Stream.SHADOW_GRADIENT and channel.destination == self.epoch.member:
                    # Those of the next iteration depend on what this member does in it.
                    channel.take()
        except EpochChanged:
            # The operation has committed; what was left of it in the channels is gone with their epoch.
            self.drop()

    # -- what was consumed --------------------------------------------------------------------------------

    def account(self) -> None:
        """Notes what the iteration that has just committed has consumed, if micro-batches have checksums.

        A first or last stage notes the checksum of each micro-batch that it loads. The checksums travel with the
        gradients that the micro-batches contribute to: to the shadow with the reduced gradients, to all with the
        commit. So nothing commits unaccounted, and of a role that is taken over they are of what its lost owner used.
        """
        progress = self.progress
        if not progress.checksums:
            return
        self.binding.refresh()
        samples = None
        if self.dataset is not None and self.shared:
            with self.binding.for_script():  # a dataset may tell its length itself
                ends = progress.consumed - self.ds.micro_batches, progress.consumed
                samples = self.dataset.samples_before(ends[0]), self.dataset.samples_before(ends[1])
        # All slices of a copy of the model use the same batches: one speaks for them.
        checksums = [
            each for pipeline in progress.operation.agreed.consumed[:: self.epoch.layout.slices] for each in pipeline
        ]
        progress.newest = Consumed(
            step=progress.steps,
            global_step=self.binding.local.attributes["global_steps"],
            checksum=f"{zlib.crc32(struct.pack(f'>{len(checksums)}I', *checksums)):08x}",
            samples=samples,
        )


@contextmanager
def reading(context: EngineContext) -> Iterator[None]:
    """In the body the script draws batches, as between two of its calls and without other ranks."""
    with context.binding.for_script(), context.groups.alone(DRAW):
        yield


def _none(rank: int) -> Iterator[Any]:
    """The iterator of a script that gives none at an end of a pipeline."""
    raise UnsupportedError(
        f"the script gives no iterator at rank {rank}: DeepSpeed takes the inputs of a pipeline from an iterator at "
        "its first stage and the labels from one at its last stage. Give train_batch and eval_batch one at both, with "
        "anything for the part that is not looked at, or make batches by set_batch_fn"
    )
    yield
