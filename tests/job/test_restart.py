"""After a fatal loss the job starts again by itself, and its results are those of an undisturbed run."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from bamboo_ds.observe.events import read_events
from bamboo_ds.observe.goodput import account
from bamboo_ds.observe.goodput.lives import Category
from tests.job.test_consumption import assert_consumed_once
from tests.support.compare import assert_computed
from tests.support.control import Job, Start
from tests.support.faults import mark
from tests.support.jobs import RunningJob, write_config
from tests.support.surviving import Reference, fault

pytestmark = pytest.mark.claim(
    "guides/clusters.md", "guides/restarts.md", "reference/events.md", "reference/limits.md", "reference/settings.md"
)


# -- jobs -----------------------------------------------------------------------------------------------


ARGUMENTS = ("--steps", "8", "--save-every", "2", "--dropout", "0.1")


def steps_of(events: list[dict[str, Any]]) -> list[list[int]]:
    """Steps of each start of the job."""
    starts: list[list[int]] = [[]]
    for event in events:
        if event["event"] == "restart":
            starts.append([])
        elif event["event"] == "step":
            starts[-1].append(event["step"])
    return starts


@pytest.mark.integration
@pytest.mark.exhaustive
def test_twice_from_a_checkpoint_with_half_of_the_members(tmp_path: Path, reference: Reference) -> None:
    """A plain loop that saves; its scheduler and layers count. The restart is hit while it replays what was done."""
    arguments = (*ARGUMENTS, "--count-samples", "--count-passes")
    faults = [fault(1, 5, "BackwardPass", 1), fault(0, 5, ".recovery.run"), fault(3, 4, ".loader.load")]
    bamboo = {"observe": {"checksums": True}}
    file, go_on = write_config(tmp_path, bamboo, 4), tmp_path / "go on"
    # The last step waits until all have copies: then workers that only stand in for others are not needed any more.
    pace = ["--slow-until", str(go_on), "--slow-s", "600", "--slow-from", "7"]
    with RunningJob(tmp_path, 4, ["--stages", "4", *arguments, *pace, "--faults", json.dumps(faults)], file) as job:
        job.wait_for("both restarts", lambda: len(job.events("restart")) == 2, 180.0)
        job.wait_for("the plan without stand-ins", lambda: len(set(job.events("plan")[-1]["owners"])) == 2)
        go_on.touch()
        result = job.finish()
    assert result.faults() == sorted(mark(f) for f in faults), result.output[-5000:]
    assert result.exit_code == 0, result.output[-5000:]
    assert_computed(result, reference(4, 1, 4, *arguments, own=True))
    first, second = result.events("restart")
    assert (first["number"], first["slots"], second["number"]) == (1, [2, 3], 2)
    assert first["checkpoint"] == str(tmp_path / "checkpoints" / "step4")
    assert steps_of(result.events()) == [[1, 2, 3, 4, 5], [], [5, 6, 7, 8]]
    assert len(result.ranks()) == 2, "workers that only stood in for others have left"
    assert [list(start) for start in assert_consumed_once(result, 1, 8).starts] == [[1, 2, 3, 4, 5], [5, 6, 7, 8]]
    spent = account(read_events(tmp_path / "events.jsonl"))
    # Nobody may be left who tells of the last member that a restart has lost.
    lost = {event["member_id"] for event in result.events("member_lost")}
    assert 2 <= len(lost) <= 4  # one that stands in cannot load again either
    assert (spent.steps, spent.repeated_steps, spent.restarts, spent.losses) == (8, 1, 2, len(lost))
    assert spent.seconds == pytest.approx(sum(spent.categories.values()))
    assert spent.categories[Category.WAITING] > 0 and spent.categories[Category.WASTED] > 0


def fill(job: Job) -> int:
    """Nothing can be written to the pipe that ``job`` prints to any more; returns the bytes that found room."""
    found = 0
    with open(f"/proc/{job.process.pid}/fd/1", "wb", buffering=0) as pipe:  # an open file of this process's own
        os.set_blocking(pipe.fileno(), False)
        for size in (4096, 1):
            while pipe.write(b"x" * size):
                found += size
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("terminal", ["closed", "full"])
def test_a_terminal_that_takes_nothing_delays_no_restart(start: Start, terminal: str) -> None:
    reading, writing = os.pipe()
    job = start(3, output=writing).run()
    os.close(writing)
    if terminal == "closed":
        os.close(reading)
    else:
        assert fill(job) > 0
    for rank in (1, 2):
        job.kill(job.worker(rank))

    def ranks(kind: str, again: Callable[[dict[str, Any]], Any]) -> set[int]:
        return {told["rank"] for told in job.find(kind) if again(told)}

    job.wait(lambda: ranks("hello", lambda told: told["env"].get("BAMBOO_RESTART_COUNT")) == {0, 1, 2}, "the restart")
    assert terminal == "closed" or fill(job) == 0, "nobody has read it meanwhile"
    job.tell_all("go")
    job.wait(lambda: ranks("plan", lambda told: told["plan"]["generation"]) == {0, 1, 2}, "their plan")
    job.tell_all("exit 0")
    # Python makes this code of what it could not print at the launcher's end.
    assert job.exit_code() == {"closed": 120, "full": 0}[terminal]
    assert len(job.events("restart")) == 1
    if terminal == "full":
        os.close(reading)


@pytest.mark.integration
def test_waits_for_joiners_and_passes_over_a_damaged_checkpoint(tmp_path: Path, reference: Reference) -> None:
    """A script that resumes by itself; a host with three of four slots is lost."""
    bamboo = {"recovery": {"min_members": 2}}
    slow = tmp_path / "fast"
    file = write_config(tmp_path, bamboo, 4)
    # Slow once both checkpoints are there: what is awaited comes before the end, whatever it takes to ask for it.
    pace = ["--slow-until", str(slow), "--slow-s", "10", "--slow-from", "4"]
    with RunningJob(tmp_path, 4, ["--stages", "4", *ARGUMENTS, "--resume", *pace], file) as job:
        job.wait_for("the first step", lambda: bool(job.events("step")))
        children = psutil.Process(job.process.pid).children()
        agents = [c.pid for c in children if {"--slot=0", "--slot=1", "--slot=2"} & set(c.cmdline())]
        assert len(agents) == 3
        saved = lambda: {e["path"] for e in job.events("checkpoint_saved") if e["step"] > 2}  # noqa: E731
        job.wait_for("two checkpoints", lambda: bool(saved()))
        job.wait_for("etcd knows the second one", lambda: job.status()["checkpoint_path"] in saved())
        for pid in agents:
            os.kill(pid, signal.SIGKILL)
        job.wait_for("it waits", lambda: "1 of bamboo.recovery.min_members = 2 are there" in job.output())
        status = job.status()
        assert [m["state"] for m in status["members"] if m["state"] in ("running", "waiting")] == ["waiting"]
        newest = Path(status["checkpoint_path"])
        # Nobody writes any more. A further one may have been completed that etcd does not know.
        damaged = [folder for folder in newest.parent.glob("step[0-9]") if folder.name != "step2"]
        assert newest in damaged
        for folder in damaged:
            victim = max(folder.glob("*.pt"), key=lambda f: f.stat().st_size)
            content = bytearray(victim.read_bytes())
            content[len(content) // 2] ^= 1
            victim.write_bytes(content)
        slow.touch()
        job.join()
        result = job.finish()
    assert len(result.events("member_lost")) >= 2
    (restart,) = result.events("restart")
    assert (restart["checkpoint"], restart["slots"][0], len(restart["slots"])) == (str(newest), 3, 2)
    assert steps_of(result.events())[1] == list(range(3, 9)), "not from the newest checkpoint that is whole"
    assert result.exit_code == 0, result.output[-5000:]
    assert_computed(result, reference(4, 1, 4, *ARGUMENTS, own=True))
