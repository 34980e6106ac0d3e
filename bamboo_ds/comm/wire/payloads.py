"""Payloads of messages: tensors where they are, on their way to host memory, and in it."""

from __future__ import annotations

import json
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy
import torch

from ...bare import bare
from ...devices import staging
from ...devices.accelerators import HOST

#: Bytes, of tensors in host memory.
_ALIGNMENT = 64
#: Structures of payloads.
NOTHING, SINGLE, TUPLE = range(3)

_DTYPE_NAMES = (
    *("float32", "float64", "float16", "bfloat16", "complex64", "complex128", "complex32"),
    *("uint8", "int8", "int16", "int32", "int64", "bool", "uint16", "uint32", "uint64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
#: Numbered by position; a dtype that this torch lacks leaves a gap.
DTYPES: dict[int, torch.dtype] = {
    code: getattr(torch, name) for code, name in enumerate(_DTYPE_NAMES) if hasattr(torch, name)
}
CODES = {dtype: code for code, dtype in DTYPES.items()}

Payload = torch.Tensor | tuple[torch.Tensor, ...] | None


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
        """The payload that was staged, on the device again."""
        return assemble(self.structure, self.tensors, after=self.copy)


@dataclass(frozen=True)
class PeerMessage:
    """A message that has arrived.

    Attributes:
        source: the member that sent it.
        sequence: its number, as the sender gave it.
        structure: ``NOTHING``, ``SINGLE`` or ``TUPLE``.
        tensors: its tensors, in host memory.
        arrival: ``time.monotonic()`` when its last byte was there.
    """

    source: str
    sequence: int
    structure: int
    tensors: list[WireTensor]
    arrival: float

    def payload(self, device: torch.device = HOST, parked: bool = False) -> Payload:
        """The payload; what its sender had on its device is copied to ``device`` here, in the main thread.

        Args:
            device: of this process.
            parked: it stays in host memory.
        """
        return assemble(self.structure, self.tensors, device, parked=parked)


def _structure(payload: Payload) -> tuple[int, tuple[torch.Tensor, ...]]:
    if payload is None:
        return NOTHING, ()
    if isinstance(payload, torch.Tensor):
        return SINGLE, (payload,)
    if isinstance(payload, tuple) and all(isinstance(tensor, torch.Tensor) for tensor in payload):
        return TUPLE, payload
    raise TypeError(f"a message carries None, a tensor or a tuple of tensors, not {type(payload).__name__} of others")


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of ``tensor`` in host memory, flat; shares its memory where it can."""
    return _flat(tensor).to("cpu")


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of ``tensor`` where it is."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.dtype not in CODES:
        raise TypeError(f"cannot send a tensor of dtype {tensor.dtype} and layout {tensor.layout}")
    return bare(tensor).resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def for_frame(payload: Payload | Staged) -> tuple[int, Sequence[WireTensor]]:
    """Structure and tensors of ``payload`` in host memory, for a frame; contiguous host tensors are not copied.

    Raises:
        TypeError: not a payload, or a tensor of a kind that cannot be sent (sparse, quantized).
    """
    if isinstance(payload, Staged):
        return payload.structure, payload.tensors
    structure, tensors = _structure(payload)
    return structure, list(map(in_host_memory, tensors))


def view(data: torch.Tensor) -> memoryview:
    """The memory of a flat byte tensor, which the view keeps alive."""
    array: Any = data.numpy()
    return memoryview(array)


def in_host_memory(tensor: torch.Tensor) -> WireTensor:
    """The tensor as a frame carries it; one in host memory that is contiguous is not copied."""
    return WireTensor(as_bytes(tensor), tensor.dtype, tuple(tensor.shape), tensor.device.type != HOST.type)


def staged(payload: Payload) -> Staged | None:
    """Has ``payload`` copied to host memory beside what its device computes; ``None`` if nothing is on a device.

    Raises:
        TypeError: see :func:`for_frame`.
    """
    area = staging.current()
    if area is None:
        return None
    structure, tensors = _structure(payload)
    there = [area.streams.carries(tensor) for tensor in tensors]
    if not any(there):
        return None
    begins = accumulate((tensor.nbytes for tensor in tensors), initial=0)
    targets, copy = area.out([(begin, _flat(t)) for begin, t, far in zip(begins, tensors, there, strict=False) if far])
    copies = iter(targets)
    parts = [
        WireTensor(next(copies) if far else _flat(tensor).clone(), tensor.dtype, tuple(tensor.shape), far)
        for tensor, far in zip(tensors, there, strict=True)
    ]
    return Staged(structure, parts, copy)


def aside(payload: Payload | Staged) -> Payload | Staged:
    """``payload`` in a form that takes no memory of a device, to be sent now or later."""
    return payload if isinstance(payload, Staged) else staged(payload) or payload


def copied(payload: Payload | Staged) -> tuple[int, list[WireTensor]]:
    """Structure and copied tensors of ``payload``, each where it is, for delivery within one member."""
    structure, tensors = _structure(payload.payload() if isinstance(payload, Staged) else payload)
    return structure, [
        WireTensor(_flat(tensor).clone(), tensor.dtype, tuple(tensor.shape), False) for tensor in tensors
    ]


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
    area = staging.current()
    return [each.to(device) for each in data] if area is None else area.into(data, after)


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


def memory(size: int, for_device: bool) -> torch.Tensor:
    """A flat byte tensor with any content, for ``size`` bytes that arrive, ``for_device`` or to stay in host memory."""
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


def read(payload: Payload) -> Any:
    """The value of :func:`written`; raises ``ValueError`` if it carries none."""
    if not isinstance(payload, torch.Tensor):
        raise ValueError("the payload carries no JSON")
    return json.loads(bytes(view(payload)))
