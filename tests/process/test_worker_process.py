"""What an agent learns of its worker's end, and when."""

from __future__ import annotations

import os
import queue
import select
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from bamboo_ds.control.agent.worker_process import WorkerProcess
from tests.support.jobs import DEADLINE_S, environment

pytestmark = pytest.mark.integration

BEGIN = """
import mmap, os, signal, sys, threading, time
from bamboo_ds.processes import hold_tether
hold_tether(os.environ)
def ready(): os.write(1, b"x")
"""
#: In small pages, which the kernel takes apart one by one.
BALLAST = """
memory = mmap.mmap(-1, 1 << 30)
memory.madvise(mmap.MADV_NOHUGEPAGE)
for at in range(0, len(memory), mmap.PAGESIZE): memory[at] = 1
"""
#: One thread computes, one waits in the kernel.
BUSY = """
threading.Thread(target=lambda: [None for _ in iter(int, 1)], daemon=True).start()
threading.Thread(target=time.sleep, args=[600], daemon=True).start()
"""
FAULTS_MAX = 20

Start = Callable[..., WorkerProcess]


@pytest.fixture
def start() -> Iterator[Start]:
    """A worker whose script has said that it is ready."""
    started = []

    def begin(script: str, first: str | None = None) -> WorkerProcess:
        """``first``: of an interpreter that runs before this one."""
        reading, writing = os.pipe()
        turns = [shlex.join([sys.executable, "-c", BEGIN + each]) for each in (first, script) if each]
        worker = WorkerProcess(
            ["sh", "-c", " && ".join(turns)] if first else shlex.split(turns[0]), environment(), writing
        )
        started.append(worker)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            assert pipe.read(1) == b"x", "it has not begun"
        return worker

    yield begin
    for worker in started:
        worker.kill(signal.SIGKILL)
        worker.reap()
        worker.await_teardown(partial(torn_down, worker))
        worker.close()


def torn_down(worker: WorkerProcess, timeout_s: float) -> bool:
    """What the parent hears from the kernel."""
    return bool(select.select([worker.pidfd], [], [], timeout_s)[0])


def test_a_death_is_known_before_the_memory_is_given_back(start: Start) -> None:
    for _ in range(FAULTS_MAX):  # a busy machine may tell late what happened early
        worker, known = start(BALLAST + BUSY + "ready(); signal.pause()"), queue.SimpleQueue[bool]()
        worker.watch(lambda worker=worker, known=known: known.put(torn_down(worker, 0.0)))  # type: ignore[misc]
        assert not worker.dead
        worker.kill(signal.SIGKILL)
        late = known.get(timeout=DEADLINE_S)
        assert worker.dead
        assert worker.reap() == -signal.SIGKILL
        worker.await_teardown(partial(torn_down, worker))
        assert torn_down(worker, 0.0)
        if not late:
            return
    raise AssertionError("never before the parent has heard it anyway")


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("os.kill(os.getpid(), signal.SIGABRT)", -signal.SIGABRT),  # with a core, where the machine makes them
        ("os._exit(7)", 7),
        ("sys.exit(7)", 7),
        ("raise ValueError", 1),
        ("threading.Thread(target=os._exit, args=[7]).start(); signal.pause()", 7),
    ],
)
@pytest.mark.parametrize("others", [BUSY, ""], ids=["threads", "alone"])
def test_however_it_ends(start: Start, ending: str, code: int, others: str) -> None:
    worker, known = start(others + f"ready(); {ending}"), queue.SimpleQueue[int]()
    worker.watch(lambda: known.put(worker.reap()))
    assert known.get(timeout=DEADLINE_S) == code


def await_watching() -> None:
    """Until no thread waits for a death any more."""
    for watching in [each for each in threading.enumerate() if each.name == "bamboo-death"]:
        watching.join(DEADLINE_S)
        assert not watching.is_alive()


@pytest.mark.parametrize(
    ("script", "code"), [("ready()", 0), ("os.fork() or (ready(), os._exit(5)); os.wait(); sys.exit(7)", 7)]
)
def test_a_child_s_death_is_not_the_worker_s_and_an_end_with_0_is_for_the_kernel_to_tell(
    start: Start, script: str, code: int
) -> None:
    worker, known = start(script), queue.SimpleQueue[int]()
    worker.watch(lambda: known.put(worker.reap()))
    await_watching()
    assert [known.get() for _ in range(known.qsize())] == ([code] if code else [])
    assert torn_down(worker, DEADLINE_S)
    assert worker.reap() == code


def test_exec_is_no_death(start: Start) -> None:
    """After it the parent hears from the kernel, as ever."""
    program = "import os, signal; os.write(1, b'x'); signal.pause()"
    worker, known = start(f"os.execv(sys.executable, [sys.executable, '-c', {program!r}])"), queue.SimpleQueue[int]()
    worker.watch(lambda: known.put(1))
    await_watching()
    assert known.empty() and not worker.dead
    worker.kill(signal.SIGKILL)
    assert torn_down(worker, DEADLINE_S)
    assert worker.reap() == -signal.SIGKILL


def test_the_second_interpreter_of_a_command_runs_as_well(start: Start) -> None:
    """The first one has held the tether."""
    worker = start("ready(); sys.exit(7)", first="pass")
    worker.watch(lambda: None)
    assert torn_down(worker, DEADLINE_S)
    assert worker.reap() == 7


def test_without_such_memory_the_parent_hears_from_the_kernel(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    worker = start("ready(); signal.pause()")
    worker.watch(lambda: None)
    worker.kill(signal.SIGKILL)
    assert torn_down(worker, DEADLINE_S)
    assert worker.reap() == -signal.SIGKILL
    assert "will be known when the kernel has taken it apart" in caplog.text
