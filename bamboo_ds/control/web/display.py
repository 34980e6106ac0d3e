"""Serves the page of a job while its member leads, on behalf of the coordinator.

Nothing in here delays or ends anything else: what goes wrong is logged and tried again.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from ...addresses import split_address
from ...errors import LeaseExpired, StoreError, StoreUnavailable
from ...secret import SETTING
from ...store import Lease, Store
from ..once import put_once
from ..registry.keys import Keys
from ..registry.mirror import Mirror
from ..registry.overview import overview
from ..registry.records import LeaveRecord, StopRecord, WebRecord
from ..settings import AgentSettings

if TYPE_CHECKING:
    from .exporter import Exporter
    from .feed import Feed
    from .server import WebServer

logger = logging.getLogger("bamboo_ds.control.web")

#: Seconds between two attempts to listen, and between two overviews of what etcd has.
_RETRY_S = 2.0
_OVERVIEW_S = 0.5
#: Exit code of a job that was ended on request: as if by SIGTERM.
STOPPED = 143


class Display:
    """The web server of one member, and its exporter. Not thread-safe: everything is called by the coordinator.

    Args:
        settings: the agent's.
        member: its member.
        store: where requests of users go.
        clock: monotonic seconds.

    Attributes:
        wake: called from other threads, has the coordinator call :meth:`follow` soon.
    """

    def __init__(
        self, settings: AgentSettings, member: str, store: Store, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings, self._member, self._store, self._clock = settings, member, store, clock
        self._observe = settings.bamboo.observe
        self.wake: Callable[[], None] = lambda: None
        self._feed: Feed | None = None
        self._server: WebServer | None = None
        self._exporter: Exporter | None = None
        self._try_at = 0.0
        self._failures = 0
        self._told: str | None = None
        self._seen: tuple[int, int] | None = None
        self._shown_at = 0.0
        self._asked: queue.SimpleQueue[tuple[str, str, Future[None]]] = queue.SimpleQueue()

    def follow(self, mirror: Mirror, lease: Lease) -> float | None:
        """Serve if this member leads; returns the monotonic time at which to call again at the latest.

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
        """Serve no more; wait up to ``timeout_s`` seconds for that. Idempotent."""
        server, self._server = self._server, None
        exporter, self._exporter = self._exporter, None
        self._feed = None
        if server is not None:
            server.close(timeout_s)
        if exporter is not None:
            exporter.close(timeout_s)
        while not self._asked.empty():
            self._asked.get()[2].set_exception(StoreUnavailable("this member does not lead any more"))

    # -- serving --------------------------------------------------------------------------------------

    def _show(self, mirror: Mirror, lease: Lease) -> float | None:
        from .feed import Feed

        now = self._clock()
        if self._feed is None:
            self._feed = Feed(self._settings.job, self._settings.events)
            self._seen, self._try_at = None, now
            self._export(self._feed)
        wakes = []
        seen = id(mirror), mirror.changes
        if seen != self._seen and now >= self._shown_at + _OVERVIEW_S:
            self._seen, self._shown_at = seen, now
            self._feed.know(overview(mirror))
        elif seen != self._seen:
            wakes.append(self._shown_at + _OVERVIEW_S)
        if self._observe.http is not None:
            if self._server is None and now >= self._try_at:
                self._try_at = now + _RETRY_S
                self._serve(self._feed, self._observe.http)
            if self._server is None:
                wakes.append(self._try_at)
            else:
                self._announce(self._server.url, mirror, lease)
                self._carry_out(mirror)
        return min(wakes, default=None)

    def _serve(self, feed: Feed, address: str) -> None:
        from .access import Access
        from .server import WebServer

        host, port = split_address(address)
        secret, job = self._settings.secret, self._settings.job
        if not secret:
            self._warn(f'"bamboo.observe.http" has no effect: the job has no secret to tell users by; set {SETTING}')
            return
        change = self._ask if self._observe.control else None
        try:
            self._server = WebServer(feed, Access(secret, job), job, host or self._settings.address, port, change)
        except OSError as error:
            self._failures += 1
            if self._failures > 1:  # who led before may need a moment to learn that it does not any more
                self._warn(
                    f'cannot serve the page of the job at "bamboo.observe.http" = {address!r}, trying on: {error}'
                )
            return
        self._failures, self._told = 0, None
        logger.info("serving the page of the job at %s; bamboo web --job %s prints the token", self._server.url, job)

    def _export(self, feed: Feed) -> None:
        if self._observe.otlp is None:
            return
        from .exporter import Exporter

        self._exporter = Exporter(feed, self._settings.job, self._observe.otlp)

    def _announce(self, url: str, mirror: Mirror, lease: Lease) -> None:
        """Let other commands find the page."""
        record = WebRecord(id=self._member, url=url)
        if mirror.get(Keys.WEB, WebRecord) != record:
            self._store.put(Keys.WEB, record.to_json(), lease)

    def _warn(self, what: str) -> None:
        """Say it once, until it has gone well."""
        if what != self._told:
            logger.warning("%s", what)
        self._told = what

    # -- what users ask for ---------------------------------------------------------------------------

    def _ask(self, what: str, member: str) -> Future[None]:
        """Called by the web server's thread: carried out by the coordinator's."""
        done: Future[None] = Future()
        self._asked.put((what, member, done))
        self.wake()
        return done

    def _carry_out(self, mirror: Mirror) -> None:
        while not self._asked.empty():
            what, member, done = self._asked.get()
            try:
                self._do(what, member, mirror)
            except (LookupError, StoreError) as error:
                done.set_exception(error)
            else:
                done.set_result(None)

    def _do(self, what: str, member: str, mirror: Mirror) -> None:
        if what == "stop":
            logger.warning("the job is to end: somebody has asked for it on the job's page")
            put_once(self._store, Keys.STOP, StopRecord(code=STOPPED, reason="the job's page", by="").to_json())
        elif member not in mirror.members:
            raise LookupError(f"there is no member {member!r}")
        else:
            record = LeaveRecord(id=member, source="web", detail="the job's page")
            put_once(self._store, Keys.leave(member), record.to_json())
