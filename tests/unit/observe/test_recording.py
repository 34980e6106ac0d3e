"""What workers record for timelines, and how it comes into files: memory, worker, agent, files."""

from __future__ import annotations

import logging
import os
import stat
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from deepspeed.runtime.pipe.schedule import ForwardPass, RecvActivation

from bamboo_ds.config import bamboo_config
from bamboo_ds.control.agent.timeline import TimelineWriter
from bamboo_ds.engine.context.recording import Recording
from bamboo_ds.errors import ConfigError, EpochChanged, ProtocolError
from bamboo_ds.observe.ring import CUT, ENV_FD, NUMBERS, REDONE, SpanRing
from bamboo_ds.observe.spans import Head, Kind, Span, SpanFile, path_for, read_timelines
from bamboo_ds.schedule import FillBubble, RecvReplica
from bamboo_ds.topology import Role

pytestmark = pytest.mark.claim("guides/timelines.md")

LOAD = NUMBERS[Kind.LOAD]


def ring_of(mode: str = "all", capacity: int = 8) -> SpanRing:
    ring = SpanRing.create(capacity)
    ring.switch(mode)
    return ring


def fill(ring: SpanRing, count: int, step: int = 1) -> None:
    for _ in range(count):
        number = ring.written
        ring.record(LOAD, step, float(number), number + 0.5, (0, 1), 0, number)


def numbers(spans: list[Span]) -> list[int | None]:
    return [span.micro_batch for span in spans]


# -- memory -------------------------------------------------------------------------------------------------


def test_a_span_is_read_as_it_was_recorded() -> None:
    ring = ring_of()
    ring.record(NUMBERS[Kind.BACKWARD], 7, 1.25, 1.5, (1, 2), 3, 4, REDONE)
    ring.record(NUMBERS[Kind.AWAIT_PLAN], 7, 2.0, 2.0, marks=CUT)
    assert ring.read(0, 2) == (
        [
            Span(Kind.BACKWARD, 7, 1.25, 1.5, (1, 2), 3, 4, redone=True),
            Span(Kind.AWAIT_PLAN, 7, 2.0, 2.0, cut=True),
        ],
        0,
    )
    ring.close()


def test_the_newest_spans_stay_and_the_others_are_counted() -> None:
    ring = ring_of()
    fill(ring, 20)
    spans, missed = ring.read(0, 20)
    assert (numbers(spans), missed) == (list(range(13, 20)), 13), "the next one takes the place of number 12"
    ring.close()


def test_both_processes_see_the_same_memory() -> None:
    ring = SpanRing.create()
    environ = {ENV_FD: str(os.dup(ring.fd)), "HOME": "/"}
    worker = SpanRing.inherited(environ)
    assert worker is not None and environ == {"HOME": "/"}
    worker.switch("losses")
    fill(worker, 3)
    worker.keep(1, 3)
    assert (ring.mode, ring.written, ring.wanted()) == ("losses", 3, (1, 3))
    ring.done = 3
    assert (worker.done, ring.wanted()) == (3, (3, 3))
    assert SpanRing.inherited(environ) is None
    worker.close()
    ring.close()


@pytest.mark.parametrize(
    ("mode", "keep", "wanted", "at_the_end"),
    [
        ("off", None, (0, 0), (0, 0)),
        ("all", None, (0, 6), (0, 6)),
        ("losses", None, (0, 0), (0, 0)),
        ("losses", (2, 4), (2, 4), (2, 4)),
        ("losses", (2, 2), (2, 2), (2, 6)),  # not all of it is there yet
    ],
)
def test_what_is_wanted(
    mode: str, keep: tuple[int, int] | None, wanted: tuple[int, int], at_the_end: tuple[int, int]
) -> None:
    ring = ring_of(mode)
    fill(ring, 6)
    if keep is not None:
        ring.keep(*keep)
    assert (ring.wanted(), ring.wanted(ended=True)) == (wanted, at_the_end)
    ring.close()


# -- the worker ---------------------------------------------------------------------------------------------


class Worker:
    """The recording of a worker that owns stage 1, whose instructions do what a test says."""

    def __init__(self, mode: str = "losses") -> None:
        self.ring = SpanRing.create(64)
        self.progress: Any = SimpleNamespace(steps=0, operation=SimpleNamespace(redone={}))
        current = SimpleNamespace(role=Role(0, 1), share=SimpleNamespace(part=SimpleNamespace(begin=0)))
        binding: Any = SimpleNamespace(current=current)
        ds: Any = SimpleNamespace(execute=self._execute)
        self.recording = Recording(ds, binding, self.progress, self.ring, mode)
        self.executed = 0
        self.fails = False

    def _execute(self, instruction: Any) -> None:
        self.executed += 1
        if self.fails:
            raise EpochChanged("a test says so")

    def iteration(self, disturbed: bool = False) -> None:
        with self.recording.iteration():
            self.recording.execute(ForwardPass(0))
            if disturbed:
                self.recording.disturbed()
            self.progress.steps += 1

    def kept(self) -> list[tuple[int, str]]:
        spans, missed = self.ring.read(*self.ring.wanted())
        assert not missed
        return [(span.step, span.kind.value) for span in spans]


