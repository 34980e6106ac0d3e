"""Collectives that run behind the host, as NCCL's do, and are cut off without an error: their results do not count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.compare import assert_computed, assert_equal
from tests.support.jobs import SUPPORT, run_bamboo, write_config
from tests.support.sliced_jobs import SLICES
from tests.support.surviving import STEPS, Reference, fault

pytestmark = pytest.mark.claim("reference/limits.md")


# -- a job -------------------------------------------------------------------------------------------------------


@pytest.mark.integration
@pytest.mark.parametrize(
    ("slices", "micro_batches"),
    [pytest.param((), 6, id="reduction"), pytest.param(SLICES, 4, id="passes", marks=pytest.mark.exhaustive)],
)
def test_what_an_abort_cuts_off_everywhere_is_done_again(
    tmp_path: Path, reference: Reference, slices: tuple[str, ...], micro_batches: int
) -> None:
    file = write_config(tmp_path, {"redundancy": {"verify_every": 2}}, micro_batches)
    arguments = (*slices, "--steps", str(STEPS))
    result = run_bamboo(tmp_path, 4, ["--stages", "2", *arguments], file, SUPPORT / "train_late.py")
    assert {path.name for path in tmp_path.glob("held-*")} == {"held-0", "held-1"}, result.output[-4000:]
    assert_equal(result, reference(2, 2, micro_batches, *arguments), [fault(3, 2, "late")])


@pytest.mark.exhaustive
@pytest.mark.integration
def test_sums_of_three_pipelines_have_the_bits_of_the_undisturbed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each communicator has an order of its own, also those that follow the loss."""
    runs: dict[str, Any] = {}
    for how in ("undisturbed", "disturbed"):
        monkeypatch.setenv("BAMBOO_TEST_LATE", how)
        (folder := tmp_path / how).mkdir()
        file = write_config(folder, {"redundancy": {"verify_every": 2}})
        command = ["--stages", "2", "--steps", str(STEPS)]
        runs[how] = run_bamboo(folder, 6, command, file, SUPPORT / "train_late.py")
        assert runs[how].exit_code == 0, runs[how].output[-4000:]
    assert {path.name for path in folder.glob("held-*")} == {"held-0", "held-1"}
    assert [event["reason"] for event in runs["disturbed"].events("member_lost")] == ["signal"]
    assert not runs["undisturbed"].events("member_lost")
    assert_computed(runs["disturbed"], runs["undisturbed"])


@pytest.mark.exhaustive
@pytest.mark.integration
def test_two_survivors_whose_aborts_wait_for_each_other_are_not_both_lost(
    tmp_path: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They hold one stage. The leader goes on without one of them, and its end frees the other."""
    monkeypatch.setenv("BAMBOO_TEST_LATE", "hang")
    block = {"redundancy": {"verify_every": 2}, "membership": {"rejoin_s": 0}}
    arguments = ("--steps", str(STEPS))
    result = run_bamboo(
        tmp_path, 4, ["--stages", "2", *arguments], write_config(tmp_path, block), SUPPORT / "train_late.py"
    )
    tail = result.output[-4000:]
    assert {path.name for path in tmp_path.glob("hung-*")} == {"hung-0", "hung-1"}, tail
    lost = {event["reason"]: event for event in result.events("member_lost")}
    assert sorted(lost) == ["abort", "signal"] and len(result.events("member_lost")) == 2, tail
    assert not result.events("restart"), tail
    assert "still blocks after" in lost["abort"]["detail"]
    assert len(result.ranks()) == 2
    assert_computed(result, reference(2, 2, 6, *arguments))
