"""Goodput: every second of every member is accounted to exactly one category."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from bamboo_ds.cli.goodput import goodput as command
from bamboo_ds.errors import ConfigError, ProtocolError
from bamboo_ds.observe import events as ev
from bamboo_ds.observe.goodput import Accountant, account
from bamboo_ds.observe.goodput.accounted import Accounted, GoodputReport
from bamboo_ds.observe.goodput.lives import Category
from tests.support.written import Written, write

pytestmark = pytest.mark.claim("reference/goodput.md")


def spent(report: GoodputReport, member: str) -> dict[str, float]:
    return {c.value: round(s, 6) for c, s in report.members[member].categories.items() if round(s, 6)}


def assert_complete(report: GoodputReport) -> None:
    """Intervals of a member neither overlap nor leave gaps within a life; sums are those of the parts."""
    for member, intervals in report.intervals.items():
        assert all(interval.begin < interval.end for interval in intervals)
        assert all(a.end <= b.begin for a, b in pairwise(intervals))
        lived = sum(interval.end - interval.begin for interval in intervals)
        mine = report.members[member]
        assert mine.seconds == pytest.approx(lived) == pytest.approx(sum(mine.categories.values()))
    assert report.seconds == pytest.approx(sum(mine.seconds for mine in report.members.values()))
    assert report.seconds == pytest.approx(sum(report.categories.values()))
    for category, seconds in report.categories.items():
        assert seconds == pytest.approx(sum(mine.categories[category] for mine in report.members.values()))
        assert seconds >= 0


def lossy() -> Written:
    """Steps of 2 s from 10 s on. At 17.5 s, in the fourth one, ``b`` dies, and ``a`` takes over from it."""
    job = Written("a", "b")
    job.steps(1, 3, at=10)
    job.lose(18, "b")
    job.plan(18, 2, ["a"], owners=["a", "a"], lost=["b"])
    job.recover(21, 2, "a", step=4, pause=1, redo=2)  # notices at 18, agrees at 19
    job.step(21, 4, seconds=5, epoch=2)
    job.finish(22)
    return job


def test_a_loss() -> None:
    report = account(lossy().events)
    # The step had lasted 1.5 s, and lasts 2 s more after the agreement: 1.5 s of it are redone.
    assert spent(report, "a") == {
        "initialization": 10,
        "productive": 6 + 1.5 + 0.5,
        "detection_and_agreement": 0.5 + 1,
        "redone": 1.5,
        "other": 1,
    }
    assert spent(report, "b") == {"initialization": 10, "productive": 6, "wasted_progress_from_disruption": 1.5}
    assert (report.seconds, report.wall_seconds, report.steps, report.losses) == (39.5, 22, 4, 1)
    assert report.goodput == pytest.approx(14 / 39.5)
    assert report.steps_per_second == pytest.approx(4 / 22)
    assert_complete(report)


def test_a_loss_that_is_noticed_late_is_waiting_for_it() -> None:
    """The interrupted step cannot have computed for longer than an ordinary one."""
    job = Written("a", "b")
    job.steps(1, 3, at=10)
    job.lose(30, "b", detection=None)
    job.plan(30, 2, ["a"], owners=["a", "a"], lost=["b"])
    job.recover(33, 2, "a", step=4, pause=1, redo=2)
    job.step(33, 4, seconds=17, epoch=2)
    job.finish(33)
    expected = {"initialization": 10, "productive": 6 + 2, "detection_and_agreement": 13, "redone": 2}
    assert spent(account(job.events), "a") == expected


@pytest.mark.parametrize("after_step", [False, True])
def test_a_member_that_pauses_before_the_leader_is_sure_waits_once(after_step: bool) -> None:
    """``b`` falls silent at 17.5 s. ``a`` misses it from 18 s on, the leader takes it for lost at 20 s."""
    job = Written("a", "b")
    job.steps(1, 3, at=10)
    job.lose(20, "b", detection=2.5)
    job.plan(20, 2, ["a"], owners=["a", "a"], lost=["b"])
    told = [
        lambda: job.recover(23, 2, "a", step=4, pause=3, redo=2, detection=2.5),
        lambda: job.step(23, 4, seconds=7, epoch=2),
    ]
    for tell in reversed(told) if after_step else told:
        tell()
    job.finish(23)
    expected = {"initialization": 10, "productive": 6 + 1.5 + 0.5, "detection_and_agreement": 3.5, "redone": 1.5}
    assert spent(account(job.events), "a") == expected


def test_a_step_that_lasts_no_longer_than_others_has_redone_nothing() -> None:
    job = Written("a", "b")
    job.steps(1, 3, at=10)
    job.lose(17, "b")
    job.plan(17, 2, ["a"], owners=["a", "a"], lost=["b"])
    job.recover(18.75, 2, "a", step=4, pause=0.25, redo=1.5)
    job.step(18.75, 4, seconds=2.75, epoch=2)
    job.finish(18.75)
    assert spent(account(job.events), "a") == {"initialization": 10, "productive": 8, "detection_and_agreement": 0.75}


@pytest.mark.parametrize(("waited", "saving"), [(True, 3), (False, 0.5)])
def test_the_write_of_a_checkpoint_counts_where_training_waits_for_it(waited: bool, saving: float) -> None:
    job = Written("a")
    job.steps(1, 2, at=10)
    job.add(ev.CheckpointSaved, 17, step=2, path="/c/2", seconds=2.5, bytes=1, waited=waited)
    job.step(19, 3)
    job.finish(19)
    others = {"other": 3 - saving} if saving < 3 else {}
    expected = {"initialization": 10, "productive": 6, "unproductive_checkpoint_save_time": saving, **others}
    assert spent(account(job.events), "a") == expected


def test_a_redo_without_a_step_to_compare_with_is_all_redone() -> None:
    job = Written("a", "b")
    job.lose(12, "b")
    job.plan(12, 2, ["a"], owners=["a", "a"], lost=["b"])
    job.recover(16, 2, "a", step=1, pause=1, redo=3)
    job.step(16, 1, seconds=6, epoch=2)
    job.finish(16)
    expected = {"initialization": 10, "productive": 1.5, "detection_and_agreement": 1.5, "redone": 3}
    assert spent(account(job.events), "a") == expected


def test_a_member_joins_as_a_standby_and_shadows_later() -> None:
    job = Written("a", "b")
    job.steps(1, 2, at=10)
    job.join(13, 2, "c")
    job.plan(13, 2, "abc", owners="ab", shadows="ba")
    job.reconfigure(15, 2, 1, "a", "b")
    job.steps(3, 4, at=15, epoch=2)
    built = {"step": 4, "role": (0, 0), "seconds": 1.5, "bytes": 1}
    job.add(ev.ReplicaBuilt, 17, 2, "c", **built)
    job.add(ev.ReplicaBuilt, 17, 2, "a", **built)  # it computes meanwhile
    job.plan(17, 3, "abc", owners="ab", shadows="ca")
    job.reconfigure(20, 3, 1, "a", "b", "c")
    job.step(22, 5, epoch=3)
    job.plan(22, 4, "abc", owners="ab", shadows="ca", lent=[(0, 1, 2)])
    job.reconfigure(23, 4, 1, "a", "b", "c")
    job.step(25, 6, epoch=4)
    job.finish(25)
    report = account(job.events)
    assert spent(report, "a") == {"initialization": 10, "productive": 12, "reconfiguration": 3}
    # Its shadowing is redundancy until a part of the stage is its own.
    assert spent(report, "c") == {
        "initialization": 2,
        "standby": 3.5,
        "reconfiguration": 1.5,
        "redundancy": 3,
        "productive": 2,
    }
    assert_complete(report)


def restarted(checkpoint: str | None) -> Written:
    """Saved after step 2, at 14 s; both holders of a stage die at 17.5 s; it starts again at 25 s, ``c`` takes part."""
    job = Written("a", "b", "c")
    job.steps(1, 2, at=10)
    job.step(17, 3)
    job.add(ev.CheckpointSaved, 17, step=2, path="/c/2", seconds=2.5, bytes=1)
    job.lose(18, "a")
    job.lose(18, "b")
    job.plan(18, 2, ["c"], owners=["a", "b", "c"], lost=["a", "b"])
    job.add(ev.Fatal, 19, 2, stages=[(0, 0)], members=["a", "b"], checkpoint=checkpoint)
    job.add(ev.Restart, 25, 2, "c", number=1, slots=[2], checkpoint=checkpoint, step=3)
    job.join(30, 3, "d", "e", "f")
    job.plan(30, 3, "def", owners="def")
    return job


def test_a_restart_repeats_what_came_after_its_checkpoint() -> None:
    job = restarted("/c/2")
    job.steps(3, 4, at=40, epoch=3)
    job.finish(44)
    report = account(job.events)
    assert spent(report, "c") == {
        "initialization": 10,
        "productive": 4,
        "unproductive_checkpoint_save_time": 0.5,  # the copy, between the steps
        "other": 0.5,
        "wasted_progress_from_disruption": 2 + 0.5,  # the third step, and the interrupted one
        "detection_and_agreement": 1.5,
        "infrastructure_recovery_from_disruption": 6,
    }
    lost = {"wasted_progress_from_disruption": 2.5, "unproductive_checkpoint_save_time": 0.5, "other": 0.5}
    assert spent(report, "a") == {"initialization": 10, "productive": 4, **lost}
    assert spent(report, "d") == {"initialization": 15, "productive": 4}
    assert (report.steps, report.repeated_steps, report.restarts, report.losses) == (4, 1, 1, 2)
    assert_complete(report)


@pytest.mark.parametrize(("checkpoint", "wasted", "steps"), [(None, 3, 0), ("/c/2", 1, 2), ("/c/other", 0, 3)])
def test_a_restart_that_did_not_get_on(checkpoint: str | None, wasted: int, steps: int) -> None:
    """What it would have repeated is known from its checkpoint, if an event told of that."""
    job = restarted(checkpoint)
    job.finish(31)
    report = account(job.events)
    assert (report.repeated_steps, report.steps) == (wasted, steps)
    assert spent(report, "d") == {"initialization": 6}
    assert_complete(report)


def test_a_script_that_loads_a_checkpoint_repeats_steps() -> None:
    job = Written("a")
    for number, global_step in enumerate((1, 2, 3, 2, 3), 1):
        job.step(10 + 2 * number, number, global_step=global_step)
    job.finish(20)
    report = account(job.events)
    assert spent(report, "a") == {"initialization": 10, "productive": 6, "wasted_progress_from_disruption": 4}
    assert (report.steps, report.repeated_steps) == (3, 2)


def test_steps_that_are_told_twice_or_not_at_all() -> None:
    """Their emitters were lost just then."""
    job = Written("a", "b")
    job.step(12, 1)
    job.step(12.5, 1)
    job.step(20, 4)
    job.finish(20)
    report = account(job.events)
    assert spent(report, "a") == {"initialization": 10, "productive": 10}
    assert report.steps == 4


def test_members_that_are_awaited() -> None:
    job = Written("a", "b")
    job.step(12, 1)
    job.add(ev.MembersAwaited, 20, 1, members=["b"], seconds=6.0)
    job.finish(20)
    report = account(job.events)
    expected = {"initialization": 10, "productive": 2, "infrastructure_recovery_from_disruption": 6, "other": 2}
    assert spent(report, "a") == expected
    assert spent(report, "b") == {"initialization": 10, "productive": 2, "other": 8}


def test_a_member_leaves() -> None:
    job = Written("a", "b")
    job.step(12, 1)
    job.plan(12, 2, ["a"], owners=["a", "a"])
    job.reconfigure(13, 2, 1, "a")
    job.add(ev.MemberLeft, 15, 2, "b", member_id="b", reason="preempt", detail="", seconds=4.0)
    job.step(15, 2, epoch=2)
    job.finish(15)
    report = account(job.events)
    assert spent(report, "a") == {"initialization": 10, "productive": 4, "reconfiguration": 1}
    assert spent(report, "b") == {"initialization": 10, "productive": 2, "reconfiguration": 3}
    assert report.leaves == 1


def test_a_plan_that_does_not_wait_for_a_steps_end() -> None:
    """Nobody is lost; what is done again is told apart as after a loss."""
    job = Written("a", "b")
    job.step(12, 1)
    job.plan(13, 2, ["a", "b"], owners=["b", "a"])
    job.recover(15, 2, "a", 2, pause=0.5, redo=1.5, detection=0)
    job.step(15, 2, seconds=3, epoch=2)
    job.finish(15)
    report = account(job.events)
    assert spent(report, "a") == {"initialization": 10, "productive": 4, "reconfiguration": 0.5, "redone": 0.5}


def test_a_member_that_only_stood_in_for_another_ends_with_its_last_step() -> None:
    """No event tells of its end."""
    job = Written("a", "b")
    job.plan(11, 2, ["a"], owners=["a", "a"])
    job.step(12, 1)
    job.reconfigure(13, 2, 1, "a")
    job.step(15, 2, epoch=2)
    job.finish(16)
    report = account(job.events)
    assert spent(report, "b") == {"initialization": 10, "productive": 2}
    assert report.seconds == 12 + 16 and (report.leaves, report.losses) == (0, 0)


def test_without_a_launcher_and_without_an_end() -> None:
    """Members begin when they join, and end with the last event."""
    job = Written()
    job.join(4, 1, "a")
    job.plan(4, 1, "a", owners="a")
    job.step(12, 1)
    assert spent(account(job.events), "a") == {"initialization": 6, "productive": 2}


def test_jobs_one_after_the_other() -> None:
    job = lossy()
    later = Written("x")
    later.steps(1, 2, at=10)
    later.finish(14)
    moved = [event.model_copy(update={"time": event.time + timedelta(seconds=100)}) for event in later.events]
    report = account([*job.events, *moved])
    assert spent(report, "x") == {"initialization": 10, "productive": 4}
    assert spent(report, "a") == spent(account(job.events), "a")
    assert (report.steps, report.repeated_steps) == (6, 0)


NAMES = st.sampled_from("abcd")
SECONDS = st.floats(0, 20)


@st.composite
def sequences(draw: st.DrawFn) -> list[ev.Event]:
    """Any events at any times, forwards and backwards."""
    job = Written()
    at = 0.0
    for _ in range(draw(st.integers(0, 25))):
        at += draw(st.floats(-2, 10))
        epoch, number, member = draw(st.integers(1, 6)), draw(st.integers(1, 9)), draw(NAMES)
        match draw(st.integers(0, 11)):
            case 0:
                job.add(ev.RunStarted, at, 0, None, members=2, command=["train.py"])
            case 1:
                job.finish(max(0.0, at))
            case 2:
                job.join(at, epoch, member)
            case 3:
                job.lose(at, member, draw(st.none() | SECONDS))
            case 4:
                more = {"reason": "preempt", "detail": "", "seconds": 1.0}
                job.add(ev.MemberLeft, at, epoch, member, member_id=member, **more)
            case 5 | 6:
                members = draw(st.lists(NAMES, min_size=1, unique=True))
                roles = st.lists(st.sampled_from(members), min_size=3, max_size=3)
                shadows = draw(st.just([]) | st.lists(st.none() | st.sampled_from(members), min_size=3, max_size=3))
                lent = draw(st.lists(st.tuples(st.integers(0, 2), st.just(0), st.just(1))))
                job.plan(at, epoch, members, draw(roles), shadows, lent=lent)
            case 7:
                job.recover(at, epoch, member, number, draw(SECONDS), draw(SECONDS))
            case 8:
                job.reconfigure(at, epoch, draw(SECONDS), member)
                more = {"step": number, "role": (0, 0), "seconds": draw(SECONDS), "bytes": 1}
                job.add(ev.ReplicaBuilt, at, epoch, member, **more)
            case 9:
                job.add(ev.MembersAwaited, at, epoch, members=[member], seconds=draw(SECONDS))
            case 10:
                job.step(at, number, draw(SECONDS), epoch, global_step=draw(st.none() | st.integers(1, 9)))
            case 11:
                saved = draw(st.sampled_from(["/c/1", None]))
                if draw(st.booleans()):
                    job.add(ev.Fatal, at, epoch, stages=[(0, 0)], members=[member], checkpoint=saved)
                elif draw(st.booleans()):
                    job.add(ev.Restart, at, epoch, number=1, slots=[0], checkpoint=saved, step=number)
                else:
                    more = {"path": "/c/1", "seconds": draw(SECONDS), "bytes": 1}
                    job.add(ev.CheckpointSaved, at, epoch, step=number, **more)
    return job.events


@given(sequences())
@settings(deadline=None, max_examples=300)
def test_every_second_is_accounted_to_one_category(events: list[ev.Event]) -> None:
    report, running = account(events), Accountant()
    assert_complete(report)
    for event in events:
        running.add(event)
    assert running.snapshot().model_dump() == report.model_dump(include=set(Accounted.model_fields))
    width = report.wall_seconds / 7
    _, members = report.over_time(7)
    for category, counts in members.items():
        assert sum(counts) * width == pytest.approx(report.categories[category], abs=1e-6)


# -- the command ------------------------------------------------------------------------------------------


def test_the_command(tmp_path: Path) -> None:
    path = str(write(tmp_path / "events.jsonl", lossy().events))
    done = CliRunner().invoke(command, [path], catch_exceptions=False)
    assert "goodput 35.44%" in done.output and "2 members in 22.0 s, 4 steps, 1 losses" in done.output
    assert {category.value for category in Category} <= set(done.output.split())
    done = CliRunner().invoke(command, [path, "--json"], catch_exceptions=False)
    told = json.loads(done.output)
    assert told["categories"]["redone"] == pytest.approx(1.5)
    assert told["members"]["b"]["seconds"] == pytest.approx(17.5) and "intervals" not in told


def test_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = tmp_path / "goodput.png"
    arguments = [str(write(tmp_path / "events.jsonl", lossy().events)), "--png", str(picture)]
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "matplotlib", None)
        with pytest.raises(ConfigError, match=r"bamboo_ds\[benchmarks\]"):
            CliRunner().invoke(command, arguments, catch_exceptions=False)
    pytest.importorskip("matplotlib")
    CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert picture.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="cannot write"):
        CliRunner().invoke(command, [*arguments[:2], str(tmp_path / "no" / "x.png")], catch_exceptions=False)


def test_files_that_cannot_be_accounted(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"event":"step"}\n')
    with pytest.raises(ProtocolError, match=r"events\.jsonl:1: not an event"):
        CliRunner().invoke(command, [str(path)], catch_exceptions=False)
    path.write_text("")
    with pytest.raises(ConfigError, match="no event tells of a member"):
        CliRunner().invoke(command, [str(path)], catch_exceptions=False)
