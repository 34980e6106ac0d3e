"""What workers write: the way to the terminal, and how far members are."""

from __future__ import annotations

import gc
import os
import queue
import select
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bamboo_ds.control.agent import output
from bamboo_ds.control.agent.output import WorkerOutput
from bamboo_ds.control.agent.telling import Telling
from bamboo_ds.control.registry.records import LayoutRecord, ProgressRecord
from bamboo_ds.control.settings import AgentSettings
from bamboo_ds.engine.context.history import History
from bamboo_ds.engine.context.records import Progress, ScriptPhase
from bamboo_ds.engine.joining import replay
from bamboo_ds.engine.joining.replay import Replay
from bamboo_ds.launchers.narration import Sparse, progress
from bamboo_ds.observe import outlet
from bamboo_ds.observe.outlet import Outlet, Sink
from bamboo_ds.topology import Layout
from bamboo_ds.topology.planner import initial_plan, with_redundancy
from bamboo_ds.worker.activity import Activity
from tests.support.records import left, member, mirror

pytestmark = pytest.mark.claim("guides/logs.md")

#: Other work may take the processors.
DEADLINE_S = 40.0


def test_a_full_disk_is_tried_again_and_told(caplog: pytest.LogCaptureFixture) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    sink = Sink(full)
    for data in (b"12345", b"67"):
        sink.write(data)
    reading, writing = os.pipe()
    os.dup2(writing, full)
    for data in (b"89", b"10"):
        sink.write(data)
    assert os.read(reading, 100) == b"\n[bamboo] 7 bytes were not shown\n8910"
    os.close(reading)
    sink.write(b"it is gone")
    sink.write(b"it is gone")
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        f"nothing is shown on descriptor {full} until there is room for it",
        f"nothing is shown any more on descriptor {full}",
    ]
    for fd in (writing, full):
        os.close(fd)


def test_a_screen_that_others_have_made_not_blocking() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    data = b"x" * 300_000
    thread = threading.Thread(target=Sink(writing).write, args=(data,))
    thread.start()
    found = 0
    while found < len(data) and select.select([reading], [], [], DEADLINE_S / 4)[0]:
        found += len(os.read(reading, 1 << 20))
    thread.join(DEADLINE_S)
    assert found == len(data)
    os.close(reading)
    os.close(writing)


