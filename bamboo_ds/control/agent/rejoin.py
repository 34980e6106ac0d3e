"""The way of an evicted member back into the job: as a member that joins, in a process of the same id.

Others have taken its roles over; what its worker had is worth nothing any more. When etcd answers again and the job
goes on without it, its agent starts anew (:mod:`.reexec`), with a slot of its own as any member that joins.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from tenacity import Retrying, retry_if_result, stop_after_delay, wait_exponential

from ...errors import ProtocolError, StoreError
from ..registry.access import open_store
from ..registry.mirror import Mirror
from ..registry.vacancies import Desertion, find_vacancy, is_over
from .mailbox import Mailbox
from .slot import Slot
from .states import State

if TYPE_CHECKING:
    from ...store.client import Store

logger = logging.getLogger("bamboo_ds.control.rejoin")

#: A member that was part of the job for so many seconds has earned that its earlier evictions are forgotten.
_GOOD_S = 600.0
#: Seconds before it rejoins for the second time; doubled before each further one, up to the longest.
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
_STORE_TIMEOUT_S = 2.0

Prospect = Literal["open", "not yet", "over"]


def pause_s(rejoins: int) -> float:
    """Seconds that a member waits which has rejoined so many times already, and was evicted again."""
    if rejoins == 0:
        return 0.0
    return float(min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(rejoins - 1, 30)))


def prospect(mirror: Mirror, member: str, restarts: bool) -> Prospect:
    """Whether the job can take in a process that was ``member`` before.

    ``over``: it has ended, also by a fatal loss unless it ``restarts`` after one. ``not yet``: it still counts with
    ``member``, it is starting, or has no members.
    """
    plan = mirror.plan
    if plan is None or mirror.job is None or is_over(mirror):
        return "over"
    if plan.lost_roles:
        return "open" if restarts else "over"
    alive = any(other in mirror.members for other in plan.members)
    return "open" if alive and plan.layout is not None and member not in plan.members else "not yet"


class Rejoin:
    """Looks for a way back into the job.

    Args:
        member: what it was.
        slot: that of the agent whose worker was evicted, or that has waited for a restart. It goes from rejoining to
            starting, or ends.
        clock: monotonic seconds.
    """

    def __init__(self, member: str, slot: Slot, clock: Callable[[], float] = time.monotonic) -> None:
        settings = slot.settings
        self._settings, self._member, self._slot, self._clock = settings, member, slot, clock
        earned = settings.waiting or slot.member_s >= _GOOD_S
        self._rejoins = 0 if earned else settings.rejoins
        self._desertion = Desertion(clock)

    def find(self, mailbox: Mailbox) -> None:
        """Looks until there is a place, the slot is told to end, the job is over, or has not been seen for too long.

        Args:
            mailbox: of the agent; what it is told meanwhile is handled.
        """
        settings, rejoin_s = self._settings, self._settings.bamboo.membership.rejoin_s

        def wait(seconds: float) -> None:
            mailbox.handle_until(lambda: self._slot.state is not State.REJOINING, seconds)

        pause = pause_s(self._rejoins)
        if pause:
            logger.warning("evicted again, %d times now: waiting for %.0f s", self._rejoins + 1, pause)
        if settings.feeder or rejoin_s <= 0:
            return
        wait(pause)
        searching = Retrying(
            retry=retry_if_result(lambda _: self._slot.state is State.REJOINING),
            stop=stop_after_delay(rejoin_s),
            wait=wait_exponential(multiplier=0.2, max=5.0),
            sleep=wait,
            retry_error_callback=lambda state: logger.warning("found no way back into the job within %.0f s", rejoin_s),
        )
        searching(self.look)
        mailbox.handle_all()  # it may be told to end after all

    def _open(self) -> Store:
        settings = self._settings
        return open_store(settings.store, settings.job, _STORE_TIMEOUT_S, settings.secret)

    def look(self) -> None:
        """Looks once."""
        settings, restarts = self._settings, self._settings.bamboo.recovery.max_restarts > 0
        if self._slot.state is not State.REJOINING:
            return
        try:
            with self._open() as store:
                mirror = Mirror(store.get_prefix(""))
                view = prospect(mirror, self._member, restarts)
                lease_ttl_s = settings.bamboo.membership.lease_ttl_s
                deserted = self._desertion.look(mirror if view == "not yet" else None, lease_ttl_s)
                if view == "over" or (deserted and not restarts):
                    logger.info("there is no job to come back to")
                    self._slot.end()
                if view != "open" and not (deserted and restarts):
                    return
                assert mirror.plan is not None
                vacancy = find_vacancy(store, mirror, mirror.plan, own_slot=settings.slot, restart=deserted)
        except StoreError as error:
            logger.info("cannot come back yet: %s", error)
            return
        except ProtocolError as error:
            logger.error("cannot come back: %s", error)
            self._slot.end()
            return
        fields = dataclasses.asdict(vacancy)
        renewed = dataclasses.replace(settings, **fields, restart_from=None, extra={}, rejoins=self._rejoins + 1)
        logger.warning("coming back into the job, as slot %d", renewed.slot)
        self._slot.start_with(renewed)
