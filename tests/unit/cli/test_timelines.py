"""Timelines of a job as a trace for Perfetto, and as a picture of its schedule."""

from __future__ import annotations

import gzip
import json
from datetime import datetime, timedelta, timezone
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bamboo_ds.cli import plot as picture
from bamboo_ds.cli.plot import plot
from bamboo_ds.cli.trace import trace
from bamboo_ds.errors import ConfigError
from bamboo_ds.observe import events as ev
from bamboo_ds.observe.iterations import Recorded
from bamboo_ds.observe.spans import Head, Kind, Span, Timeline, path_for
from bamboo_ds.observe.trace import chrome_trace
from tests.support.recorded import check_rules

pytestmark = pytest.mark.claim("guides/timelines.md")

UTC = 1_800_000_000.0


def timeline_of(rank: int, spans: list[Span]) -> Timeline:
    head = Head(job="gpt", member=f"m{rank}-x", rank=rank, host="h", boot="b", monotonic=0.0, utc=UTC)
    return Timeline(head, UTC, sorted(spans, key=lambda span: (span.begin, -span.end)))


def a_job() -> tuple[list[ev.Event], list[Timeline]]:
    """Iteration 1 from 1 s to 2 s; 2 from 2 s on, in which ``m1`` dies at 2.4 s, the others pause, and end at 4 s."""
    first = [
        Span(Kind.ITERATION, 1, 1.0, 2.0),
        Span(Kind.FORWARD, 1, 1.0, 1.2, (0, 0), 0, 0),
        Span(Kind.REDUNDANT_FORWARD, 1, 1.2, 1.4, (0, 1), 0, 0),
        Span(Kind.RECV_GRAD, 1, 1.4, 1.6, (0, 0), 0, 0),
        Span(Kind.BACKWARD, 1, 1.6, 1.8, (0, 0), 0, 0),
        Span(Kind.COMMIT, 1, 1.8, 1.9, (0, 0)),
        Span(Kind.STEP, 1, 1.9, 2.0, (0, 0)),
        Span(Kind.ITERATION, 2, 2.0, 4.0),
        Span(Kind.FORWARD, 2, 2.0, 2.2, (0, 0), 0, 0),
        Span(Kind.RECV_GRAD, 2, 2.2, 2.45, (0, 0), 0, 0, cut=True),
        Span(Kind.AWAIT_PLAN, 2, 2.45, 2.6),
        Span(Kind.REBUILD, 2, 2.6, 2.7),
        Span(Kind.AGREE, 2, 2.7, 2.8),
        Span(Kind.FORWARD, 2, 2.8, 3.0, (0, 1), 0, 0, redone=True),
        Span(Kind.BACKWARD, 2, 3.0, 3.2, (0, 1), 0, 0),
        Span(Kind.BACKWARD, 2, 3.2, 3.4, (0, 0), 0, 0),
    ]
    second = [
        Span(Kind.ITERATION, 1, 1.05, 2.0),
        Span(Kind.FORWARD, 1, 1.2, 1.4, (0, 1), 0, 0),
        Span(Kind.BACKWARD, 1, 1.4, 1.6, (0, 1), 0, 0),
        Span(Kind.FORWARD, 2, 2.2, 2.4, (0, 1), 0, 0),
    ]

    def at(seconds: float, **more: Any) -> dict[str, Any]:
        time = datetime.fromtimestamp(UTC, timezone.utc) + timedelta(seconds=seconds)
        return {"job": "gpt", "time": time, "member": "m0-x", "epoch": 1, **more}

    plan = {"members": ["m0-x"], "owners": ["m0-x"] * 2, "shadows": [None] * 2, "pipelines": 1, "lost": ["m1-x"]}
    losses = {"frc_done": 0, "frc_total": 1, "loss": 1.0}
    recovered = {"pause_seconds": 0.35, "plan_seconds": 0.15, "rebuild_seconds": 0.2, "redo_seconds": 1.2}
    recovered |= {"detection_seconds": 0.05, "forwards_redone": 1, "backwards_redone": 0, "mode": "resume"}
    told: list[ev.Event] = [
        ev.RunStarted(**at(0.5, member=None), members=2, command=["x"]),
        ev.MemberJoined(**at(0.6), member_id="m1-x", host="h", rank=1),
        ev.Step(**at(2.0), step=1, seconds=1.0, **losses),
        ev.MemberLost(**at(2.55), member_id="m1-x", reason="signal", detail="SIGKILL", detection_seconds=0.05),
        ev.PlanWritten(**at(2.56, epoch=2), reason="lost m1-x (signal: SIGKILL)", **plan),
        ev.TakeoverDone(**at(2.57, epoch=2), role=(0, 1), from_="m1-x", to="m0-x", seconds=0.07),
        ev.Step(**at(3.9, epoch=2), step=2, seconds=1.9, **losses),
        ev.Recovered(**at(4.0, epoch=2), step=2, **recovered),
        ev.ReplicaBuilt(**at(4.5, epoch=2), step=2, role=(0, 1), seconds=0.6, bytes=5),
        ev.ReplicaBuilt(**at(4.6, epoch=2), step=2, role=(0, 0), seconds=0.6, bytes=5),
        ev.CheckpointSaved(**at(5.0, epoch=2), step=2, path="/c", seconds=0.5, bytes=9),
        ev.Reconfigured(**at(5.5, epoch=3), step=2, pause_seconds=0.1, previous=2),
        ev.RunFinished(**at(6.0, member=None), exit_code=0, run_seconds=5.5),
    ]
    return told, [timeline_of(0, first), timeline_of(1, second)]


