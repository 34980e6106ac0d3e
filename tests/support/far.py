"""Stand-ins for tensors on devices, for machines that have none."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

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
