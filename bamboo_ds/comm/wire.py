"""The form of a transport message: one packet with header and small tensors, then the large tensors.

A packet is a byte tensor of at most :data:`PACKET` bytes: little-endian int64 words, then the bytes of the
small tensors, each aligned to 16 bytes.

    words: sequence, structure, tensors, words, bytes of an extension, then per tensor:
           dtype, device, place, dimensions, each dimension's size

If the per-tensor words do not fit they travel as an extension, the first message after the packet. Each
tensor that is not in the packet is one more message of raw bytes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import ProtocolError

#: Bytes of the buffer in which a receiver awaits a packet.
PACKET = 16384
#: Tensors of at most so many bytes travel in the packet, while they fit.
SMALL = 4096
_ALIGN = 16
_FIXED = 5

NOTHING, SINGLE, TUPLE, END = range(4)
_HOST, _CUDA = range(2)
#: In place of an offset into the packet: the tensor is a message of its own.
_OWN_MESSAGE = -1

_DTYPE_NAMES = (
    *("float32", "float64", "float16", "bfloat16", "complex64", "complex128", "complex32"),
    *("uint8", "int8", "int16", "int32", "int64", "bool", "uint16", "uint32", "uint64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
#: Numbered by position; a dtype that this torch lacks leaves a gap.
_DTYPES: dict[int, torch.dtype] = {
    code: getattr(torch, name) for code, name in enumerate(_DTYPE_NAMES) if hasattr(torch, name)
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}

Payload = torch.Tensor | tuple[torch.Tensor, ...] | None


def encode(sequence: int, payload: Payload, end: bool = False) -> list[torch.Tensor]:
    """The byte tensors to send, in order: the packet first.

    Large contiguous host tensors are not copied: the result shares their memory.

    Raises:
        TypeError: not a payload, or a tensor of a kind that cannot be sent (sparse, quantized).
    """
    tensors: tuple[torch.Tensor, ...]
    if end:
        structure, tensors = END, ()
    elif payload is None:
        structure, tensors = NOTHING, ()
    elif isinstance(payload, torch.Tensor):
        structure, tensors = SINGLE, (payload,)
    elif isinstance(payload, tuple) and all(isinstance(part, torch.Tensor) for part in payload):
        structure, tensors = TUPLE, payload
    else:
        raise TypeError(f"a message carries None, a tensor or a tuple of tensors, not {type(payload).__name__}")
    dimensions = sum(part.dim() for part in tensors)
    words = 4 * len(tensors) + dimensions
    extended = 8 * (_FIXED + words) > PACKET // 2
    offset = _aligned(8 * (_FIXED + (0 if extended else words)))
    described: list[int] = []
    packed: list[tuple[int, torch.Tensor]] = []
    messages: list[torch.Tensor] = []
    for part in tensors:
        data = as_bytes(part)
        place = _OWN_MESSAGE
        if data.numel() <= SMALL and offset + data.numel() <= PACKET:
            place = offset
            packed.append((offset, data))
            offset = _aligned(offset + data.numel())
        elif data.numel():
            messages.append(data)
        described += (_CODES[part.dtype], _CUDA if part.is_cuda else _HOST, place, part.dim(), *part.shape)
    extension = bytearray()
    if extended:
        extension = bytearray(struct.pack(f"<{words}q", *described))
        described = []
    head = struct.pack(
        f"<{_FIXED + len(described)}q", sequence, structure, len(tensors), words, len(extension), *described
    )
    packet = torch.empty(max(offset, len(head)), dtype=torch.uint8)
    packet[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    for place, data in packed:
        packet[place : place + data.numel()] = data
    if extension:
        messages.insert(0, torch.frombuffer(extension, dtype=torch.uint8))
    return [packet, *messages]


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGN) * _ALIGN


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of ``tensor`` in host memory, flat; shares its memory where it can."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.dtype not in _CODES:
        raise TypeError(f"cannot send a tensor of dtype {tensor.dtype} and layout {tensor.layout}")
    host = tensor.detach().resolve_conj().resolve_neg()
    return host.to("cpu").contiguous().reshape(-1).view(torch.uint8)


@dataclass(frozen=True)
class Head:
    """A parsed packet, whose large tensors are still to come.

    Attributes:
        sequence: number of the message in its lane.
        structure: ``NOTHING``, ``SINGLE``, ``TUPLE`` or ``END``.
        extension: bytes of the extension that follows; 0 if none.
        words: number of per-tensor words.
        described: the per-tensor words, unless they are in the extension.
    """

    sequence: int
    structure: int
    extension: int
    words: int
    described: tuple[int, ...]


def _view(data: torch.Tensor) -> memoryview:
    array: Any = data.numpy()
    return memoryview(array)


def decode_head(packet: torch.Tensor) -> Head:
    """Parse the words of a received packet; raises ``ProtocolError`` if it is none."""
    data = _view(packet)
    sequence, structure, _, words, extension = struct.unpack_from(f"<{_FIXED}q", data)
    if not NOTHING <= structure <= END or words < 0 or extension not in (0, 8 * words):
        raise ProtocolError(f"not a message header: {(sequence, structure, words, extension)}")
    described = () if extension else struct.unpack_from(f"<{words}q", data, 8 * _FIXED)
    return Head(sequence, structure, extension, words, described)


def decode_extension(head: Head, extension: torch.Tensor) -> Head:
    """``head`` completed by its extension."""
    described = struct.unpack(f"<{head.words}q", _view(extension))
    return Head(head.sequence, head.structure, head.extension, head.words, described)


@dataclass(frozen=True)
class Part:
    """One tensor of a message: its bytes in a buffer of its own, and what they mean."""

    data: torch.Tensor
    own_message: bool
    dtype: torch.dtype
    shape: tuple[int, ...]
    cuda: bool

    def tensor(self) -> torch.Tensor:
        """The tensor, on the device type where its sender had it."""
        tensor = self.data.view(self.dtype).reshape(self.shape)
        return tensor.to("cuda") if self.cuda else tensor


def decode_parts(head: Head, packet: torch.Tensor) -> list[Part]:
    """The tensors of a message; the buffers of those in their own messages are still to be filled, in order."""
    parts: list[Part] = []
    words = iter(head.described)
    for code in words:
        device, place, dimensions = next(words), next(words), next(words)
        dtype = _DTYPES.get(code)
        if dtype is None:
            raise ProtocolError(f"message {head.sequence} carries dtype {code}, which this torch does not have")
        shape = tuple(next(words) for _ in range(dimensions))
        size = dtype.itemsize
        for extent in shape:
            size *= extent
        if place == _OWN_MESSAGE:
            data = torch.empty(size, dtype=torch.uint8)
        else:
            data = packet[place : place + size].clone()
        parts.append(Part(data, place == _OWN_MESSAGE and size > 0, dtype, shape, device == _CUDA))
    return parts


def assemble(structure: int, parts: list[Part]) -> Payload:
    """The payload that was sent."""
    if structure == NOTHING:
        return None
    tensors = tuple(part.tensor() for part in parts)
    return tensors[0] if structure == SINGLE else tensors


def copy_payload(payload: Payload) -> Payload:
    """A detached copy, for delivery within one member."""
    if payload is None:
        return None
    if isinstance(payload, torch.Tensor):
        return payload.detach().clone()
    return tuple(part.detach().clone() for part in payload)
