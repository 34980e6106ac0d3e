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

import struct
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ...errors import ProtocolError
from . import payloads
from .payloads import CODES, DTYPES, NOTHING, TUPLE, Payload, Staged, WireTensor, in_host_memory, view

#: Bytes of the block with which every frame starts.
HEAD = 256
_PREFIX = struct.Struct("<BBHIqqq")
_MAX_META = 1 << 28
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
#: Where the sender has a tensor: in host memory, or in that of its device.
_HOST, _DEVICE = range(2)

#: A frame as it is sent: its head, then the data in segments, each in pieces.
Segments = deque[list[memoryview]]


def encode(key: bytes, sequence: int, payload: Payload | Staged, epoch: int = 0) -> Segments:
    """A data frame.

    Contiguous host tensors are not copied: the frame shares (and keeps) their memory. What of a staged payload is not
    complete yet must not be looked at.

    Raises:
        TypeError: not a payload, or a tensor of a kind that cannot be sent (sparse, quantized).
    """
    structure, tensors = payloads.for_frame(payload)
    pieces = [view(each.data) for each in tensors if each.data.numel()]
    return deque([[_head(DATA, structure, len(tensors), sequence, epoch, key, _words(tensors))], *segments(pieces)])


def _words(tensors: Sequence[WireTensor]) -> list[int]:
    words: list[int] = []
    for tensor in tensors:
        words += (CODES[tensor.dtype], _DEVICE if tensor.on_device else _HOST, len(tensor.shape), *tensor.shape)
    return words


def describe(tensors: Sequence[torch.Tensor]) -> memoryview:
    """The head of a frame that carries ``tensors``."""
    return _head(DATA, TUPLE, len(tensors), 0, 0, b"", _words(list(map(in_host_memory, tensors))))


def described(data: memoryview) -> list[WireTensor]:
    """The tensors of :func:`describe`, with buffers of the right size that are still to be filled, in order.

    Raises:
        ProtocolError: it is no head, or tells of a dtype that this torch lacks.
    """
    head = decode_head(data[:HEAD])
    return decode_meta(head, bytes(data[HEAD:]) if head.extension else head.meta)[1]


def segments(pieces: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """The segments into which a frame's data are cut, at either end."""
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
    """Parses a block; raises ``ProtocolError`` if it is none."""
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
            tensors.append(WireTensor(payloads.memory(size, device == _DEVICE), dtype, shape, device == _DEVICE))
    except (StopIteration, RuntimeError, ValueError, OverflowError, MemoryError) as error:
        if isinstance(error, ProtocolError):
            raise
        raise ProtocolError(f"message {head.sequence} for {key!r} has a broken header: {error!r}") from error
    return key, tensors
