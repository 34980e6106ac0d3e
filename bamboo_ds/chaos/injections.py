"""Faults being carried out, each an :class:`Injection`: begun, looked at until it is done, undone."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..control.registry.records import MemberRecord
from .faults import Fault, Kind
from .processes import EFFECT_S, Process, ProcessGone, agent_of, worker_of
from .situation import Situation
from .victim import Order, VictimUnreachable

#: Seconds that a notified member may take to leave.
NOTICE_S = 60.0
#: How often an exception is raised in a worker that does not end. While modules are imported many are caught.
RAISES = 6
#: Seconds beyond its own that a worker gets to answer after a held lock.
_ANSWER_S = 2.0


class Impossible(Exception):
    """The fault cannot be carried out on this host or in this job; says why."""


@dataclass
class Account:
    """What an injection has done so far; becomes a :class:`~.faults.FaultRecord`."""

    pids: list[int] = field(default_factory=list)
    members: list[str] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    seconds: float | None = None
    confirmed: bool = False
    detail: str = ""


class Injection(ABC):
    """A fault that is being carried out.

    Attributes:
        began: ``time.monotonic()`` of its begin.
        due: when to look at it again at the latest, on the same clock; ``None``: whenever something has changed.
        account: what it has done so far.
    """

    def __init__(self, fault: Fault, members: Sequence[MemberRecord] = ()) -> None:
        self.fault = fault
        self.began = time.monotonic()
        self.due: float | None = None
        self.account = Account(members=[m.id for m in members], slots=[m.slot for m in members])
        self._records = list(members)

    @abstractmethod
    def begin(self) -> None:
        """Inject the fault.

        Raises:
            ProcessGone: nobody was there to be hit.
            Impossible: not here.
        """

    def done(self, situation: Situation) -> bool:
        """Look at it; whether it is over."""
        return True

    def undo(self) -> None:
        """Give up what would go on: it is not left behind. Idempotent."""
        return  # most kinds are over at once


class Kill(Injection):
    """SIGKILL of workers, of agents, or of all processes of a host."""

    def begin(self) -> None:
        with contextlib.ExitStack() as held:
            # All of them are at hand before the first one dies.
            workers = [held.enter_context(worker_of(record)) for record in self._records]
            agents: list[Process] = []
            if self.fault.kind is not Kind.KILL:
                agents = [held.enter_context(agent_of(record)) for record in self._records]
            first = agents or workers
            self.began = time.monotonic()
            for process in first:
                process.signal(signal.SIGKILL)
            if self.fault.kind is Kind.HOST:
                for process in workers:
                    with contextlib.suppress(ProcessGone):  # the kernel was faster: it ends workers with their agents
                        process.signal(signal.SIGKILL)
            self.account.pids = [process.pid for process in (*agents, *workers)]
            alive = [process.pid for process in (*agents, *workers) if not process.dead(EFFECT_S)]
            self.account.confirmed = not alive
            if alive:
                self.account.detail = f"processes {alive} live {EFFECT_S} s after SIGKILL"


class Stop(Injection):
    """SIGSTOP of some processes; SIGCONT ``fault.seconds`` later."""

    def __init__(self, fault: Fault, members: Sequence[MemberRecord], pids: Sequence[int] = ()) -> None:
        super().__init__(fault, members)
        self._pids = list(pids)
        self._held: list[Process] = []

    def begin(self) -> None:
        assert self.fault.seconds is not None
        with contextlib.ExitStack() as held:
            for record in self._records:
                self._held.append(held.enter_context(worker_of(record)))
                if self.fault.kind is Kind.FREEZE:
                    self._held.append(held.enter_context(agent_of(record)))
            self._held += [held.enter_context(Process(pid)) for pid in self._pids]
            held.pop_all()  # kept open until :meth:`undo`
        self.account.pids = [process.pid for process in self._held]
        self.began = time.monotonic()
        self.due = self.began + self.fault.seconds
        try:
            for process in self._held:
                process.signal(signal.SIGSTOP)
        except ProcessGone:
            self.undo()
            raise
        running = [process.pid for process in self._held if not process.stopped(EFFECT_S)]
        self.account.confirmed = not running
        if running:
            self.account.detail = f"processes {running} were not stopped"

    def done(self, situation: Situation) -> bool:
        if time.monotonic() < (self.due or 0.0) and not all(process.dead() for process in self._held):
            return False
        self.undo()
        return True

    def undo(self) -> None:
        """Continue those that still live."""
        if not self._held:
            return
        dead = [process.pid for process in self._held if process.dead()]
        if dead:
            self.account.detail = f"{len(dead)} of {len(self._held)} were killed while they were stopped"
        for process in self._held:
            with contextlib.suppress(ProcessGone):  # told above
                process.signal(signal.SIGCONT)
            process.close()
        self._held.clear()
        self.account.seconds = time.monotonic() - self.began


def _order(worker: Process, fault: Fault) -> Order:
    """Tell a worker to do ``fault`` to itself; raises :class:`ProcessGone` or :class:`Impossible`."""
    what = fault.kind.value
    assert what in ("hold_gil", "exception", "exit")
    try:
        return Order(worker.pid, what, fault.seconds or 0.0)  # type: ignore[arg-type]
    except VictimUnreachable as error:
        if worker.dead(0.0):
            raise ProcessGone(str(error)) from error
        raise Impossible(str(error)) from error


class Raise(Injection):
    """An exception in a worker's main thread, again and again until it has ended the worker.

    One that comes while a destructor or a callback runs is reported and forgotten, by Python itself.
    """

    def __init__(self, fault: Fault, members: Sequence[MemberRecord] = ()) -> None:
        super().__init__(fault, members)
        self._worker: Process | None = None
        self._raised = 0

    def begin(self) -> None:
        self._worker = worker_of(self._records[0])
        self.account.pids = [self._worker.pid]
        self.began = time.monotonic()
        try:
            self._raise(self._worker)
        except (ProcessGone, Impossible):
            self.undo()
            raise

    def done(self, situation: Situation) -> bool:
        if self._worker is None:
            return True
        self.account.confirmed = self._worker.dead()
        if not self.account.confirmed:
            if time.monotonic() < (self.due or 0.0):
                return False
            if self._raised < RAISES:
                with contextlib.suppress(ProcessGone, Impossible):  # it ends, or is asked again
                    self._raise(self._worker)
                return False
        self.account.detail = f"raised {self._raised} times" if self._raised > 1 else ""
        self.undo()
        return True

    def undo(self) -> None:
        """Let go of the worker."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def _raise(self, worker: Process) -> None:
        self._raised += 1
        self.due = time.monotonic() + EFFECT_S
        order = _order(worker, self.fault)
        try:
            order.done(_ANSWER_S)
        finally:
            order.close()


