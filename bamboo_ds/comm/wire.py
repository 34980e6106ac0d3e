"""The form of messages between members.

A frame is a block of :data:`HEAD` bytes, an extension if the block does not hold everything, and raw data:

    kind (1 byte), structure (1), key length (2), tensors (4), sequence (8), epoch (8), length of key and words (8),
    key, words: per tensor its dtype, device, number of dimensions and each dimension's size (8 bytes each)
    [key and words as an extension, where they do not fit]
    the bytes of all tensors in segments of :data:`SEGMENT`, the last one shorter, with a mark (1 byte) before each

A mark says that the segment's bytes follow, that another carrier has them (:mod:`.carriers`), that another frame comes
in between, and then a mark again, or that the frame ends here and is void. So a large frame lets small ones pass, and
what an ended epoch has left to send is given up in the middle. Numbers are little-endian.
"""

from __future__ import annotations

import json
import struct
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy
import torch

from ..bare import bare
from ..devices import staging
from ..devices.accelerators import HOST
from ..errors import ProtocolError

#: Bytes of the block with which every frame starts.
HEAD = 256
_PREFIX = struct.Struct("<BBHIqqq")
_MAX_META = 1 << 28
#: Bytes, of tensors in host memory.
_ALIGNMENT = 64
#: Bytes of data between two marks.
SEGMENT = 1 << 19
#: Marks: the frame ends here and is void; the segment follows; another frame does, which no other comes between. All
#: others are another carrier's.
VOID, HERE, BETWEEN = memoryview(b"\0"), memoryview(b"\1"), memoryview(b"\xff")

#: Kinds of frames: data for a key; "answer when you have read everything before this"; the answer; "I have left this
#: epoch and all before it", and with a sequence: "it is over"; what concerns memory that both ends share.
DATA, FLUSH, ACK, LEFT, SHARE = range(5)
#: The epoch of frames that concern the connection, and no epoch.
EVERY = (1 << 63) - 1
#: Structures of payloads.
NOTHING, SINGLE, TUPLE = range(3)
#: Where the sender has a tensor: in host memory, or in that of its device.
_HOST, _DEVICE = range(2)

