"""Batches of one operation (an iteration or an evaluation), drawn once and kept until it commits."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from ...bare import bare
from ...comm.channel import Channel
from ...comm.wire.payloads import Payload
from ...errors import ProtocolError, UnsupportedError
from ...state import join, split
from ..stage.tracing import checksum

PARTS = ("inputs", "labels")

#: Makes a context in which the script's own code runs.
ForScript = Callable[[], AbstractContextManager[object]]


def as_payload(part: str, value: Any) -> Payload:
    """A part of a batch in a form that a channel carries.

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
    """An object with tensors in it, such as a whole batch, in a form that a channel carries; see :func:`from_message`.

    Raises:
        UnsupportedError: there is something in it other than tensors, numbers, text, lists, tuples and dictionaries.
    """
    text, tensors = split(batch)
    return (torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8), *tensors)


def from_message(payload: Payload) -> Any:
    """The object that :func:`as_message` was given."""
    assert isinstance(payload, tuple)
    return join(payload[0].cpu().numpy().tobytes().decode(), payload[1:])


def digest(value: Any, crc: int = 0) -> int:
    """CRC-32 of what is in ``value``, going on from ``crc``: of tensors all they contain, of other objects the type."""
    leaves, structure = tree_flatten(value)
    crc = zlib.crc32(str(structure).encode(), crc)
    for leaf in leaves:
        if torch.is_tensor(leaf) and leaf.layout is torch.strided:
            crc = checksum(leaf, crc)
        else:
            plain = leaf is None or isinstance(leaf, (bool, int, float, str, bytes))
            crc = zlib.crc32(repr(leaf if plain else type(leaf)).encode(), crc)
    return crc


def _copied(batch: Any) -> Any:
    """``batch`` with tensors of its own."""
    return tree_map_only(torch.Tensor, lambda tensor: bare(tensor).clone(), batch)


@dataclass(frozen=True)
class Source:
    """The source of this member's batches of one pipeline in an operation.

    Attributes:
        iterator: of the script, or ``None`` if this member is no source.
        process: applied to each batch.
        parts: what this member takes from the iterator; other parts it receives.
        shared: every member that needs batches has such an iterator, so none serves others.
        whole: batches have no known parts yet, and are sent as they are.
    """

    iterator: Iterator[Any] | None = None
    process: Callable[[Any], Any] | None = None
    parts: tuple[str, ...] = PARTS
    shared: bool = False
    whole: bool = False


@dataclass(frozen=True)
class Served:
    """The batches that this member sends on a channel.

    Attributes:
        part: of batches.
        first: micro-batch that comes next.
        apart: only where the ends of the pipeline are, since the other member has an iterator, too.
    """

    part: str
    first: int
    apart: bool = False


