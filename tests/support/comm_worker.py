"""A small cluster of data-plane processes that a test commands: no etcd, no agents, plans made by hand.

``Cluster`` (in the test) starts ``Member`` processes from a fork server. Each has a main thread, which runs the
commands one by one, and a control thread, which answers at once and aborts the session when told.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import multiprocessing.forkserver
import os
import queue
import signal
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from bamboo_ds.secret import JobSecret
from tests.support.etcd import wait_until
from tests.support.ports import free_port
from tests.support.processes import wait_stopped

DEADLINE = 10.0  # seconds in which anything must happen; a bound on hangs, not a target
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "bamboo_ds.comm.backend", "bamboo_ds.comm.session"])


#: Of the members' job.
SECRET = JobSecret("the-secret-of-all-clusters-of-the-tests")

#: All members that this test process has started, to say more about a hang.
_REMOTES: weakref.WeakSet[Remote] = weakref.WeakSet()


# -- inside a member ------------------------------------------------------------------------------------------
#: Seconds after which members say who does not come to attach.
TELL_AFTER_S = 0.3


class Member:
    """The commands that a member's main thread understands, one method each."""

    def __init__(self, name: str, address: str, host: str | None) -> None:
        import torch

        from bamboo_ds.comm.session import Session

        torch.set_num_threads(1)
        self.name = name
        self.failures: list[tuple[str | None, str]] = []
        self.kept: list[Any] = []
        self.awaited: list[tuple[list[str], float]] = []
        self.session = Session(
            *(name, address, timedelta(seconds=60), lambda member, reason: self.failures.append((member, reason))),
            awaited=lambda members, seconds: self.awaited.append((list(members), seconds)),
            tell_after_s=TELL_AFTER_S,
            secret=SECRET,
            host=host,
        )
        self.channels: dict[str, Any] = {}

    def place(self) -> str:
        return self.session.place

    def conclude(self) -> None:
        """Make an end of the epoch's channels."""
        self.channels = {}
        self.session.conclude()

    def attach(self, plan: Any) -> float:
        if self.channels:
            self.conclude()
        start = time.monotonic()
        self.session.attach(plan)
        self.session.meet()
        return time.monotonic() - start

    def init(self, rank: int, world: int) -> None:
        from bamboo_ds.comm.session import init_process_group

        init_process_group(self.session, rank, world)

    def init_stock(self, rank: int, world: int, port: int) -> None:
        """Stock gloo, to compare with."""
        from torch import distributed as dist

        store = dist.TCPStore("127.0.0.1", port, world, rank == 0, wait_for_workers=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)

    def case(self, name: str, rank: int, world: int) -> list[Any]:
        from tests.support.comm_cases import CASES

        try:
            return [portable(value) for value in CASES[name](rank, world)]
        except RuntimeError as error:
            if "does not support" not in str(error):
                raise
            return ["unsupported"]  # gloo has learnt some operations with the years

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(self, *arguments)

    def census(self) -> tuple[int, int]:
        """Threads and descriptors of this process."""
        assert self.session.released(timedelta(seconds=DEADLINE))
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

    def close(self) -> None:
        import torch

        if self.channels:
            self.conclude()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        self.session.close()


def portable(value: Any) -> Any:
    """Tensors as (dtype, shape, bytes): bit-exact, and no shared memory between processes."""
    import torch

    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().reshape(-1)
        return str(value.dtype), tuple(value.shape), bytes(flat.view(torch.uint8).numpy())
    if isinstance(value, (list, tuple)):
        return [portable(each) for each in value]
    return value


def serve(name: str, address: str, host: str | None, commands: Connection, parent: Sequence[Connection]) -> None:
    """The process of one member."""
    for end in parent:
        end.close()
    os.environ["OMP_NUM_THREADS"] = "1"
    faulthandler.register(signal.SIGUSR1)
    warnings.simplefilter("ignore", FutureWarning)  # torch renames collectives; the old names must work
    member = Member(name, address, host)
    todo: queue.Queue[tuple[str, tuple[Any, ...]] | None] = queue.Queue()
    sending = threading.Lock()

    def answer(kind: str, value: Any) -> None:
        with sending:
            commands.send((kind, value))

    def control() -> None:
        while True:
            try:
                kind, command, arguments = commands.recv()
            except (EOFError, OSError):
                os._exit(3)  # the test is gone
            if kind == "main":
                todo.put((command, arguments))
                if command == "close":
                    return
            elif command == "abort":
                member.session.abort(*arguments)
                answer("control", None)
            elif command == "blocked":
                epoch = member.session._epoch
                waits = epoch is not None and (
                    epoch.life.blocked
                    or epoch.links.waiting
                    or any(not work.is_completed() for work in list(epoch.groups.works))
                )
                answer("control", bool(waits))
            elif command == "ask":
                answer("control", arguments[0](member))
            elif command == "failures":
                answer("control", list(member.failures))
            elif command == "awaited":
                answer("control", list(member.awaited))

    thread = threading.Thread(target=control, name="control", daemon=True)
    thread.start()
    while True:
        item = todo.get()
        assert item is not None
        command, arguments = item
        try:
            value = getattr(member, command)(*arguments)
            answer("done", value)
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            answer("raised", (type(error).__name__, str(error), text))
        if command == "close":
            thread.join()
            return


