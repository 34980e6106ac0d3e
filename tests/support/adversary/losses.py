"""Kinds of loss functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.support.adversary import layers


class Measured(nn.Module):
    """A loss with a buffer that it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        layers.happens("loss")
        loss = nn.functional.mse_loss(outputs, labels)
        self.mean.mul_(0.9).add_(0.1 * loss.detach())
        return loss / (1 + self.mean)


class Counted:
    """A loss that is an object, which counts."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        layers.happens("loss")
        self.calls += 1
        return nn.functional.mse_loss(outputs, labels) * (1 + 0.01 * self.calls)

    def method(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self(outputs, labels)


class Kept(nn.Module):
    """A loss with a number that it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.scale = 0, 1.0

    def forward(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        layers.happens("loss")
        self.calls += 1
        return nn.functional.mse_loss(outputs, labels) * (1 + 0.01 * self.calls)


def _mse(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    layers.happens("loss")
    return nn.functional.mse_loss(outputs, labels)


def _closure() -> Any:
    calls = 0

    def loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return _mse(outputs, labels) * (1 + 0.01 * calls)

    return loss


def _warm(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return _mse(outputs, labels) * layers.GLOBALS["temperature"]


def _function_attribute(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    _function_attribute.calls += 1  # type: ignore[attr-defined]
    return _mse(outputs, labels) * (1 + 0.01 * _function_attribute.calls)  # type: ignore[attr-defined]


_function_attribute.calls = 0  # type: ignore[attr-defined]

LOSSES: dict[str, Callable[[], Any]] = {
    "mse": lambda: _mse,
    "module": lambda: nn.MSELoss(),
    "huber": lambda: nn.HuberLoss(),
    "measured": Measured,
    "kept": Kept,
    "object": Counted,
    "method": lambda: Counted().method,
    "closure": _closure,
    "warm": lambda: _warm,
    "function-attribute": lambda: _function_attribute,
}
