"""Faults being carried out, each an :class:`Injection`: begun, looked at until it is done, undone."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import psutil

from ..control.registry.records import MemberRecord
from .faults import Fault, FaultKind
from .processes import EFFECT_S, agent_of, dead, stopped, worker_of
from .situation import JobSituation
from .victim import ENV_CHAOS, address

#: Seconds that a notified member may take to leave.
NOTICE_S = 60.0
#: How often an exception is raised in a worker that does not end. While modules are imported many are caught.
RAISES = 6
#: Seconds beyond its own that a worker gets to answer after a held lock.
_ANSWER_S = 2.0


class Impossible(Exception):
    """The fault cannot be carried out on this host or in this job; says why."""


class Injection(ABC):
    """A fault that is being carried out.

    Attributes:
        began: ``time.monotonic()`` of its begin.
        due: when to look at it again at the latest, on the same clock; ``None``: whenever something has changed.
        situation: the job's at its begin.
        members, slots, pids, seconds, confirmed, detail: what it has done so far, see :class:`~.faults.FaultRecord`.
    """

    def __init__(self, fault: Fault, members: Sequence[MemberRecord] = ()) -> None:
        self.fault = fault
        self.began = time.monotonic()
        self.due: float | None = None
        self.situation = JobSituation()
        self.members = [record.id for record in members]
        self.slots = [record.slot for record in members]
        self.pids: list[int] = []
        self.seconds: float | None = None
        self.confirmed = False
        self.detail = ""
        self._records = list(members)

    @abstractmethod
    def begin(self) -> None:
        """Injects the fault.

        Raises:
            psutil.NoSuchProcess: nobody was there to be hit.
            Impossible: not here.
        """

    def done(self, situation: JobSituation) -> bool:
        """Looks at the fault; returns whether it is over."""
        return True

    def undo(self) -> None:
        """Ends what would outlive the fault. Idempotent."""
        return  # most kinds are over at once


class ProcessKill(Injection):
    """SIGKILL of workers, of agents, or of all processes of a host."""

    def begin(self) -> None:
        # All of them are at hand before the first one dies.
        workers = [worker_of(record) for record in self._records]
        agents = [] if self.fault.kind is FaultKind.KILL else [agent_of(record) for record in self._records]
        self.began = time.monotonic()
        for process in agents or workers:
            process.kill()
        for process in workers if self.fault.kind is FaultKind.HOST else ():
            with contextlib.suppress(psutil.NoSuchProcess):  # the kernel was faster: it ends workers with their agents
                process.kill()
        self.pids = [process.pid for process in (*agents, *workers)]
        alive = [process.pid for process in (*agents, *workers) if not dead(process, EFFECT_S)]
        self.confirmed = not alive
        if alive:
            self.detail = f"processes {alive} live {EFFECT_S} s after SIGKILL"


class Stop(Injection):
    """SIGSTOP of members' workers (and agents), or of another process; SIGCONT ``fault.seconds`` later."""

    def __init__(self, fault: Fault, members: Sequence[MemberRecord], pids: Sequence[int] = ()) -> None:
        super().__init__(fault, members)
        self._others = list(pids)
        self._held: list[psutil.Process] = []

    def begin(self) -> None:
        assert self.fault.seconds is not None
        held = [worker_of(record) for record in self._records]
        if self.fault.kind is FaultKind.FREEZE:
            held += [agent_of(record) for record in self._records]
        self._held = held + [psutil.Process(pid) for pid in self._others]
        self.pids = [process.pid for process in self._held]
        self.began = time.monotonic()
        self.due = self.began + self.fault.seconds
        try:
            for process in self._held:
                process.suspend()
        except psutil.NoSuchProcess:
            self.undo()
            raise
        running = [process.pid for process in self._held if not stopped(process, EFFECT_S)]
        self.confirmed = not running
        if running:
            self.detail = f"processes {running} were not stopped"

    def done(self, situation: JobSituation) -> bool:
        if time.monotonic() < (self.due or 0.0) and not all(map(dead, self._held)):
            return False
        self.undo()
        return True

    def undo(self) -> None:
        """Continues the stopped processes that still live."""
        if not self._held:
            return
        killed = sum(map(dead, self._held))
        if killed:
            self.detail = f"{killed} of {len(self._held)} were killed while they were stopped"
        for process in self._held:
            with contextlib.suppress(psutil.NoSuchProcess):  # told above
                process.resume()
        self._held.clear()
        self.seconds = time.monotonic() - self.began


