"""Tensors that layers keep as plain attributes, neither parameters nor buffers, such as caches of rotary embeddings.

Constants among them may be large, so copies of a stage are sent what has changed since they were equal. Changes are
seen by the tensor's identity and torch's count of writes; neither sees what is written through ``.data``, or into an
array of NumPy.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch.utils._pytree import tree_flatten, tree_map

from ...bare import bare
from ...comm.wire.payloads import DTYPES, as_bytes
from ...state import ARRAYS, SCALARS, Tree

#: Of layers, by the layers' names: attributes that are tensors or arrays, or a tuple, list or dictionary with some.
Plain = dict[str, dict[str, Any]]

#: Name of each layer, its attributes, and the names of those that it does not share with all layers.
Attributes = Iterable[tuple[str, dict[str, Any], list[str]]]

_CONTAINERS = frozenset((tuple, list, dict))
_SENT = frozenset(DTYPES.values())
#: How many values an attribute may hold; each is looked at in every iteration.
_MOST = 64


def holds_tensors(value: Any) -> bool:
    """Whether ``value`` is a tensor or an array that can be sent, or a container of a few and of numbers."""
    if type(value) not in _CONTAINERS:
        return _is_tensor(value)
    pending, looked, holds = [value], 0, False
    while pending:
        part = pending.pop()
        looked += 1
        if type(part) in _CONTAINERS:
            if looked + len(part) > _MOST or (type(part) is dict and not {*map(type, part)} <= {str, int}):
                return False
            pending.extend(part.values() if type(part) is dict else part)
        elif _is_tensor(part):
            holds = True
        elif type(part) not in SCALARS:
            return False
    return holds


def _is_tensor(value: Any) -> bool:
    if type(value) is torch.Tensor:
        return value.layout is torch.strided and value.dtype in _SENT and not value.is_meta
    return type(value) is numpy.ndarray and value.dtype.type in ARRAYS


class PlainTensors:
    """The plain tensors of one stage's layers.

    Args:
        attributes: gives those of the layers as they are now.
    """

    def __init__(self, attributes: Callable[[], Attributes]) -> None:
        self._attributes = attributes
        self._settled = self._built = self.marks()

    def now(self) -> Plain:
        """All of them; they are the layers'."""
        found = {}
        for path, attributes, names in self._attributes():
            own = {name: attributes[name] for name in names if name in attributes and holds_tensors(attributes[name])}
            if own:
                found[path] = own
        return found

    def nbytes(self) -> int:
        """The bytes of all of them."""
        values = (value for own in self.now().values() for value in own.values())
        return sum(leaf.nbytes for value in values for leaf in _apart(value)[1])

    def marks(self) -> dict[str, dict[str, Mark]]:
        """Marks by which changes are seen."""
        return {path: {name: Mark.of(value) for name, value in own.items()} for path, own in self.now().items()}

    def settle(self) -> None:
        """All copies of the stage are equal now."""
        self._settled = self.marks()

    def changed(self) -> Plain:
        """The tensors that are others than when the copies were equal last, or were made since."""
        return self.since(self._settled)

    def made(self) -> Plain:
        """The tensors that are others than when the stage was built."""
        return self.since(self._built)

    def since(self, marks: Mapping[str, Mapping[str, Mark]]) -> Plain:
        """The tensors that are others than when :meth:`marks` gave ``marks``."""
        found = {}
        for path, own in self.now().items():
            before = marks.get(path, {})
            changed = {n: value for n, value in own.items() if n not in before or not before[n].unchanged(value)}
            if changed:
                found[path] = changed
        return found

    def put(self, given: Plain, whole: bool, began: Mapping[str, Mapping[str, Any]], device: torch.device) -> None:
        """Takes over what :func:`packed` gave of another copy of the stage.

        Args:
            given: what has changed there, or all of it.
            whole: it is all.
            began: numbers that all copies began with; the other copy still has such a one where it has no tensor.
            device: of tensors that are not on the host.
        """
        own, copies = self.now(), dict[int, Any]()
        for path, attributes, _ in self._attributes():
            theirs, mine = given.get(path, {}), own.get(path, {})
            for name in mine.keys() - theirs.keys():
                settled = self._settled.get(path, {}).get(name)
                if not whole and settled is not None:
                    continue  # it is the same there
                if name in began.get(path, {}):
                    attributes[name] = began[path][name]
                elif name not in self._built.get(path, {}):
                    del attributes[name]
            for name, packet in theirs.items():
                if not (whole and name in mine and _equal(mine[name], packet["value"])):
                    attributes[name] = _unpacked(packet, device, copies)


