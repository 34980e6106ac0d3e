"""At most one start of a job commits, publishes and accounts, whatever processes, clocks and the network do."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .support.fencing_model import FENCES, KINDS, RATES, SECONDS, Broken, Step, draw, quiet, run

#: By the fence that is switched off, a schedule that then breaks an invariant: the number of a drawn one, or steps.
BREAKING: dict[str, int | list[Step]] = {
    "pause": 24,
    "lineage": 476,
    "wait": 24,
    "mark": 247,
    "clean": 441,
    # An agent is held in the middle of writing that its worker has failed, until others have gone on without it.
    "stop": [Step("pass", seconds=4.0), Step("fail", 0, 1, 7.0)],
    # The leader is held in the middle of writing a plan, until others have written plans.
    "swap": [
        Step("pass", seconds=4.0),
        Step("join", seconds=4.0),
        Step("hold", 1, 2, 7.0),
        Step("kill worker", 0, 0, 12.0),
    ],
}

NUMBERS = st.integers(0, 4)
STEPS = st.builds(Step, st.sampled_from(list(KINDS)), NUMBERS, NUMBERS, st.sampled_from(SECONDS))


@pytest.fixture(autouse=True, scope="module")
def silence() -> Iterator[None]:
    """Of these jobs' logs, which are most of what they cost."""
    logger = logging.getLogger("bamboo_ds")
    level = logger.level
    quiet()
    yield
    logger.setLevel(level)


@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(STEPS, max_size=8), st.tuples(*[st.sampled_from(RATES)] * 3))
def test_no_schedule_breaks_an_invariant(steps: list[Step], rates: tuple[float, ...]) -> None:
    run([Step("pass", seconds=2.0), *steps], rates)


def test_drawn_schedules_break_none_and_have_faults_of_all_kinds() -> None:
    happened = sum((run(*draw(seed)) for seed in range(900)), start=type(run([]))())
    assert set(KINDS) - {"pass"} <= set(happened), sorted(set(KINDS) - set(happened))
    assert min(happened[what] for what in ("restarts", "paused", "published", "refused", "writer stopped")) > 0


@pytest.mark.parametrize("fence", FENCES)
def test_every_fence_is_needed(fence: str) -> None:
    """Without it the same schedules break an invariant."""
    found = BREAKING[fence]
    steps, rates = draw(found) if isinstance(found, int) else (found, (1.0,))
    run(steps, rates)
    with pytest.raises(Broken):
        run(steps, rates, [fence])
