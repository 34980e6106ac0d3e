"""Models of one pipeline stage: each rank computes all layers, and the other ranks are its siblings."""

from __future__ import annotations

import os
import signal
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from bamboo_ds.errors import EXIT_FATAL_LOSS
from tests.support import sliced_jobs
from tests.support.jobs import SUPPORT, RunningJob, slow_until, write_config
from tests.support.precisions import BF16_ZERO, FP16_ZERO, FP32_ZERO
from tests.support.surviving import Reference, fault, survive, survive_in_turn

pytestmark = [pytest.mark.claim("guides/scripts.md", "reference/limits.md"), pytest.mark.integration]

CHECKED = {
    "topology": {"blocks": "auto"},
    "redundancy": {"mode": "eager-frc-lazy-brc", "verify_every": 1, "check_exact": 2},
    "observe": {"checksums": True},
}
FAULTS = {
    "forward": [fault(1, 4, "ForwardPass", 1)],
    "backward": [fault(0, 4, "BackwardPass", 2)],
    "commit": [fault(1, 4, "Commit")],
}
#: Pipelines, fault, block, configuration.
CASES: dict[str, tuple[int, str, dict[str, Any], dict[str, Any]]] = {
    "bf16-zero": (2, "forward", CHECKED, BF16_ZERO),
    "fp32": (2, "backward", CHECKED, {}),
    "fp32-zero": (2, "commit", CHECKED, FP32_ZERO),
    "fp16-zero": (2, "forward", {}, FP16_ZERO),
    "no replicas": (2, "backward", {"redundancy": {"mode": "none"}}, {}),
    "four": (4, "forward", CHECKED, {}),
}


@pytest.mark.parametrize(
    "name", [name if name == "bf16-zero" else pytest.param(name, marks=pytest.mark.exhaustive) for name in CASES]
)
def test_a_sibling_takes_over(tmp_path: Path, reference: Reference, name: str) -> None:
    pipelines, where, block, config = CASES[name]
    # The mean of more than two losses depends on the order of a sum, which DeepSpeed leaves to the collective.
    result = survive(
        tmp_path, reference, FAULTS[where], 1, pipelines, own=pipelines > 2, micro_batches=4, bamboo=block, **config
    )
    assert not result.events("replica_mismatch")
    # Nobody but a worker that is started for it draws the lost rank's batches: that wait is a part of the pause.
    lost = next(event for event in result.events("plan") if event["lost"])
    fed = next(event for event in result.events("plan") if event["epoch"] == lost["epoch"] + 1)
    pause = max(event["plan_seconds"] for event in result.events("recovered"))
    between = datetime.fromisoformat(fed["time"]) - datetime.fromisoformat(lost["time"])
    assert pause > 0.8 * between.total_seconds() > 0
    if block is CHECKED:
        assert all(event["consumed"] for event in result.events("step"))
        assert result.events("replica_verified")
        assert "with one pipeline stage no redundant passes run: redundancy.mode eager-frc-lazy-brc" in result.output


def test_losses_in_turn_down_to_one_member(tmp_path: Path, reference: Reference) -> None:
    """Checkpoints, evaluations and stages that are divided while two members have three roles."""
    faults = [fault(0, 2, "ForwardPass", 2), fault(2, 5, ".iteration.passes.forward", 1, evaluating=True)]
    arguments = ("--evaluate-every", "2", "--save-every", "3", "--dropout", "0.1")
    survive_in_turn(
        *(tmp_path, reference, faults, 1, 3, arguments),
        own=True,
        micro_batches=4,
        bamboo={"topology": {"blocks": "auto"}, "redundancy": {"verify_every": 1}},
        **FP32_ZERO,
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("config", [{}, BF16_ZERO], ids=["fp32", "bf16-zero"])
def test_slices(tmp_path: Path, reference: Reference, config: dict[str, Any]) -> None:
    sliced_jobs.survive(tmp_path, reference, [fault(1, 1, "~backward", 1)], 1, pipelines=4, **config)


@pytest.mark.exhaustive
def test_a_script_like_gpt_neox(tmp_path: Path, reference: Reference) -> None:
    """As most of its configurations have it."""
    faults = [fault(0, 2, "ForwardPass", 1), fault(2, 4, "BackwardPass", 1)]
    script, arguments = SUPPORT / "train_like_neox.py", ("--pos-emb", "alibi")
    survive(tmp_path, reference, faults, 1, 4, arguments, own=True, micro_batches=4, script=script)


def test_a_rank_alone_trains_and_none_takes_over(tmp_path: Path) -> None:
    block = {"checkpoint": {"every_s": 0.05, "dir": str(tmp_path / "checkpoints")}}
    command = ["--stages", "1", *slow_until(tmp_path / "never", 0.1)]
    with RunningJob(tmp_path, 1, command, write_config(tmp_path, block, 4)) as job:
        job.wait_for("a checkpoint of its own", lambda: bool(job.events("checkpoint_saved")))
        os.kill(job.status()["members"][0]["pid"], signal.SIGKILL)
        result = job.finish()
    assert result.exit_code == EXIT_FATAL_LOSS
    assert "not every stage has a replica" in result.output
    assert "the worker of slot 0 is lost as the last one here (signal SIGKILL): none can take over" in result.output
