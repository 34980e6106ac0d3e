"""The form in which a snapshot of state travels, and its way in memory.

A snapshot is a text and tensors, as :func:`~bamboo_ds.state.tree.split` makes them. On the wire it is

    prefix      magic, length of the header, crc32 of the header
    header      JSON: text, and dtype and shape of each tensor
    tensors     their bytes, one after another
    checksum    crc32 of these bytes (4 bytes, little-endian)
"""

from __future__ import annotations

import math
import struct
import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError, field_validator

from ..errors import UnsupportedError
from ..secret import JobSecret

#: What is sent, or received, at once.
PIECE_BYTES = 2 << 20
#: Path of the one resource; the key is a query parameter, since it may hold any character.
PATH = "/state"
PREFIX = struct.Struct("<8sQI")
CHECKSUM = struct.Struct("<I")
_MAGIC = b"bamboo\0\2"
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
    """A tensor without its data; ``dtype`` is torch's name."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dtype: str
    shape: tuple[NonNegativeInt, ...]

    @field_validator("dtype")
    @classmethod
    def _known(cls, name: str) -> str:
        if not isinstance(getattr(torch, name, None), torch.dtype):
            raise ValueError(f"dtype {name!r} is unknown to this torch")
        return name

    @property
    def nbytes(self) -> int:
        """Bytes of the data."""
        return int(math.prod(self.shape) * getattr(torch, self.dtype).itemsize)


class Header(BaseModel):
    """All of a snapshot but the data."""

    model_config = ConfigDict(extra="forbid", frozen=True)

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


def pieces(views: Iterable[memoryview]) -> Iterator[memoryview]:
    """All of ``views`` in order, in pieces of at most :data:`PIECE_BYTES`."""
    for each in views:
        for start in range(0, len(each), PIECE_BYTES):
            yield each[start : start + PIECE_BYTES]


class StateSnapshot:
    """A snapshot on its owner. The tensors must not change until :meth:`withdraw` has returned.

    Contiguous tensors in host memory are not copied, others are.

    Attributes:
        head: prefix and header.
        nbytes: bytes of all that is sent.

    Raises:
        UnsupportedError: a sparse or quantized tensor, or one without data (``meta``).
    """

    def __init__(self, text: str, tensors: Sequence[torch.Tensor]) -> None:
        self._views = [view(_as_bytes(tensor, number)) for number, tensor in enumerate(tensors)]
        meta = tuple(TensorMeta(dtype=str(t.dtype).removeprefix("torch."), shape=tuple(t.shape)) for t in tensors)
        self.head = Header(text=text, tensors=meta).encode()
        self.nbytes = len(self.head) + sum(map(len, self._views)) + CHECKSUM.size
        self._lock, self._withdrawn = threading.Lock(), False

    def pieces(self) -> Iterator[memoryview]:
        """The bytes of the tensors."""
        return pieces(self._views)

    def checksum(self, piece: memoryview, value: int) -> int:
        """The crc32 of what ends with ``piece``, going on from that of what came before.

        If a tensor changes after a withdrawal, what is sent of it does not agree with the checksum any more.

        Raises:
            Withdrawn: :meth:`withdraw` was called.
        """
        with self._lock:
            if self._withdrawn:
                raise Withdrawn
            return zlib.crc32(piece, value)

    def withdraw(self) -> None:
        """Release the tensors: none is read from now on."""
        with self._lock:
            self._views, self._withdrawn = [], True


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