def test_a_trace_has_every_span_once_on_tracks_in_order() -> None:
    told, timelines = a_job()
    found = chrome_trace(told, timelines)
    threads = check_rules(found)
    shown = [e for e in found["traceEvents"] if e["ph"] == "X" and e["cat"] != "event"]
    assert len(shown) == sum(len(timeline.spans) for timeline in timelines)
    origin = UTC + 0.5
    expected = sorted((round((t.utc(s.begin) - origin) * 1e6), s.step) for t in timelines for s in t.spans)
    assert sorted((round(e["ts"]), e["args"]["step"]) for e in shown) == expected
    assert [e["ts"] for e in found["traceEvents"] if e["ph"] != "M"] == sorted(
        e["ts"] for e in found["traceEvents"] if e["ph"] != "M"
    )
    names = {(e["name"], threads[e["pid"], e["tid"]]) for e in shown}
    assert {
        ("F 0", "stage 0"),
        ("rF 0", "stage 1"),
        ("F 0 (redone)", "stage 1"),
        ("RecvGrad 0 (cut)", "stage 0"),
    } < names
    assert {("Commit", "commit, pauses, checkpoints"), ("AwaitPlan", "commit, pauses, checkpoints")} < names
    assert ("iteration 2", "iterations") in names
    order = sorted(place for place in threads if place[0] == 2)
    assert [threads[place] for place in order][:2] == ["iterations", "commit, pauses, checkpoints"]
    assert [threads[place] for place in order][-2:] == ["stage 0", "stage 1"]


def test_a_trace_of_events_alone() -> None:
    told, _ = a_job()
    found = chrome_trace(told)
    threads = check_rules(found)
    shown = {(e["name"], threads[e["pid"], e["tid"]]): e for e in found["traceEvents"] if e["ph"] == "X"}
    recoveries = "recoveries (events)"
    assert set(shown) == {
        *((f"step {n}", "steps") for n in (1, 2)),
        *((part, recoveries) for part in ("recovery", "detection", "plan", "rebuild", "redone and remaining work")),
        ("change of plan", recoveries),
    }
    whole = shown["recovery", recoveries]
    assert (whole["ts"], whole["dur"]) == (pytest.approx(1.9e6, abs=1), pytest.approx(1.6e6, abs=1))
    parts = [shown[name, recoveries] for name in ("detection", "plan", "rebuild", "redone and remaining work")]
    assert all(a["ts"] + a["dur"] == pytest.approx(b["ts"], abs=1) for a, b in pairwise(parts))
    assert whole["args"]["forwards redone"] == 1
    begun = {e["name"] for e in found["traceEvents"] if e["ph"] == "b"}
    assert begun == {"copy of stage 1 (pipeline 0)", "copy of stage 0 (pipeline 0)", "checkpoint of step 2"}
    assert {e["name"] for e in found["traceEvents"] if e["ph"] == "i"} >= {
        "loss of m1-x",
        "plan 2",
        "takeover of stage 1",
    }
    check_rules(chrome_trace([]))


def test_the_iterations_that_are_drawn() -> None:
    told, timelines = a_job()
    assert Recorded(told, timelines).chosen() == [1, 2]
    assert Recorded([], timelines).chosen() == [1], "without a loss the newest undisturbed one"
    with pytest.raises(ConfigError, match=r"observe\.timeline"):
        Recorded(told, []).chosen()
    with pytest.raises(ConfigError, match="--step 9: that iteration is not recorded; these are: 1, 2"):
        Recorded(told, timelines).grid(9)


