"""The parts of an agent's side towards etcd, put together.

Importing this loads gRPC, which a process must not have loaded when it forks: so not before the worker is there.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

from ...observe.events import EventWriter
from ...processes import process_space, started
from ..leader.leader import Leader
from ..loop import AgentLoop
from ..registry.access import open_store
from ..registry.keys import Keys
from ..registry.records import MemberRecord
from ..settings import AgentSettings
from ..web.display import JobPage
from .callbacks import Callbacks
from .coordinator import Coordinator

_STORE_TIMEOUT_S = 2.0
#: Seconds without etcd that a member bears which joins: nothing is lost with it.
_JOINING_S = 60.0


def make_coordinator(
    settings: AgentSettings,
    member: str,
    pid: int,
    place: str,
    events: EventWriter,
    callbacks: Callbacks,
    loop: AgentLoop,
    *,
    on_feed: Callable[[int, int], None] = lambda slot, rank: None,
    last_heartbeat: Callable[[], float | None] = lambda: None,
) -> Coordinator:
    """The coordinator of ``member``, not started; see there and :class:`Leader` for the callbacks.

    Args:
        pid: process id of the worker, or of the agent if that waits for the job's restart.
        place: of the worker, for others.
        loop: serves the page.
    """
    record = member_record(settings, member, pid, place)
    store = open_store(settings.store, settings.job, _STORE_TIMEOUT_S, settings.secret)
    coordinator = Coordinator(
        store,
        Leader(store, events, settings, member, on_feed),
        record,
        lease_ttl_s=settings.bamboo.membership.lease_ttl_s,
        callbacks=callbacks,
        last_heartbeat=last_heartbeat,
        after_epoch=settings.after_epoch,
        outage_s=outage_s(settings),
        settings=settings.settings,
        display=JobPage(settings, member, store, loop) if settings.bamboo.observe.http is not None else None,
    )
    if settings.slot == 0 and settings.script_rank is None and not settings.waiting:
        coordinator.write(Keys.SPEC, settings.record(settings.world_size, settings.pipelines))
    return coordinator


def outage_s(settings: AgentSettings) -> float:
    """Seconds without etcd that a member bears which takes no part."""
    membership = settings.bamboo.membership
    return max(membership.rejoin_s if settings.waiting else _JOINING_S, 3 * membership.lease_ttl_s)


def member_record(settings: AgentSettings, member: str, pid: int, place: str) -> MemberRecord:
    """The record of ``member``; ``pid`` and ``place`` as above."""
    return MemberRecord(
        id=member,
        slot=settings.slot,
        host=settings.host or socket.gethostname(),
        zone=settings.zone,
        address=settings.address,
        pid=pid,
        agent_pid=os.getpid(),
        agent_started=None if settings.waiting else started(os.getpid()),
        process_space="" if settings.waiting else process_space(),
        incarnation=member.rpartition("-")[2],
        script_rank=settings.rank,
        joiner=settings.joins and not settings.waiting,
        feeder=settings.feeder,
        state="waiting" if settings.waiting else "running",
        generation=None if settings.joins else settings.generation or 0,
        events=settings.events,
        place=place,
    )
