"""What workers record for timelines, and how it comes into files: pipe, worker, agent, files."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass, RecvActivation

from bamboo_ds.config import bamboo_config
from bamboo_ds.control.agent.timeline import AroundLosses, TimelineWriter
from bamboo_ds.engine.context.recording import Recording
from bamboo_ds.errors import ConfigError, EpochChanged, ProtocolError
from bamboo_ds.observe.span_pipe import CAPACITY, ENV_FD, SpanReader, SpanWriter
from bamboo_ds.observe.spans import Head, Kind, Span, SpanFile, path_for, read_timelines
from bamboo_ds.schedule import FillBubble, RecvReplica
from bamboo_ds.topology import Role

#: What instructions are given.
CHANNELS: Any = object()

pytestmark = pytest.mark.claim("guides/timelines.md")


def pipe_of(capacity: int = CAPACITY) -> tuple[SpanWriter, SpanReader]:
    reader = SpanReader(capacity)
    return SpanWriter(reader.writing), reader


def load(number: int, step: int = 1) -> Span:
    return Span(Kind.LOAD, step, float(number), number + 0.5, (0, 1), 0, number)


def fill(writer: SpanWriter, numbers: Iterable[int], step: int = 1) -> None:
    for number in numbers:
        writer.write(load(number, step))


def numbers(spans: Iterable[Span]) -> list[int | None]:
    return [span.micro_batch for span in spans]


# -- the pipe -----------------------------------------------------------------------------------------------


def test_a_span_is_read_once_as_it_was_written() -> None:
    writer, reader = pipe_of()
    assert reader.read() == []
    spans = [
        Span(Kind.BACKWARD, 7, 1.25, 1.5, (1, 2), 3, 4, redone=True),
        Span(Kind.AWAIT_PLAN, 7, 2.0, 2.0, cut=True),
    ]
    for span in spans:
        writer.write(span)
    assert (reader.read(), reader.missing, reader.all) == (spans, 0, False)
    writer.all = True
    writer.write(spans[0])
    assert (reader.read(), reader.all) == (spans[:1], True)
    reader.close()


def test_spans_that_have_no_room_are_counted_and_keep_nobody_waiting() -> None:
    writer, reader = pipe_of(capacity=4096)
    fill(writer, range(200))
    first = reader.read()
    assert numbers(first) == list(range(len(first))) and 90 < len(first) < 150
    fill(writer, range(200, 210))
    assert (numbers(reader.read()), reader.missing) == (list(range(200, 210)), 200 - len(first))
    fill(writer, range(210, 212))
    assert (numbers(reader.read()), reader.missing) == ([210, 211], 0)
    reader.close()


def test_a_worker_without_its_pipe_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    reader = SpanReader()
    environ = {ENV_FD: str(os.dup(reader.writing)), "HOME": "/"}
    fd = int(environ[ENV_FD])
    os.set_inheritable(fd, True)
    writer = SpanWriter.inherited(environ)
    assert writer is not None and environ == {"HOME": "/"} and not os.get_inheritable(fd)
    assert SpanWriter.inherited(environ) is None
    reader.close()
    with caplog.at_level(logging.WARNING, logger="bamboo_ds"):
        fill(writer, range(3))
    (told,) = caplog.records
    assert "no timeline of this member from now on" in told.getMessage() and "Broken pipe" in told.getMessage()
    os.close(fd)


# -- the worker ---------------------------------------------------------------------------------------------


class Worker:
    """The recording of a worker that owns stage 1, whose instructions do what a test says."""

    def __init__(self, mode: str = "losses", pipe: bool = True) -> None:
        self.reader = SpanReader()
        self.progress: Any = SimpleNamespace(steps=0, operation=SimpleNamespace(redone={}))
        current = SimpleNamespace(role=Role(0, 1), share=SimpleNamespace(part=SimpleNamespace(begin=0)))
        binding: Any = SimpleNamespace(current=current)
        ds: Any = SimpleNamespace(execute=self._execute)
        writer = SpanWriter(self.reader.writing) if pipe else None
        self.recording = Recording(ds, binding, self.progress, writer, mode)
        self.executed = 0
        self.fails = False
        self._around_losses = AroundLosses()

    def _execute(self, instruction: Any, channels: Any) -> None:
        assert channels is CHANNELS
        self.executed += 1
        if self.fails:
            raise EpochChanged("a test says so")

    def iteration(self, disturbed: bool = False) -> list[int]:
        """An iteration; returns those that the agent writes then."""
        with self.recording.iteration():
            self.recording.execute(ForwardPass(0), CHANNELS)
            if disturbed:
                self.recover()
                assert self._chosen() == [], "members recover: nothing is written now"
            self.progress.steps += 1
        return self._chosen()

    def recover(self) -> None:
        with self.recording.span(Kind.AWAIT_PLAN):
            pass

    def _chosen(self) -> list[int]:
        spans = [span for read in self.reader.read() for span in self._around_losses.add(read)]
        iterations = [span.step for span in spans if span.kind is Kind.ITERATION]
        assert {span.step for span in spans if span.kind is Kind.FORWARD} == set(iterations), "they are whole"
        return iterations


def test_instructions_are_recorded_with_their_roles_and_marks() -> None:
    worker = Worker("all")
    worker.progress.operation.redone = {(Role(0, 1), 0): (2, 1)}
    for instruction in (ForwardPass(1), ForwardPass(2), FillBubble("grad", 0), RecvReplica(Role(0, 2))):
        worker.recording.execute(instruction, CHANNELS)
    worker.recording.execute(BackwardPass(0), CHANNELS)
    worker.recording.execute(BackwardPass(1), CHANNELS)
    worker.fails = True
    with pytest.raises(EpochChanged):
        worker.recording.execute(RecvActivation(3), CHANNELS)
    with pytest.raises(EpochChanged), worker.recording.span(Kind.AGREE):
        raise EpochChanged("a test says so")
    spans = worker.reader.read()
    assert worker.executed == 7 and worker.reader.all
    assert [(s.kind.value, s.role, s.micro_batch, s.redone, s.cut) for s in spans] == [
        ("ForwardPass", (0, 1), 1, True, False),
        ("ForwardPass", (0, 1), 2, False, False),
        ("RecvReplica", (0, 2), None, False, False),
        ("BackwardPass", (0, 1), 0, True, False),
        ("BackwardPass", (0, 1), 1, False, False),
        ("RecvActivation", (0, 1), 3, False, True),
        ("Agree", None, None, False, True),
    ]
    assert all(span.begin <= span.end for span in spans)
    worker.reader.close()


@pytest.mark.parametrize(("mode", "pipe"), [("off", True), ("losses", False)])
def test_nothing_is_recorded_where_it_is_off(mode: str, pipe: bool) -> None:
    worker = Worker(mode, pipe)
    with worker.recording.iteration(), worker.recording.span(Kind.AGREE):
        worker.recording.execute(ForwardPass(0), CHANNELS)
    assert (worker.executed, worker.reader.read()) == (1, [])
    worker.reader.close()


def test_the_setting() -> None:
    config = bamboo_config({"bamboo": {}})
    assert config is not None and config.observe.timeline == "losses"
    with pytest.raises(ConfigError, match=r'"bamboo.observe.timeline" is \'always\''):
        bamboo_config({"bamboo": {"observe": {"timeline": "always"}}})


# -- the agent ----------------------------------------------------------------------------------------------


def test_iterations_around_a_loss_are_chosen() -> None:
    worker = Worker()
    for _ in range(5):
        assert worker.iteration() == []
    assert worker.iteration(disturbed=True) == []
    assert worker.iteration() == [4, 5, 6, 7]
    assert worker.iteration(disturbed=True) == []
    assert worker.iteration() == [8, 9], "each is written once"
    for _ in range(4):
        assert worker.iteration() == []
    assert worker.iteration(disturbed=True) == []
    assert worker.iteration(disturbed=True) == []
    assert worker.iteration() == [12, 13, 14, 15, 16]
    for _ in range(2):
        assert worker.iteration() == []
    worker.recover()  # a change of plan between iterations
    assert worker.iteration() == []
    assert worker.iteration() == [17, 18, 19, 20]
    worker.reader.close()


def test_spans_that_are_held_are_bounded() -> None:
    around = AroundLosses()
    for number in range(20_000):
        assert not around.add(load(number))
    assert numbers(around.end(lost=True)) == list(range(20_000 - 2**14, 20_000))


def agent_of(folder: Path, mode: str) -> tuple[TimelineWriter, SpanWriter]:
    agent = TimelineWriter(str(folder / "events.jsonl"), "gpt", "m1-ab", 1)
    (fd,) = agent.fds
    assert agent.environment == {ENV_FD: str(fd)}
    worker = SpanWriter(fd)
    worker.all = mode == "all"
    return agent, worker


def written(folder: Path) -> list[int | None]:
    return [m for timeline in read_timelines(folder / "events.jsonl") for m in numbers(timeline.spans)]


def test_the_agent_writes_what_is_wanted_for_its_owner_alone(tmp_path: Path) -> None:
    agent, worker = agent_of(tmp_path, "all")
    agent.write()
    assert not list(tmp_path.iterdir())
    fill(worker, range(3))
    agent.write()
    fill(worker, range(3, 5))
    agent.end(lost=False)
    agent.end(lost=False)
    path = path_for(tmp_path / "events.jsonl", "m1-ab")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (found,) = read_timelines(tmp_path / "events.jsonl")
    assert numbers(found.spans) == [0, 1, 2, 3, 4]
    assert (found.head.job, found.member, found.head.rank) == ("gpt", "m1-ab", 1)


@pytest.mark.parametrize("lost", [True, False])
def test_of_a_lost_worker_the_last_iterations_are_written(tmp_path: Path, lost: bool) -> None:
    agent, worker = agent_of(tmp_path, "losses")
    for step in range(1, 7):
        fill(worker, (2 * step, 2 * step + 1), step)
    agent.write()
    assert not list(tmp_path.iterdir())
    agent.end(lost)
    assert written(tmp_path) == ([8, 9, 10, 11, 12, 13] if lost else [])


def test_a_worker_that_ends_well_after_a_loss_leaves_what_there_is(tmp_path: Path) -> None:
    agent, worker = agent_of(tmp_path, "losses")
    fill(worker, range(3))
    worker.write(Span(Kind.AWAIT_PLAN, 1, 10.0, 11.0))
    agent.write()
    assert not list(tmp_path.iterdir())
    agent.end(lost=False)
    assert written(tmp_path) == [0, 1, 2, None]


def test_without_events_there_is_no_timeline() -> None:
    agent = TimelineWriter(None, "gpt", "m1-ab", 1)
    assert (agent.fds, agent.environment) == ((), {})
    agent.write()
    agent.end(lost=True)


def test_a_failure_to_write_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    agent, worker = agent_of(tmp_path / "nothing", "all")
    with caplog.at_level(logging.WARNING, logger="bamboo_ds"):
        for _ in range(3):
            fill(worker, range(1))
            agent.write()
        agent.end(lost=True)
    (told,) = caplog.records
    assert "no timeline of this member from now on" in told.getMessage() and "nothing" in told.getMessage()


def test_spans_that_came_too_fast_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    agent, worker = agent_of(tmp_path, "all")
    fill(worker, range(40_000))
    agent.write()
    fill(worker, range(40_000, 40_001))
    with caplog.at_level(logging.WARNING, logger="bamboo_ds"):
        agent.end(lost=False)
    found = written(tmp_path)
    assert found == [*range(len(found) - 1), 40_000]
    assert f"lacks {40_001 - len(found)} spans" in caplog.text


def test_much_is_written_in_parts(tmp_path: Path) -> None:
    agent, worker = agent_of(tmp_path, "all")
    fill(worker, range(5000))
    for count in (2000, 4000, 5000):
        agent.write()
        assert written(tmp_path) == list(range(count))
    agent.end(lost=False)


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
