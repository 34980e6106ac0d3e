"""What keeps the engine's parts small: rooms of few files, files of few lines, constructors of few parts."""

from __future__ import annotations

import importlib
import inspect
from collections import Counter
from pathlib import Path

import pytest
from pydantic import BaseModel

from bamboo_ds import engine

ROOT = Path(engine.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))


def test_rooms_and_files_stay_small() -> None:
    assert {str(file): lines for file in FILES if (lines := len(file.read_text().splitlines())) > 450} == {}
    assert {room: count for room, count in Counter(file.parent.name for file in FILES).items() if count > 24} == {}
    doors = [room for room in {file.parent for file in FILES} if len((room / "__init__.py").read_text()) < 80]
    assert not doors, "a room's docstring says what it is for"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_constructors_take_few_parts(file: Path) -> None:
    """Messages are not put together of parts; all other classes get at most eight."""
    name = ".".join((engine.__name__, *file.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
    for kind in vars(importlib.import_module(name)).values():
        if inspect.isclass(kind) and kind.__module__ == name and not issubclass(kind, BaseModel):
            given = [each for each in inspect.signature(kind).parameters.values() if each.kind is not each.VAR_KEYWORD]
            assert len(given) <= 8, f"{kind.__name__}: {len(given)}"
