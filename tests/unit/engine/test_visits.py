"""What a script does for each stage is done for all, whoever computes them."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from bamboo_ds import for_each_stage
from bamboo_ds.engine.operations.visits import StageVisits
from bamboo_ds.engine.script.changes import without_process
from bamboo_ds.topology import Layout, Plan, initial_plan, takeover, with_redundancy

pytestmark = pytest.mark.claim("guides/scripts.md")


def test_without_a_block_there_is_one_stage() -> None:
    engine = SimpleNamespace()
    assert for_each_stage(engine, lambda given: given is engine) == [True]


LAYOUT = Layout(1, 3)
PLAN = with_redundancy(initial_plan(["a", "b", "c"]), LAYOUT, True)


def moved() -> Plan:
    """Stages 0 and 1 have changed places."""
    return replace(PLAN, owners=("b", "a", "c"))


@pytest.mark.parametrize(
    ("plan", "made", "told"),
    [
        (PLAN, False, None),
        (takeover(PLAN, ["b"]), False, "for ranks 1 (stage 1 of pipeline 0)"),
        (takeover(PLAN, ["b"]), True, None),
        (moved(), False, "for ranks 0 (stage 0 of pipeline 0), 1 (stage 1 of pipeline 0)"),
    ],
)
def test_stages_without_a_process_are_told_at_the_end(
    plan: Plan, made: bool, told: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    visits: Any = SimpleNamespace(epoch=SimpleNamespace(plan=plan, layout=LAYOUT, leads=True), made=made)
    with caplog.at_level(logging.WARNING):
        StageVisits.tell_absent(visits)
    assert (told in caplog.text) if told else not caplog.text
    assert bool(without_process(plan)) is (plan is not PLAN)