class Obey(Injection):
    """A worker holds its lock or exits, because it is told to."""

    _order: Order | None = None

    def begin(self) -> None:
        with worker_of(self._records[0]) as worker:
            self.account.pids = [worker.pid]
            self.began = time.monotonic()
            self._order = _order(worker, self.fault)
            if self.fault.kind is Kind.EXIT:
                self.account.confirmed = worker.dead(EFFECT_S)
            else:
                assert self.fault.seconds is not None
                self.due = self.began + self.fault.seconds
                return
        self.undo()

    def done(self, situation: Situation) -> bool:
        if self._order is None:
            return True
        if time.monotonic() < (self.due or 0.0):
            return False
        held = self._order.done(_ANSWER_S)
        self.account.confirmed = True  # it had begun
        self.account.seconds = time.monotonic() - self.began if held is None else held
        self.account.detail = "it was killed meanwhile" if held is None else ""
        self.undo()
        return True

    def undo(self) -> None:
        """Ask no more."""
        if self._order is not None:
            self._order.close()
            self._order = None


class Notify(Injection):
    """The file that a member's agent takes for a notice."""

    def __init__(self, fault: Fault, members: Sequence[MemberRecord], template: str | None) -> None:
        super().__init__(fault, members)
        self._template = template
        self._path: Path | None = None
        self._admitted = False

    def begin(self) -> None:
        record = self._records[0]
        if self._template is None:
            raise Impossible('the job\'s configuration has no "bamboo.notices.file": its agents watch no file')
        worker_of(record).close()
        path = Path(self._template.replace("{slot}", str(record.slot)).replace("{member}", record.id))
        self.account.pids = [record.agent_pid]
        self.began = time.monotonic()
        self.due = self.began + NOTICE_S
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps({"kind": "preempt", "detail": "bamboo chaos", "deadline_s": NOTICE_S}))
        temporary.rename(path)  # readers see all of it or nothing
        self._path = path

    def done(self, situation: Situation) -> bool:
        member = self._records[0].id
        admitted = situation.plan is not None and member in situation.plan.members
        dropped, self._admitted = self._admitted and not admitted, admitted
        if member in situation.left or dropped:
            self.account.confirmed = True
            self.account.seconds = time.monotonic() - self.began
            self.undo()
            return True
        if time.monotonic() >= (self.due or 0.0):
            self.account.detail = f"{member} did not leave within {NOTICE_S:.0f} s"
            self.undo()
            return True
        return False

    def undo(self) -> None:
        """Withdraw the notice."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None