def test_instructions_are_recorded_with_their_roles_and_marks() -> None:
    worker = Worker("all")
    worker.progress.operation.redone = {(Role(0, 1), 0): (2, 1)}
    for instruction in (ForwardPass(1), ForwardPass(2), FillBubble("grad", 0), RecvReplica(Role(0, 2))):
        worker.recording.execute(instruction)
    worker.fails = True
    with pytest.raises(EpochChanged):
        worker.recording.execute(RecvActivation(3))
    with pytest.raises(EpochChanged), worker.recording.span(Kind.AGREE):
        raise EpochChanged("a test says so")
    spans, _ = worker.ring.read(0, worker.ring.written)
    assert worker.executed == 5
    assert [(s.kind.value, s.role, s.micro_batch, s.redone, s.cut) for s in spans] == [
        ("ForwardPass", (0, 1), 1, True, False),
        ("ForwardPass", (0, 1), 2, False, False),
        ("RecvReplica", (0, 2), None, False, False),
        ("RecvActivation", (0, 1), 3, False, True),
        ("Agree", None, None, False, True),
    ]
    assert all(span.begin <= span.end for span in spans)
    worker.ring.close()


def test_iterations_around_a_loss_are_kept() -> None:
    worker = Worker()
    for _ in range(5):
        worker.iteration()
    assert worker.kept() == []
    worker.iteration(disturbed=True)
    assert worker.kept() == [], "members recover: nothing is written now"
    worker.iteration()
    assert [step for step, kind in worker.kept() if kind == "Iteration"] == [4, 5, 6, 7]
    # Another one before the agent has come to it takes nothing away.
    worker.iteration(disturbed=True)
    worker.iteration()
    assert [step for step, kind in worker.kept() if kind == "Iteration"] == [4, 5, 6, 7, 8, 9]
    worker.ring.done = worker.ring.written
    for _ in range(4):
        worker.iteration()
    worker.iteration(disturbed=True)
    worker.iteration(disturbed=True)
    worker.iteration()
    assert [step for step, kind in worker.kept() if kind == "Iteration"] == [12, 13, 14, 15, 16]
    worker.ring.close()


@pytest.mark.parametrize("ring", [True, False])
def test_nothing_is_recorded_where_it_is_off(ring: bool) -> None:
    worker = Worker("off")
    if not ring:
        worker.recording._ring = None
    worker.iteration(disturbed=True)
    with worker.recording.span(Kind.AGREE):
        pass
    assert (worker.executed, worker.ring.written, worker.kept()) == (1, 0, [])
    worker.ring.close()


def test_the_setting() -> None:
    config = bamboo_config({"bamboo": {}})
    assert config is not None and config.observe.timeline == "losses"
    with pytest.raises(ConfigError, match=r'"bamboo.observe.timeline" is \'always\''):
        bamboo_config({"bamboo": {"observe": {"timeline": "always"}}})


# -- the agent ----------------------------------------------------------------------------------------------


def writer_of(folder: Path, mode: str) -> tuple[TimelineWriter, SpanRing]:
    writer = TimelineWriter(str(folder / "events.jsonl"), "gpt", "m1-ab", 1)
    worker = SpanRing.inherited({ENV_FD: str(os.dup(next(iter(writer.fds))))})
    assert worker is not None and set(writer.environment) == {ENV_FD}
    worker.switch(mode)
    return writer, worker


def written(folder: Path) -> list[int | None]:
    return [m for timeline in read_timelines(folder / "events.jsonl") for m in numbers(timeline.spans)]


def test_the_agent_writes_what_is_wanted_for_its_owner_alone(tmp_path: Path) -> None:
    writer, worker = writer_of(tmp_path, "all")
    writer.write()
    assert not list(tmp_path.iterdir())
    fill(worker, 3)
    writer.write()
    fill(worker, 2)
    writer.end(lost=False)
    writer.end(lost=False)
    path = path_for(tmp_path / "events.jsonl", "m1-ab")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (found,) = read_timelines(tmp_path / "events.jsonl")
    assert numbers(found.spans) == [0, 1, 2, 3, 4]
    assert (found.head.job, found.member, found.head.rank) == ("gpt", "m1-ab", 1)
    worker.close()


def test_of_a_lost_worker_the_last_iterations_are_written(tmp_path: Path) -> None:
    writer, worker = writer_of(tmp_path, "losses")
    for step in range(1, 7):
        fill(worker, 2, step)
    writer.write()
    assert not list(tmp_path.iterdir())
    writer.end(lost=True)
    assert written(tmp_path) == [6, 7, 8, 9, 10, 11]
    worker.close()


