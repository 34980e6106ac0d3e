"""Copies of state dictionaries in host memory, independent of the original."""

from __future__ import annotations

import io
import pickle
import threading
from collections import defaultdict
from typing import Any, NoReturn

import torch
from torch import nn

from ..bare import bare
from ..devices.accelerators import HOST, page_locked, release_page_locked


class BufferPool:
    """Host memory that successive copies share.

    Touching fresh memory takes several times as long as copying into memory that is mapped. Between two saves the pool
    keeps the memory of the last one; memory for the tensors of devices is page-locked. For several threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: dict[tuple[int, bool], list[torch.Tensor]] = defaultdict(list)

    def take(self, nbytes: int, pinned: bool) -> torch.Tensor:
        """A buffer of ``nbytes`` bytes (``uint8``, one dimension) with arbitrary contents."""
        with self._lock:
            free = self._free[nbytes, pinned]
            if free:
                return free.pop()
        return page_locked(nbytes) if pinned else torch.empty(nbytes, dtype=torch.uint8)

    def give(self, buffers: list[torch.Tensor], pinned: bool) -> None:
        """Returns buffers to the pool, after which the caller must not use them."""
        with self._lock:
            for buffer in buffers:
                self._free[bare(buffer).numel(), pinned].append(buffer)

    def trim(self) -> None:
        """Free the memory that is not in use."""
        with self._lock:
            locked = any(pinned and buffers for (_, pinned), buffers in self._free.items())
            self._free.clear()
        if locked:
            release_page_locked()


class HostCopy:
    """A deep copy of ``state`` whose tensors lie in host memory.

    Works for everything that ``torch.save`` takes: tensors are copied one by one, the structure around them is
    pickled at once. So an object that cannot be saved is reported to the caller, not later by a writer. Tensors that
    show the same elements of the same storage become one tensor, others become independent of each other.

    Args:
        state: the original.
        pool: source of the memory.

    Attributes:
        nbytes: bytes of the copied tensors.

    Raises:
        pickle.PicklingError, TypeError, AttributeError: an object cannot be pickled; as ``torch.save`` does.
    """

    def __init__(self, state: Any, pool: BufferPool | None = None) -> None:
        structure = io.BytesIO()
        pickler = _Pickler(structure, pool)
        pickler.dump(state)
        self._structure = structure.getvalue()
        self._tensors, self._pool = pickler.copies, pool
        self._buffers = pickler.buffers
        self.nbytes = sum(bare(t).numel() * bare(t).element_size() for t in self._tensors if t.layout is torch.strided)

    def state(self) -> Any:
        """The state with the copied tensors."""
        return _Unpickler(self._structure, self._tensors).load()

    def release(self) -> None:
        """Returns the memory to the pool. After that neither :meth:`state` nor its results may be used."""
        buffers, self._tensors, self._buffers = self._buffers, [], {}
        if self._pool is not None:
            for pinned, some in buffers.items():
                self._pool.give(some, pinned)


def _tensor(index: int) -> NoReturn:
    """Placeholder of a tensor in the pickled structure, which :class:`_Unpickler` replaces."""
    raise pickle.UnpicklingError("a host copy can only be read by its owner")


class _Pickler(pickle.Pickler):
    """Puts every tensor aside."""

    def __init__(self, structure: io.BytesIO, pool: BufferPool | None) -> None:
        super().__init__(structure, pickle.HIGHEST_PROTOCOL)
        self.copies: list[torch.Tensor] = []
        self.buffers: dict[bool, list[torch.Tensor]] = {}  # by whether they are page-locked
        self._pool = pool
        self._known: dict[Any, int] = {}
        # A tensor that only exists while its owner is pickled must not leave its address to another one.
        self._alive: list[torch.Tensor] = []

    # Unlike persistent_id this is not called for every number in a list.
    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        identity = _identity(value)
        if identity not in self._known:
            self._known[identity] = len(self.copies)
            self._alive.append(value)
            self.copies.append(self._copy(value))
        return _tensor, (self._known[identity],)

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        plain = bare(tensor)
        if plain.device.type == "meta":
            return plain
        if self._pool is None or type(plain) is not torch.Tensor or not _simple(plain):
            copied = plain.to("cpu", copy=True)
        else:
            pinned = plain.device.type != HOST.type
            buffer = self._pool.take(plain.numel() * plain.element_size(), pinned)
            self.buffers.setdefault(pinned, []).append(buffer)
            copied = bare(buffer).view(plain.dtype).view(plain.shape)
            copied.copy_(plain)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(copied, requires_grad=tensor.requires_grad)
        return copied.requires_grad_(tensor.requires_grad)


class _Unpickler(pickle.Unpickler):
    def __init__(self, structure: bytes, tensors: list[torch.Tensor]) -> None:
        super().__init__(io.BytesIO(structure))
        self._tensors = tensors

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (__name__, _tensor.__name__):
            return self._tensors.__getitem__
        return super().find_class(module, name)


def _simple(plain: torch.Tensor) -> bool:
    """Whether the bytes of a bare tensor are its elements, one after the other."""
    ordinary = plain.layout is torch.strided and not plain.is_quantized and not plain.is_conj() and not plain.is_neg()
    return ordinary and plain.numel() > 0 and plain.is_contiguous()


def _identity(tensor: torch.Tensor) -> Any:
    """Equal for tensors that show the same elements in the same way."""
    plain = bare(tensor)
    if plain.layout is not torch.strided or plain.device.type == "meta" or not plain.numel():
        return id(tensor)
    place = (plain.device, plain.untyped_storage().data_ptr(), plain.storage_offset())
    view = (plain.shape, plain.stride(), plain.dtype, plain.is_conj(), plain.is_neg())
    return (*place, *view, type(tensor), tensor.requires_grad)
