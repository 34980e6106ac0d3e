"""A worker's part of its job from start to end, in a process of its own; the test is its agent."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest

from bamboo_ds.comm.places import Listener
from bamboo_ds.control.messages import ExitNotice, Heartbeat, Message, PlanPush, parse_to_agent
from bamboo_ds.errors import EXIT_FATAL_LOSS
from bamboo_ds.topology import Layout, Plan
from bamboo_ds.variables import ENV_ADDRESS, ENV_FD, ENV_JOB, ENV_JOINER, ENV_LISTENER, ENV_MEMBER
from tests.support.jobs import environment
from tests.support.processes import start

pytestmark = [pytest.mark.claim("reference/cli.md"), pytest.mark.integration]

#: Several test suites may share two cores.
DEADLINE_S = 60.0
#: Member ``a`` is the worker, alone at first.
ALONE = Plan(epoch=1, owners=("a",), members=("a",), script_ranks=(0,))
BEGIN = """
import sys
from datetime import timedelta
from bamboo_ds.worker.channel import WorkerChannel
from bamboo_ds.errors import EpochChanged
from bamboo_ds.worker.job import Job

channel = WorkerChannel.from_environment()
job = Job(channel, None, timedelta(seconds=20))
job.start()
print("started", flush=True)
"""

M = TypeVar("M", bound=Message)


class Worker:
    """A worker whose script is ``script``, with ``job`` and ``channel`` in it, once the job has started."""

    def __init__(self, folder: Path, script: str, joiner: bool) -> None:
        self._sock, theirs = socket.socketpair()
        self._sock.settimeout(DEADLINE_S)
        self._file = self._sock.makefile("rb")
        self._log = folder / "errors.txt"
        env = environment() | {"RANK": "0", "WORLD_SIZE": "1"}
        env |= {ENV_FD: str(theirs.fileno()), ENV_MEMBER: "a", ENV_JOB: "j", ENV_ADDRESS: "127.0.0.1"}
        if joiner:
            env[ENV_JOINER] = "1"
        listener = Listener.open("127.0.0.1")
        self._place = str(listener.place)
        env[ENV_LISTENER] = listener.handed_on()
        program = folder / "script.py"
        program.write_text(BEGIN + textwrap.dedent(script))
        (reading, self._input), (self._output, writing) = os.pipe(), os.pipe()
        with theirs, listener.socket, open(self._log, "wb") as log:
            self.process = start(
                [sys.executable, "-u", str(program)],
                env,
                writing,
                pass_fds=[theirs.fileno(), listener.socket.fileno()],
                stdin=reading,
                errors=log.fileno(),
            )
        os.close(reading)
        os.close(writing)
        self._printed = open(self._output, "rb", buffering=0)  # noqa: SIM115

    def push(self, plan: Plan, **places: str) -> None:
        """``places``: of other members than the worker."""
        known = {"a": self._place, **places}
        plan = replace(plan, places=tuple(known.get(member, "") for member in plan.members))
        self._sock.sendall(PlanPush(plan=plan).to_line())

    def read(self, kind: type[M]) -> M:
        """The next message of ``kind``; others are skipped."""
        deadline = time.monotonic() + DEADLINE_S  # heartbeats come all the time
        while time.monotonic() < deadline and (line := self._file.readline()):
            message = parse_to_agent(line)
            if isinstance(message, kind):
                return message
        raise AssertionError(f"the worker does not send {kind.__name__}: {self.errors()}")

    def line(self) -> str:
        """The next line that the script prints."""
        assert select.select([self._output], [], [], DEADLINE_S)[0], f"the script prints nothing: {self.errors()}"
        return self._printed.readline().decode()

    def wait_started(self) -> None:
        assert self.line() == "started\n", self.errors()

    def end(self) -> tuple[int, str]:
        """Let the script go on, to its end: the exit code, and what it has printed meanwhile."""
        with suppress(BrokenPipeError):  # it has ended already
            os.write(self._input, b"\n")
        try:
            code = self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the worker does not end: {self.errors()}") from None
        return code, self._printed.read().decode()

    def errors(self) -> str:
        return self._log.read_text()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._input)
        self._printed.close()
        self._file.close()
        self._sock.close()


Begin = Callable[..., Worker]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """Starts workers: ``begin(script, joiner=False)``."""
    workers: list[Worker] = []

    def one(script: str, joiner: bool = False) -> Worker:
        folder = tmp_path / str(len(workers))
        folder.mkdir()
        workers.append(Worker(folder, script, joiner))
        return workers[-1]

    yield one
    for worker in workers:
        worker.close()


# -- the end ------------------------------------------------------------------------------------------------


def test_exit_counts_like_sys_exit(begin: Begin) -> None:
    """Peers are waited for only after a clean end."""
    expected = {
        "quit(3)": (3, "started\n"),
        "exit('a reason')": (1, "started\n"),
        "exit()": (0, "started\nall have met\n"),
    }
    workers = {}
    for call in expected:
        workers[call] = begin(f"job.at_finish = lambda: print('all have met')\n{call}")
        workers[call].push(ALONE)
    assert {call: worker.end() for call, worker in workers.items()} == expected


def test_end_that_fails_is_an_exit_code(begin: Begin) -> None:
    worker = begin("""
        def finish():
            raise RuntimeError("no space")
        job.at_finish = finish
    """)
    worker.push(ALONE)
    notice = worker.read(ExitNotice)
    assert (notice.reason, notice.failed) == ("RuntimeError: no space", True)
    assert worker.end() == (1, "started\n")
    assert "RuntimeError: no space" in worker.errors()


def test_end_that_meets_a_fatal_loss(begin: Begin) -> None:
    """All who had a stage are lost while the others wait for them at the end."""
    worker = begin("job.at_finish = lambda: job.enter(job.next_plan(1))")
    worker.push(ALONE)
    worker.wait_started()
    worker.push(replace(ALONE, epoch=2, owners=("a", "b"), lost=("b",), layout=Layout(1, 2), lost_roles=(1,)))
    notice = worker.read(ExitNotice)
    assert notice.reason.startswith("FatalLoss: no living member holds stage 1 of pipeline 0") and not notice.failed
    assert worker.end() == (EXIT_FATAL_LOSS, "")


# -- epochs -------------------------------------------------------------------------------------------------


def test_an_epoch_is_entered_without_waiting_for_anybody(begin: Begin) -> None:
    """Whatever came meanwhile, the newest one; another member, stopped say, keeps nobody from it."""
    worker = begin("""
        sys.stdin.readline()  # whatever a script does between two calls
        channel.wait_plan(3, 60)
        job.enter(job.next_plan(1))
        print("epoch", job.session.epoch)
    """)
    worker.push(ALONE)
    worker.wait_started()
    silent = Listener.open("127.0.0.1")  # takes connections, and says nothing
    with silent.socket:
        for epoch, when in ((2, "now"), (3, "boundary"), (4, "now")):
            plan = replace(ALONE, epoch=epoch, when=when, members=("b", "a"), script_ranks=(0, 0))
            worker.push(plan, b=str(silent.place))
        assert worker.end() == (0, "epoch 4\n"), worker.errors()


def test_a_plan_that_interrupts_iterations_alone(begin: Begin) -> None:
    """It finds the worker between two of them, or in one."""
    worker = begin("""
        import threading

        abort, learnt = job.session.abort, threading.Event()
        job.session.abort = lambda *arguments, **more: (abort(*arguments, **more), learnt.set())
        channel.wait_plan(2, 60)
        print("between", learnt.is_set())
        with job.iterating():
            print("begun", job.session.aborted)
        job.enter(job.next_plan(1))
        learnt.clear()
        with job.iterating():
            print("again", job.session.aborted, flush=True)
            assert learnt.wait(60)
            print("within", job.session.aborted)
    """)
    worker.push(ALONE)
    worker.wait_started()
    for epoch in (2, 3):
        worker.push(replace(ALONE, epoch=epoch, when="iteration"))
    found = [worker.line() for _ in range(3)]
    assert found == ["between False\n", "begun plan of epoch 3 arrived\n", "again None\n"]
    worker.push(replace(ALONE, epoch=4, when="iteration"))
    assert worker.end() == (0, "within plan of epoch 4 arrived\n"), worker.errors()


def test_epoch_that_ended_before_it_was_attached(begin: Begin) -> None:
    """A member without any epoch does not call those who have left the old one."""
    worker = begin(
        """
        import threading

        plan, abort, learnt = job.next_plan(0), job.session.abort, threading.Event()
        job.session.abort = lambda *arguments, **more: (abort(*arguments, **more), learnt.set())
        print("at the door", flush=True)
        sys.stdin.readline()
        assert learnt.wait(60)
        try:
            job.session.attach(plan)
        except EpochChanged as error:
            print(type(error).__name__, error)
        """,
        joiner=True,
    )
    other = Listener.open("127.0.0.1")
    with other.socket:
        worker.push(replace(ALONE, members=("b", "a"), owners=("b",), script_ranks=(0, 0)), b=str(other.place))
        worker.wait_started()
        assert worker.line() == "at the door\n"
        worker.push(replace(ALONE, epoch=2, lost=("b",)))
        code, printed = worker.end()
        assert code == 0, worker.errors()
        assert printed.startswith("EpochChanged ") and "plan of epoch 2 arrived" in printed
        other.socket.setblocking(False)
        with pytest.raises(BlockingIOError):
            other.socket.accept()


def test_loss_before_the_first_epoch_is_entered(begin: Begin) -> None:
    """Nothing of the script has failed: the job may start again."""
    worker = begin("")
    other = Listener.open("127.0.0.1")
    with other.socket:
        worker.push(replace(ALONE, owners=("a", "b"), members=("a", "b"), script_ranks=(0, 1)), b=str(other.place))
        worker.read(Heartbeat)
        worker.push(replace(ALONE, epoch=2, owners=("a", "b"), lost=("b",), lost_roles=(1,)))
        notice = worker.read(ExitNotice)
        # The first when it was waiting for b, the second when it was about to.
        assert notice.reason.startswith(("EpochChanged: ", "FatalLoss: ")) and not notice.failed
        assert worker.end() == (EXIT_FATAL_LOSS, "")