def test_without_a_file_the_worker_has_what_its_agent_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a folder, where it cannot be made, and where there is no terminal for the worker; prefixes need none."""

    def none_left() -> None:
        raise OSError("out of pty devices")

    monkeypatch.setattr(output.os, "openpty", none_left)
    monkeypatch.setattr(output.os, "isatty", lambda fd: fd == 2)
    monkeypatch.setattr(output.os.path, "samestat", lambda a, b: False)
    # The log of this process stays where it is.
    monkeypatch.setattr(output.logs, "show_by", lambda outlet: None)
    monkeypatch.setattr(output, "Outlet", lambda sink: SimpleNamespace(empty=True))
    common = {"job": "j", "command": (), "slot": 1, "world_size": 2, "store": "", "parent_pid": 1}
    (tmp_path / "file").write_text("")
    gc.collect()  # what tests before have left open ends here, not below
    before = os.listdir("/proc/self/fd")
    for settings in (
        AgentSettings(**common),
        AgentSettings(**common, logs=str(tmp_path), tee=False),
        AgentSettings(**common, logs=str(tmp_path / "file")),
        AgentSettings(**common, logs=str(tmp_path)),
    ):
        found = WorkerOutput(settings)
        found.start("m1-a", 7)
        assert found.stdout is found.stderr is found.path is None
        found.close(lambda seconds: None, lambda: False)
    assert os.listdir("/proc/self/fd") == before
    prefixed = WorkerOutput(AgentSettings(**common, logs=str(tmp_path / "file"), prefix=True))
    assert prefixed.path is None and prefixed.stdout is not None and prefixed.stderr is not None
    for stream in prefixed._streams:
        os.close(stream.reading)
        os.close(stream.worker)
    told = [record.message.rpartition(": ") for record in caplog.records]
    assert [each[0].partition(":")[0] for each in told] == 3 * ["the output of this worker is in no file"]
    assert told[1][2] == "out of pty devices"


def test_a_line_is_shown_in_one_piece_and_a_beginning_without_an_end_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """So lines of several workers are not mixed, whose agents share a terminal."""
    written: queue.Queue[bytes] = queue.Queue()
    sink: Any = SimpleNamespace(write=written.put, missed=0)
    monkeypatch.setattr(outlet, "_REST_S", 1e6)
    shown = Outlet(sink)
    shown.show(b"half of ")
    shown.show(b"a line\nand the")
    assert written.get(timeout=DEADLINE_S) == b"half of a line\n"
    shown.show(b" next\n")
    assert written.get(timeout=DEADLINE_S) == b"and the next\n"
    shown.show(b"x" * 5000)
    assert written.get(timeout=DEADLINE_S) == b"x" * 4096
    shown.show(b"\n")
    assert written.get(timeout=DEADLINE_S) == b"x" * 904 + b"\n"
    monkeypatch.setattr(outlet, "_REST_S", 0.0)
    shown.show(b"\r 10%")
    assert written.get(timeout=DEADLINE_S) == b"\r 10%"
    monkeypatch.setattr(outlet, "_REST_S", 1e6)
    shown.show(b"\r 20%")
    shown.close()
    assert written.get(timeout=DEADLINE_S) == b"\r 20%" and shown.empty


# -- progress -------------------------------------------------------------------------------------------------


def test_what_members_are_at_is_one_line() -> None:
    names = [f"m{slot}-a" for slot in range(6)]
    found: dict[str, Any] = {"plan": initial_plan(names[:5])}
    members = [member(name, slot) for slot, name in enumerate(names)]

    def line() -> str | None:
        return progress(mirror(*members, *found.values()))

    where = "at or before deepspeed.initialize (libraries, data, layers, extensions that DeepSpeed compiles)"
    assert line() == f"0 of 5 engines are built: all scripts are {where}"
    found["report"] = LayoutRecord(id=names[1], layout=Layout(1, 5), redundant=True)
    for name, doing in (
        (names[5], "replays step 310 of 630, about 40 s"),
        (names[0], "compiles it"),
        (names[2], "compiles it"),
    ):
        found[name] = ProgressRecord(id=name, step=0, doing=doing)
    built = f"1 of 5 engines are built: the script of each of m0, m2, m3, m4 is {where}"
    assert line() == f"{built}; each of m0, m2 compiles it; m5 replays step 310 of 630, about 40 s"
    for name in names:
        found[name] = ProgressRecord(id=name, step=0, doing="compiles it")
    assert line() == f"{built}; each of 6 members compiles it"
    found.clear()
    assert line() is None


def test_of_what_takes_long_there_are_few_lines() -> None:
    sparse = Sparse(0.0)
    lines = [
        (1, "a"),
        (9, "b"),
        (10, "c"),
        (12, "d"),
        (20, "c"),
        (21, "d"),
        (22, "e"),
        (30, None),
        (35, "f"),
        (41, "f"),
    ]
    assert [at for at, line in lines if sparse.due(line, at)] == [10, 21, 41]


def test_a_replay_tells_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first call that is replayed until the script is where the job is; evaluations are no steps."""
    clock = SimpleNamespace(monotonic=lambda: 100.0)
    monkeypatch.setattr(replay, "time", clock)
    history, activity = History(), Activity()
    for number in range(4):
        history.add("evaluate" if number == 1 else "train", number)
    job: Any = SimpleNamespace(replaying=True, channel=SimpleNamespace(activity=activity))
    progress = Progress(seed=1)
    progress.script.phase, progress.script.target = ScriptPhase.CATCHING_UP, 4
    context: Any = SimpleNamespace(job=job, progress=progress, history=history)
    none: Any = None
    replayed = Replay(context, none, none, none)
    assert activity.words() is None
    assert replayed.recorded("train") == 0
    clock.monotonic = lambda: 120.0
    assert activity.words() == "replays step 1 of 3, about 40 s"
    activity.told = "compiles"
    assert replayed.recorded("evaluate") == 1
    assert activity.words() == "compiles; replays step 1 of 3, about 40 s"
    activity.told = None
    assert [replayed.recorded("train") for _ in range(3)] == [2, 3, None]
    assert activity.words() is None and not job.replaying


def test_a_member_that_joins_tells_its_course() -> None:
    told: list[str] = []
    now = [0.0]
    telling = Telling("m4-e", lambda text: told.append(text[:9] + text[18:]), lambda: now[0])
    for at, doing in (
        (1.0, None),
        (2.0, "replays step 1 of 3"),
        (5.0, "replays step 2 of 3"),
        (13.0, "replays step 3 of 3"),
    ):
        now[0] = at
        telling.note_doing(doing)
    layout, members = Layout(1, 2), ["m0-a", "m1-b", "m4-e"]
    first = with_redundancy(initial_plan(members[:2]), layout, True)
    telling.note_plan(first)
    standby = replace(first, epoch=3, members=tuple(members))
    telling.note_plan(standby)
    telling.note_plan(standby)
    telling.note_plan(replace(standby, epoch=4, owners=("m4-e", "m1-b"), shadows=("m1-b", "m4-e")))
    telling.note_end(left("m4-e", 4, "finished"))
    assert told == [
        "[bamboo] m4-e replays step 1 of 3\n",
        "[bamboo] m4-e replays step 3 of 3\n",
        "[bamboo] m4-e has joined the job and is a standby, as one of 3 members\n",
        "[bamboo] m4-e owns (0,0) and shadows (0,1), as one of 3 members\n",
        "[bamboo] m4-e has ended: finished (exit 0)\n",
    ]
