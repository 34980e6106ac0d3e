"""State that optimizers, schedulers and layers of scripts keep beside that which copies of a stage get.

An optimizer may keep momenta in a dictionary by ``id(parameter)``, a scheduler an object of statistics, a layer a list.
Results may depend on that. A copy that has something else there, where the owner's has changed or has tensors in it,
lacks something that it may need: the check of the first steps compares it.
"""

from __future__ import annotations

import argparse
import functools
import io
import logging
import random
import threading
import types
import zlib
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy
import torch
from torch import distributed as dist
from torch import nn

from ...state import SCALARS
from .attributes import holds_tensors
from .clones import OWN, kept_by
from .layers import OF_ALL
from .portable import portable
from .references import content_of
from .rng import GENERATORS
from .tracing import checksum

#: How deep objects are looked into, and how many values of one attribute are looked at.
_DEPTH, _MOST = 8, 10_000
#: What belongs to the process, or is told by its type: it is not looked into.
_OPAQUE = (type, types.ModuleType, types.BuiltinFunctionType, nn.Module, torch.optim.Optimizer, dist.ProcessGroup)
_OF_PROCESS = (
    *(logging.Logger, logging.Handler, threading.Thread, io.IOBase, types.GeneratorType, types.FrameType),
    argparse.Namespace,  # the script's options, in which the rank differs; layers may hold them from a pass on
)
#: What is told by what it contains, or by how it is made, and not by its attributes.
_CONTAINERS = (Mapping, list, tuple, deque, set, frozenset, numpy.ndarray, torch.Tensor)
_CALLABLE = (types.FunctionType, types.MethodType, functools.partial)


class Contents(NamedTuple):
    """The contents of an attribute.

    Attributes:
        digest: equal in all processes where all of it is.
        tensors: whether there are tensors or arrays in it.
    """

    digest: int
    tensors: bool


class Runtime(Protocol):
    """The runtime whose contents are told; see :class:`~.runtime.StageRuntime`."""

    attributes: dict[str, Any]

    @property
    def module(self) -> Any:
        """The stage's module."""


def beside_steps(runtime: Runtime) -> dict[str, Contents]:
    """State that the optimizer of ``runtime`` keeps besides what is sent, by name; and tensors of schedulers."""
    names, parts = _names(runtime), {}
    optimizer = runtime.attributes["basic_optimizer"]
    if optimizer is not None:
        sent = {*OWN, "defaults", *kept_by(optimizer)}
        for name, value in vars(optimizer).items():
            if name not in sent and not isinstance(value, OrderedDict):  # of hooks
                parts[f"attribute {name!r} of the optimizer ({type(optimizer).__name__})"] = contents_of(value, names)
    of_scheduler = _of_scheduler(runtime, names)
    return {**parts, **{name: each for name, each in of_scheduler.items() if each.tensors}}


def beside_layers(runtime: Runtime) -> dict[str, Contents]:
    """The same of the layers and the loss function, whose results are compared, and of a scheduler without tensors."""
    names = _names(runtime)
    parts = {name: each for name, each in _of_scheduler(runtime, names).items() if not each.tensors}
    for path, layer in runtime.module.named_modules():
        for name, value in vars(layer).items() if path else ():
            sent = type(value) in SCALARS or isinstance(value, GENERATORS) or holds_tensors(value)
            if name not in OF_ALL and not sent:
                what = f"of layer {path} ({type(layer).__name__})"
                parts.update((f"attribute {n!r} {what}", contents_of(v, names)) for n, v in _one_by_one(name, value))
    loss = getattr(runtime.module, "loss_fn", None)
    if loss is not None and not isinstance(loss, nn.Module):
        parts["what the loss function keeps"] = contents_of(loss, names)
    return parts


