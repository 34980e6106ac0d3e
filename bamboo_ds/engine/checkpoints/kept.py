"""State that a restart needs of a role besides DeepSpeed's files: attributes of layers and of the optimizer, and types.

And how often the script has changed the stage, since a new owner does not. It is in a file of its own in the
checkpoint, where there is anything, and only the job itself reads it when it starts again: a script that loads a
checkpoint gets what DeepSpeed loads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ...bare import bare
from ...state import Tree, join, split
from ..stage.attributes import packed
from ..stage.clones import kept_by, load_optimizer, put_kept
from ..stage.layers import newer
from ..stage.runtime import StageRuntime

#: Attributes that torch's optimizers have of themselves, or get from schedulers.
_OF_ALL = {*vars(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)), "_opt_called", "_step_count"}


def file_of(folder: str | Path, rank: int) -> str:
    """The file of the role with this rank in the checkpoint ``folder``."""
    return str(Path(folder) / f"bamboo_kept_rank_{rank:05d}.pt")


def save_kept(runtime: StageRuntime, folder: str | Path, rank: int, save: Callable[[Any, str], None]) -> None:
    """``save`` what ``runtime`` keeps, if there is anything."""
    numbers = {path: each for path, each in newer(runtime.layers.numbers(), runtime.layers.began).items() if each}
    made = packed(runtime.layers.tensors.made())
    kept = {name: value for name, value in kept_by(runtime.optimizer.inner).items() if name not in _OF_ALL}
    count = runtime.layers.changes.count
    if numbers or made or kept or count:
        text, tensors = split({"numbers": numbers, "tensors": made, "attributes": kept, "changes": count})
        save({"kept": text, "tensors": [bare(tensor).cpu() for tensor in tensors]}, file_of(folder, rank))


def load_kept(runtime: StageRuntime, folder: str | Path, rank: int) -> None:
    """Gives ``runtime`` what :func:`save_kept` has saved of its role."""
    file = Path(file_of(folder, rank))
    if not file.exists():
        return
    saved = torch.load(file, weights_only=True)
    kept: Tree = join(saved["kept"], saved["tensors"])
    runtime.layers.set_numbers(kept["numbers"])
    runtime.layers.set_tensors(kept["tensors"], whole=False)
    runtime.layers.changes.follow(kept["changes"], 0 if kept["changes"] else -1)
    if kept["attributes"]:
        put_kept(runtime.optimizer.inner, kept["attributes"])


@contextmanager
def keeping_types(optimizer: Any) -> Iterator[None]:
    """In the body ``optimizer`` loads states with the types that their tensors have."""

    def load(given: Any) -> None:
        del optimizer.__dict__["load_state_dict"]
        try:
            load_optimizer(optimizer, given)
        finally:
            optimizer.__dict__["load_state_dict"] = load

    optimizer.__dict__["load_state_dict"] = load
    try:
        yield
    finally:
        del optimizer.__dict__["load_state_dict"]
