"""The form in which a snapshot of state travels, and its way in memory.

A snapshot is a text and tensors, as :func:`~bamboo_ds.state.tree.split` makes them. On the wire it is

    prefix      magic, length of the header, crc32 of the header
    header      JSON: identity, chunk size, text, and dtype, shape and bytes of each tensor
    chunk k     the bytes, its crc32        (4 bytes, little-endian), for each k from the one asked for

The chunks are the bytes of all tensors, one after another, cut every :data:`CHUNK_BYTES`; only the last may be
shorter. Every answer carries the header, so that a receiver that resumes notices if the owner has put another
snapshot under the key: its identity differs.
"""

from __future__ import annotations

import bisect
import itertools
import math
import struct
import threading
import uuid
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, ValidationError, model_validator

from ..errors import UnsupportedError
from ..secret import JobSecret

#: What is checked, and sent again, at once.
CHUNK_BYTES = 2 << 20
#: Path of the one resource; the key is a query parameter, since it may hold any character.
PATH = "/state"
PREFIX = struct.Struct("<8sQI")
CHECKSUM = struct.Struct("<I")
_MAGIC = b"bamboo\0\1"
_LARGEST_HEADER = 1 << 30


class Corrupt(Exception):
    """Received data differs from the data that was sent."""


class Withdrawn(Exception):
    """The snapshot is no longer offered."""


#: Headers: what the receiver has drawn, and the owner's proof that the answer is its own.
NONCE = "Bamboo-Nonce"
PROOF = "Bamboo-Proof"


@dataclass(frozen=True)
class Pass:
    """Credentials with which the owner of a snapshot and its receivers prove themselves to each other.

    Attributes:
        secret: the job's.
        token: the owner's, which all members know.
    """

    secret: JobSecret
    token: str

    def __post_init__(self) -> None:
        if not (self.token and self.token.isascii() and self.token.isprintable()):
            raise ValueError("the token of state transfers must be printable ASCII and not empty")

    def authorization(self, key: str) -> str:
        """Value of the HTTP header with which a receiver proves that it may have the snapshot under ``key``."""
        return f"Bamboo {self.secret.tag('state', self.token, key).hex()}"

    def proof(self, key: str, nonce: str) -> str:
        """Value of the HTTP header with which the owner proves that the answer about ``key`` is its own."""
        return self.secret.tag("state answer", self.token, key, nonce).hex()


class TensorMeta(BaseModel):
    """A tensor without its data; ``dtype`` is torch's name, ``nbytes`` the bytes of the data."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dtype: str
    shape: tuple[NonNegativeInt, ...]
    nbytes: NonNegativeInt

    @model_validator(mode="after")
    def _consistent(self) -> TensorMeta:
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"dtype {self.dtype!r} is unknown to this torch")
        if self.nbytes != math.prod(self.shape) * dtype.itemsize:
            raise ValueError(f"{self.nbytes} bytes are not a {self.dtype} tensor of shape {self.shape}")
        return self


class Header(BaseModel):
    """All of a snapshot but the data; ``identity`` is different for every snapshot that was ever offered."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    identity: str
    chunk_bytes: PositiveInt
    text: str
    tensors: tuple[TensorMeta, ...]

    def encode(self) -> bytes:
        """Prefix and header."""
        body = self.model_dump_json().encode()
        return PREFIX.pack(_MAGIC, len(body), zlib.crc32(body)) + body


def header_size(prefix: bytes) -> tuple[int, int]:
    """Length and crc32 of the header that follows; raises :class:`Corrupt` if it is no prefix."""
    magic, length, crc = PREFIX.unpack(prefix)
    if magic != _MAGIC or length > _LARGEST_HEADER:
        raise Corrupt(f"the answer starts with {prefix.hex()}, which is no snapshot of this version")
    return length, crc


def decode_header(body: bytes, crc: int) -> Header:
    """Parse a header.

    Raises:
        Corrupt: the checksum is wrong.
        UnsupportedError: the checksum is right but the content is not understood, as with another version's.
    """
    if zlib.crc32(body) != crc:
        raise Corrupt("the checksum of the header is wrong")
    try:
        return Header.model_validate_json(body)
    except ValidationError as error:
        raise UnsupportedError(f"the header of a snapshot is not understood: {error}") from error