def _one_by_one(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The attributes of an object one by one, with their paths; anything else as it is.

    Layers of GPT-NeoX have the script's options in an attribute, in which the rank differs and a count of samples is
    brought up to date on all ranks alike.
    """
    inside = getattr(value, "__dict__", None)
    if not isinstance(inside, dict) or isinstance(value, (*_CONTAINERS, *_CALLABLE, *_OPAQUE, *_OF_PROCESS)):
        yield name, value
    else:
        yield from ((f"{name}.{each}", content) for each, content in list(inside.items()))


def _of_scheduler(runtime: Runtime, names: Mapping[int, str]) -> dict[str, Contents]:
    """State that the scheduler keeps and its ``state_dict`` leaves out, or that cannot be sent."""
    scheduler = runtime.attributes["lr_scheduler"]
    if scheduler is None:
        return {}
    sent = portable(scheduler.state_dict())
    return {
        f"attribute {name!r} of the scheduler ({type(scheduler).__name__})": contents_of(value, names)
        for name, value in vars(scheduler).items()
        if name not in sent
    }


def newer(now: Mapping[str, Contents], began: Mapping[str, Contents]) -> dict[str, int]:
    """Digests of what has tensors in it, or has changed since it was as it ``began``."""
    return {name: each.digest for name, each in now.items() if each.tensors or began.get(name) != each}


def _names(runtime: Runtime) -> dict[int, str]:
    """Names of the parts of the role, by their ``id``: scripts use that of parameters as a key."""
    names = {id(p): f"parameter {name}" for name, p in runtime.module.named_parameters()}
    parts = ("optimizer", "basic_optimizer", "lr_scheduler", "module")  # DeepSpeed's optimizers are no torch's
    return {**{id(runtime.attributes.get(part)): f"the {part}" for part in parts}, **names}


def contents_of(value: Any, names: Mapping[int, str]) -> Contents:
    """The contents of ``value``; ``names``: of parameters, by their ``id``."""
    walk = _Walk(names)
    digest = 0
    for each in walk.told(value, 0):
        digest = zlib.crc32(each.encode(), digest)
    return Contents(digest, walk.tensors)


@dataclass
class _Walk:
    """One walk through an object and all that it has, told as text that is equal where the objects are."""

    names: Mapping[int, str]
    tensors: bool = False
    looked: int = 0

    def __post_init__(self) -> None:
        self._inside_of: set[int] = set()

    def told(self, value: Any, depth: int) -> Iterator[str]:
        self.looked += 1
        if type(value) is int and value in self.names:
            yield self.names[value]
        elif isinstance(value, SCALARS):
            yield f"{type(value).__name__} {value!r}"
        elif id(value) in self.names:
            yield self.names[id(value)]
        elif isinstance(value, torch.Tensor):
            yield self._of_tensor(value)
        elif isinstance(value, (numpy.ndarray, numpy.generic)):
            self.tensors = True
            yield f"{value.dtype} {value.shape} {zlib.crc32(numpy.ascontiguousarray(value).tobytes())}"
        elif isinstance(value, GENERATORS):
            yield f"generator {_state_of(value)}"
        elif id(value) in self._inside_of or depth > _DEPTH or self.looked > _MOST:
            yield f"a {type(value).__qualname__}"
        else:
            self._inside_of.add(id(value))
            yield from self._inside(value, depth + 1)
            self._inside_of.remove(id(value))

    def _of_tensor(self, tensor: torch.Tensor) -> str:
        self.tensors = True
        if tensor.layout is not torch.strided or tensor.is_meta:
            return f"a tensor {tensor.layout} {tuple(tensor.shape)}"
        return f"tensor {checksum(tensor)}"

    def _inside(self, value: Any, depth: int) -> Iterator[str]:
        yield type(value).__qualname__
        if isinstance(value, Mapping):
            items = [" ".join((*self.told(k, depth), *self.told(each, depth))) for k, each in list(value.items())]
            yield from sorted(items)
        elif isinstance(value, (list, tuple, deque)):
            for each in list(value):
                yield from self.told(each, depth)
        elif isinstance(value, (set, frozenset)):
            yield from sorted(" ".join(self.told(each, depth)) for each in value)
        elif isinstance(value, types.FunctionType):
            yield value.__qualname__
            for cell in value.__closure__ or ():
                yield from self.told(content_of(cell), depth)
        elif isinstance(value, types.MethodType):
            yield from self.told(value.__self__, depth)
        elif isinstance(value, functools.partial):
            yield from self.told((value.func, value.args, value.keywords), depth)
        elif not isinstance(value, (*_OPAQUE, *_OF_PROCESS)):
            yield from self.told(getattr(value, "__dict__", {}), depth)


def _state_of(generator: Any) -> int:
    if isinstance(generator, torch.Generator):
        return checksum(generator.get_state())
    if isinstance(generator, random.Random):
        state: Any = generator.getstate()
    elif isinstance(generator, numpy.random.RandomState):
        state = generator.get_state(legacy=False)
    else:
        state = generator.bit_generator.state
    return zlib.crc32(repr(state).encode())
