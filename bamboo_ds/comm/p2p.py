"""Sends and receives of process groups, over the epoch's links."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch

from ..bare import bare
from ..errors import UnsupportedError
from .links import Links, Ticket
from .wire.payloads import PeerMessage, WireTensor
from .work import NO_TIMEOUT, CompletedWork


class SendWork(CompletedWork):
    """A send: complete when its tensor may be changed."""

    def __init__(self, links: Links, member: str, ticket: Ticket, tensor: torch.Tensor, timeout: timedelta) -> None:
        super().__init__([tensor])
        self._links = links
        self._member = member
        self._ticket = ticket
        self._timeout = timeout

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Waits until the kernel has taken everything.

        Raises:
            EpochChanged, PeerLost: it never will.
            RuntimeError: not within the timeout.
        """
        links = self._links
        limit = timeout if timeout != NO_TIMEOUT else self._timeout
        with links.changed:
            if not links.wait("send", lambda: self._ticket.written, [self._member], limit):
                raise RuntimeError(f"Timed out waiting {limit} for send operation to {self._member} to complete")
        return True

    def is_completed(self) -> bool:
        """Whether the tensor may be changed, or never will be sent."""
        links = self._links
        with links.changed:
            return links.life.aborted is not None or self._ticket.written or links.failure(self._member) is not None

    def get_future(self) -> torch.futures.Future[Any]:
        """Refuses, as in gloo: sends have none."""
        raise RuntimeError("a send has no future")


class Receives:
    """The receives that a process has posted in one epoch, by key, in order."""

    def __init__(self, links: Links) -> None:
        self.links = links
        self._posted: dict[bytes, deque[RecvWork]] = {}

    def post(self, work: RecvWork) -> None:
        """Queues a receive; the caller holds the links' condition."""
        self._posted.setdefault(work.key, deque()).append(work)

    def withdraw(self, work: RecvWork) -> None:
        """Takes back a receive that nothing has arrived for; the caller holds the links' condition."""
        self._posted[work.key].remove(work)

    def match(self, key: bytes) -> None:
        """Gives arrived messages to posted receives: each takes the oldest it accepts, the first posted first.

        The caller holds the links' condition.
        """
        inbox = self.links.inbox(key)
        posted = self._posted.get(key, ())
        for work in [work for work in posted if inbox]:
            for message in inbox:
                if work.source is None or message.sequence == work.source:
                    work.message = message
                    inbox.remove(message)
                    self.withdraw(work)
                    break


class RecvWork(CompletedWork):
    """A receive.

    Args:
        receives: those posted in the epoch.
        key: the stream.
        tensor: for what arrives.
        source: group rank of the sender; ``None`` for any.
        members: that may send it.
    """

    def __init__(
        self,
        receives: Receives,
        key: bytes,
        tensor: torch.Tensor,
        source: int | None,
        members: Iterable[str],
        timeout: timedelta,
    ) -> None:
        super().__init__([tensor])
        self.key = key
        self.source = source
        self.message: PeerMessage | None = None
        self._receives, self._links = receives, receives.links
        self._members = tuple(members)
        self._timeout = timeout
        self._taken = False
        self._lock = threading.Lock()
        with self._links.changed:
            receives.post(self)

    def _arrived(self) -> bool:
        if self.message is None:
            self._receives.match(self.key)
        return self.message is not None

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Waits for the message and copies it into the tensor.

        Raises:
            EpochChanged, PeerLost: it never comes.
            RuntimeError: not within the timeout (the receive is withdrawn then), or of another size.
        """
        limit = timeout if timeout != NO_TIMEOUT else self._timeout
        with profiled("recv" if self.source is not None else "recvAnySource", self._result[0]):
            self._wait(limit)
        return True

    def _wait(self, limit: timedelta) -> None:
        links = self._links
        with links.changed:
            if not links.wait("recv", self._arrived, self._members, limit):
                self._receives.withdraw(self)
                raise RuntimeError(f"Timed out waiting {limit} for recv operation to complete")
        with self._lock:
            if not self._taken:
                self._take()
                self._taken = True

    def _take(self) -> None:
        assert self.message is not None
        (sent,) = self.message.tensors
        put(self._result[0], sent, self.message.sequence)

    def is_completed(self) -> bool:
        """Whether :meth:`wait` would return, or raise, at once."""
        with self._links.changed:
            return (
                self._arrived()
                or self._links.life.aborted is not None
                or any(self._links.failure(member) is not None for member in self._members)
            )

    def source_rank(self) -> int:
        """Group rank of the sender, after :meth:`wait`."""
        return -1 if self.message is None else self.message.sequence

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """Refuses, as in gloo: receives have none."""
        raise RuntimeError("a receive has no future")


def put(tensor: torch.Tensor, sent: WireTensor, source: int) -> None:
    """Copies into ``tensor`` what rank ``source`` has ``sent``; raises ``RuntimeError`` if it is of another size."""
    plain = bare(tensor)
    size = plain.numel() * plain.element_size()
    if sent.data.numel() != size:
        raise RuntimeError(f"recv: rank {source} sent {sent.data.numel()} bytes, the tensor takes {size}")
    # Like any transport of bytes: the receiver's dtype tells what they mean.
    plain.copy_(sent.data.view(tensor.dtype).view(tensor.shape))


def profiled(operation: str, tensor: torch.Tensor) -> Any:
    """A context that torch's profiler records, with the shape of ``tensor``, as it does collectives."""
    return torch._C._profiler._RecordFunctionFast(f"bamboo:{operation}", [tensor])


def check(tensors: list[torch.Tensor], tag: int) -> torch.Tensor:
    """The one tensor of a send or receive; raises what stock backends raise for misuse."""
    if len(tensors) != 1:
        raise ValueError(f"send and recv take one tensor, got {len(tensors)}")
    if tag < 0:
        raise ValueError(f"tag must not be negative, got {tag}")
    if tensors[0].layout is not torch.strided:
        raise UnsupportedError(f"send and recv take dense tensors, not {tensors[0].layout}")
    return tensors[0]


def deliver_here(links: Links, key: bytes, source: int, tensor: torch.Tensor) -> CompletedWork:
    """Sends to another role of the same member."""
    links.keep(key, source, tensor)
    return CompletedWork([tensor])
