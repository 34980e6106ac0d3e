"""Stand-ins for devices and their accelerators, for machines that have none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.accelerator import real_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from torch.overrides import TorchFunctionMode


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


#: What a device does without anybody who looks at the elements.
_BY_ITSELF = {"aten::view", "aten::view.dtype", "aten::clone"}


class FarTensor(torch.Tensor):
    """A tensor whose device is ``device`` as far as torch can tell, with its elements where only copies reach them.

    It does nothing but what data planes need: it is copied to host memory and on its device, and written from there.
    Anything else that would look at its elements fails, such as an operation that takes it for one in host memory.
    """

    @staticmethod
    def __new__(cls, elements: torch.Tensor, device: str) -> FarTensor:
        made: FarTensor = torch.Tensor._make_wrapper_subclass(
            cls, elements.shape, strides=elements.stride(), dtype=elements.dtype, device=torch.device(device)
        )
        made.elements = elements
        return made

    elements: torch.Tensor

    def __repr__(self) -> str:  # type: ignore[override]
        return f"FarTensor({self.elements!r}, device={self.device})"

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> FarTensor:  # type: ignore[override]
        """Torch's would ask for the device's driver."""
        assert type(source) is torch.Tensor and source.device.type == "cpu"
        self.elements.copy_(source)
        return self

    @classmethod
    def __torch_dispatch__(cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operation.name()
        if name == "aten::detach":
            return cls(args[0].elements, str(args[0].device))
        if name == "aten::_to_copy":
            assert torch.device(kwargs["device"]).type == "cpu", f"from device to device: {kwargs}"
            return args[0].elements.clone()
        if name in _BY_ITSELF:
            return cls(operation(args[0].elements, *args[1:], **(kwargs or {})), str(args[0].device))
        raise AssertionError(f"{name} of a tensor on {args[0].device}")


class FakeDriver(TorchFunctionMode):
    """In its body tensors in host memory can be copied to any device, where they are :class:`FarTensor`."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.to and isinstance(args[1], torch.device) and args[1].type != "cpu":
            return FarTensor(args[0].clone(), str(args[1]))
        return function(*args, **(kwargs or {}))


def far(*elements: float, device: str = "xpu:0") -> FarTensor:
    """A tensor of ``elements`` on ``device``."""
    return FarTensor(torch.tensor(elements), device)
