"""``docs/claims.md`` and ``docs/state.md`` name tests and benchmarks that exist, and sections that the pages have."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from .support.docs import headings, links

ROOT = Path(__file__).parents[1]


def claims() -> str:
    return (ROOT / "docs" / "claims.md").read_text()


def proofs() -> dict[str, str]:
    """What each row of a table says behind its claim, by the claim."""
    rows = [line.strip("| ").split(" | ") for line in claims().splitlines() if line.startswith("| ")]
    return {claim: proof for claim, proof in rows if claim != "claim" and not claim.startswith("---")}


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


def test_what_proves_a_claim_exists() -> None:
    named = {name for proof in proofs().values() for name in re.findall("`([^`]+)`", proof)}
    assert named, "the tables have another form"
    missing = sorted(name for name in named if not exists(name))
    assert not missing, f"docs/claims.md names what does not exist: {', '.join(missing)}"


def test_every_claim_says_what_proves_it() -> None:
    bare = [claim for claim, proof in proofs().items() if not re.search(r"`[^`]+`|\bnone\b", proof)]
    assert not bare, f"docs/claims.md says neither what proves these claims nor `none`: {'; '.join(bare)}"


def test_sections_are_those_of_the_pages() -> None:
    page = ROOT / "docs" / "claims.md"
    sections = re.findall(r"^## (.+)$", claims(), re.MULTILINE)
    linked = {f"[{link.text}]({link.target})": link for link in links(page)}
    wrong = [
        section
        for section in sections
        if section not in linked or headings(linked[section].file).get(linked[section].anchor) != linked[section].text
    ]
    assert sections and not wrong, f"no page has the sections {', '.join(wrong)}"


def states() -> list[list[str]]:
    """The rows of the tables of states: what, what becomes of it, where, and tests."""
    lines = (ROOT / "docs" / "state.md").read_text().splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    return [row for row in rows if row[0] not in ("state", "---")]


def test_every_state_has_its_treatment_and_a_test() -> None:
    rows = states()
    assert len(rows) > 40, "the tables have another form"
    for row in rows:
        assert len(row) == 4 and row[1] in ("replicated", "keyed", "compared", "refused", "own", "outside"), row
        named = re.findall("`([^`]+)`", row[3])
        assert named and (named == ["none"]) <= (row[1] == "outside"), row
        missing = [name for name in named if name != "none" and not exists(name)]
        assert not missing, f"docs/state.md names what does not exist: {', '.join(missing)}"