class Order:
    """An order to a worker; :meth:`close` it.

    Args:
        worker: the process.
        fault: of the kind ``hold_gil``, ``exception`` or ``exit``.
        timeout_s: seconds that the worker has to begin.

    Raises:
        Impossible: it does not listen, or did not begin.
        psutil.NoSuchProcess: it is gone.
    """

    def __init__(self, worker: psutil.Process, fault: Fault, timeout_s: float = 5.0) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(timeout_s)
        self._stream = self._socket.makefile("rb")
        begun, why = b"", "it ended before it obeyed"
        try:
            self._socket.connect(address(worker.pid))
            order = {"do": fault.kind.value, "seconds": fault.seconds or 0.0}
            self._socket.sendall(json.dumps(order).encode() + b"\n")
            begun = self._stream.readline()
        except OSError as error:
            why = str(error)
        if not begun:
            self.close()
            if dead(worker):
                raise psutil.NoSuchProcess(worker.pid)
            raise Impossible(
                f"the worker {worker.pid} takes no orders ({why}): run the script with -m bamboo_ds.chaos.victim, or "
                f"call bamboo_ds.chaos.victim.install() in it with {ENV_CHAOS}=1"
            )

    def done(self, timeout_s: float) -> float | None:
        """Seconds that it took; ``None``: the worker ended, or is not done within ``timeout_s`` seconds."""
        self._socket.settimeout(timeout_s)
        try:
            line = self._stream.readline()
        except OSError:
            return None
        return json.loads(line)["done"] if line else None

    def close(self) -> None:
        """Stops asking."""
        self._stream.close()
        self._socket.close()


class Raise(Injection):
    """An exception in a worker's main thread, again and again until it has ended the worker.

    One that comes while a destructor or a callback runs is reported and forgotten, by Python itself.
    """

    _raised = 0

    def begin(self) -> None:
        self._worker = worker_of(self._records[0])
        self.pids = [self._worker.pid]
        self.began = time.monotonic()
        self._raise()

    def done(self, situation: JobSituation) -> bool:
        self.confirmed = dead(self._worker)
        if not self.confirmed:
            if time.monotonic() < (self.due or 0.0):
                return False
            if self._raised < RAISES:
                with contextlib.suppress(psutil.NoSuchProcess, Impossible):  # it ends, or is asked again
                    self._raise()
                return False
        self.detail = f"raised {self._raised} times" if self._raised > 1 else ""
        return True

    def _raise(self) -> None:
        self._raised += 1
        self.due = time.monotonic() + EFFECT_S
        with contextlib.closing(Order(self._worker, self.fault)) as order:
            order.done(_ANSWER_S)


class Obey(Injection):
    """A worker holds its lock or exits, because it is told to."""

    _order: Order | None = None

    def begin(self) -> None:
        worker = worker_of(self._records[0])
        self.pids = [worker.pid]
        self.began = time.monotonic()
        self._order = Order(worker, self.fault)
        if self.fault.kind is FaultKind.EXIT:
            self.confirmed = dead(worker, EFFECT_S)
            self.undo()
        else:
            assert self.fault.seconds is not None
            self.due = self.began + self.fault.seconds

    def done(self, situation: JobSituation) -> bool:
        if self._order is None:
            return True
        if time.monotonic() < (self.due or 0.0):
            return False
        held = self._order.done(_ANSWER_S)
        self.confirmed = True  # it had begun
        self.seconds = time.monotonic() - self.began if held is None else held
        self.detail = "it was killed meanwhile" if held is None else ""
        self.undo()
        return True

    def undo(self) -> None:
        """Stops asking."""
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
        worker_of(record)
        path = Path(self._template.replace("{slot}", str(record.slot)).replace("{member}", record.id))
        self.pids = [record.agent_pid]
        self.began = time.monotonic()
        self.due = self.began + NOTICE_S
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps({"kind": "preempt", "detail": "bamboo chaos", "deadline_s": NOTICE_S}))
        temporary.rename(path)  # readers see all of it or nothing
        self._path = path

    def done(self, situation: JobSituation) -> bool:
        member = self._records[0].id
        admitted = situation.plan is not None and member in situation.plan.members
        dropped, self._admitted = self._admitted and not admitted, admitted
        if member in situation.left or dropped:
            self.confirmed = True
            self.seconds = time.monotonic() - self.began
            self.undo()
            return True
        if time.monotonic() >= (self.due or 0.0):
            self.detail = f"{member} did not leave within {NOTICE_S:.0f} s"
            self.undo()
            return True
        return False

    def undo(self) -> None:
        """Withdraws the notice."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None
