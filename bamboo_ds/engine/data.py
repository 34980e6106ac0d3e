"""Batches of one operation (an iteration or an evaluation), drawn once and kept until it commits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..comm.transport import Lane, Payload, Transport
from ..errors import ProtocolError, UnsupportedError


def as_payload(labels: Any) -> Payload:
    """Labels in a form that a lane carries.

    Raises:
        UnsupportedError: labels are neither ``None``, a tensor, nor a list or tuple of tensors.
    """
    if labels is None or torch.is_tensor(labels):
        return labels
    if isinstance(labels, (list, tuple)) and all(torch.is_tensor(x) for x in labels):
        return tuple(labels)
    raise UnsupportedError(
        f"the second element of a batch (labels) is a {type(labels).__name__}: with redundancy it must be None, a "
        "tensor, or a tuple of tensors, since the last stage's shadow needs it"
    )


class Batches:
    """The micro-batches of this member's pipeline in the current operation.

    A *holder* has an iterator and draws from it; every other member that computes or shadows the last stage
    receives the labels from a holder. What was drawn or received is kept until :meth:`end`, so a takeover never
    draws again: each sample is consumed once.
    """

    def __init__(self) -> None:
        self._iterator: Iterator[Any] | None = None
        self._process: Callable[[Any], Any] | None = None
        self._drawn: list[Any] = []
        self._labels: list[Payload] = []
        self._transport: Transport | None = None
        self._serving: dict[Lane, int] = {}
        self._source: Lane | None = None

    def set_source(self, iterator: Iterator[Any] | None, process: Callable[[Any], Any] | None) -> None:
        """Where batches come from in the current operation; ``None``: this member is no holder."""
        self._iterator, self._process = iterator, process

    @property
    def received(self) -> int:
        """How many labels this member has received in this operation."""
        return len(self._labels)

    def connect(self, transport: Transport, serving: dict[Lane, int], source: Lane | None) -> None:
        """Use the lanes of a new epoch.

        Args:
            transport: the epoch's.
            serving: lanes on which this member, a holder, sends labels, and the first label that each needs.
            source: the lane on which this member receives labels.
        """
        self._transport, self._serving, self._source = transport, dict(serving), source
        self._serve()

    def batch(self, micro_batch: int) -> Any:
        """Batch ``micro_batch``: a holder's own, or ``(None, labels)``. Draws or receives what is missing.

        Raises:
            StopIteration: the iterator is exhausted.
            EpochChanged: while labels were awaited.
        """
        if self._iterator is not None:
            while len(self._drawn) <= micro_batch:
                batch = next(self._iterator)
                self._drawn.append(self._process(batch) if self._process else batch)
                self._serve()
            return self._drawn[micro_batch]
        while len(self._labels) <= micro_batch:
            if self._source is None or self._transport is None:
                raise ProtocolError(f"nobody sends the labels of micro-batch {micro_batch} to this member")
            self._labels.append(self._transport.recv(self._source, len(self._labels)))
        return None, self._labels[micro_batch]

    def ready(self, micro_batch: int) -> bool:
        """Whether :meth:`batch` would not wait for another member."""
        if self._iterator is not None or len(self._labels) > micro_batch:
            return True
        if self._source is None or self._transport is None or len(self._labels) < micro_batch:
            return False
        return self._transport.ready(self._source)

    def complete(self, micro_batches: int) -> None:
        """A holder draws what it has not needed, so that all holders consume the same number of batches."""
        if self._iterator is not None and micro_batches:
            self.batch(micro_batches - 1)

    def end(self, micro_batches: int) -> None:
        """The operation has committed: take in labels that were not needed and forget everything.

        They have arrived already: their sender drained its sends before it entered the commit.
        """
        if self._source is not None and self._transport is not None and self._iterator is None:
            while len(self._labels) < micro_batches:
                self._labels.append(self._transport.recv(self._source, len(self._labels)))
        self.drop()

    def drop(self) -> None:
        """Forget everything of the current operation."""
        self._drawn.clear()
        self._labels.clear()
        self._serving = dict.fromkeys(self._serving, 0)

    def _serve(self) -> None:
        for lane, sent in self._serving.items():
            for m in range(sent, len(self._drawn)):
                assert self._transport is not None
                self._transport.send(lane, m, as_payload(self._drawn[m][1]))
            self._serving[lane] = max(sent, len(self._drawn))
