"""Events and logs: what is written, by several processes at once, can be read back strictly."""

from __future__ import annotations

import json
import logging
import re
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, get_args

import jsonschema
import pytest
from pydantic import ValidationError

from bamboo_ds.errors import ConfigError, ProtocolError
from bamboo_ds.observe import events, logs
from bamboo_ds.observe.events import EventWriter, parse_event, read_events
from bamboo_ds.observe.tail import EventTail
from tests.support.docs import events_schema

pytestmark = pytest.mark.claim("concepts.md", "reference/cli.md", "reference/events.md")

COMMON: dict[str, Any] = {"job": "gpt", "member": "m0", "epoch": 3}
SAMPLES: list[events.Event] = [
    events.RunStarted(job="gpt", epoch=0, members=4, command=["train.py", "--steps", "5"]),
    events.RunFinished(job="gpt", epoch=0, exit_code=0, run_seconds=12.5),
    events.MemberJoined(**COMMON, member_id="m1", host="h", rank=1),
    events.MemberLost(**COMMON, member_id="m1", reason="signal", detail="SIGKILL", detection_seconds=0.031),
    events.MemberFailed(
        **COMMON,
        member_id="m1",
        host="b",
        rank=1,
        exit_code=3,
        reason="exit",
        detail="3",
        error="RuntimeError: shapes",
        log="/logs/gpt/worker-1.log",
    ),
    events.NoticeReceived(
        **COMMON, kind="preempt", source="aws", deadline_seconds=119.5, detail="spot instance-action", leaves=True
    ),
    events.MemberLeft(**COMMON, member_id="m0", reason="preempt", detail="aws: spot instance-action", seconds=3.5),
    events.PlanWritten(
        **COMMON, members=["m0"], owners=["m0", "m0"], shadows=[None, "m0"], lost=["m1"], reason="takeover"
    ),
    events.MemoryShort(**COMMON, roles=[(0, 1)], members=["m0"]),
    events.TakeoverPlanned(**COMMON, role=(0, 1), from_="m1", to="m0"),
    events.TakeoverDone(**COMMON, role=(0, 1), from_="m1", to="m0", seconds=0.3),
    events.Recovered(
        **COMMON,
        step=7,
        pause_seconds=0.3,
        detection_seconds=None,
        plan_seconds=0.02,
        rebuild_seconds=0.05,
        redo_seconds=0.2,
        forwards_redone=2,
        backwards_redone=3,
        mode="resume",
    ),
    events.Reconfigured(**COMMON, step=7, pause_seconds=0.02, previous=2),
    events.MembersAwaited(**COMMON, members=["m1"], seconds=120.0),
    events.ReplicaBuilt(**COMMON, step=7, role=(0, 1), seconds=1.5, bytes=1 << 20),
    events.ReplicasPlaced(**COMMON, step=1, parked=False, reason="redundancy.park is false", bytes=1 << 20),
    events.Step(**COMMON, step=7, loss=2.5, seconds=0.1, frc_done=3, frc_total=4),
    events.CollectiveIncomplete(
        **COMMON, step=7, operation="allreduce", ranks=[0, 1], lost_ranks=[1], moved_ranks=[], place="train.py:3 in f"
    ),
    events.IteratorsDiffer(**COMMON, step=0, call="train_batch"),
    events.ReplicaVerified(**COMMON, step=7, role=(0, 1), checksum="ab"),
    events.ReplicaMismatch(**COMMON, step=7, role=(0, 1), expected="ab", found="cd", tensors=["parameter 0.weight"]),
    events.MemberCorrupt(
        **COMMON, step=7, member_id="m1", role=(0, 1), copy_of="owner", tensors=["parameter 0.weight"]
    ),
    events.ExactMismatch(**COMMON, step=2, role=(0, 1), found="replica", tensors=["counter global_steps (3 and 2)"]),
    events.ExactChecked(**COMMON, step=3, steps=3, stages=4, tensors=618, not_rehearsed=[(0, 3)]),
    events.RedundancyExhausted(**COMMON, step=7, role=(0, 1), dropped=2, reason="out of memory"),
    events.CheckpointSaved(**COMMON, step=7, path="/c/step7", seconds=0.4, bytes=1 << 20),
    events.CheckpointFailed(**COMMON, step=7, path="/c/step7", own=True, reason="No space left on device"),
    events.Fatal(**COMMON, stages=[(0, 1)], members=["m0", "m1"], checkpoint=None),
    events.Restart(**COMMON, number=1, slots=[0, 2], checkpoint="/c/step7", step=9),
]
TAKEOVER = next(sample for sample in SAMPLES if isinstance(sample, events.TakeoverPlanned))


def test_every_kind_goes_to_a_file_and_back(tmp_path: Path) -> None:
    assert {type(sample) for sample in SAMPLES} == set(get_args(events.Event))
    with EventWriter(tmp_path / "events.jsonl") as writer:
        for sample in SAMPLES:
            writer.emit(sample)
    assert list(read_events(tmp_path / "events.jsonl")) == SAMPLES


