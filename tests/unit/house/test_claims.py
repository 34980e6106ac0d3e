"""Markers of tests name pages that exist, ``docs/state.md`` tests that exist."""

from __future__ import annotations

import ast
import re
from functools import cache

from tests.support.docs import ROOT, claims, page_of, states


@cache
def names_in(file: str) -> frozenset[str]:
    """The top-level tests in a file, which need not be there."""
    path = ROOT / "tests" / file
    body = ast.parse(path.read_text()).body if path.is_file() else []
    functions = (each.name for each in body if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)))
    return frozenset(name for name in functions if name.startswith("test_"))


def exists(name: str) -> bool:
    """Whether ``name`` is a file of the repository, or a test as ``file::test[parameters]``."""
    file, separator, test = name.partition("::")
    if separator:
        return test.partition("[")[0] in names_in(file)
    return (ROOT / name).is_file()


def test_markers_name_pages_and_every_guide_has_a_test() -> None:
    named = claims()
    missing = sorted(claim for claim in named if not page_of(claim).is_file())
    assert not missing, f"markers of tests name no page: {', '.join(missing)}"
    guides = {f"guides/{page.name}" for page in (ROOT / "docs" / "guides").glob("*.md")}
    assert not guides - named, f"no test proves what these claim: {', '.join(sorted(guides - named))}"


def test_every_state_has_its_treatment_and_a_test() -> None:
    found = states()
    text = (ROOT / "docs" / "state.md").read_text()
    assert len(found) == len(re.findall(r"^- [^*\n]", text, re.MULTILINE)) > 40, "the lists have another form"
    for each in found:
        assert each.treatment in ("replicated", "keyed", "compared", "refused", "own", "outside"), each
        assert (each.tests == ["none"]) <= (each.treatment == "outside"), each
        missing = [name for name in each.tests if name != "none" and not exists(name)]
        assert not missing, f"docs/state.md names what does not exist: {', '.join(missing)}"