_DTYPE_NAMES = (
    *("float32", "float64", "float16", "bfloat16", "complex64", "complex128", "complex32"),
    *("uint8", "int8", "int16", "int32", "int64", "bool", "uint16", "uint32", "uint64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
#: Numbered by position; a dtype that this torch lacks leaves a gap.
DTYPES: dict[int, torch.dtype] = {
    code: getattr(torch, name) for code, name in enumerate(_DTYPE_NAMES) if hasattr(torch, name)
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}

Payload = torch.Tensor | tuple[torch.Tensor, ...] | None


#: A frame as it is sent: its head, then the data in segments, each in pieces.
Segments = deque[list[memoryview]]


def encode(key: bytes, sequence: int, payload: Payload | Staged, epoch: int = 0) -> Segments:
    """A data frame.

    Contiguous host tensors are not copied: the frame shares (and keeps) their memory. What of a staged payload is not
    complete yet must not be looked at.

    Raises:
        TypeError: not a payload, or a tensor of a kind that cannot be sent (sparse, quantized).
    """
    if isinstance(payload, Staged):
        structure, tensors = payload.structure, payload.tensors
    else:
        structure, plain = _structure(payload)
        tensors = list(map(_in_host_memory, plain))
    pieces = [view(each.data) for each in tensors if each.data.numel()]
    return deque([[_head(DATA, structure, len(tensors), sequence, epoch, key, _words(tensors))], *segments(pieces)])


def _words(tensors: Sequence[WireTensor]) -> list[int]:
    words: list[int] = []
    for tensor in tensors:
        words += (_CODES[tensor.dtype], _DEVICE if tensor.on_device else _HOST, len(tensor.shape), *tensor.shape)
    return words


def describe(tensors: Sequence[torch.Tensor]) -> memoryview:
    """The head of a frame that carries ``tensors``."""
    return _head(DATA, TUPLE, len(tensors), 0, 0, b"", _words(list(map(_in_host_memory, tensors))))


def described(data: memoryview) -> list[WireTensor]:
    """The tensors of :func:`describe`, with buffers of the right size that are still to be filled, in order.

    Raises:
        ProtocolError: it is no head, or tells of a dtype that this torch lacks.
    """
    head = decode_head(data[:HEAD])
    return decode_meta(head, bytes(data[HEAD:]) if head.extension else head.meta)[1]


def segments(pieces: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """What a frame's data are cut into, at either end."""
    current: list[memoryview] = []
    left = SEGMENT
    for piece in pieces:
        while piece.nbytes:
            current.append(piece[:left])
            left, piece = left - current[-1].nbytes, piece[left:]
            if not left:
                yield current
                current, left = [], SEGMENT
    if current:
        yield current


def _structure(payload: Payload) -> tuple[int, tuple[torch.Tensor, ...]]:
    if payload is None:
        return NOTHING, ()
    if isinstance(payload, torch.Tensor):
        return SINGLE, (payload,)
    if isinstance(payload, tuple) and all(isinstance(tensor, torch.Tensor) for tensor in payload):
        return TUPLE, payload
    raise TypeError(f"a message carries None, a tensor or a tuple of tensors, not {type(payload).__name__} of others")


def control(kind: int, sequence: int = 0, epoch: int = 0, key: bytes = b"") -> Segments:
    """A frame without data."""
    return deque([[_head(kind, NOTHING, 0, sequence, epoch, key, [])]])


def _head(
    kind: int, structure: int, tensors: int, sequence: int, epoch: int, key: bytes, words: list[int]
) -> memoryview:
    meta = key + struct.pack(f"<{len(words)}q", *words)
    prefix = _PREFIX.pack(kind, structure, len(key), tensors, sequence, epoch, len(meta))
    if len(prefix) + len(meta) <= HEAD:
        return memoryview((prefix + meta).ljust(HEAD, b"\0"))
    return memoryview(prefix.ljust(HEAD, b"\0") + meta)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of ``tensor`` in host memory, flat; shares its memory where it can."""
    return _flat(tensor).to("cpu")


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of ``tensor`` where it is."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.dtype not in _CODES:
        raise TypeError(f"cannot send a tensor of dtype {tensor.dtype} and layout {tensor.layout}")
    return bare(tensor).resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def view(data: torch.Tensor) -> memoryview:
    """The memory of a flat byte tensor, which the view keeps alive."""
    array: Any = data.numpy()
    return memoryview(array)


class Buffers:
    """Memory for what arrives: that of messages that have been dropped is kept for the next ones of the same size.

    Most of the time in which a large message is received would go into the faults of fresh pages.

    Args:
        smallest: bytes of messages that are worth it.
        most: bytes that are kept.
    """

    def __init__(self, smallest: int = 1 << 20, most: int = 64 << 20) -> None:
        self._smallest, self._most = smallest, most
        # By identity, oldest first. No lock: a collection may drop a message at any moment, on any thread.
        self._free: dict[int, Any] = {}

    def take(self, size: int) -> torch.Tensor:
        """A flat byte tensor with any content, aligned as torch's own are."""
        if size < self._smallest:
            return torch.empty(size, dtype=torch.uint8)
        memory = self._found(size + _ALIGNMENT)
        if memory is None:
            memory = numpy.empty(size + _ALIGNMENT, numpy.uint8)  # asks the kernel for huge pages
        begin = -memory.ctypes.data % _ALIGNMENT
        part = memory[begin : begin + size]
        weakref.finalize(part, self._keep, memory).atexit = False
        return torch.from_numpy(part)

    def _found(self, size: int) -> Any:
        for key, memory in reversed(list(self._free.items())):  # the last one is in caches
            if memory.nbytes == size and self._free.pop(key, None) is not None:
                return memory
        return None

    def _keep(self, memory: Any) -> None:
        self._free[id(memory)] = memory
        kept = list(self._free.items())  # at once: others may take and keep meanwhile
        size = sum(each.nbytes for _, each in kept)
        for key, each in kept:
            if size <= self._most:
                break
            self._free.pop(key, None)
            size -= each.nbytes


_BUFFERS = Buffers()


def _memory(size: int, for_device: bool) -> torch.Tensor:
    found = staging.current() if for_device else None
    return _BUFFERS.take(size) if found is None else found.streams.memory(size)


def tensor_of(data: bytes | memoryview) -> torch.Tensor:
    """A flat byte tensor with a copy of ``data``."""
    found = torch.empty(len(data), dtype=torch.uint8)
    view(found)[:] = data
    return found


def written(value: object) -> torch.Tensor:
    """A payload that carries ``value`` as JSON, for :func:`read`."""
    return tensor_of(json.dumps(value).encode())


def read(data: torch.Tensor) -> Any:
    """The value of :func:`written`."""
    return json.loads(bytes(view(data)))


@dataclass(frozen=True)
class WireTensor:
    """One tensor of a message: its bytes, and what they mean.

    Attributes:
        data: flat bytes.
        on_device: they are in host memory, and the tensor belongs on a device.
    """

    data: torch.Tensor
    dtype: torch.dtype
    shape: tuple[int, ...]
    on_device: bool

    def tensor(self) -> torch.Tensor:
        """The tensor, where the bytes are."""
        return self.data.view(self.dtype).reshape(self.shape)


def _in_host_memory(tensor: torch.Tensor) -> WireTensor:
    return WireTensor(as_bytes(tensor), tensor.dtype, tuple(tensor.shape), tensor.device.type != HOST.type)


@dataclass(frozen=True)
class Staged:
    """A payload that is on its way to host memory, and stays there. It may be sent any number of times.

    Attributes:
        tensors: complete when ``copy`` is.
    """

    structure: int
    tensors: Sequence[WireTensor]
    copy: staging.Copy

    def payload(self) -> Payload:
        """What was staged, on the device again."""
        return assemble(self.structure, self.tensors, after=self.copy)


def staged(payload: Payload) -> Staged | None:
    """Have ``payload`` copied to host memory beside what its device computes; ``None``: nothing of it is on a device.

    Raises:
        TypeError: see :func:`encode`.
    """
    found = staging.current()
    if found is None:
        return None
    structure, tensors = _structure(payload)
    there = [found.streams.carries(tensor) for tensor in tensors]
    if not any(there):
        return None
    begins = accumulate((tensor.nbytes for tensor in tensors), initial=0)
    targets, copy = found.out([(begin, _flat(t)) for begin, t, far in zip(begins, tensors, there, strict=False) if far])
    copies = iter(targets)
    parts = [
        WireTensor(next(copies) if far else _flat(tensor).clone(), tensor.dtype, tuple(tensor.shape), far)
        for tensor, far in zip(tensors, there, strict=True)
    ]
    return Staged(structure, parts, copy)


@dataclass(frozen=True)
class FrameHead:
    """A parsed block.

    Attributes:
        kind: ``DATA``, ``FLUSH``, ``ACK``, ``LEFT`` or ``SHARE``.
        structure: ``NOTHING``, ``SINGLE`` or ``TUPLE``.
        sequence: number of the message for its key, of the question or of the answer.
        epoch: that the message belongs to, or that was left.
        extension: bytes of the extension that follows; 0 if none.
        meta: key and words, unless they are in the extension.
        key_length: bytes of the key.
        tensors: number of tensors.
    """

    kind: int
    structure: int
    sequence: int
    epoch: int
    extension: int
    meta: bytes
    key_length: int
    tensors: int


def decode_head(block: bytearray | memoryview) -> FrameHead:
    """Parse a block; raises ``ProtocolError`` if it is none."""
    kind, structure, key_length, tensors, sequence, epoch, length = _PREFIX.unpack_from(block)
    if not (DATA <= kind <= SHARE and NOTHING <= structure <= TUPLE and key_length <= length <= _MAX_META):
        raise ProtocolError(f"not a message header: {bytes(block[: _PREFIX.size]).hex()}")
    inline = _PREFIX.size + length <= HEAD
    meta = bytes(block[_PREFIX.size : _PREFIX.size + length]) if inline else b""
    return FrameHead(kind, structure, sequence, epoch, 0 if inline else length, meta, key_length, tensors)


def decode_meta(head: FrameHead, meta: bytes) -> tuple[bytes, list[WireTensor]]:
    """The key, and the tensors with buffers of the right size that are still to be filled, in order."""
    key = meta[: head.key_length]
    if (len(meta) - head.key_length) % 8:
        raise ProtocolError(f"message {head.sequence} for {key!r} has a broken header")
    tensors = []
    try:
        words = iter(struct.unpack(f"<{(len(meta) - head.key_length) // 8}q", meta[head.key_length :]))
        for _ in range(head.tensors):
            code, device, dimensions = next(words), next(words), next(words)
            dtype = DTYPES.get(code)
            if dtype is None:
                raise ProtocolError(f"message {head.sequence} for {key!r} carries dtype {code}, unknown to this torch")
            shape = tuple(next(words) for _ in range(dimensions))
            if dimensions < 0 or any(extent < 0 for extent in shape):
                raise ProtocolError(f"message {head.sequence} for {key!r} carries a tensor of shape {shape}")
            size = dtype.itemsize
            for extent in shape:
                size *= extent
            tensors.append(WireTensor(_memory(size, device == _DEVICE), dtype, shape, device == _DEVICE))
    except (StopIteration, RuntimeError, ValueError, OverflowError, MemoryError) as error:
        if isinstance(error, ProtocolError):
            raise
        raise ProtocolError(f"message {head.sequence} for {key!r} has a broken header: {error!r}") from error
    return key, tensors


@dataclass(frozen=True)
class PeerMessage:
    """A message that has arrived.

    Attributes:
        source: the member that sent it.
        sequence: its number, as the sender gave it.
        structure, tensors: see above.
        arrival: ``time.monotonic()`` when its last byte was there.
    """

    source: str
    sequence: int
    structure: int
    tensors: list[WireTensor]
    arrival: float

    def payload(self, device: torch.device = HOST, parked: bool = False) -> Payload:
        """What was sent; what its sender had on its device is copied to ``device`` here, in the main thread.

        Args:
            device: of this process.
            parked: it stays in host memory.
        """
        return assemble(self.structure, self.tensors, device, parked=parked)


def assemble(
    structure: int,
    received: Sequence[WireTensor],
    device: torch.device = HOST,
    after: staging.Copy | None = None,
    parked: bool = False,
) -> Payload:
    """The payload that was sent. What its sender had on its device goes to ``device``, that of the receiver.

    Args:
        structure: of the payload.
        received: its tensors.
        device: see above.
        after: brings them to the host.
        parked: they stay in host memory.
    """
    if structure == NOTHING:
        return None
    data = [each.data for each in received]
    there = [number for number, each in enumerate(received) if each.on_device]
    if there and not parked:
        for number, copied in zip(there, _on_device([data[number] for number in there], device, after), strict=True):
            data[number] = copied
    tensors = tuple(replace(each, data=flat).tensor() for each, flat in zip(received, data, strict=True))
    return tensors[0] if structure == SINGLE else tensors


def _on_device(
    data: Sequence[torch.Tensor], device: torch.device, after: staging.Copy | None
) -> Sequence[torch.Tensor]:
    found = staging.current()
    return [each.to(device) for each in data] if found is None else found.into(data, after)


def copied_tensors(payload: Payload) -> tuple[int, list[WireTensor]]:
    """Structure and copied tensors of ``payload``, each where it is, for delivery within one member."""
    structure, tensors = _structure(payload)
    return structure, [
        WireTensor(_flat(tensor).clone(), tensor.dtype, tuple(tensor.shape), False) for tensor in tensors
    ]
