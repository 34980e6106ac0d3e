"""Answers to accusations: a worker whose heart beats is alive, whatever others can reach."""

from __future__ import annotations

from collections.abc import Callable

from ...store.client import Store
from ...topology.plan import Plan
from ..registry.keys import Keys
from ..registry.mirror import Mirror
from ..registry.records import HealthReply

#: How often a pending accusation is compared with the worker's heartbeat, in seconds.
_POLL_S = 0.1


class HealthReplies:
    """The replies of one member.

    Args:
        store: of its coordinator.
        member: its id.
        last_heartbeat: monotonic seconds of the worker's newest heartbeat; ``None``: none, or none is expected.
        clock: monotonic seconds.
    """

    def __init__(
        self, store: Store, member: str, last_heartbeat: Callable[[], float | None], clock: Callable[[], float]
    ) -> None:
        self._store, self._member, self._last_heartbeat, self._clock = store, member, last_heartbeat, clock
        self._accused: tuple[int, float] | None = None  # epoch, and when we learnt of it

    def reply(self, mirror: Mirror, plan: Plan | None) -> float | None:
        """Answer an accusation as soon as a heartbeat disproves it; returns when to look again."""
        me = self._member
        if plan is None or mirror.healthy.get(me) == plan.epoch:
            return None
        if not any(s.accused == me and s.epoch == plan.epoch for s in mirror.suspicions):
            return None
        if self._accused is None or self._accused[0] != plan.epoch:
            self._accused = (plan.epoch, self._clock())
        heartbeat = self._last_heartbeat()
        if heartbeat is not None and heartbeat > self._accused[1]:
            self._store.put(Keys.health(me), HealthReply(id=me, epoch=plan.epoch).to_json())
            return None
        return self._clock() + _POLL_S