class PipelineBatches:
    """The micro-batches of one pipeline in the current operation.

    A *source* has an iterator and draws from it; any other member that computes or shadows an end of the pipeline
    receives what it needs from a source. Where the ends of the pipeline are apart (:mod:`~bamboo_ds.topology.sources`)
    a source takes only the part of its own end from its iterator. What was drawn or received is kept until :meth:`end`,
    so a takeover never draws again: each sample is consumed once. A draw that ends in the middle, by an error of what
    processes batches, goes on from what the iterator has given.

    Args:
        for_script: iterators and what processes their batches run in it.
    """

    def __init__(self, for_script: ForScript = nullcontext) -> None:
        self._for_script = for_script
        self._source = Source()
        self._apart = False
        self._drawn: list[Any] = []
        self._given: list[Any] = []  # by the iterator, and not processed yet: one at most
        self._digest = 0
        self._received: dict[str, list[Payload]] = {part: [] for part in PARTS}
        self._serving: dict[Channel, Served] = {}
        self._sources: dict[str, Channel] = {}

    def set_source(self, source: Source, apart: bool = False) -> None:
        """Sets the source of an operation's batches, and whether the ends of the pipeline are apart."""
        self._source, self._apart = source, apart
        self._given.clear()  # what a script's own error has left there

    @property
    def digest(self) -> int | None:
        """Checksum of all that was drawn here in this operation, or ``None`` if this member is no source."""
        return None if self._source.iterator is None or self._source.shared else self._digest

    @property
    def own(self) -> tuple[str, ...]:
        """Parts that this member draws."""
        return () if self._source.iterator is None else self._source.parts

    @property
    def received(self) -> dict[str, int]:
        """The numbers of inputs and labels that this member has received in this operation."""
        return {part: len(values) for part, values in self._received.items()}

    def connect(self, serving: Mapping[Channel, Served], sources: Mapping[str, Channel]) -> None:
        """Uses the channels of a new epoch.

        Args:
            serving: channels on which this member, a source, sends a part.
            sources: the channels on which this member receives each part.
        """
        self._serving, self._sources = dict(serving), dict(sources)
        self._serve()

    def batch(self, micro_batch: int, inputs: bool, labels: bool) -> Any:
        """Batch ``micro_batch``: a source's own, or the parts asked for (all of it where batches are sent as they are).

        Draws or receives what is missing.

        Raises:
            StopIteration: the iterator is exhausted.
            EpochChanged: while a part was awaited.
        """
        wanted = [part for part, asked in zip(PARTS, (inputs, labels), strict=True) if asked]
        if self._source.whole:
            wanted = wanted[:1]  # which gives all of it
        if set(wanted) <= set(self.own):
            self._draw(micro_batch + 1)
            return self._drawn[micro_batch]
        if self._source.whole:
            return from_message(self._part(wanted[0], micro_batch))
        return tuple(self._part(part, micro_batch) if part in wanted else None for part in PARTS)

    def _draw(self, count: int) -> None:
        while len(self._drawn) < count:
            source = self._source
            assert source.iterator is not None
            with self._for_script():
                if not self._given:
                    self._given.append(next(source.iterator))
                batch = self._given[0]
                if source.process is not None:
                    batch = source.process(batch)
            # The iterator may fill the same tensors again: DeepSpeed copies what it loads, too.
            self._drawn.append(_copied(batch))
            self._given.clear()
            if not source.shared:
                seen = batch if source.whole or not isinstance(batch, (list, tuple)) else batch[: len(PARTS)]
                self._digest = digest(seen, self._digest)
            self._serve()

    def _part(self, part: str, micro_batch: int) -> Payload:
        values = self._received[part]
        while len(values) <= micro_batch:
            channel = self._sources.get(part)
            if channel is None:
                raise ProtocolError(f"nobody sends the {part} of micro-batch {micro_batch} to this member")
            values.append(channel.recv(len(values)))
        return values[micro_batch]

    def told(self, part: str, micro_batch: int) -> Payload:
        """A part of a batch that was drawn or received, as it is sent."""
        if part not in self.own:
            return self._part(part, micro_batch)
        return self._message(part, self._drawn[micro_batch])

    def take(self, part: str, values: Sequence[Payload]) -> None:
        """Uses these of the current operation, where no other member gives them to this one."""
        if part not in self._sources and part not in self.own:
            self._received[part] = list(values)

    def _message(self, part: str, batch: Any) -> Payload:
        return as_message(batch) if self._source.whole else as_payload(part, batch[PARTS.index(part)])

    def ready(self, micro_batch: int, part: str) -> bool:
        """Whether :meth:`batch` would not wait for another member for this part."""
        if part in self.own or len(self._received[part]) > micro_batch:
            return True
        channel = self._sources.get(part)
        if channel is None or len(self._received[part]) < micro_batch:
            return False
        return channel.ready()

    def draw_ahead(self, micro_batches: int) -> None:
        """Draws everything that others need now."""
        if self._source.iterator is not None and self._in_use() and not self._source.shared:
            self._draw(micro_batches)

    @property
    def drawn(self) -> int:
        """The number of batches that this member has drawn in this operation."""
        return len(self._drawn)

    def lacks(self, micro_batches: int) -> bool:
        """Whether this member has yet to draw some of so many batches, and will in any case."""
        source = self._source
        return source.iterator is not None and self.drawn < micro_batches and (self.drawn > 0 or not source.shared)

    def draw_next(self) -> None:
        """Draws a batch that is needed later."""
        self._draw(self.drawn + 1)

    def complete(self, micro_batches: int) -> None:
        """A source draws what it has not needed, so that all sources consume the same number of batches."""
        if self.lacks(micro_batches):
            self._draw(micro_batches)

    def end(self, micro_batches: int) -> None:
        """Takes in what was not needed and forgets everything: the operation has committed.

        It has arrived already: its sender drained its sends before it entered the commit.
        """
        for part in self._sources:
            if part not in self.own:
                self._part(part, micro_batches - 1)
        self.drop()

    def drop(self) -> None:
        """Forgets everything of the current operation."""
        self._drawn.clear()
        self._digest = 0
        for values in self._received.values():
            values.clear()
        self._serving = {channel: replace(served, first=0) for channel, served in self._serving.items()}

    def _in_use(self) -> dict[Channel, Served]:
        """Channels on which this member sends in this operation."""
        return {channel: served for channel, served in self._serving.items() if self._apart or not served.apart}

    def _serve(self) -> None:
        if self._source.shared:
            return
        for channel, served in self._in_use().items():
            for m in range(served.first, len(self._drawn)):
                channel.send(m, self._message(served.part, self._drawn[m]))
            self._serving[channel] = replace(served, first=max(served.first, len(self._drawn)))
