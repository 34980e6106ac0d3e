"""Same-host failure detector: reports a dead agent at once instead of when its lease runs out."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from ...errors import EXIT_FATAL_LOSS
from ...processes import boot_id, process_space, started
from ..registry.keys import Keys
from ..registry.mirror import Mirror
from ..registry.records import LeftRecord, MemberRecord, in_slot_order

if TYPE_CHECKING:
    from ...store.client import Store

#: Each agent watches so many that come next in the order of slots. When both it and they die together, those before it
#: watch the next ones as soon as they know.
_WATCHED = 2


def report_dead_agent(store: Store, record: MemberRecord, died: float, detail: str) -> None:
    """Tell the leader of a member whose agent cannot. Does nothing if the agent has said good-bye, or others have.

    Args:
        died: monotonic seconds at which its death was seen.
        detail: what of it is known.
    """
    key = Keys.member(record.id)
    if store.get(key) is None:
        return
    departure = LeftRecord(
        id=record.id,
        slot=record.slot,
        outcome="lost",
        reason="signal",
        detail=detail,
        code=EXIT_FATAL_LOSS,
        since=died,
        boot=boot_id(),
    )
    store.create(Keys.left(record.id), departure.to_json())
    store.delete(key)
    now = Mirror(store.get_prefix(Keys.LEADER))
    if now.leader == record.id:
        store.compare_and_delete(Keys.LEADER, now.revision(Keys.LEADER))


def watched_by(me: str, members: Iterable[MemberRecord], space: str) -> dict[str, MemberRecord]:
    """Whom the agent of ``me`` watches: the next members in the order of slots that have joined.

    The others are children of a launcher, which sees their deaths.

    Args:
        members: all that are registered.
        space: :func:`process_space` of ``me``.
    """
    near = in_slot_order(r for r in members if r.process_space == space or r.id == me)
    at = next((n for n, record in enumerate(near) if record.id == me), None)
    if at is None:
        return {}
    following = [record for record in (*near[at + 1 :], *near[:at]) if record.joiner]
    return {record.id: record for record in following[:_WATCHED]}


class Neighbours:
    """Watches the agents of some members of this host, so that each that has joined is watched by somebody.

    Args:
        me: id of the member that watches.
        died: called with the record of a member whose agent is dead, and the monotonic time at which that was seen; on
            a thread of this object. It may be called for one that has just left in order.
    """

    def __init__(self, me: str, died: Callable[[MemberRecord, float], None]) -> None:
        self._me, self._died = me, died
        self._watched: dict[str, tuple[int, MemberRecord]] = {}  # pidfds by member
        self._dropped: list[int] = []
        self._known: frozenset[str] = frozenset()
        self._lock = threading.Lock()
        self._wake_read, self._wake_write = socket.socketpair()
        self._closed = False
        self._thread = threading.Thread(target=self._watch, name="bamboo-neighbours", daemon=True)
        self._thread.start()

    def follow(self, members: Iterable[MemberRecord]) -> None:
        """Watch those of ``members`` (all that are registered) that this agent is to watch, and nobody else."""
        near = watched_by(self._me, members, process_space())
        if near.keys() == self._known:
            return
        for member in near.keys() - self._known:
            self._add(near[member])
        with self._lock:
            for member in self._watched.keys() - near.keys():
                self._dropped.append(self._watched.pop(member)[0])
        self._known = frozenset(near)
        self._wake_write.send(b"\0")

    def _add(self, record: MemberRecord) -> None:
        try:
            pidfd = os.pidfd_open(record.agent_pid)
        except ProcessLookupError:
            self._died(record, time.monotonic())
            return
        # Looked at only now: from here on the number cannot change its meaning.
        if started(record.agent_pid) != record.agent_started:
            os.close(pidfd)
            self._died(record, time.monotonic())
            return
        with self._lock:
            self._watched[record.id] = pidfd, record

    def _watch(self) -> None:
        while not self._closed:
            poll = select.poll()
            with self._lock:
                # Nobody else closes any: while it is polled, a descriptor's number must not change its meaning.
                while self._dropped:
                    os.close(self._dropped.pop())
                for pidfd, _ in self._watched.values():
                    poll.register(pidfd, select.POLLIN)
            poll.register(self._wake_read, select.POLLIN)
            ready = {fd for fd, _ in poll.poll()}
            now = time.monotonic()
            if self._wake_read.fileno() in ready:
                self._wake_read.recv(4096)
            with self._lock:
                dead = [record for pidfd, record in self._watched.values() if pidfd in ready]
                for record in dead:
                    os.close(self._watched.pop(record.id)[0])
            for record in dead:
                self._died(record, now)

    def close(self) -> None:
        """Watch no more. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._wake_write.send(b"\0")
        self._thread.join()
        for pidfd in [*self._dropped, *(pidfd for pidfd, _ in self._watched.values())]:
            os.close(pidfd)
        self._watched.clear()
        self._dropped.clear()
        self._wake_read.close()
        self._wake_write.close()
