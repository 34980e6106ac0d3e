"""Scripts drawn from a grammar of what people do: each trains as with stock DeepSpeed, or is refused at once.

A script runs in the engine's model, with losses at drawn places and a loop in plain torch as the oracle, and as a job
with stock DeepSpeed as the oracle. Many more: ``python -m tests.support.adversary.judge`` and ``…model``.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.support.adversary import grammar, model
from tests.support.adversary.judge import DIFFERS, INVALID, REFUSED, TRAINS, Verdict, judge, known
from tests.support.adversary.script import Script, parsed, simpler

pytestmark = pytest.mark.claim("guides/scripts.md", "reference/guarantees.md", "state.md")

#: Of the seeds of the suite, what becomes of their jobs and how many losses strike there.
SUITE = {
    **dict.fromkeys((437, 438, 440, 442, 444, 461, 462, 477), (TRAINS, 1)),
    **dict.fromkeys((464, 466), (REFUSED, 0)),
}
#: In the model these run undisturbed, with the losses that were drawn, and with others: so many losses strike.
STRUCK = {437: 3, 438: 3, 440: 2, 442: 3, 444: 3, 461: 2, 462: 4, 477: 3, 464: 0, 466: 0}
#: Those that are run as jobs.
JOBS = (437, 464)


def seeds(usual: Iterable[int], further: int) -> list[Any]:
    """The usual ones, and those of ``make exhaustive``."""
    rest = [*sorted(SUITE.keys() - set(usual)), *range(1000, 1000 + further)]
    return [*usual, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in rest)]


def check(script: Script, verdict: Verdict) -> None:
    """It must not differ, but for what is known."""
    if verdict.outcome == INVALID:
        pytest.skip(f"this is no script of stock DeepSpeed's: {verdict.why}")
    met = known(script, verdict) if verdict.outcome == DIFFERS else ""
    assert verdict.outcome != DIFFERS or met, f"{verdict.why}\n--script '{script.text()}'"


@pytest.mark.parametrize("seed", seeds(SUITE, 200))
def test_in_the_model(seed: int) -> None:
    script = model.simulable(grammar.draw(seed))
    with model.simulation():
        found = model.judge(script)
    for verdict in found:
        check(script, verdict)
    if seed in SUITE:
        assert {verdict.outcome for verdict in found} == {SUITE[seed][0]}
        assert sum(verdict.kills for verdict in found) == STRUCK[seed]


@pytest.mark.integration
@pytest.mark.parametrize("seed", seeds(JOBS, 8))
def test_as_a_job(seed: int, tmp_path: Path) -> None:
    script = grammar.draw(seed)
    verdict = judge(tmp_path / "job", script)
    check(script, verdict)
    if seed in SUITE:
        assert (verdict.outcome, verdict.kills) == SUITE[seed], verdict.why


def test_scripts_are_data() -> None:
    """The same from their text; each that is simpler is another one, and can be run."""
    for seed in range(50):
        script = grammar.draw(seed)
        assert parsed(script.text()) == script == grammar.draw(seed)
        assert script not in simpler(script)
        assert all(len(each.layers) >= each.stages > 1 and parsed(each.text()) == each for each in simpler(script))
