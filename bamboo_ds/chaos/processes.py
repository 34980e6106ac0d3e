"""Acting on processes of this host by pidfd, never by name."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Collection, Iterable

import psutil
from typing_extensions import Self

from ..control.registry.records import MemberRecord
from ..errors import BambooError
from ..processes import status_of
from ..store.endpoints import parse_endpoints
from ..variables import ENV_MEMBER

#: Seconds within which a signal takes effect, else something is wrong with the host.
EFFECT_S = 5.0


class ProcessGone(BambooError, RuntimeError):
    """The process that is to be acted on does not exist (any more)."""


class Process:
    """One process, held by a pidfd: it cannot be confused with another one that gets its number later.

    Use as a context manager, or :meth:`close`. Raises :class:`ProcessGone` if there is no process ``pid``.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        try:
            self.pidfd = os.pidfd_open(pid)
        except (ProcessLookupError, OSError) as error:
            raise ProcessGone(f"there is no process {pid}") from error

    def signal(self, signum: signal.Signals) -> None:
        """Send ``signum``; raises :class:`ProcessGone` if it is dead."""
        try:
            signal.pidfd_send_signal(self.pidfd, signum)
        except ProcessLookupError as error:
            raise ProcessGone(f"process {self.pid} is dead") from error

    def dead(self, timeout_s: float = 0.0) -> bool:
        """Whether it is dead, at the latest after ``timeout_s`` seconds."""
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def stopped(self, timeout_s: float = 0.0) -> bool:
        """Whether it is stopped by a signal, at the latest after ``timeout_s`` seconds."""
        deadline = time.monotonic() + timeout_s
        while not self.dead():
            if state_of(self.pid) in ("T", "t"):
                return True
            if time.monotonic() >= deadline:
                return False
            # There is no event to wait for: the kernel tells only the parent.
            time.sleep(0.001)
        return False

    def close(self) -> None:
        """Let go of it. Idempotent."""
        pidfd, self.pidfd = self.pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def state_of(pid: int) -> str | None:
    """The kernel's letter for the state of a process; ``None`` if there is none."""
    status = status_of(pid)
    return None if status is None else status[0]


def worker_of(record: MemberRecord) -> Process:
    """The worker of a member; raises :class:`ProcessGone` unless its process on this host is that."""
    process = Process(record.pid)
    try:
        # Looked at only after the descriptor was opened: from now on the number cannot change its meaning.
        if not process.dead() and psutil.Process(record.pid).environ().get(ENV_MEMBER) == record.id:
            return process
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        pass  # dead, or somebody else's: not this member's in either case
    process.close()
    raise ProcessGone(f"the worker of {record.id} ({record.pid}) is not a process of this host")


def agent_of(record: MemberRecord) -> Process:
    """The agent of a member; raises :class:`ProcessGone` unless it is the parent of the member's living worker."""
    agent = Process(record.agent_pid)
    try:
        with worker_of(record):
            if not agent.dead() and psutil.Process(record.pid).ppid() == record.agent_pid:
                return agent
    except (psutil.NoSuchProcess, ProcessGone):
        pass  # without the worker nothing tells whose agent it is
    agent.close()
    raise ProcessGone(f"the agent of {record.id} ({record.agent_pid}) is not a process of this host")


def feeders_of(members: Collection[MemberRecord], everybody: Iterable[MemberRecord]) -> list[MemberRecord]:
    """Members that only draw batches, and that end with the agents of ``members``, which have started them."""
    agents = {record.agent_pid for record in members}
    found = []
    for record in everybody:
        try:
            if record.feeder and record not in members and psutil.Process(record.agent_pid).ppid() in agents:
                found.append(record)
        except psutil.NoSuchProcess:
            continue  # it has just ended
    return found


def here(record: MemberRecord) -> bool:
    """Whether the member runs on this host."""
    try:
        worker_of(record).close()
    except ProcessGone:
        return False
    return True


def listener(root_pid: int, url: str) -> int | None:
    """The descendant of process ``root_pid`` that serves the store at ``url``, if any."""
    (place,) = parse_endpoints([url], None)
    try:
        family = psutil.Process(root_pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return None
    for process in family:
        try:
            if place.path:  # etcd's own folder
                found = process.cwd() == os.path.dirname(place.path)
            else:
                sockets = process.net_connections(kind="tcp")
                found = any(s.status == psutil.CONN_LISTEN and s.laddr and s.laddr.port == place.port for s in sockets)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # it has just ended
        if found:
            return process.pid
    return None