class Chunks:
    """The bytes of several tensors as one sequence of chunks."""

    def __init__(self, views: Sequence[memoryview], chunk_bytes: int) -> None:
        self._views = [view for view in views if len(view)]
        self._ends = list(itertools.accumulate(len(view) for view in self._views))
        self._size = chunk_bytes
        self.nbytes = self._ends[-1] if self._ends else 0

    def __len__(self) -> int:
        return -(-self.nbytes // self._size)

    def __getitem__(self, number: int) -> list[memoryview]:
        """The pieces of chunk ``number``, none of them empty, in order."""
        return list(self._pieces(number * self._size, min((number + 1) * self._size, self.nbytes)))

    def _pieces(self, start: int, end: int) -> Iterator[memoryview]:
        at = bisect.bisect_right(self._ends, start)
        while start < end:
            stop = min(self._ends[at], end)
            offset = self._ends[at] - len(self._views[at])
            yield self._views[at][start - offset : stop - offset]
            start, at = stop, at + 1


class StateSnapshot:
    """StateSnapshot under one key. The tensors must not change until :meth:`withdraw` has returned.

    Contiguous tensors in host memory are not copied, others are.

    Raises:
        UnsupportedError: a sparse or quantized tensor, or one without data (``meta``).
    """

    def __init__(self, text: str, tensors: Sequence[torch.Tensor], chunk_bytes: int = CHUNK_BYTES) -> None:
        flat = [_as_bytes(tensor, number) for number, tensor in enumerate(tensors)]
        meta = tuple(
            TensorMeta(dtype=str(one.dtype).removeprefix("torch."), shape=tuple(one.shape), nbytes=data.numel())
            for one, data in zip(tensors, flat, strict=True)
        )
        self.head = Header(identity=uuid.uuid4().hex, chunk_bytes=chunk_bytes, text=text, tensors=meta).encode()
        self._chunks = Chunks([view(data) for data in flat], chunk_bytes)
        self._count, self._nbytes, self._chunk_bytes = len(self._chunks), self._chunks.nbytes, chunk_bytes
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Number of chunks."""
        return self._count

    def bytes_from(self, number: int) -> int:
        """Bytes of an answer that starts with chunk ``number``."""
        left = self._nbytes - number * self._chunk_bytes
        return len(self.head) + max(0, left) + (self._count - number) * CHECKSUM.size

    def size(self, number: int) -> int:
        """Bytes of chunk ``number`` without its checksum."""
        return min(self._chunk_bytes, self._nbytes - number * self._chunk_bytes)

    def read(self, number: int) -> tuple[memoryview | bytes, bytes]:
        """Chunk ``number`` and its packed checksum.

        A single piece is not copied. If its tensor changes after a withdrawal, the sent bytes no longer agree
        with the checksum, which was computed before.

        Raises:
            Withdrawn: :meth:`withdraw` was called.
        """
        with self._lock:
            pieces = self._chunks[number] if number < len(self._chunks) else []
            if not pieces:
                raise Withdrawn
            data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            return data, CHECKSUM.pack(zlib.crc32(data))

    def withdraw(self) -> None:
        """Release the tensors: no chunk is read from now on."""
        with self._lock:
            self._chunks = Chunks([], 1)


def _as_bytes(tensor: torch.Tensor, number: int) -> torch.Tensor:
    """The bytes of ``tensor`` in host memory, flat; shares its memory where it can."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise UnsupportedError(
            f"tensor {number} of a snapshot cannot be sent: dtype {tensor.dtype}, layout {tensor.layout}, "
            f"device {tensor.device}"
        )
    host = tensor.detach().resolve_conj().resolve_neg().to("cpu")
    return host.contiguous().reshape(-1).view(torch.uint8)


def view(data: torch.Tensor) -> memoryview:
    """The memory of a flat byte tensor, which the view keeps alive."""
    array: Any = data.numpy()
    return memoryview(array)