def test_the_grid_of_a_takeover() -> None:
    told, timelines = a_job()
    calm, hit = (Recorded(told, timelines).grid(step) for step in (1, 2))
    assert (calm.seconds, calm.notes) == (pytest.approx(1.0), ())
    assert [(row.member, [(x.role, x.replica) for x in row.lanes], row.died) for row in calm.rows] == [
        ("m0-x", [((0, 0), False), ((0, 1), True)], None),
        ("m1-x", [((0, 1), False)], None),
    ]
    heir, victim = hit.rows
    assert victim.died == pytest.approx(0.45), "no later than the others' pause, although the leader told of it later"
    assert [(cell.style, cell.label) for cell in heir.lanes[1].cells] == [("redone", "0"), ("backward", "0")]
    assert [cell.style for cell in heir.across] == [
        "pause: new plan",
        "pause: new connections",
        "pause: agreement",
    ]
    assert heir.lanes[1].cells[0].begin == pytest.approx(0.8)
    assert hit.notes == ("lost m1-x (signal: SIGKILL)", "pause 350 ms", "redone: 1 forward, 0 backward")


def test_of_several_runs_in_a_file_the_last_one_counts() -> None:
    told, timelines = a_job()
    later = [timeline_of(2, [Span(Kind.ITERATION, 1, 50.0, 51.0), Span(Kind.FORWARD, 1, 50.0, 50.2, (0, 0), 0, 0)])]
    assert Recorded(told, [*timelines, *later]).chosen() == [2], "iteration 1 of the later run came after the loss"
    assert Recorded([], [*timelines, *later]).chosen() == [1]
    assert Recorded(told, [*timelines, *later]).grid(1).notes == ()


def test_a_step_that_was_done_twice_is_the_last_one() -> None:
    told, timelines = a_job()
    again = timeline_of(2, [Span(Kind.ITERATION, 1, 9.0, 9.5), Span(Kind.FORWARD, 1, 9.0, 9.2, (0, 0), 0, 0)])
    assert [row.member for row in Recorded(told, [*timelines, again]).grid(1).rows] == ["m2-x"]


def saved(folder: Path) -> Path:
    """The job's files."""
    told, timelines = a_job()
    events = folder / "events.jsonl"
    events.write_text("".join(event.to_json() + "\n" for event in told))
    for timeline in timelines:
        lines = [timeline.head.model_dump_json(), *(span.to_json() for span in timeline.spans)]
        path_for(events, timeline.member).write_text("\n".join(lines) + "\n")
    return events


def test_the_command_trace(tmp_path: Path) -> None:
    events = saved(tmp_path)
    for name in ("t.json", "t.json.gz"):
        done = CliRunner().invoke(trace, [str(events), "-o", str(tmp_path / name)])
        assert done.exit_code == 0 and "13 events, 20 spans of 2 members" in done.output, done.output
    plain = (tmp_path / "t.json").read_bytes()
    check_rules(json.loads(plain))
    assert gzip.decompress((tmp_path / "t.json.gz").read_bytes()) == plain
    for output, told in ((tmp_path / "t.pftrace", r"\.json"), (tmp_path / "no" / "t.json", "cannot write")):
        with pytest.raises(ConfigError, match=told):
            CliRunner().invoke(trace, [str(events), "-o", str(output)], standalone_mode=False, catch_exceptions=False)
    events.write_text("{}\n")
    with pytest.raises(ConfigError, match=r"events\.jsonl:1"):
        CliRunner().invoke(trace, [str(events), "-o", str(tmp_path / "t.json")], catch_exceptions=False)


def test_the_command_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events, png, drawn = saved(tmp_path), tmp_path / "grid.png", []
    done = CliRunner().invoke(plot, [str(events), "-o", str(png)])
    assert done.exit_code == 0 and png.read_bytes().startswith(b"\x89PNG"), done.output
    monkeypatch.setattr(picture, "draw", lambda path, grids, title: drawn.append(([g.step for g in grids], title)))
    for more in ([], ["--step", "2", "--title", "T"]):
        assert CliRunner().invoke(plot, [str(events), "-o", str(png), *more]).exit_code == 0
    assert drawn == [([1, 2], "job gpt"), ([2], "T")]
    monkeypatch.setattr(picture, "draw", lambda path, grids, title: drawn.append([r.member for r in grids[0].rows]))
    assert CliRunner().invoke(plot, [str(events), "-o", str(png), "--member", "m1"]).exit_code == 0
    assert drawn[-1] == ["m1-x"]
    with pytest.raises(ConfigError, match="--member m7: iteration 1 is recorded of m0-x, m1-x"):
        CliRunner().invoke(plot, [str(events), "-o", str(png), "--member", "m7"], catch_exceptions=False)
