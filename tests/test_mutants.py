"""Every mutant of the schedule is found, or it is known why none needs to be: :mod:`tests.support.mutants`."""

from __future__ import annotations

import subprocess
import sys

import pytest

from .support.mutants import ROOT, TESTS, mutants
from .support.survivors import SURVIVORS

pytestmark = pytest.mark.claim("reference/guarantees.md")


def test_survivors_are_mutants() -> None:
    """None is explained that the code, as it is now, does not have."""
    all_of_them = {(mutant.function, mutant.change) for module in TESTS for mutant in mutants(module)}
    assert {(function, change) for function, changes in SURVIVORS.items() for change in changes} <= all_of_them


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("module", TESTS)
def test_mutants_are_found(module: str) -> None:
    command = [sys.executable, "-m", "tests.support.mutants", "--module", module]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stdout + told.stderr