@dataclass(frozen=True, eq=False)
class Mark:
    """A mark by which it is seen that an attribute has changed."""

    structure: str
    leaves: tuple[tuple[weakref.ref[Any], int], ...]

    @classmethod
    def of(cls, value: Any) -> Mark:
        """The mark of ``value`` as it is now."""
        structure, leaves = _apart(value)
        return cls(structure, tuple((weakref.ref(leaf), _writes(leaf)) for leaf in leaves))

    def unchanged(self, value: Any) -> bool:
        """Whether ``value`` is what the attribute was."""
        structure, leaves = _apart(value)
        if structure != self.structure:
            return False
        return all(known() is leaf and n == _writes(leaf) for (known, n), leaf in zip(self.leaves, leaves, strict=True))


def _writes(leaf: Any) -> int:
    """The number of times that torch has counted a write of ``leaf``; what inference mode makes is not counted."""
    return 0 if type(leaf) is not torch.Tensor or bare(leaf).is_inference() else leaf._version


def _apart(value: Any) -> tuple[str, list[Any]]:
    """Everything but the tensors as text, and the tensors."""
    flat, structure = tree_flatten(value)
    text = f"{structure} {', '.join(repr(each) if type(each) in SCALARS else '*' for each in flat)}"
    return text, [each for each in flat if type(each) not in SCALARS]


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """``value`` with ``change`` of its tensors and arrays in their place."""
    return tree_map(lambda each: each if type(each) in SCALARS else change(each), value)


def packed(found: Plain) -> Tree:
    """The values ``found``, with the places of their tensors; a value that is one tensor stays one."""
    known: dict[int, Any] = {}

    def detached(leaf: Any) -> Any:
        if id(leaf) not in known:
            known[id(leaf)] = bare(leaf) if torch.is_tensor(leaf) else leaf
        return known[id(leaf)]

    def packet(value: Any) -> Tree:
        return {"on": [_place(leaf) for leaf in _apart(value)[1]], "value": _mapped(value, detached)}

    return {path: {name: packet(value) for name, value in own.items()} for path, own in found.items()}


def _place(leaf: Any) -> str:
    return leaf.device.type if torch.is_tensor(leaf) else "cpu"


def _unpacked(packet: Tree, device: torch.device, copies: dict[int, Any]) -> Any:
    """The value of ``packet`` with tensors of its own; ``copies``: those that are there already."""
    places = iter(packet["on"])

    def copied(leaf: Any) -> Any:
        place = next(places)
        if id(leaf) not in copies:
            on = device if place == device.type else torch.device(place)
            # The original is kept, so that no other one gets its id.
            copies[id(leaf)] = leaf, bare(leaf).to(on, copy=True) if torch.is_tensor(leaf) else leaf.copy()
        return copies[id(leaf)][1]

    return _mapped(packet["value"], copied)


def _equal(mine: Any, theirs: Any) -> bool:
    (one, own), (other, given) = _apart(mine), _apart(theirs)
    return one == other and all(map(_same, own, given))


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other) or one.dtype != other.dtype or one.shape != other.shape:
        return False
    if not torch.is_tensor(one):
        return bool(one.tobytes() == other.tobytes())
    return torch.equal(as_bytes(one), as_bytes(other))
