"""A stand-in for the accelerators of devices, for machines that have none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.accelerator import real_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator


class FakeAccelerator(CPU_Accelerator):
    """DeepSpeed's accelerator of devices that are not there.

    Args:
        kind: their type, as torch has it.
        number: of the current one.
        backend: what DeepSpeed would communicate by.
        total, others, allocated, cached: bytes of the current one, of which others, this process and its allocator's
            cache have so many.
    """

    def __init__(
        self,
        kind: str = "xpu",
        number: int = 0,
        backend: str = "xccl",
        total: int = 0,
        others: int = 0,
        allocated: int = 0,
        cached: int = 0,
    ) -> None:
        super().__init__()
        self._name, self.number, self._communication_backend_name = kind, number, backend
        self.total, self.others, self.allocated, self.cached = total, others, allocated, cached
        self.asked: list[Any] = []
        self.pinned: list[int] = []
        self._locked: set[int] = set()

    def install(self, monkeypatch: pytest.MonkeyPatch) -> FakeAccelerator:
        """Let this process have it, and torch a module of its kind, which asks the device for its memory."""
        module = SimpleNamespace(
            mem_get_info=lambda number: (self.available_memory(number), self.total),
            get_device_name=lambda number: f"{self._name} {number} of a test",
        )
        monkeypatch.setattr(torch, "get_device_module", lambda kind: {self._name: module}[kind])
        monkeypatch.setattr(real_accelerator, "ds_accelerator", self)
        return self

    def device_name(self, device_index: int | None = None) -> str:
        return self._name if device_index is None else f"{self._name}:{device_index}"

    def device_count(self) -> int:
        return 2

    def communication_backend_version(self) -> tuple[int, ...]:
        return 2, 27, 5

    def current_device(self) -> int:
        return self.number

    def current_device_name(self) -> str:
        return f"{self._name}:{self.number}"

    def default_generator(self, device_index: int) -> torch.Generator:
        self.asked.append(("generator", device_index))
        return self.generators[device_index]

    @property
    def generators(self) -> dict[int, torch.Generator]:
        return self.__dict__.setdefault("_generators", {number: torch.Generator() for number in range(4)})

    def current_stream(self, device_index: int | None = None) -> Any:
        class Stream:
            @staticmethod
            def synchronize() -> None:
                self.asked.append(("synchronize", device_index))

        return Stream()

    def empty_cache(self) -> None:
        self.asked.append("empty_cache")
        self.cached = 0

    def pin_empty(self, *size: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
        """Memory that counts as page-locked."""
        made = torch.empty(*size, dtype=dtype, device=device)
        self.pinned.append(made.nbytes)
        self._locked.add(made.data_ptr())
        return made

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.data_ptr() in self._locked

    def total_memory(self, device_index: int | None = None) -> int:
        self.asked.append(("total", device_index))
        return self.total

    def memory_allocated(self, device_index: int | None = None) -> int:
        return self.allocated

    def memory_reserved(self, device_index: int | None = None) -> int:
        return self.allocated + self.cached

    def available_memory(self, device_index: int | None = None) -> int:
        return self.total - self.others - self.allocated - self.cached
