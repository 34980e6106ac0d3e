"""Where the script's code runs that gives batches: iterators, data sets and ``batch_fn``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ..context.shared import InContext


@dataclass(eq=False)
class Reading(InContext):
    """Lets the script read as between two of its calls, whatever this member computes, and without other ranks."""

    @contextmanager
    def batches(self) -> Iterator[None]:
        """The body draws batches."""
        with self.binding.for_script(), self.groups.alone():
            yield
