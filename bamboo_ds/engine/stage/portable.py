"""The parts of scripts' objects' states that can be sent to a copy of a stage; the rest the copy has of its own."""

from __future__ import annotations

import copy
import enum
from collections.abc import Mapping
from typing import Any

import numpy
import torch

from ...state import ARRAYS, SCALARS, Tree


def travels(value: Any) -> bool:
    """Whether ``value`` can be sent, but perhaps for parts of dictionaries in it."""
    if isinstance(value, Mapping):
        return True
    if isinstance(value, (list, tuple)):
        return all(map(travels, value))
    if isinstance(value, (numpy.ndarray, numpy.generic)):
        return value.dtype.type in ARRAYS
    return torch.is_tensor(value) or (isinstance(value, SCALARS) and not isinstance(value, enum.Enum))


def portable(value: Any) -> Tree:
    """``value`` without what cannot be sent in its dictionaries."""
    if isinstance(value, Mapping):
        return {key: portable(each) for key, each in value.items() if travels(each)}
    if isinstance(value, (list, tuple)):
        return (list if isinstance(value, list) else tuple)(map(portable, value))
    return value


def completed(given: Tree, own: Any) -> Any:
    """The state ``given`` by :func:`portable` elsewhere, in the types of a copy's ``own``, with what was not sent."""
    if isinstance(given, Mapping) and isinstance(own, Mapping):
        kept = {key: part for key, part in own.items() if key not in given and not travels(part)}
        result: Any = {} if type(own) is dict else copy.copy(own)
        if result:
            result.clear()
        for key, part in given.items():
            result[key] = completed(part, own.get(key))
        for key, part in kept.items():
            result[key] = part
        return result
    if isinstance(given, (list, tuple)) and isinstance(own, (list, tuple)) and len(given) == len(own):
        result = [completed(part, mine) for part, mine in zip(given, own, strict=True)]
        return result if isinstance(given, list) else type(own)(*result) if hasattr(own, "_fields") else tuple(result)
    return given


def same(one: Any, other: Any) -> bool:
    """Whether two states are the same, tensors and arrays among them; what else cannot be sent is not looked at."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if torch.is_tensor(one) and torch.is_tensor(other):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, numpy.ndarray) and isinstance(other, numpy.ndarray):
        return bool(numpy.array_equal(one, other))
    return not travels(one) or (travels(other) and bool(one == other))
