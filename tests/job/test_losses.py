"""Losses of other kinds and at other times: workers that stop or hang, in a recovery, in an evaluation, all at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bamboo_ds.errors import EXIT_FATAL_LOSS
from tests.support.jobs import run_bamboo, run_stock, run_text, write_config
from tests.support.surviving import Reference, fault, survive, survive_in_turn

pytestmark = [
    pytest.mark.claim(
        "reference/cli.md",
        "reference/events.md",
        "reference/guarantees.md",
        "reference/limits.md",
        "reference/settings.md",
    ),
    pytest.mark.integration,
]


def test_workers_that_stop_or_hang(tmp_path: Path, reference: Reference) -> None:
    """The hearts of those that hang beat, but they do not get on; those that wait for them are left alone."""
    faults = [
        fault(1, 2, "ForwardPass", 2, signal="SIGSTOP"),
        fault(3, 2, "LoadMicroBatch", 1, signal="hang"),
        fault(2, 2, "Commit", signal="SIGSTOP"),
    ]
    settings = {"heartbeat_timeout_s": 5, "hang_timeout_s": 8, "start_timeout_s": 60, "lease_ttl_s": 10}
    result = survive_in_turn(tmp_path, reference, faults, 4, bamboo={"membership": settings})
    assert [event["reason"] for event in result.events("member_lost")] == ["heartbeat", "hang", "heartbeat"]


#: The new owner of stage 1 is stage 0's: it has nothing to fall back on, so the other survivor goes instead. Stage 1
#: re-sends what stage 2 has not used; that is one activation when both have come to where they wait.
AFTER_A_RESENT_ACTIVATION = fault(3, 2, "BackwardPass", 2, pause=1.0), fault(1, 2, "ResendActivation")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        # Stage 1 goes at its third backward; stage 3 follows while the survivors recover.
        (fault(1, 2, "BackwardPass", 2), fault(3, 2, ".recovery.roles.follow")),
        pytest.param(*AFTER_A_RESENT_ACTIVATION, marks=pytest.mark.exhaustive),
    ],
    ids=lambda each: each["at"],
)
def test_loss_during_a_recovery(
    tmp_path: Path, reference: Reference, first: dict[str, Any], second: dict[str, Any]
) -> None:
    survive(tmp_path, reference, [first, second])


def test_losses_during_evaluations(tmp_path: Path, reference: Reference) -> None:
    """In a pass of one; in the next when others have its commit, which dies with the outputs of the last stage."""
    faults = [fault(1, 2, ".iteration.passes.forward", 1, evaluating=True), fault(3, 4, "._reduce_outputs")]
    survive(tmp_path, reference, faults, arguments=("--steps", "5", "--evaluate-every", "2"))


def test_adjacent_losses_are_fatal_and_say_so(tmp_path: Path) -> None:
    file = write_config(tmp_path, {"recovery": {"max_restarts": 0}}, 4)
    # The owner of stage 1, and its shadow as soon as it takes the stage over.
    faults = [fault(1, 3, "BackwardPass", 1), fault(0, 3, ".recovery.run")]
    command = ["--stages", "3", "--steps", "5", "--faults", json.dumps(faults), "--save-every", "2"]
    result = run_bamboo(tmp_path, 3, command, file)
    assert len(result.faults()) == 2
    assert result.exit_code == EXIT_FATAL_LOSS, result.output[-4000:]
    assert result.output.count("bamboo_ds.errors.FatalLoss: no living member holds stage 1 of pipeline 0") == 1
    assert "train_batch" in result.output and "takeover.py" not in result.output, "the script's lines alone"
    assert str(tmp_path / "checkpoints" / "step2") in result.output
    (event,) = result.events("fatal")
    assert event["stages"] == [[0, 0], [0, 1]] or event["stages"] == [[0, 1]]
    assert event["checkpoint"] == str(tmp_path / "checkpoints" / "step2")
    # Each of the two deaths may be told first, or both at once: that of m1 is seen by its connections before.
    lost = {member[:2] for member in event["members"]}
    assert lost and lost <= {"m0", "m1"}


BUILDING = """
import json, os, sys, time
from pathlib import Path
from bamboo_ds.engine import BambooPipelineEngine as Engine
from bamboo_ds.engine.recovery.copies import Copies
from bamboo_ds.worker.job import current_job
from faults import install
from small_job import begin

rank, method = int(os.environ["RANK"]), getattr(Copies, slow)

def wait(copies, *arguments):
    setattr(Copies, slow, method)
    if slow == "copy_state":  # once its copies are complete
        copies.copy_state(*arguments)
    deadline, session = time.monotonic() + 60, current_job().session
    while session.aborted is None:  # the others have begun, and one is lost there
        assert time.monotonic() < deadline
        time.sleep(0.01)
    session.check()

if rank == 1:
    setattr(Copies, slow, wait)
engine, batches = begin(7, stages=3)
out = sys.argv[sys.argv.index("--out") + 1]
if isinstance(engine, Engine):
    if rank == 2:
        Path(out, "built").touch()
    deadline = time.monotonic() + 60
    while evaluates and rank == 0 and not Path(out, "built").exists():  # its state is nowhere else before
        assert time.monotonic() < deadline
        time.sleep(0.01)
    at = ".iteration.passes.forward" if evaluates else "ForwardPass"
    install(engine, json.dumps([{"rank": 0, "step": 0, "at": at, "micro_batch": 0, "evaluating": evaluates}]), out)
losses = [float(engine.eval_batch(batches))] if evaluates else []
losses += [float(engine.train_batch(batches)) for _ in range(4)]
Path(out, f"losses-{rank}.json").write_text(json.dumps(losses))
"""


@pytest.mark.parametrize(
    ("slow", "evaluates"), [("copy_state", True), pytest.param("_build", False, marks=pytest.mark.exhaustive)]
)
def test_one_computes_while_another_is_being_built(tmp_path: Path, slow: str, evaluates: bool) -> None:
    """A loss there is survived, whether the last replicas are complete or not made yet: those are made then.

    A worker draws the batches of the lost end.
    """
    script = f"slow, evaluates = {slow!r}, {evaluates}\n{BUILDING}"
    result = run_text(tmp_path, script, 3, {"recovery": {"max_restarts": 0}})
    assert result.faults() and len(result.events("member_lost")) == 1
    lacking = [event["role"] for event in result.events("replica_built")].count([0, 2])
    assert evaluates or lacking
    stock = tmp_path / "stock"
    stock.mkdir()
    undisturbed = run_stock(stock, 3, [], write_config(stock, None), tmp_path / "script.py")
    assert undisturbed.exit_code == 0, undisturbed.output[-4000:]
    expected = (stock / "losses-0.json").read_text()
    found = {f.name: f.read_text() for f in tmp_path.glob("losses-*.json")}
    assert {"losses-1.json", "losses-2.json"} <= set(found) and set(found.values()) == {expected}
