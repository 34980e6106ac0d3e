"""Both ends of one connection, driven by hand."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import torch

from bamboo_ds.comm import wire
from bamboo_ds.comm.carriers import slabs
from bamboo_ds.comm.connection import Connection
from bamboo_ds.comm.wire import payloads


class Narrow:
    """A socket of which the kernel takes so many bytes, and no more until it is told to."""

    def __init__(self, real: socket.socket) -> None:
        self._real = real
        self.takes: int | None = None  # ``None``: what there is place for
        self.taken = 0

    def sendmsg(self, pieces: list[memoryview], *others: Any) -> int:
        if self.takes is None:
            count = self._real.sendmsg(pieces, *others)
        else:
            data = b"".join(pieces)[: self.takes]
            if not data:
                raise BlockingIOError
            count = self._real.send(data, socket.MSG_NOSIGNAL)
            self.takes -= count
        self.taken += count
        return count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class Incoming:
    """Has frames taken by a function."""

    purpose = "a test"

    def __init__(self, take: Callable[..., None]) -> None:
        self.receive = take

    def opened(self, connection: Connection) -> None:
        """Nothing happens."""

    def closed(self, connection: Connection, reason: str | None) -> None:
        """Nothing happens."""


def share(caller: Connection, host: Connection) -> None:
    """What the two would agree on, were they of two processes."""
    descriptor = slabs.created()
    for end in (caller, host):
        end.sharing.memory = memory = slabs.Slabs(descriptor, end is caller)
        end.sharing._use(memory)
    os.close(descriptor)


class Ends:
    """Both ends of one connection.

    Args:
        shared: they share memory.

    Attributes:
        got: epoch, key, sequence and payload of the frames that have arrived, in order.
    """

    def __init__(self, shared: bool = False) -> None:
        one, other = socket.socketpair()
        for end in (one, other):
            end.setblocking(False)
        self.narrow, self._other = Narrow(one), other
        self.watched: list[int] = []
        narrow: Any = self.narrow
        deaf, hearing = (Incoming(each) for each in (self._refuse, self._take))
        self.sender = Connection("b", narrow, deaf, self._note)
        self.receiver = Connection("a", other, hearing, lambda connection: None)
        self.sender.open = self.receiver.open = True
        if shared:
            share(self.sender, self.receiver)
        self.got: list[tuple[int, bytes, int, payloads.Payload]] = []

    def _note(self, connection: Connection) -> None:
        self.watched.append(connection.interest)

    def _refuse(self, *frame: object) -> None:
        raise AssertionError(f"nothing is sent to this end: {frame}")

    def _take(self, connection: Connection, head: wire.FrameHead, key: bytes, tensors: Any) -> None:
        self.got.append((head.epoch, key, head.sequence, payloads.assemble(head.structure, tensors)))

    def send(self, epoch: int, sequence: int, payload: payloads.Payload, key: bytes = b"key") -> int:
        return self.sender.send(epoch, wire.encode(key, sequence, payload, epoch))

    def pump(self) -> None:
        """Until all is sent and read."""
        while self.sender.written < self.sender.sent:
            before = self.narrow.taken
            self.receiver.read()
            self.sender.flush()
            assert self.narrow.taken > before, "nothing goes on"
        self.receiver.read()

    def close(self) -> None:
        self.sender.end()
        self.receiver.end()


def same(found: payloads.Payload, sent: payloads.Payload) -> bool:
    if isinstance(sent, torch.Tensor):
        return isinstance(found, torch.Tensor) and found.dtype == sent.dtype and torch.equal(found, sent)
    if sent is None or found is None:
        return sent is found
    return isinstance(found, tuple) and len(found) == len(sent) and all(map(same, found, sent))


def filled(size: int) -> torch.Tensor:
    """Bytes that tell where they are."""
    return (torch.arange(size, dtype=torch.int64) * 7 % 251).to(torch.uint8)
