"""Answers for members that are accused: a worker whose heart beats is alive, whatever others can reach."""

from __future__ import annotations

from collections.abc import Callable

from ...store.client import Store
from ...topology.plan import Plan
from ..registry.keys import Keys
from ..registry.mirror import Mirror
from ..registry.records import HealthReply, HealthRequest

#: How often an open question is compared with the worker's heartbeat, in seconds.
_POLL_S = 0.1


class HealthReplies:
    """The replies of one member.

    Args:
        store: of its coordinator.
        member: its id.
        last_heartbeat: monotonic seconds of the worker's newest heartbeat, or ``None`` if none is expected.
        clock: monotonic seconds.
    """

    def __init__(
        self, store: Store, member: str, last_heartbeat: Callable[[], float | None], clock: Callable[[], float]
    ) -> None:
        self._store, self._member, self._last_heartbeat, self._clock = store, member, last_heartbeat, clock
        self._asked: tuple[int, float] | None = None  # epoch, and when we learnt of it
        self._replied = 0  # epoch

    def reply(self, mirror: Mirror, plan: Plan | None) -> float | None:
        """Answers the leader's question as soon as there is a heartbeat after it; returns when to look again."""
        me = self._member
        question = mirror.get(Keys.asked(me), HealthRequest)
        if plan is None or question is None or question.epoch != plan.epoch or self._replied == plan.epoch:
            return None
        if self._asked is None or self._asked[0] != plan.epoch:
            self._asked = (plan.epoch, self._clock())
        heartbeat = self._last_heartbeat()
        if heartbeat is not None and heartbeat > self._asked[1]:
            self._store.put(Keys.health(me), HealthReply(id=me, epoch=plan.epoch).to_json())
            self._replied = plan.epoch
            return None
        return self._clock() + _POLL_S