# -- inside the test ------------------------------------------------------------------------------------------
class Raised(Exception):
    """A member's command raised."""

    def __init__(self, member: str, kind: str, text: str, trace: str) -> None:
        super().__init__(f"{member}: {kind}: {text}\n{trace}")
        self.member, self.kind, self.text = member, kind, text


class Remote:
    """The test's end of one member."""

    def __init__(self, name: str, address: str, host: str | None = None) -> None:
        self.name, self.host = name, host
        sys.audit("os.fork")  # what multiprocessing does itself tells no hook of it
        here, there = _CONTEXT.Pipe()
        self._connection = here
        self._answers: dict[str, list[Any]] = {"main": [], "control": []}
        self.process = _CONTEXT.Process(target=serve, args=(name, address, host, there, ()), name=name, daemon=True)
        self.process.start()
        _REMOTES.add(self)
        there.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def start(self, command: str, *arguments: Any) -> None:
        """Have the main thread run a command."""
        self._connection.send(("main", command, arguments))

    def _answer(self, kind: str, deadline: float) -> Any:
        end = time.monotonic() + deadline
        while not self._answers[kind]:
            if not self._connection.poll(max(0.0, end - time.monotonic())):
                for remote in _REMOTES:  # they print the stacks of their threads
                    if remote.process.is_alive():
                        os.kill(remote.pid, signal.SIGUSR1)
                raise AssertionError(f"member {self.name} hangs: no answer within {deadline} s")
            what, value = self._connection.recv()
            self._answers["control" if what == "control" else "main"].append((what, value))
        return self._answers[kind].pop(0)

    def finish(self, deadline: float = DEADLINE) -> Any:
        """The result of the oldest command started; raises :class:`Raised`."""
        what, value = self._answer("main", deadline)
        if what == "raised":
            raise Raised(self.name, *value)
        return value

    def outcome(self, deadline: float = DEADLINE) -> Raised | None:
        """Whether the oldest command started raised, and what."""
        try:
            self.finish(deadline)
        except Raised as raised:
            return raised
        return None

    def run(self, command: str, *arguments: Any) -> Any:
        self.start(command, *arguments)
        return self.finish()

    def control(self, command: str, *arguments: Any) -> Any:
        """Have the control thread do something at once."""
        self._connection.send(("control", command, arguments))
        return self._answer("control", DEADLINE)[1]

    def answered(self) -> bool:
        """Whether the oldest command started has ended."""
        if not self._answers["main"] and self._connection.poll():
            what, value = self._connection.recv()
            self._answers["control" if what == "control" else "main"].append((what, value))
        return bool(self._answers["main"])

    def wait_blocked(self) -> None:
        """Wait until the main thread is inside an operation that may block, or done with it."""
        end = time.monotonic() + DEADLINE
        while not self.control("blocked") and not self.answered():
            assert time.monotonic() < end, f"member {self.name} never entered the operation"

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.process.join(DEADLINE)
        assert self.process.exitcode == -signal.SIGKILL
        self._connection.close()

    def stop(self) -> None:
        """SIGSTOP; returns when the kernel has stopped it."""
        os.kill(self.pid, signal.SIGSTOP)
        self.wait_stopped()

    def wait_stopped(self) -> None:
        """Wait until the kernel has stopped it."""
        wait_stopped(self.pid, DEADLINE)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


