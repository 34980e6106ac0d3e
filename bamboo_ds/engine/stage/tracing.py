"""Results of a stage's layers in its passes, as checksums, to find the layer from which on two copies differ."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import nn

from ...bare import bare
from ...comm.wire.payloads import Payload
from ...state import Tree, split

#: What is computed, by a name that tells where, with a checksum for each time that it was.
Trace = dict[str, list[int]]


#: Bytes of contents that are folded before their CRC-32, and of a row; the factor of each row before the next one.
_LARGE, _ROW = 1 << 20, 1 << 17
_FACTOR = numpy.uint32(0x9E3779B1)


class Traces:
    """The passes of one iteration.

    A layer that is checkpointed is seen in its forward passes alone; one that is a function or compiled is not seen.
    """

    def __init__(self) -> None:
        self._forward: dict[Any, Trace] = {}
        self._backward: dict[Any, Trace] = {}

    def clear(self) -> None:
        """A new iteration begins."""
        self._forward.clear()
        self._backward.clear()

    def forward(self, role: Any) -> Trace:
        """Outputs of ``role``'s layers, in the order of the layers."""
        return self._forward.get(role, {})

    def backward(self, role: Any) -> Trace:
        """Gradients that its layers give back, in any order; see :func:`given_back`."""
        return self._backward.get(role, {})

    @contextmanager
    def of(self, role: Any, module: Any, micro_batch: int) -> Iterator[None]:
        """The body is the forward pass of ``micro_batch`` through ``module``, a ``PipelineModule``."""
        forward, backward = self._forward.setdefault(role, {}), self._backward.setdefault(role, {})
        seen: set[int] = set()
        handles = []
        for number, layer in enumerate(module.forward_funcs, module._local_start):
            # Of a layer that is compiled hooks would become a part, and it would be compiled again in each pass.
            if isinstance(layer, nn.Module) and layer._compiled_call_impl is None and id(layer) not in seen:
                seen.add(id(layer))
                names = output_of(module, number, micro_batch), given_back(module, number + 1, micro_batch)
                forward[names[0]] = []  # a pass may be done again
                backward.pop(names[1], None)
                handles.append(nn.Module.register_forward_hook(layer, _observer(forward, backward, *names)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _observer(forward: Trace, backward: Trace, output: str, gradient: str) -> Any:
    def note_gradient(value: torch.Tensor) -> None:
        backward.setdefault(gradient, []).append(checksum(value))

    def note(layer: nn.Module, inputs: Any, result: Any) -> None:
        tensors = tensors_in(result)
        forward.setdefault(output, []).extend(map(checksum, tensors))
        for tensor in tensors:
            if tensor.requires_grad:
                torch.Tensor.register_hook(tensor, note_gradient)

    return note


def layer_name(module: Any, number: int) -> str:
    """People's name for the layer of the bound stage that is ``number`` of the model, or for what follows the last."""
    at = number - module._local_start
    if at >= len(module.forward_funcs):
        return "the loss function" if number == len(module._layer_specs) else "the next stage"
    layer = module.forward_funcs[at]
    kind = type(layer).__name__ if isinstance(layer, nn.Module) else getattr(layer, "__name__", "function")
    return f"layer {number} ({kind})"


def output_of(module: Any, number: int, micro_batch: int) -> str:
    """Name of what a layer gives in a forward pass."""
    return f"output of {layer_name(module, number)} in micro-batch {micro_batch}"


def given_back(module: Any, number: int, micro_batch: int) -> str:
    """Name of what a layer gives in a backward pass to the one before it."""
    return f"gradient that {layer_name(module, number)} gives back in micro-batch {micro_batch}"


def owner_of(module: Any, parameter: str) -> int:
    """Number of the first layer of the stage that has the ``parameter`` of this name; -1: another part has it."""
    head, _, rest = parameter.partition(".")
    part = module._modules.get(head)
    if head == "tied_modules":
        part = module.tied_modules[rest.partition(".")[0]]
    for at, layer in enumerate(module.forward_funcs):
        # DeepSpeed makes such a function of a layer that uses tied weights in another way.
        if layer is part or (isinstance(layer, functools.partial) and any(each is part for each in layer.args)):
            return int(module._local_start + at)
    return -1


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in lists, tuples and dictionaries, and in subclasses of these, which torch takes for leaves."""
    if torch.is_tensor(value):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for each in inner for tensor in tensors_in(each)]


def checksum(tensor: torch.Tensor, value: int = 0) -> int:
    """CRC-32 of shape, type and contents, going on from ``value``."""
    return content_checksum(tensor, zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), value))


def payload_checksum(payload: Payload) -> int:
    """CRC-32 over shapes, types and contents; whether a single tensor is in a tuple makes no difference."""
    value = 0
    for tensor in () if payload is None else (payload,) if torch.is_tensor(payload) else payload:
        value = checksum(tensor, value)
    return value


def bits(state: Tree) -> tuple[str, list[int]]:
    """Text and numbers that are equal for trees that are the same to the last bit."""
    text, tensors = split(state)
    return text, [checksum(tensor) for tensor in tensors]


def content_checksum(tensor: torch.Tensor, value: int = 0) -> int:
    """The same of the contents alone; of large ones CRC-32 of what :func:`_folded` makes of them."""
    if not bare(tensor).numel():
        return value
    data = bare(tensor).cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    whole = data.size // _ROW * _ROW
    if whole >= _LARGE:
        value, data = zlib.crc32(_folded(data[:whole]).data, value), data[whole:]
    return zlib.crc32(data.data, value)


#: Elements of a row.
_COLUMNS = 1024
#: Types of whole numbers by their bytes.
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def sum_of_bits(tensors: Iterable[torch.Tensor]) -> int:
    """CRC-32 of weighted sums of the bits of ``tensors``, taken as whole numbers: equal on whatever devices they are.

    It is computed where the tensors are, by two looks at each: rows and columns are summed, and weighted by their
    places. Hardly any change leaves both as they were.
    """
    sums = []
    for tensor in tensors:
        plain = bare(tensor).contiguous().reshape(-1)
        plain = torch.view_as_real(plain).reshape(-1) if plain.is_complex() else plain
        whole = plain.view(_WHOLE[plain.element_size()])
        rest = whole.numel() % _COLUMNS
        rows = whole[: whole.numel() - rest].view(-1, _COLUMNS)
        parts = rows.sum(1, dtype=torch.int64), rows.sum(0, dtype=torch.int64), whole[whole.numel() - rest :]
        sums += [(part * torch.arange(1, part.numel() + 1, device=part.device)).sum() for part in parts]
    numbers = torch.stack(sums).tolist() if sums else []
    return zlib.crc32(repr(numbers).encode())


def _folded(data: Any) -> Any:
    """Rows of ``data`` over each other: a polynomial of them, modulo 2**32 in each column.

    A processor does that several times as fast as a CRC. Other contents of a row, or another order of the rows, give
    other columns: the factor is odd, so that it has an inverse.
    """
    total = numpy.zeros(_ROW // 4, numpy.uint32)
    for row in data.view(numpy.uint32).reshape(-1, total.size):
        numpy.multiply(total, _FACTOR, out=total)
        numpy.add(total, row, out=total)
    return total
