"""Serves the page of a job while its member leads, on behalf of the coordinator.

Nothing in here delays or ends anything else: what takes time is done by other threads, some time after the member has
begun to lead, when it has a loss to handle; what goes wrong is logged and tried again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from ...addresses import split_address
from ...errors import EXIT_STOPPED, LeaseExpired, StoreError
from ...observe.view import Overview
from ...secret import SETTING
from ...store.client import Lease, Store
from ..loop import AgentLoop
from ..registry.access import is_genuine, put_once
from ..registry.keys import Keys
from ..registry.mirror import Mirror
from ..registry.overview import overview
from ..registry.records import LeaveRecord, StopRecord, WebRecord
from ..settings import AgentSettings

if TYPE_CHECKING:
    from .server import WebServer

logger = logging.getLogger("bamboo_ds.control.web")

#: Seconds that a member has led before it serves, between two attempts to listen, and between two overviews of etcd.
_CALM_S, _RETRY_S, _OVERVIEW_S = 0.5, 2.0, 0.5
#: Seconds between two looks whether it listens by now.
_LOOK_S = 0.1


class JobPage:
    """The web server of one member. Not thread-safe: everything is called by the coordinator.

    Args:
        settings: the agent's.
        member: its member.
        store: where requests of users go.
        loop: the agent's; runs it.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        settings: AgentSettings,
        member: str,
        store: Store,
        loop: AgentLoop,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings, self._member, self._store, self._loop, self._clock = settings, member, store, loop, clock
        self._server: WebServer | None = None
        self._opening: Future[WebServer] | None = None
        self._try_at: float | None = None  # ``None``: the member does not lead
        self._failures = 0
        self._told: str | None = None
        self._seen: tuple[int, int] | None = None
        self._shown_at = 0.0

    def follow(self, mirror: Mirror, lease: Lease) -> float | None:
        """Serves if this member leads; returns the monotonic time at which to call again at the latest.

        Raises:
            LeaseExpired: the member has to register anew.
        """
        if mirror.leader != self._member:
            self.close(0.0)
            return None
        try:
            return self._show(mirror, lease)
        except LeaseExpired:
            raise
        except StoreError as error:
            logger.debug("what the page has to do with etcd fails: %s", error)
        except Exception as error:
            self._warn(f"the page and the metrics of the job are not served: {error!r}")
        return self._clock() + _RETRY_S

    def close(self, timeout_s: float) -> None:
        """Serves no more; waits up to ``timeout_s`` seconds for that. Idempotent, and never fails."""
        server, self._server = self._server, None
        opening, self._opening = self._opening, None
        self._try_at = self._seen = None
        try:
            if opening is not None:
                opening.add_done_callback(_abandon)
            elif server is not None:
                server.close(timeout_s)
        except Exception as error:
            self._warn(f"the page of the job has not ended well: {error!r}")

    # -- serving --------------------------------------------------------------------------------------

    def _show(self, mirror: Mirror, lease: Lease) -> float | None:
        now = self._clock()
        if self._try_at is None:
            self._try_at = now + _CALM_S
        if self._opening is not None and self._opening.done():
            self._note_opened(self._opening)
        if self._server is not None and not self._server.alive:
            self._server = None
        if self._server is None and self._opening is None:
            if now < self._try_at:
                return self._try_at
            change = self._change if self._settings.bamboo.observe.control else None
            serving = asyncio.to_thread(_serve, self._settings, change, self._loop, overview(mirror))
            self._opening = self._loop.run(serving)
        if self._server is None:
            return now + _LOOK_S
        seen, again = (id(mirror), mirror.changes), self._shown_at + _OVERVIEW_S
        news = seen != self._seen
        if news and now >= again:
            self._seen, self._shown_at = seen, now
            self._server.feed.know(overview(mirror))
            news = False
        self._announce(self._url(self._server), mirror, lease)
        return again if news else None

    def _note_opened(self, opening: Future[WebServer]) -> None:
        self._opening, self._try_at, self._seen = None, self._clock() + _RETRY_S, None
        try:
            self._server = opening.result()
        except OSError as error:
            self._failures += 1
            if self._failures > 1:  # who led before may need a moment to learn that it does not any more
                self._warn(str(error))
            return
        self._failures, self._told = 0, None
        url, job = self._url(self._server), self._settings.job
        logger.info("serving the page of the job at %s; bamboo web --job %s has the token", url, job)

    def _url(self, server: WebServer) -> str:
        """The URL at which it listens; of all addresses the one that other members know."""
        own = f"//[{self._settings.address}]:" if ":" in self._settings.address else f"//{self._settings.address}:"
        return server.url.replace("//0.0.0.0:", own).replace("//[::]:", own)

    def _announce(self, url: str, mirror: Mirror, lease: Lease) -> None:
        """Lets other commands find the page."""
        record = WebRecord(id=self._member, url=url)
        if mirror.get(Keys.WEB, WebRecord) != record:
            self._store.put(Keys.WEB, record.to_json(), lease)

    def _warn(self, what: str) -> None:
        """Warns once, until it has gone well."""
        if what != self._told:
            logger.warning("%s", what)
        self._told = what

    def _change(self, what: str, member: str) -> None:
        """Does what a user asks for, in a thread of the web server."""
        if what == "stop":
            logger.warning("the job is to end: somebody has asked for it on the job's page")
            put_once(self._store, Keys.STOP, StopRecord(code=EXIT_STOPPED, reason="the job's page", by="").to_json())
        elif not is_genuine(self._store, Keys.member(member)):
            raise LookupError(f"there is no member {member!r}")
        else:
            record = LeaveRecord(id=member, source="web", detail="the job's page")
            put_once(self._store, Keys.leave(member), record.to_json())


def _serve(
    settings: AgentSettings, change: Callable[[str, str], None] | None, loop: AgentLoop, known: Overview
) -> WebServer:
    """Serves the page, from what is ``known`` on, by a thread that may take its time to import what that needs.

    Raises:
        OSError: cannot listen at the address; the message names the setting.
    """
    from .access import Access
    from .feed import Feed
    from .server import WebServer

    address, job, secret = settings.bamboo.observe.http, settings.job, settings.secret
    assert address is not None
    if not secret:
        raise OSError(f'"bamboo.observe.http" has no effect: the job has no secret to tell users by; set {SETTING}')
    host, port = split_address(address)
    place, feed = (host or settings.address, port), Feed(job, settings.events)
    feed.know(known)
    try:
        return WebServer(feed, Access(secret, job), job, place, change, loop)
    except OSError as error:
        what = f'cannot serve the page of the job at "bamboo.observe.http" = {address!r}, trying on'
        raise OSError(f"{what}: {error}") from error


def _abandon(opening: Future[WebServer]) -> None:
    """Abandons what was being opened."""
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close(0.0)