def test_the_documented_form() -> None:
    moment = datetime(2030, 1, 2, 3, 4, 5, 0, timezone(timedelta(hours=2)))
    event = events.TakeoverPlanned(**COMMON, time=moment, role=(0, 1), from_="m1", to="m0")
    assert json.loads(event.to_json()) == {
        "schema": 1,
        "event": "takeover_planned",
        "job": "gpt",
        "time": "2030-01-02T01:04:05.000000Z",
        "member": "m0",
        "epoch": 3,
        "role": [0, 1],
        "from": "m1",
        "to": "m0",
    }
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", json.loads(SAMPLES[0].to_json())["time"])


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_diverged_loss_can_be_told(loss: float) -> None:
    event = events.Step(**COMMON, step=7, loss=loss, seconds=0.1, frc_done=0, frc_total=0)
    back = parse_event(json.dumps(json.loads(event.to_json(), parse_constant=pytest.fail)))
    assert isinstance(back, events.Step) and repr(back.loss) == repr(loss)


def test_fields_are_checked_when_written() -> None:
    with pytest.raises(ValidationError):
        events.MemberLost(**COMMON, member_id="m1", reason="boredom", detail="", detection_seconds=None)  # type: ignore[arg-type]
    with pytest.raises(ValidationError):
        events.Step(**COMMON, step=-1, loss=0.0, seconds=0.1, frc_done=0, frc_total=0)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{}\n", r":2: .*event"),
        (b"not json\n", r":2: "),
        (b'{"event": "party"}\n', r":2: .*party"),
        (TAKEOVER.to_json().replace('"to"', '"too"').encode() + b"\n", r":2: .*(to|too)"),
        (TAKEOVER.to_json().replace('"schema":1', '"schema":2').encode() + b"\n", r":2: .*schema"),
        (TAKEOVER.to_json().replace('Z"', '"').encode() + b"\n", r":2: .*zone"),
        (TAKEOVER.to_json().encode(), r":2: .*cut short"),
    ],
    ids=["no event", "no JSON", "unknown", "a field's name", "schema", "no zone", "cut short"],
)
def test_reading_is_strict_and_names_the_line(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(SAMPLES[0].to_json().encode() + b"\n" + line)
    with pytest.raises(ProtocolError, match=re.escape(str(path)) + message):
        list(read_events(path))


def test_a_file_is_followed_while_it_grows(tmp_path: Path) -> None:
    """In pieces; the rest of a line is waited for; what is no event is an error, or passed over and told."""
    path, faults = tmp_path / "events.jsonl", list[ProtocolError]()
    lines = [sample.to_json().encode() + b"\n" for sample in SAMPLES]
    path.write_bytes(b"".join([*lines[:3], b"rubbish\n", *lines[3:-1], lines[-1][:40]]))
    tail, found, limit = EventTail(path, skip=faults.append), list[events.Event](), max(map(len, lines)) + 1
    while some := tail.read(limit):
        assert sum(len(line) for line, _ in some) <= limit
        found += [event for _, event in some]
    assert found == SAMPLES[:-1] and len(faults) == 1 and f"{path}:4:" in str(faults[0])
    with open(path, "ab") as file:
        file.write(lines[-1][40:])
    assert [event for _, event in tail.read()] == SAMPLES[-1:] and tail.read() == []
    with pytest.raises(ProtocolError, match=":4:"):
        EventTail(path).read()
    assert len(EventTail(path, path.stat().st_size - len(lines[-1])).read()) == 1


def test_without_a_path_nothing_is_written() -> None:
    writer = EventWriter(None)
    writer.emit(SAMPLES[0])
    writer.close()
    writer.close()


def test_the_schema_describes_every_field_and_accepts_what_is_written() -> None:
    schema = json.loads(events_schema())
    for model in get_args(events.Event):
        for name, info in model.model_fields.items():
            assert info.description or name == "event", f"{model.__name__}.{name} is not documented"
    described = jsonschema.Draft202012Validator(schema)
    diverged = events.Step(**COMMON, step=7, loss=float("nan"), seconds=0.1, frc_done=0, frc_total=0)
    for event in [*SAMPLES, diverged]:
        described.validate(json.loads(event.to_json()))
    fields = json.loads(SAMPLES[0].to_json())
    for wrong in [{**fields, "further": 1}, {**fields, "members": "4"}, {**fields, "event": "unknown"}]:
        assert not described.is_valid(wrong)
    assert not described.is_valid({name: value for name, value in fields.items() if name != "job"})


def test_log_lines_carry_member_role_and_epoch(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    logging.getLogger(logs.LOGGER).handlers.clear()
    monkeypatch.setattr(logs, "_context", logs.LogContext())
    monkeypatch.setenv(logs.LEVEL_VARIABLE, "info")
    assert logs.configure() is logs.configure() and len(logging.getLogger(logs.LOGGER).handlers) == 1
    logs.set_context(member="m2", role="(0,2)", epoch=5)
    logs.set_context(epoch=6)
    logging.getLogger(f"{logs.LOGGER}.store").info("hello")
    logging.getLogger(logs.LOGGER).debug("silence")
    logging.getLogger(logs.LOGGER).warning("about another", extra={"member": "m3"})
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith("I bamboo [m2 (0,2) e6] bamboo_ds.store: hello")
    assert "[m3 (0,2) e6]" in second
    monkeypatch.setenv(logs.LEVEL_VARIABLE, "loud")
    with pytest.raises(ConfigError, match="BAMBOO_LOG_LEVEL"):
        logs.configure()
