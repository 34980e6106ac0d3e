"""Small real processes that look like members of a job, and situations around them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from bamboo_ds.chaos.situation import JobSituation
from bamboo_ds.control.registry.records import MemberRecord
from bamboo_ds.topology import Candidate, Layout, Plan, initial_plan, with_redundancy
from bamboo_ds.variables import ENV_MEMBER

from .records import member

#: An agent: starts a worker that dies with it, tells its process id, waits.
AGENT = """
import ctypes, subprocess, sys
libc = ctypes.CDLL(None)
worker = subprocess.Popen([sys.executable, "-c", sys.argv[1]], preexec_fn=lambda: libc.prctl(1, 9))
worker.wait()
"""
#: A worker that does nothing but count.
IDLE = """
import os, sys, threading
print(os.getpid(), flush=True)
threading.Event().wait()
"""
#: A worker that takes orders; its main thread runs Python code all the time.
OBEDIENT = """
import os, sys, time
from bamboo_ds.chaos.victim import ChaosException, install
assert install()
print(os.getpid(), flush=True)
try:
    while True:
        time.sleep(0.005)
except ChaosException:
    sys.exit(21)
"""


def record(slot: int, pid: int = 0, agent_pid: int = 0, host: str = "here", **more: Any) -> MemberRecord:
    """A member's record."""
    return member(f"m{slot}", slot, pid=pid, agent_pid=agent_pid, host=host, script_rank=slot, **more)


@contextmanager
def members(count: int, worker: str = IDLE, **env: str) -> Iterator[list[MemberRecord]]:
    """``count`` agents with their workers, as processes; ended at the end, whatever their state."""
    agents: list[subprocess.Popen[str]] = []
    found = []
    try:
        for slot in range(count):
            agent = subprocess.Popen(
                [sys.executable, "-S", "-c", AGENT, worker],
                env={**os.environ, ENV_MEMBER: f"m{slot}", **env},
                stdout=subprocess.PIPE,
                text=True,
            )
            agents.append(agent)
        for slot, agent in enumerate(agents):
            assert agent.stdout is not None
            pid = int(agent.stdout.readline())
            found.append(record(slot, pid, agent.pid, socket.gethostname()))
        yield found
    finally:
        for agent in agents:
            agent.kill()  # the kernel ends its worker with it
            agent.wait()
            assert agent.stdout is not None
            agent.stdout.close()


def settled(records: Sequence[MemberRecord], layout: Layout | None = None) -> JobSituation:
    """A job of these members, in which nothing is left to do."""
    layout = layout or Layout(1, len(records))
    founders = records[: layout.size]
    everybody = [Candidate(r.id, r.slot, r.host, script_rank=r.script_rank) for r in founders]
    plan = with_redundancy(initial_plan([r.id for r in founders]), layout, True, everybody)
    standbys = records[layout.size :]
    plan = replace(
        plan,
        members=(*plan.members, *(r.id for r in standbys)),
        script_ranks=(*plan.script_ranks, *(0 for _ in standbys)),
    )
    return at(plan, records)


def at(plan: Plan, records: Sequence[MemberRecord], **more: Any) -> JobSituation:
    """The situation in which all ``records`` have entered ``plan``."""
    ids = [r.id for r in records]
    ready = {m: tuple(r for r, shadow in enumerate(plan.shadows) if shadow == m) for m in ids}
    values: dict[str, Any] = {
        "plan": plan,
        "members": {r.id: r for r in records},
        "entered": dict.fromkeys(ids, plan.epoch),
        "ready": ready,
        "built": frozenset(ids),
        "leader": ids[0] if ids else None,
        "step": 3,
    }
    return JobSituation(**{**values, **more})
