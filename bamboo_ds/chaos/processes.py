"""Processes of this host, as psutil has them: none is taken for another one that gets its number later."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable

import psutil

from ..control.registry.records import MemberRecord
from ..store.endpoints import parse_endpoints
from ..variables import ENV_MEMBER

#: Seconds within which a signal takes effect, else something is wrong with the host.
EFFECT_S = 5.0
#: Seconds between two looks at a process: the kernel tells only its parent.
_LOOK_S = 0.001

_DEAD = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


def dead(process: psutil.Process, timeout_s: float = 0.0) -> bool:
    """Whether ``process`` is dead, at the latest after ``timeout_s`` seconds."""
    return _becomes(process, _DEAD, timeout_s)


def stopped(process: psutil.Process, timeout_s: float = 0.0) -> bool:
    """Whether ``process`` is stopped by a signal, at the latest after ``timeout_s`` seconds."""
    return _becomes(process, _STOPPED, timeout_s)


def _becomes(process: psutil.Process, states: Collection[str], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            state = process.status() if process.is_running() else psutil.STATUS_DEAD
        except psutil.NoSuchProcess:
            state = psutil.STATUS_DEAD
        if state in states or state in _DEAD or time.monotonic() >= deadline:
            return state in states
        time.sleep(_LOOK_S)


def worker_of(record: MemberRecord) -> psutil.Process:
    """The worker of a member; raises ``psutil.NoSuchProcess`` unless its process on this host is that."""
    worker = psutil.Process(record.pid)
    try:
        if not dead(worker) and worker.environ().get(ENV_MEMBER) == record.id:
            return worker
    except psutil.AccessDenied:
        pass  # somebody else's: not this member's
    raise psutil.NoSuchProcess(record.pid, msg=f"the worker of {record.id} is not a process of this host")


def agent_of(record: MemberRecord) -> psutil.Process:
    """The agent of a member; raises ``psutil.NoSuchProcess`` unless it is the parent of the member's living worker."""
    agent = psutil.Process(record.agent_pid)
    if not dead(agent) and worker_of(record).ppid() == agent.pid:
        return agent
    raise psutil.NoSuchProcess(record.agent_pid, msg=f"the agent of {record.id} is not a process of this host")


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
        worker_of(record)
    except psutil.NoSuchProcess:
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
