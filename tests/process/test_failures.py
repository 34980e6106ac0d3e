"""Workers that fail by themselves: an end of the job, or a loss like any other, but not for ever."""

from __future__ import annotations

from pathlib import Path

import pytest

from bamboo_ds.control.leader.failures import hopeless
from tests.support.control import Start
from tests.support.jobs import write_config
from tests.support.records import left

pytestmark = pytest.mark.claim("quickstart.md", "reference/events.md", "reference/settings.md")


@pytest.mark.parametrize(
    ("failures", "given_up"),
    [
        ([], False),
        ([("OSError: disk", 4)], False),
        ([("OSError: disk", 4), ("OSError: disk", 5)], False),
        ([("OSError: disk", 4), ("ValueError: x", 4)], False),
        ([("OSError: of a", 4), ("OSError: of b", 4)], True),
        ([("OSError: disk", 4), ("ValueError: x", 4), ("exit code 13", 4)], True),
        ([("exit code 13", None), ("exit code 13", None)], True),
        ([(None, 4), (None, 4), (None, 4)], False),
    ],
)
def test_what_comes_back_is_given_up(failures: list[tuple[str | None, int | None]], given_up: bool) -> None:
    records = [left(f"m{n}", code=1, error=error, step=step) for n, (error, step) in enumerate(failures)]
    assert (hopeless(records) is not None) is given_up


def config(folder: Path) -> tuple[str, str]:
    return "--config", str(write_config(folder, {"recovery": {"on_exception": "takeover"}}))


def test_workers_that_have_said_how_they_end_and_do_not(start: Start, tmp_path: Path) -> None:
    job = start(3, "--grace-s", "1", *config(tmp_path)).run()
    job.tell(1, "linger")
    assert job.wait_epoch(3, 1)["lost"] == [job.member(1)]
    assert "has not ended in time" in job.output()
    job.tell(2, "done")
    job.wait(lambda: job.find("done", 2), "it has closed its channel")
    job.kill(job.worker(2))
    job.finish(1, 2)
    (lost,) = job.events("member_lost")
    assert (lost["reason"], lost["detail"]) == ("exit", "RuntimeError: a test says so")


def test_an_error_that_comes_back_ends_the_job(start: Start, tmp_path: Path) -> None:
    job = start(4, *config(tmp_path)).run()
    job.tell(1, "raise")
    assert job.wait_epoch(3, 1)["lost"] == [job.member(1)]
    job.tell(3, "raise")
    assert job.exit_code() == 1
    assert "several workers have failed" in job.output()
    assert len(job.events("member_lost")) == 1


def test_when_all_fail_the_job_ends_with_the_code_of_the_first(start: Start, tmp_path: Path) -> None:
    job = start(2, *config(tmp_path)).run()
    job.tell(1, "exit 13")
    assert job.wait_epoch(3, 1)["lost"] == [job.member(1)]
    job.wait(lambda: job.events("member_lost"), "the leader has told of the loss")
    (lost,) = job.events("member_lost")
    assert (lost["reason"], lost["detail"]) == ("exit", "exit code 13")
    job.tell(0, "raise")
    assert job.exit_code() == 13
