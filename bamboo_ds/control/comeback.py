"""How an evicted member comes back: as a newcomer to the job, in a process of the same id.

Others have taken its roles over; what its worker had is worth nothing any more. When etcd answers again and the job
goes on without it, its agent starts anew (:mod:`.rebirth`), with a slot of its own as anybody who joins.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from tenacity import Retrying, retry_if_result, stop_after_delay, wait_exponential

from ..errors import ProtocolError, StoreError
from .access import open_store
from .agent_settings import AgentSettings
from .membership import JobRecord, Keys
from .mirror import Mirror
from .newcomer import find_vacancy, is_over

if TYPE_CHECKING:
    from ..store import Store

logger = logging.getLogger("bamboo_ds.control.comeback")

#: A member that was part of the job for so many seconds has earned that its earlier evictions are forgotten.
_GOOD_S = 600.0
#: Seconds before the second comeback; doubled before each further one, up to the longest.
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
_STORE_TIMEOUT_S = 2.0
#: Lease times after which a job none of whose members is registered has ended.
_DESERTED = 3.0

Prospect = Literal["open", "not yet", "over"]


def pause_s(comebacks: int) -> float:
    """Seconds that a member waits which has come back so many times already, and was evicted again."""
    if comebacks == 0:
        return 0.0
    return float(min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(comebacks - 1, 30)))


def prospect(mirror: Mirror, member: str, restarts: bool) -> Prospect:
    """Whether the job can take in somebody who was ``member`` before.

    ``over``: it has ended, also by a fatal loss unless it ``restarts`` after one. ``not yet``: it still counts with
    ``member``, it is starting, or nobody is there.
    """
    plan = mirror.plan
    if plan is None or mirror.get(Keys.SPEC, JobRecord) is None or is_over(mirror):
        return "over"
    if plan.unheld:
        return "open" if restarts else "over"
    alive = any(other in mirror.members for other in plan.members)
    return "open" if alive and plan.layout is not None and member not in plan.members else "not yet"


class Comeback:
    """Looks for a way back into the job.

    Args:
        settings: of the agent whose worker was evicted.
        member: what it was.
        member_s: seconds for which it was part of the job.
        wait: waits for so many seconds; false, at once, when the agent is to end.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        settings: AgentSettings,
        member: str,
        member_s: float,
        wait: Callable[[float], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._settings = settings
        self._member = member
        self._wait = wait
        self._comebacks = 0 if member_s >= _GOOD_S else settings.comebacks
        self._deserted_since: float | None = None
        self._ended = False

    def find(self) -> AgentSettings | None:
        """The settings to start anew with; ``None`` if the job is over, or has not been seen for too long."""
        settings = self._settings
        pause = pause_s(self._comebacks)
        if pause:
            logger.warning("evicted again, %d times now: waiting for %.0f s", self._comebacks + 1, pause)
        if settings.feeder or settings.rejoin_s <= 0 or not self._wait(pause):
            return None
        patience = Retrying(
            retry=retry_if_result(lambda found: found is None and not self._ended),
            stop=stop_after_delay(settings.rejoin_s),
            wait=wait_exponential(multiplier=0.2, max=5.0),
            sleep=self._sleep,
            retry_error_callback=lambda state: logger.warning(
                "found no way back into the job within %.0f s", settings.rejoin_s
            ),
        )
        found: AgentSettings | None = patience(self._look)
        return found

    def _sleep(self, seconds: float) -> None:
        self._ended = self._ended or not self._wait(seconds)

    def _open(self) -> Store:
        settings = self._settings
        return open_store(settings.store, settings.job, _STORE_TIMEOUT_S, settings.secret)

    def _look(self) -> AgentSettings | None:
        settings = self._settings
        if self._ended:
            return None
        try:
            with self._open() as store:
                mirror = Mirror(store.get_prefix(""))
                view = prospect(mirror, self._member, settings.max_restarts > 0)
                deserted = self._deserted(view, mirror)
                if view == "over" or (deserted and not settings.max_restarts):
                    logger.info("there is no job to come back to")
                    self._ended = True
                if view != "open" and not (deserted and settings.max_restarts):
                    return None
                assert mirror.plan is not None
                vacancy = find_vacancy(store, mirror, mirror.plan, own_slot=settings.slot, restart=deserted)
        except StoreError as error:
            logger.info("cannot come back yet: %s", error)
            return None
        except ProtocolError as error:
            logger.error("cannot come back: %s", error)
            self._ended = True
            return None
        return dataclasses.replace(
            settings,
            **dataclasses.asdict(vacancy),
            restart_from=None,
            extra=None,
            comebacks=self._comebacks + 1,
        )

    def _deserted(self, view: Prospect, mirror: Mirror) -> bool:
        """Whether nobody has been there for so long that nobody will be."""
        plan = mirror.plan
        if view != "not yet" or plan is None or any(m in mirror.members for m in plan.members):
            self._deserted_since = None
            return False
        now = self._clock()
        if self._deserted_since is None:
            self._deserted_since = now
        return now - self._deserted_since > _DESERTED * self._settings.lease_ttl_s
