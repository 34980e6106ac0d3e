"""Mutants of the schedule: :mod:`tests.support.mutants`."""

from __future__ import annotations

from tests.support.mutants import TESTS, mutants
from tests.support.survivors import SURVIVORS


def test_survivors_are_mutants() -> None:
    """None is explained that the code, as it is now, does not have."""
    all_of_them = {(mutant.function, mutant.change) for module in TESTS for mutant in mutants(module)}
    assert {(function, change) for function, changes in SURVIVORS.items() for change in changes} <= all_of_them
