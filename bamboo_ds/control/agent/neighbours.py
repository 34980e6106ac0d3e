"""Same-host failure detector: reports a dead agent at once instead of when its lease runs out."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from multiprocessing.connection import wait
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
    """Tells the leader of a member whose agent cannot, unless the agent has said good-bye, or others have told.

    What it leaves under its lease is removed in any case, the leadership among it.

    Args:
        died: monotonic seconds at which its death was seen.
        detail: what of it is known.
    """
    key = Keys.member(record.id)
    if store.get(key) is not None:
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
    # Those of its host watch others in its place.
    store.delete_keys([key, Keys.host(record.process_space, record.id)])
    now = Mirror(store.get_prefix(Keys.LEADER))
    if now.leader == record.id:
        store.compare_and_delete(Keys.LEADER, now.revision(Keys.LEADER))


def watched_by(me: MemberRecord, joiners: Iterable[MemberRecord], space: str) -> dict[str, MemberRecord]:
    """The members that the agent of ``me`` watches: the next ones in the order of slots that have joined.

    The others are children of a launcher, which sees their deaths.

    Args:
        joiners: those that are registered.
        space: :func:`process_space` of ``me``.
    """
    near = in_slot_order([me, *(r for r in joiners if r.process_space == space and r.id != me.id)])
    at = near.index(me)
    return {record.id: record for record in (*near[at + 1 :], *near[:at])[:_WATCHED]}


class Neighbours:
    """The agents of some members of this host, so that each that has joined is watched by an agent.

    Attributes:
        dead: members whose agents were found dead, with the monotonic time at which that was; a report takes
            it out. One may have left in order just before.
    """

    def __init__(self) -> None:
        self._seen: Mapping[str, MemberRecord] | None = None
        self._watched: dict[int, MemberRecord] = {}  # by pidfd
        self._known: frozenset[str] = frozenset()
        self.dead: dict[str, tuple[MemberRecord, float]] = {}

    @property
    def pidfds(self) -> list[int]:
        """Descriptors that are readable once an agent is dead; :meth:`look` then."""
        return list(self._watched)

    def follow(self, me: MemberRecord, joiners: Mapping[str, MemberRecord]) -> None:
        """Watches those of ``joiners`` that the agent of ``me`` is to watch, and no others."""
        if joiners is self._seen:
            return
        self._seen, near = joiners, watched_by(me, joiners.values(), process_space())
        for pidfd, record in list(self._watched.items()):
            if record.id not in near:
                self._drop(pidfd)
        for member in near.keys() - self._known:
            self._add(near[member])
        self._known = frozenset(near)

    def _add(self, record: MemberRecord) -> None:
        try:
            pidfd = os.pidfd_open(record.agent_pid)
        except ProcessLookupError:
            self._note(record)
            return
        self._watched[pidfd] = record
        # Looked at only now: from here on the number cannot change its meaning.
        if started(record.agent_pid) != record.agent_started:
            self._note(self._drop(pidfd))

    def _note(self, record: MemberRecord) -> None:
        self.dead[record.id] = record, time.monotonic()

    def _drop(self, pidfd: int) -> MemberRecord:
        os.close(pidfd)
        return self._watched.pop(pidfd)

    def look(self) -> None:
        """Notes the agents that have died."""
        for pidfd in wait(self.pidfds, 0.0):
            assert isinstance(pidfd, int)
            self._note(self._drop(pidfd))

    def close(self) -> None:
        """Stops watching. Idempotent."""
        for pidfd in self.pidfds:
            self._drop(pidfd)
