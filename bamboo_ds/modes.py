"""Modes of redundancy."""

from __future__ import annotations

from enum import Enum


class RedundancyMode(str, Enum):
    """What a shadow computes ahead of a loss (the paper's three modes, and none at all)."""

    NONE = "none"
    LAZY = "lazy-frc-lazy-brc"
    EAGER_FORWARD = "eager-frc-lazy-brc"
    EAGER = "eager-frc-eager-brc"

    @property
    def replicas(self) -> bool:
        """Whether roles have replicas at all."""
        return self is not RedundancyMode.NONE

    @property
    def eager_forward(self) -> bool:
        """Whether redundant forward passes run before a loss."""
        return self in (RedundancyMode.EAGER_FORWARD, RedundancyMode.EAGER)

    @property
    def eager_backward(self) -> bool:
        """Whether redundant backward passes run before a loss."""
        return self is RedundancyMode.EAGER
