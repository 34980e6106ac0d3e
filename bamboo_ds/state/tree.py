"""State dictionaries as tensors plus JSON, so that they travel without pickle.

A tree is made of dictionaries, lists, tuples, ``None``, booleans, integers, floats, strings and tensors, and of arrays
and numbers of NumPy. :func:`split` separates the tensors from the rest, :func:`join` puts them together again; types,
keys and every bit of floats and tensors survive, and what is one tensor stays one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any

import numpy
import torch

from ..errors import ProtocolError, UnsupportedError

Tree = Any

#: Types of values that are numbers, text, or nothing.
SCALARS = (bool, int, float, str, NoneType)
#: Types of NumPy's arrays that torch has, too.
ARRAYS = frozenset(
    getattr(numpy, name)
    for name in (
        *("bool_", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
)


def split(tree: Tree) -> tuple[str, list[torch.Tensor]]:
    """Separate a tree into JSON and the tensors it refers to.

    Raises:
        UnsupportedError: a value of another type; names where it is.
    """
    tensors: list[torch.Tensor] = []
    places: dict[int, int] = {}

    def encode(value: Tree, path: str) -> Any:
        if isinstance(value, (numpy.ndarray, numpy.generic)) and value.dtype.type in ARRAYS:
            tensors.append(torch.from_numpy(numpy.array(value)))  # one of its own, that can be written to
            return ["array" if isinstance(value, numpy.ndarray) else "number", len(tensors) - 1]
        if isinstance(value, SCALARS):
            return value
        if torch.is_tensor(value):
            place = places.setdefault(id(value), len(tensors))
            if place == len(tensors):
                tensors.append(value)
            return ["tensor", place]
        if isinstance(value, Mapping):
            pairs = [[encode(k, path), encode(v, f"{path}[{k!r}]")] for k, v in value.items()]
            return ["dict", pairs]
        if isinstance(value, (list, tuple)):
            kind = "list" if isinstance(value, list) else "tuple"
            return [kind, [encode(v, f"{path}[{i}]") for i, v in enumerate(value)]]
        raise UnsupportedError(
            f"{path} is a {type(value).__name__}, which cannot be sent to a replica; state may hold tensors, numbers, "
            "strings, None, lists, tuples and dictionaries, and arrays of NumPy"
        )

    return json.dumps(encode(tree, "state")), tensors


def join(text: str, tensors: Sequence[torch.Tensor]) -> Tree:
    """The tree that :func:`split` took apart.

    Raises:
        ProtocolError: ``text`` is not :func:`split`'s output.
    """

    def decode(value: Any) -> Tree:
        if not isinstance(value, list):
            return value
        kind, content = value
        if kind == "tensor":
            return tensors[content]
        if kind in ("array", "number"):
            array = tensors[content].cpu().numpy()
            return array if kind == "array" else array[()]
        if kind == "dict":
            return {decode(k): decode(v) for k, v in content}
        if kind == "list":
            return [decode(v) for v in content]
        if kind == "tuple":
            return tuple(decode(v) for v in content)
        raise ProtocolError(f"unknown node {kind!r} in a state message")

    return decode(json.loads(text))
