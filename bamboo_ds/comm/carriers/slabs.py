"""Shared memory of the two ends of one connection, which are processes of one host.

::

    one memfd:   token . flags . flags | slab 0 . slab 1 … | slab 0 . slab 1 …
                         caller's, host's    caller to host     host to caller

A slab's flag is set by the sender before it copies a segment in, and cleared by the receiver when it has copied it out:
each waits for nothing, since a segment that finds no free slab goes in the stream. The memory has no name; it is gone
when both processes have let go of it, or are dead.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
from collections.abc import Iterable, Sequence
from typing import Any

import numpy
import torch

from ...errors import ProtocolError
from .. import wire

#: Slabs of each direction. The lowest that is free is taken, so that few are in use (and in caches) where the receiver
#: keeps up, and memory is taken only by those that ever were.
SLABS = 32
#: Bytes of the smallest segments that are worth it.
SMALLEST = 1 << 15
#: Bytes before the slabs, and of the token with which they begin.
_HEADER, TOKEN = 4096, 32
#: Where the flags of each direction are: in lines of their own of the processors' caches.
_FLAGS = (1024, 2048)
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
#: The mark of slab 0.
_FIRST = 2


def size_of(slab: int) -> int:
    """Bytes of the memory, if a slab has ``slab`` of them."""
    return _HEADER + 2 * SLABS * slab


class Slabs:
    """See :class:`.carrier.Carrier`.

    Args:
        descriptor: of the memory; not needed any more afterwards.
        caller: this end has called the other one.

    Attributes:
        sent, received: segments.
    """

    def __init__(self, descriptor: int, caller: bool) -> None:
        self._slab = wire.SEGMENT
        size = size_of(self._slab)
        # Unlike Python's own, this mapping holds no descriptor.
        memory = torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=size, dtype=torch.uint8).numpy()
        to_host, to_caller = (self._direction(memory, number) for number in range(2))
        self._out, self._in = (to_host, to_caller) if caller else (to_caller, to_host)
        self.token = bytes(memory[:TOKEN])
        self.sent = self.received = 0

    def _direction(self, memory: Any, number: int) -> tuple[memoryview, Any]:
        """Flags and slabs."""
        begin = _HEADER + number * SLABS * self._slab
        slabs = memory[begin : begin + SLABS * self._slab].reshape(SLABS, self._slab)
        return memoryview(memory[_FLAGS[number] : _FLAGS[number] + SLABS]), slabs

    def ready(self, size: int) -> bool:
        """Whether the segment is large enough, and a slab is free."""
        return size >= SMALLEST and 0 in self._out[0]

    def send(self, segment: Sequence[memoryview]) -> list[memoryview]:
        """Copies the segment into the lowest slab that is free."""
        flags, slabs = self._out
        place = bytes(flags).index(0)
        flags[place] = 1
        begin, slab = 0, slabs[place]
        for piece in segment:
            numpy.copyto(slab[begin : begin + piece.nbytes], numpy.frombuffer(piece, numpy.uint8))
            begin += piece.nbytes
        self.sent += 1
        return [memoryview(bytes([_FIRST + place]))]

    def receive(self, mark: int, segment: Sequence[memoryview]) -> Iterable[memoryview]:
        """Copies the segment out."""
        flags, slabs = self._in
        place = mark - _FIRST
        if not (0 <= place < SLABS and flags[place]):
            raise ProtocolError(f"there is nothing in slab {place}")
        begin, slab = 0, slabs[place]
        for piece in segment:
            # Other threads go on meanwhile, unlike with an assignment to the view.
            numpy.copyto(numpy.frombuffer(piece, numpy.uint8), slab[begin : begin + piece.nbytes])
            begin += piece.nbytes
        flags[place] = 0
        self.received += 1
        return ()

    def abort(self) -> None:
        """Unmaps the memory."""
        nothing = numpy.empty((0, 0), numpy.uint8)
        self._out = self._in = (memoryview(b""), nothing)


def created() -> int:
    """A descriptor of fresh memory of fixed size."""
    descriptor = os.memfd_create("bamboo-slabs", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size_of(wire.SEGMENT))
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        os.pwrite(descriptor, secrets.token_bytes(TOKEN), 0)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def opened(pid: int, descriptor: int, token: bytes) -> int:
    """A descriptor of the memory that another process of this host has created.

    Args:
        pid: of the process, and ``descriptor``: its number there.
        token: with which the memory begins.

    Raises:
        OSError: there is no such process or descriptor here, it is another user's, or no such memory.
    """
    path = f"/proc/{pid}/fd/{descriptor}"
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(f"{path} is no memory")
    own = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if fcntl.fcntl(own, fcntl.F_GET_SEALS) & _SEALS != _SEALS or os.fstat(own).st_size != size_of(wire.SEGMENT):
            raise OSError(f"{path} has another size, or one that may change")
        if len(token) != TOKEN or os.pread(own, TOKEN, 0) != token:
            raise OSError(f"{path} is other memory than was meant")
    except OSError:
        os.close(own)
        raise
    return own
