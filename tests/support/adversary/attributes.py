"""Attributes that scripts put on things."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.support.adversary import layers
from tests.support.adversary.script import Attribute

VALUES: dict[str, Callable[[], Any]] = {
    "one": lambda: 1,
    "none": lambda: None,
    "true": lambda: True,
    "text": lambda: "text",
    "tensor": lambda: torch.ones(()),
    "list": lambda: [1, 2],
    "function": lambda: nothing,
}


def nothing(*_: Any, **__: Any) -> None:
    pass


def put(thing: Any, attribute: Attribute) -> None:
    """Put ``attribute`` on ``thing``."""
    setattr(thing, attribute.name, VALUES[attribute.value]())


def made(kind: str, attributes: tuple[Attribute, ...]) -> nn.Module:
    """A layer, with those attributes that are for it and its tensors."""
    layer = layers.KINDS[kind]()
    for attribute in attributes:
        if attribute.on == "layer":
            put(layer, attribute)
        if attribute.on == "parameter":
            for parameter in layer.parameters():
                put(parameter, attribute)
        if attribute.on == "buffer":
            for buffer in layer.buffers():
                put(buffer, attribute)
    return layer
