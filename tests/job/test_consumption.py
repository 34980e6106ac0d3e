"""What steps have consumed: events tell what was used, and the verification sees whatever is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bamboo_ds.observe import events as ev
from bamboo_ds.observe.consumption import Consumption
from tests.job.test_elastic import assert_same
from tests.support.faults import in_turn
from tests.support.jobs import Reference, Result, RunningJob, slow_until, write_config
from tests.support.surviving import fault
from tests.unit.engine.test_consumption import expected, found

pytestmark = pytest.mark.claim(
    "concepts.md", "guides/observing.md", "reference/goodput.md", "reference/guarantees.md", "reference/settings.md"
)


def assert_consumed_once(result: Result, pipelines: int, steps: int) -> Consumption:
    """Every step of a job of the tests' script has consumed what it would in an undisturbed run."""
    told = found(list(ev.read_events(result.out / "events.jsonl")))
    assert (told.problems(), told.alike()) == ([], 0)
    assert {number: each.checksum for number, each in told.history().items()} == expected(steps, pipelines, 4, 4)
    return told


@pytest.mark.exhaustive
@pytest.mark.integration
@pytest.mark.parametrize("data", ["iterators", "training_data"])
def test_every_batch_once_whatever_happens(tmp_path: Path, reference: Reference, data: str) -> None:
    """The member that tells of a step dies between commit and event, one joins, the owner of a last stage dies."""
    now, go = tmp_path / "now", tmp_path / "go"
    arguments = ["--training-data"] if data == "training_data" else []
    # Ranks 0..3 are (pipeline, stage) = (0,0), (1,0), (0,1), (1,1).
    faults = in_turn(fault(0, 3, ".supply.account"), fault(2, 4, "BackwardPass", 2, when=str(now)))
    config = write_config(tmp_path, {"observe": {"checksums": True}}, 4)
    script = ["--stages", "2", *arguments, *slow_until(go), "--faults", json.dumps(faults)]
    with RunningJob(tmp_path, 4, script, config) as running:
        running.wait_for("a loss", lambda: len(running.events("member_lost")) == 1)
        running.join()
        running.wait_for("the joiner owns a stage", lambda: len(set(running.plan()["owners"])) == 4)
        now.touch()
        running.wait_for("another loss", lambda: len(running.events("member_lost")) == 2)
        go.touch()
        result = running.finish()
    assert_same(result, reference(2, 2, 4, *arguments, *result.length), faults, joined=1, untold=(3,))
    told = assert_consumed_once(result, 2, int(result.length[1]))
    ranges = [each.samples for each in told.history().values()]
    assert ranges == [(32 * n, 32 * n + 32) if arguments else None for n in range(len(ranges))]
    # Only survivors tell of the lost member's last step.
    missing = told.starts[0].keys() - {event["step"] for event in result.events("step")}
    assert missing == {3}
