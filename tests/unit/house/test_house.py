"""The package's own rules that linters do not know."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import bamboo_ds

PACKAGE = Path(bamboo_ds.__file__).parent
#: Lines of a file, files of a folder, and parameters of a constructor in the engine, at most.
LINES, FILES, PARAMETERS = 450, 24, 8


def classes(folder: Path = PACKAGE) -> Iterator[ast.ClassDef]:
    for path in sorted(folder.rglob("*.py")):
        yield from (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef))


def test_no_class_name_occurs_twice() -> None:
    """A reader who meets a name looks for one class, and finds it."""
    names = Counter(each.name for each in classes())
    assert not {name for name, count in names.items() if count > 1}


def test_files_and_folders_fit_in_the_head() -> None:
    long = [str(path) for path in PACKAGE.rglob("*.py") if len(path.read_text().splitlines()) > LINES]
    files = Counter(path.parent for path in PACKAGE.rglob("*.py"))
    assert not long
    assert not {str(folder): count for folder, count in files.items() if count > FILES}


def test_the_engine_s_classes_are_given_few_things() -> None:
    """Of a dataclass without a constructor these are its fields that have no default."""
    wide = {}
    for each in classes(PACKAGE / "engine"):
        init = next((f for f in each.body if isinstance(f, ast.FunctionDef) and f.name == "__init__"), None)
        made = any("dataclass" in ast.unparse(decorator) for decorator in each.decorator_list)
        if init is not None:
            given = len(init.args.args) + len(init.args.kwonlyargs) - 1
        else:
            given = sum(isinstance(f, ast.AnnAssign) and f.value is None for f in each.body) if made else 0
        if given > PARAMETERS:
            wide[each.name] = given
    assert not wide
