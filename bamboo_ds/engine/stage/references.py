"""References of values, through closures, globals, attributes and containers; and other modules in their place.

Scripts give a ``PipelineModule`` its own methods as loss function or as layers: a copy of it has its own ones.
"""

from __future__ import annotations

import copy
import dis
import functools
import inspect
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from deepspeed.runtime.pipe.module import LayerSpec, TiedLayerSpec
from torch import nn

from ...bare import bare

#: How far from a hook objects are looked at.
DEPTH = 4


def reached(value: Any, depth: int, seen: dict[int, Any]) -> Iterator[Any]:
    """Modules, optimizers, and tensors of more than one number that ``value`` refers to."""
    if id(value) in seen or not depth or isinstance(value, (type, types.ModuleType, str, bytes)):
        return
    seen[id(value)] = value
    if isinstance(value, (nn.Module, torch.optim.Optimizer)) or (torch.is_tensor(value) and bare(value).numel() > 1):
        yield value
        return
    for child in _children(value):
        yield from reached(child, depth - 1, seen)


def leads_to(value: Any, wanted: Any, depth: int = DEPTH) -> bool:
    """Whether ``value``, a function that may be wrapped, is or refers to ``wanted``."""
    if value is wanted:
        return True
    if not depth or isinstance(value, (type, types.ModuleType, str, bytes)):
        return False
    return any(leads_to(child, wanted, depth - 1) for child in _children(value))


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


def _names(code: types.CodeType) -> list[str]:
    """Names of globals that ``code`` and the functions in it use."""
    own = [each.argval for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    return [*own, *(name for each in code.co_consts if isinstance(each, types.CodeType) for name in _names(each))]


def content_of(cell: Any) -> Any:
    """The value in a cell of a function's closure; ``None`` where the variable has none yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


class Rebinding:
    """Puts copies of modules in the place of these in functions and arguments.

    Args:
        copies: by the ``id`` of what was copied.
    """

    def __init__(self, copies: Mapping[int, Any]) -> None:
        self._copies = copies
        self._done: dict[int, Any] = {}

    def of(self, value: Any) -> Any:
        """``value`` with the copies; itself if it does not lead to what was copied.

        Looks into methods, functions that refer to a module by a variable of an outer function or a default, partial
        functions, lists, tuples, dictionaries, and specs of layers.
        """
        if isinstance(value, (nn.Module, nn.Parameter)):
            return self._copies.get(id(value), value)
        if isinstance(value, types.MethodType):
            owner = self.of(value.__self__) if isinstance(value.__self__, nn.Module) else value.__self__
            return value if owner is value.__self__ else types.MethodType(value.__func__, owner)
        if id(value) not in self._done:
            self._done[id(value)] = value  # as long as it is under way, if it refers to itself
            self._done[id(value)] = self._inside(value)
        return self._done[id(value)]

    def _inside(self, value: Any) -> Any:
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if type(value) is functools.partial:
            parts = value.func, value.args, value.keywords
            func, args, keywords = map(self.of, parts)
            return value if _same((func, args, keywords), parts) else functools.partial(func, *args, **keywords)
        if type(value) in (list, tuple):
            items = [self.of(each) for each in value]
            return value if _same(items, value) else type(value)(items)
        if type(value) is dict:
            values = [self.of(each) for each in value.values()]
            return value if _same(values, value.values()) else dict(zip(value, values, strict=True))
        if isinstance(value, LayerSpec):
            return self._spec(value)
        return value

    def _function(self, function: types.FunctionType) -> Any:
        parts = function.__closure__ or (), function.__defaults__, function.__kwdefaults__
        closure, defaults, keywords = tuple(map(self._cell, parts[0])), self.of(parts[1]), self.of(parts[2])
        if _same((*closure, defaults, keywords), (*parts[0], *parts[1:])):
            return function
        own = types.FunctionType(function.__code__, function.__globals__, function.__name__, defaults, closure)
        own.__kwdefaults__, own.__qualname__, own.__module__ = keywords, function.__qualname__, function.__module__
        own.__dict__.update(function.__dict__)
        return own

    def _cell(self, cell: types.CellType) -> types.CellType:
        content = content_of(cell)
        found = self.of(content)
        return cell if found is content else types.CellType(found)

    def _spec(self, spec: Any) -> Any:
        names = ["module_args", "module_kwargs", *(["forward_fn"] if isinstance(spec, TiedLayerSpec) else [])]
        before = [getattr(spec, name) for name in names]
        after = [self.of(each) for each in before]
        if _same(after, before):
            return spec
        own = copy.copy(spec)
        own.__dict__.update(zip(names, after, strict=True))
        return own


def _same(mine: Any, others: Any) -> bool:
    return all(a is b for a, b in zip(mine, others, strict=True))
