"""What values refer to: through closures, globals, attributes and containers."""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Iterator, Mapping
from types import CodeType, ModuleType
from typing import Any

import torch
from torch import nn

#: How far from a hook objects are looked at.
DEPTH = 4


def reached(value: Any, depth: int, seen: dict[int, Any]) -> Iterator[Any]:
    """Modules, optimizers, and tensors of more than one number that ``value`` refers to."""
    if id(value) in seen or not depth or isinstance(value, (type, ModuleType, str, bytes)):
        return
    seen[id(value)] = value
    if isinstance(value, (nn.Module, torch.optim.Optimizer)) or (torch.is_tensor(value) and value.numel() > 1):
        yield value
        return
    for child in _children(value):
        yield from reached(child, depth - 1, seen)


def _children(value: Any) -> list[Any]:
    if inspect.isfunction(value):
        cells = [content_of(cell) for cell in value.__closure__ or ()]
        named = [value.__globals__[name] for name in _names(value.__code__) if name in value.__globals__]
        return [*cells, *named, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    if inspect.ismethod(value):
        return [value.__self__, value.__func__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    return list(getattr(value, "__dict__", {}).values())


def _names(code: CodeType) -> list[str]:
    """Names of globals that ``code`` and the functions in it use."""
    own = [each.argval for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    return [*own, *(name for each in code.co_consts if isinstance(each, CodeType) for name in _names(each))]


def content_of(cell: Any) -> Any:
    """The value in a cell of a function's closure; ``None`` where the variable has none yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None