class Cluster:
    """Members ``m0``, ``m1``, …; member i owns role i unless a plan says otherwise.

    Args:
        apart: each is told that it is on a host of its own; they share no memory.
    """

    def __init__(self, size: int, address: str = "127.0.0.1", apart: bool = False) -> None:
        from bamboo_ds.topology import Plan

        self.address = address
        self.names = tuple(f"m{index}" for index in range(size))
        self.members = {name: Remote(name, address, name if apart else None) for name in self.names}
        self.places: dict[str, str] = {}
        self.plan = Plan(epoch=0, owners=self.names, members=self.names)

    def __getitem__(self, index: int) -> Remote:
        return self.members[self.names[index]]

    def next_plan(self, **changes: Any) -> Any:
        """The next epoch's plan; by default as the current one."""
        plan = replace(self.plan, epoch=self.plan.epoch + 1, **changes)
        for name in plan.members:
            if name not in self.places:
                self.places[name] = self.members[name].run("place")
        self.plan = replace(plan, places=tuple(self.places[name] for name in plan.members))
        return self.plan

    def attach(self, **changes: Any) -> list[float]:
        """Take all members of the next plan into its epoch; returns their seconds."""
        plan = self.next_plan(**changes)
        for name in plan.members:
            self.members[name].start("attach", plan)
        return [self.members[name].finish() for name in plan.members]

    def everybody(self, command: str, arguments: Callable[[int], tuple[Any, ...]] = lambda _: ()) -> list[Any]:
        """Run a command on all members of the plan at once; their results in order."""
        for index, name in enumerate(self.plan.members):
            self.members[name].start(command, *arguments(index))
        return [self.members[name].finish() for name in self.plan.members]

    def replace_member(self, index: int) -> None:
        """Start a new process in place of a killed member, once the others have seen that one's connections end.

        Jobs never give a name twice. Here an end that is seen late would be taken for the new process's.
        """
        name = self.names[index]
        for other in self.members.values():
            if other.name != name and other.process.is_alive():
                wait_until(partial(_has_forgotten, other, name), f"{other.name} has seen {name} end", DEADLINE)
        self.members[name] = Remote(name, self.address, self.members[name].host)
        self.places.pop(name)

    def close(self) -> None:
        """End all members cleanly; fails if one does not end with exit code 0."""
        for member in self.members.values():
            member.start("close")
        for member in self.members.values():
            outcome = member.outcome()
            assert outcome is None, outcome
        for member in self.members.values():
            member.process.join(DEADLINE)
            assert member.process.exitcode == 0, f"{member.name} ended with {member.process.exitcode}"

    def destroy(self) -> None:
        """Kill what is left, after a failed test."""
        for member in self.members.values():
            if member.process.is_alive():
                member.process.kill()
                member.process.join(DEADLINE)


@contextlib.contextmanager
def cluster(
    size: int, world: bool = True, attached: bool = True, stock: bool = False, apart: bool = False
) -> Iterator[Cluster]:
    """A cluster, in epoch 1 if ``attached``, with torch.distributed initialised if ``world``; closed at the end.

    With ``stock`` torch.distributed is gloo's, to compare with.
    """
    made = Cluster(size, apart=apart)
    try:
        if attached and not stock:
            made.attach()
        if stock:
            port = free_port()
            made.everybody("init_stock", lambda index: (index, size, port))
        elif world:
            made.everybody("init", lambda index: (index, size))
        yield made
        made.close()
    finally:
        made.destroy()


def _has_forgotten(remote: Remote, name: str) -> bool:
    return not remote.control("ask", partial(_reaches, name))


def _reaches(name: str, member: Member) -> bool:
    return member.session._hub.known(name) is not None


Census = list[tuple[int, int]]


def take_census(made: Cluster, census: list[Census]) -> None:
    """Append how many threads and descriptors each member has, when they are not more than :func:`lowest` before.

    What a member closes goes in the background: a released thread, a server's end of a connection.
    """
    census.append(made.everybody("census"))
    deadline = time.monotonic() + DEADLINE
    while len(census) > 2 and grown(census[-1], lowest(census[:-1])):
        if time.monotonic() > deadline:
            return  # the test compares, too
        again: Census = made.everybody("census")
        census[-1] = [(min(a[0], b[0]), min(a[1], b[1])) for a, b in zip(census[-1], again, strict=True)]


def lowest(census: list[Census]) -> Census:
    """The lowest numbers of each member, the first time left out: what stays is made then."""
    return [(min(n for n, _ in each), min(n for _, n in each)) for each in zip(*census[1:], strict=True)]


def grown(census: Census, base: Census) -> bool:
    """Whether a member has more threads or descriptors than in ``base``."""
    return any(
        now > then for one, other in zip(census, base, strict=True) for now, then in zip(one, other, strict=True)
    )


def stop_fork_server() -> None:
    """End the fork server, which would otherwise outlive the tests; fails if a member is left."""
    left = [remote.name for remote in _REMOTES if remote.process.is_alive()]
    multiprocessing.forkserver._forkserver._stop()  # type: ignore[attr-defined]
    assert not left, f"processes left behind: {left}"
