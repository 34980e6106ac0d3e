"""Tensors of scripts without what scripts have put on them.

A script may give its parameters, buffers and batches attributes of any name, also that of a method of torch's
(``bias.stride = 1``). A method that is called by its name is then the script's attribute. So this package calls methods
on bare tensors alone, and on modules, optimizers and schedulers only those that DeepSpeed itself calls by their names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch


def bare(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements, as a tensor without attributes of the script's and without a graph.

    Writes to it are writes to ``tensor``, and torch counts them as such.
    """
    return torch.Tensor.detach(tensor)


@contextmanager
def all_bare(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """In the body no attribute of ``tensors`` hides one of torch's: for code of torch's that calls their methods."""
    hidden = [(vars(tensor), name) for tensor in tensors for name in vars(tensor) if hasattr(torch.Tensor, name)]
    kept = [(own, name, own.pop(name)) for own, name in hidden]
    try:
        yield
    finally:
        for own, name, value in kept:
            own[name] = value
