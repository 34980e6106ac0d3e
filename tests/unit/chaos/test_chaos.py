"""The pure parts of ``bamboo chaos``: schedules, sparing, verification."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from bamboo_ds.chaos import report
from bamboo_ds.chaos.campaign import parse_weights, script_line
from bamboo_ds.chaos.faults import SECONDS, WEIGHTS, Fault, FaultKind, FaultRecord, Target
from bamboo_ds.chaos.schedule import Change, by_rate, by_trace, initial_nodes, parse_script, parse_trace
from bamboo_ds.chaos.sparing import Choice, aim, lost_roles_after, refusal
from bamboo_ds.chaos.verify import verify
from bamboo_ds.cli.main import cli
from bamboo_ds.errors import ConfigError
from bamboo_ds.observe.events import Event, parse_event
from bamboo_ds.topology import Layout, Role, takeover
from tests.support.chaos import at, record, settled

pytestmark = pytest.mark.claim("guides/chaos.md")

# -- schedules --------------------------------------------------------------------------------------------


@given(st.integers(), st.floats(0.1, 1000), st.integers(1, 60))
def test_rates_are_drawn_from_the_seed(seed: int, rate: float, count: int) -> None:
    faults = by_rate(rate, seed, count=count)
    assert faults == by_rate(rate, seed, count=count)
    assert by_rate(rate, seed, count=count + 5)[:count] == faults
    assert [f.number for f in faults] == list(range(count))
    assert all(a.at_s <= b.at_s for a, b in pairwise(faults))
    for fault in faults:
        assert fault.kind in WEIGHTS and 0 <= fault.draw < 1
        low, high = SECONDS.get(fault.kind, (0, 0))
        assert (fault.seconds is None) == (not fault.kind.timed)
        assert fault.seconds is None or low <= fault.seconds <= high * (1 + 1e-9)


def test_rate_is_that_of_the_faults_and_weights_that_of_their_kinds() -> None:
    faults = by_rate(30, 1, duration_s=7200, weights={FaultKind.KILL: 3, FaultKind.STOP: 1, FaultKind.EXIT: 0})
    assert 3300 < len(faults) < 3900 and faults[-1].at_s <= 7200
    kills = sum(f.kind is FaultKind.KILL for f in faults)
    assert {f.kind for f in faults} == {FaultKind.KILL, FaultKind.STOP} and 0.7 < kills / len(faults) < 0.8


@pytest.mark.parametrize("wrong", [{"per_minute": 0}, {"count": None}, {"weights": {FaultKind.KILL: 0}}])
def test_rates_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        by_rate(**{"per_minute": 1.0, "seed": 0, "count": 1, **wrong})


@st.composite
def traces(draw: st.DrawFn) -> list[Change]:
    changes, there, at_ms, number = [], [], 0, 0
    for gap in draw(st.lists(st.integers(0, 3), min_size=1, max_size=40)):
        at_ms += gap * 1000
        if there and draw(st.booleans()):
            changes.append(Change(at_ms, "remove", there.pop(draw(st.integers(0, len(there) - 1)))))
        else:
            number += 1
            there.append(f"n{number}")
            changes.append(Change(at_ms, "add", there[-1]))
    return changes


@given(traces(), st.integers(1, 6), st.integers(1, 8), st.sampled_from([0.5, 1.0, 60.0]))
def test_trace_becomes_joins_and_kills(changes: list[Change], initial: int, limit: int, compress: float) -> None:
    text = "".join(f"{int(c.at_ms)},{c.what},{c.node}\n" for c in changes)
    assert parse_trace(text, "t") == changes
    faults = by_trace(changes, initial, limit, compress)
    running = set(initial_nodes(changes, initial))
    most = max(limit, len(running))
    for fault in faults:
        assert fault.target is not None
        assert fault.kind in (FaultKind.JOIN, FaultKind.KILL_AGENT)
        assert (fault.target.name in running) == (fault.kind is FaultKind.KILL_AGENT)
        (running.add if fault.kind is FaultKind.JOIN else running.remove)(fault.target.name)
        assert len(running) <= most
    present = {c.node for c in changes if c.what == "add"} - {c.node for c in changes if c.what == "remove"}
    assert running <= present and len(running) >= min(len(present), limit, most)
    assert all(
        f.at_s * compress * 1000 + changes[0].at_ms in {c.at_ms for c in changes} for f in faults if compress != 60
    )


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("5,add", "expected ms,add|remove,node"),
        ("5,gone,b", "expected ms,add|remove,node"),
        ("x,add,b", "no number of milliseconds"),
        ("-1,add,b", "no number of milliseconds"),
        ("0,add,b", "is before the line above"),
        ("5,add,a", "a is there already"),
        ("5,remove,b", "b is not there"),
    ],
)
def test_bad_line_of_a_trace_is_named(line: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_trace(f"# nodes\n1,add,a\n\n{line}\n9,add,z\n", "spot.csv")
    assert str(error.value).startswith("spot.csv:4: ") and complaint in str(error.value)


def test_script_is_read_and_ordered() -> None:
    text = '{"at_s": 9, "kind": "kill", "target": 2, "healed": true}\n# later first\n{"at_s": 1, "kind": "stop"}\n'
    first, second = parse_script(text, "s", seed=3)
    assert (first.number, first.kind, first.target) == (0, FaultKind.STOP, None) and first.seconds is not None
    assert (second.number, second.at_s, second.target, second.healed) == (1, 9.0, Target("slot", "2"), True)
    assert parse_script(text, "s", seed=3) == [first, second]
    again = parse_script("\n".join(map(script_line, [first, second])), "s")
    assert [f.kind for f in again] == [FaultKind.STOP, FaultKind.KILL] and again[1].target == Target("slot", "2")


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"at_s": 1', "not JSON"),
        ('{"at_s": -1, "kind": "kill"}', "at_s"),
        ('{"at_s": 1, "kind": "hug"}', "kind"),
        ('{"at_s": 1, "kind": "kill", "who": 1}', "who"),
        ('{"at_s": 1, "kind": "kill", "target": "boss"}', "is no target"),
        ('{"at_s": 1, "kind": "kill", "target": "slot:x"}', "a slot is a number"),
        ('{"at_s": 1, "kind": "kill", "seconds": 2}', "leave out seconds"),
    ],
)
def test_bad_line_of_a_script_is_named(line: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_script(f'{{"at_s": 0, "kind": "join"}}\n{line}\n', "s.jsonl")
    assert str(error.value).startswith("s.jsonl:2: ") and complaint in str(error.value)


@pytest.mark.parametrize("text", ["slot:3", "member:m1-ab", "host:a", "node:n", "owner:1,2", "shadow:0,0", "leader"])
def test_targets_are_written_as_they_are_read(text: str) -> None:
    assert str(Target.parse(text)) == text


def test_weights() -> None:
    assert parse_weights([]) == WEIGHTS
    assert parse_weights(["kill=2", "stop=0.5"]) == {FaultKind.KILL: 2, FaultKind.STOP: 0.5}
    for wrong in (["hug=1"], ["kill=x"], ["kill=-1"]):
        with pytest.raises(ConfigError):
            parse_weights(wrong)


def test_command_prints_the_schedule_without_a_job() -> None:
    shown = CliRunner().invoke(cli, ["chaos", "--rate", "60", "--seed", "5", "--count", "7", "--dry-run"])
    assert shown.exit_code == 0
    assert [json.loads(line)["kind"] for line in shown.output.splitlines()] == [
        fault.kind.value for fault in by_rate(60, 5, count=7)
    ]
    assert isinstance(CliRunner().invoke(cli, ["chaos"]).exception, ConfigError)


# -- sparing ----------------------------------------------------------------------------------------------


def test_neighbours_are_spared_and_others_are_not() -> None:
    situation = settled([record(slot) for slot in range(4)])
    assert refusal(situation, (), ["m1"], Choice()) is None
    assert refusal(situation, ["m1"], ["m3"], Choice()) is None
    assert "nobody would hold (0,1), (0,2)" not in str(refusal(situation, ["m3"], ["m1"], Choice()))
    assert "nobody would hold" in str(refusal(situation, ["m1"], ["m2"], Choice()))
    assert refusal(situation, ["m1"], ["m2"], Choice(spare_holders=False)) is None
    assert "fewer than 3" in str(refusal(situation, ["m1"], ["m3"], Choice(min_members=3)))
    # The leader does not know of the first loss yet, or it does: the answer is the same.
    assert situation.plan is not None
    known = at(takeover(situation.plan, ["m1"]), [record(slot) for slot in (0, 2, 3)])
    assert refusal(known, ["m1"], ["m3"], Choice()) is None
    assert "nobody would hold" in str(refusal(known, ["m1"], ["m0"], Choice()))


def test_the_same_stage_of_another_pipeline_is_a_holder() -> None:
    situation = settled([record(slot) for slot in range(8)], Layout(2, 4))
    plan = situation.plan
    assert plan is not None
    role = Role(0, 1)
    both = [plan.owner(role), str(plan.shadow(role))]
    assert lost_roles_after(plan, both, situation.ready) == ()
    twins = [plan.owner(Role(1, 1)), str(plan.shadow(Role(1, 1)))]
    assert role in lost_roles_after(plan, both + twins, situation.ready)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 2), st.integers(2, 4), st.integers(0, 2), st.lists(st.floats(0, 0.999), min_size=1, max_size=9))
def test_every_stage_keeps_a_holder(pipelines: int, stages: int, standbys: int, draws: list[float]) -> None:
    """Whatever is aimed at before the leader does anything: all of it together leaves no stage without holder."""
    count = pipelines * stages + standbys
    situation = settled([record(slot) for slot in range(count)], Layout(pipelines, stages))
    assert situation.plan is not None and situation.unsettled() is None
    dead: set[str] = set()
    for draw in draws:
        found = aim(Fault(0, 0.0, FaultKind.KILL, draw=draw), situation, dead, Choice())
        if found is not None and found.refusal is None:
            (victim,) = found.members
            assert victim.id not in dead
            dead.add(victim.id)
            assert lost_roles_after(situation.plan, dead, situation.ready) == ()
    assert dead  # the first one can always be spared by its neighbour
    assert situation.unsettled(dead) is not None


def test_targets_mean_members() -> None:
    joiner = record(9, joiner=True)
    records = [*(record(slot) for slot in range(5)), joiner]
    base = settled(records[:5], Layout(1, 4))
    situation = replace(base, members={r.id: r for r in records})
    assert situation.plan is not None

    def hit(text: str, kind: FaultKind = FaultKind.KILL, choice: Choice | None = None) -> list[str]:
        found = aim(Fault(0, 0.0, kind, Target.parse(text)), situation, (), choice or Choice(spare_holders=False))
        return [r.id for r in found.members] if found else []

    assert hit("slot:2") == ["m2"] and hit("member:m3") == ["m3"] and hit("leader") == ["m0"]
    assert hit("standby") == ["m4"] and hit("joiner") == ["m9"]
    assert hit("owner:0,1") == ["m1"] and hit("shadow:0,1") == [str(situation.plan.shadow(Role(0, 1)))]
    assert hit("owner:7,1") == [] and hit("slot:77") == [] and hit("node:x") == []
    assert hit("node:x", choice=Choice(False, nodes={"x": "m2"})) == ["m2"]
    hosts = Choice(False, slots_per_host=2)
    assert hit("host:host0", FaultKind.HOST, hosts) == ["m0", "m1"]
    assert hit("slot:3", FaultKind.HOST, hosts) == ["m2", "m3"] and hit("host:host4", FaultKind.HOST, hosts) == ["m9"]
    away = Choice(False, reachable=lambda r: r.slot != 2)
    assert hit("slot:2", choice=away) == []


# -- verification -----------------------------------------------------------------------------------------


def event(kind: str, at_s: float, /, **fields: Any) -> Event:
    when = datetime.fromtimestamp(1000 + at_s, timezone.utc).isoformat()
    values = {"job": "j", "member": "m0", "epoch": 1, "event": kind, "time": when, **fields}
    return parse_event(json.dumps(values))


def step(number: int, seconds: float, member: str = "m0", loss: float = 1.0) -> Event:
    return event("step", seconds, member=member, step=number, loss=loss, seconds=0.1, frc_done=0, frc_total=0)


def plan_event(
    epoch: int, seconds: float, members: Sequence[str], lost: Sequence[str] = (), bare: bool = False
) -> Event:
    ring = [*members[1:], members[0]]
    return event(
        "plan",
        seconds,
        epoch=epoch,
        members=list(members),
        owners=list(members),
        shadows=[None if bare else m for m in ring],
        lost=list(lost),
        pipelines=1,
        reason="",
    )


def lost_event(member: str, seconds: float, reason: str = "signal") -> Event:
    return event("member_lost", seconds, member_id=member, reason=reason, detail="SIGKILL", detection_seconds=0.01)


def kill(member: str, at_s: float, /, **more: Any) -> FaultRecord:
    values = {"number": 0, "kind": "kill", "planned_s": 0, "begun_s": 0, "time": 1000 + at_s, "members": [member]}
    return FaultRecord.model_validate({**values, "outcome": "injected", "confirmed": True, **more})


def good_run() -> list[Event]:
    recovered = {"step": 3, "detection_seconds": 0.01, "plan_seconds": 0.1, "rebuild_seconds": 0.1, "mode": "resume"}
    recovered |= {"forwards_redone": 1, "backwards_redone": 2}
    return [
        event("run_started", 0, members=3, command=["x"], member=None),
        plan_event(1, 0.5, ["m0", "m1", "m2"]),
        *(step(n, n) for n in (1, 2)),
        lost_event("m1", 2.5),
        plan_event(2, 2.6, ["m0", "m2"], ["m1"], bare=True),
        event("recovered", 3.2, epoch=2, pause_seconds=0.2, redo_seconds=0.4, **recovered),
        event("recovered", 3.2, epoch=2, pause_seconds=0.3, redo_seconds=0.1, member="m2", **recovered),
        step(3, 3.2),
        plan_event(3, 3.3, ["m0", "m2"]),
        event("reconfigured", 3.4, epoch=3, step=3, pause_seconds=0.05, previous=2),
        *(step(n, n) for n in (4, 5)),
        event("run_finished", 6, exit_code=0, run_seconds=6, member=None),
    ]


def test_good_run_is_verified(tmp_path: Path) -> None:
    records = [kill("m1", 2.45)]
    verdict = verify(good_run(), records, finished=True)
    assert verdict.problems == [] and verdict.notes == []
    (effect,) = verdict.effects
    assert effect.lost == ("m1",) and (effect.pause_s, effect.redo_s) == (0.3, 0.4)
    assert effect.healed_steps == 1 and effect.healed_s == pytest.approx(0.8)
    assert effect.delay_s == pytest.approx(0.2) and verdict.healing_s == [0.05]
    report.save_json(tmp_path / "r.json", verdict, records)
    rows = json.loads((tmp_path / "r.json").read_text())["by_kind"]
    assert [(row["kind"], row["injected"], row["members_lost"]) for row in rows] == [("kill", 1, 1)]
    assert report.table(verdict, records, "t").row_count == 2


def test_notice_before_the_admission() -> None:
    """The leader admits a member that ends since it was told to leave."""
    joined = event("member_joined", 2.3, member_id="m1", host="h", rank=1)
    events = sorted([*good_run(), joined], key=lambda e: e.time)
    for at_s, problems in ((2.2, 0), (2.6, 1)):
        notice = kill("m1", at_s, kind=FaultKind.NOTICE)
        verdict = verify(events, [notice], finished=True)
        assert len(verdict.problems) == problems and len(verdict.notes) == 1 - problems, verdict


def _without(kind: str) -> list[Event]:
    return [e for e in good_run() if e.event != kind]


@pytest.mark.parametrize(
    ("events", "records", "problem"),
    [
        (_without("run_finished"), [kill("m1", 2.4)], "did not say how it ended"),
        (_without("step"), [kill("m1", 2.4)], "no step was done"),
        (good_run(), [], "m1 was lost (signal: SIGKILL) without a fault that hit it"),
        (good_run(), [kill("m1", 2.4, kind=FaultKind.STOP, seconds=0.3)], "though it was hit for 0.30 s only (stop)"),
        (good_run(), [kill("m1", 2.4), kill("m2", 4.5, number=1)], "m2 was hit by kill, but the last plan lists it"),
        (good_run(), [kill("m1", 2.4, confirmed=False)], "was not confirmed"),
        (good_run(), [kill("m1", 2.4), kill("", 3, kind=FaultKind.JOIN, outcome="failed")], "failed"),
        ([*good_run(), step(7, 7)], [kill("m1", 2.4)], "step 7 came after step 5"),
        ([*good_run(), step(5, 7)], [kill("m1", 2.4)], "step 5 was done twice"),
        ([*good_run(), plan_event(3, 7, ["m0", "m2"])], [kill("m1", 2.4)], "epoch 3 was written after that of 3"),
        ([*good_run(), plan_event(4, 7, ["m0", "m1"])], [kill("m1", 2.4)], "m1 is a member again in epoch 4"),
        ([event("run_started", 0, members=1, command=[]), *good_run()], [kill("m1", 2.4)], "started 2 times"),
        ([*good_run(), event("fatal", 7, stages=[[0, 1]], members=["m1"], checkpoint=None)], [kill("m1", 2)], "fatal"),
    ],
)
def test_what_is_wrong_is_found(events: list[Event], records: list[FaultRecord], problem: str) -> None:
    assert any(problem in found for found in verify(events, records, finished=True).problems)


def test_a_speaker_that_dies_may_leave_a_gap_or_a_repetition() -> None:
    begin = [plan_event(1, 0, ["m0", "m1"]), step(1, 1), step(2, 2)]
    end = [lost_event("m0", 2.1), plan_event(2, 2.2, ["m1"], ["m0"])]
    for following in (step(2, 3, "m1"), step(4, 3, "m1")):
        verdict = verify([*begin, *end, following], [kill("m0", 2)], finished=False)
        assert verdict.problems == [] and len(verdict.notes) == 1
    other = verify([*begin, *end, step(2, 3, "m1", loss=2.0)], [kill("m0", 2)], finished=False)
    assert other.problems == ["step 2 was done twice: losses 1.0 and 2.0"]
