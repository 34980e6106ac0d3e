"""The package's own rules that linters do not know."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import bamboo_ds

PACKAGE = Path(bamboo_ds.__file__).parent

#: Names that more than one class has yet. It only gets shorter: a class that gets a name of its own leaves it.
KNOWN_DOUBLES: set[str] = {
    "Decision", "Display", "Done", "Ending", "Feed", "Figures", "Finding",
    "Grid", "Head", "History", "Job", "Lane", "Measured", "Outcome",
    "Pace", "PartReport", "PlanView", "Report", "RoleReport", "Row", "Screen",
    "Shape", "Source", "Stream", "Takeover", "Totals", "Training", "Verdict",
    "View", "_Block", "_Loss", "_Part",
}  # fmt: skip


def test_no_class_name_occurs_twice() -> None:
    """A reader who meets a name looks for one class, and finds it."""
    names = Counter(
        node.name
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    assert {name for name, count in names.items() if count > 1} == KNOWN_DOUBLES
