"""Whether two runs of the demo's script computed the same, bit for bit."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

#: What DeepSpeed's checkpoint holds besides state: the configurations differ, that is the point.
_NOT_STATE = ("ds_config",)


@dataclass
class Comparison:
    """One kind of result of two runs.

    Attributes:
        what: the kind.
        values: how many values were compared (tensors, or numbers).
        size: bytes of the tensors compared.
        differences: where the runs differ, readable; at least one entry if nothing was there to compare.
    """

    what: str
    values: int = 0
    size: int = 0
    differences: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Whether there was something to compare and all of it was equal."""
        return self.values > 0 and not self.differences

    def add(self, name: str, expected: Any, found: Any) -> None:
        """Compares one value; floats and tensors by their bits."""
        self.values += 1
        self.size += expected.nbytes if torch.is_tensor(expected) else 0
        if _bits(expected) != _bits(found):
            self.differences.append(f"{name}: {_shown(expected)} and {_shown(found)}")


def compare_losses(expected: Path, found: Path, steps: int) -> Comparison:
    """The losses that every worker which reached the end of the run in folder ``found`` has seen."""
    result = Comparison("losses of every step")
    reference = json.loads((expected / "losses-0.json").read_text())
    if len(reference) != steps:
        result.differences.append(f"the undisturbed run has {len(reference)} losses, not {steps}")
    files = sorted(found.glob("losses-*.json"))
    if not files:
        result.differences.append("no worker left its losses")
    for file in files:
        losses = json.loads(file.read_text())
        if len(losses) != len(reference):
            result.differences.append(f"{file.name}: {len(losses)} losses instead of {len(reference)}")
        for step, (a, b) in enumerate(zip(reference, losses, strict=False), 1):
            result.add(f"{file.name}, step {step}", a, b)
    return result


def compare_checkpoints(expected: Path, found: Path) -> list[Comparison]:
    """All files of two checkpoint folders that DeepSpeed's pipeline engine wrote."""
    weights = Comparison("weights")
    optimizer = Comparison("optimizer state")
    others = Comparison("schedule and counters")
    names = sorted(p.name for p in expected.glob("*.pt"))
    theirs = {p.name for p in found.glob("*.pt")}
    others.values += 1
    others.differences += [f"{name} exists in one run only" for name in sorted(theirs ^ set(names))]
    for name in names:
        if name not in theirs:
            continue
        a, b = (torch.load(folder / name, weights_only=True, map_location="cpu") for folder in (expected, found))
        if name.startswith("layer_"):
            _compare(weights, name, a, b)
            continue
        for key in sorted((a.keys() | b.keys()) - set(_NOT_STATE)):
            target = optimizer if key == "optimizer" else others
            _compare(target, f"{name}[{key}]", a.get(key), b.get(key))
    return [weights, optimizer, others]


def _compare(result: Comparison, name: str, expected: Any, found: Any) -> None:
    a, b = dict(_leaves(name, expected)), dict(_leaves(name, found))
    for leaf in sorted(a.keys() | b.keys()):
        result.add(leaf, a.get(leaf, "nothing"), b.get(leaf, "nothing"))


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(f"{name}.{key}", inner)
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from _leaves(f"{name}[{index}]", inner)
    else:
        yield name, value


def _bits(value: Any) -> object:
    """Equal where each bit of two values is: 0.0 is not -0.0. Numbers that are NaN are no proof, and equal to none."""
    if torch.is_tensor(value):
        data = value.detach().contiguous().reshape(-1).view(torch.uint8)
        return value.dtype, value.shape, data.numpy().tobytes()
    if isinstance(value, float) and math.isnan(value):
        return object()
    return type(value), value.hex() if isinstance(value, float) else None, value


def _shown(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if torch.is_tensor(value) else repr(value)