def test_a_worker_that_ends_well_after_a_loss_leaves_what_there_is(tmp_path: Path) -> None:
    writer, worker = writer_of(tmp_path, "losses")
    fill(worker, 4)
    worker.keep(1, 1)
    writer.end(lost=False)
    assert written(tmp_path) == [1, 2, 3]
    worker.close()


def test_without_events_there_is_no_timeline() -> None:
    writer = TimelineWriter(None, "gpt", "m1-ab", 1)
    assert (writer.fds, writer.environment) == ((), {})
    writer.write()
    writer.end(lost=True)


def test_a_failure_to_write_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer, worker = writer_of(tmp_path / "nothing", "all")
    with caplog.at_level(logging.WARNING, logger="bamboo_ds"):
        for _ in range(3):
            fill(worker, 1)
            writer.write()
        writer.end(lost=True)
    (told,) = caplog.records
    assert "no timeline of this member from now on" in told.getMessage() and "nothing" in told.getMessage()
    worker.close()


def test_spans_that_came_too_fast_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ring = SpanRing.create(5)
    writer = TimelineWriter(str(tmp_path / "events.jsonl"), "gpt", "m1-ab", 1)
    writer.end(lost=False)
    writer._ring = ring
    ring.switch("all")
    fill(ring, 7)
    with caplog.at_level(logging.WARNING, logger="bamboo_ds"):
        writer.write()
    assert written(tmp_path) == [3, 4, 5, 6] and "lacks 3 spans" in caplog.text
    writer.end(lost=False)


def test_much_is_written_in_parts(tmp_path: Path) -> None:
    writer, worker = writer_of(tmp_path, "all")
    fill(worker, 5000)
    for count in (2000, 4000, 5000):
        writer.write()
        assert written(tmp_path) == list(range(count))
    writer.end(lost=False)
    worker.close()


def test_a_span_that_is_being_stored_is_not_read() -> None:
    ring = ring_of()
    fill(ring, 16)
    record = ring._raw(8)
    struct.Struct("<IIBBhhHid").pack_into(ring._memory, 64, 8, 1, 0, 0, 0, 0, 0, 0, 999.0)  # of the 17th, cut short
    assert ring._raw(8)[:2] == record[:2] and ring._raw(8) != record
    assert numbers(ring.read(8, 16)[0]) == list(range(9, 16))
    ring.close()


# -- files --------------------------------------------------------------------------------------------------


def test_files_are_bounded_and_keep_the_newest(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    file = SpanFile(path_for(events, "m0-a"), "gpt", "m0-a", 0, largest=4000)
    for m in range(500):
        file.write([Span(Kind.LOAD, 1, float(m), m + 0.5, (0, 0), 0, m)])
    file.close()
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert len(sizes) == 2 and max(sizes) < 4500
    (found,) = read_timelines(events)
    assert numbers(found.spans) == list(range(500 - len(found.spans), 500)) and len(found.spans) > 60


def test_a_line_that_is_cut_short_is_passed_over_and_a_wrong_one_is_named(tmp_path: Path) -> None:
    events = tmp_path / "a[1].jsonl"  # no pattern
    path = path_for(events, "m0-a")
    file = SpanFile(path, "gpt", "m0-a", 0)
    file.write([Span(Kind.LOAD, 1, 1.0, 2.0), Span(Kind.LOAD, 1, 2.0, 3.0)])
    file.close()
    with open(path, "a") as out:
        out.write('[1,"LoadMicroB')
    (found,) = read_timelines(events)
    assert len(found.spans) == 2
    for wrong in ("x\n", "[1]\n", '[1,"Nothing",0,0,0,0,1.0,1.0,""]\n', '{"timeline":1}\n'):
        path.write_bytes(path.read_bytes().rpartition(b"\n")[0] + b"\n")
        kept = path.read_bytes()
        path.write_bytes(kept + wrong.encode())
        with pytest.raises(ProtocolError, match=r"m0-a.timeline.jsonl:4: no line of a timeline"):
            read_timelines(events)
        path.write_bytes(kept)


def test_members_of_a_kernel_have_one_scale_and_hosts_their_own(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    for rank, (boot, utc) in enumerate([("one", 1000.0), ("one", 1007.0), ("two", 2000.0)]):
        head = Head(job="gpt", member=f"m{rank}", rank=rank, host="h", boot=boot, monotonic=100.0, utc=utc)
        line = Span(Kind.LOAD, 1, 101.0, 102.0).to_json()
        path_for(events, f"m{rank}").write_text(f"{head.model_dump_json()}\n{line}\n")
    assert [t.utc(t.spans[0].begin) for t in read_timelines(events)] == [1001.0, 1001.0, 2001.0]
