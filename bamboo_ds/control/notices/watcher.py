"""Asks all sources, each at its own pace."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from ..loop import AgentLoop
from .notice import Notice, NoticeSource
from .transport import SourceBroken, SourceError, open_session

if TYPE_CHECKING:
    import aiohttp

logger = logging.getLogger("bamboo_ds.control.notices")


class NoticeWatcher:
    """Asks sources for notices until stopped.

    A source that does not answer, or answers nonsense, is logged once when that begins and once when it
    ends; it is asked again every ``poll_s`` seconds and delays no other. Without sources nothing runs
    and aiohttp is not loaded.

    Args:
        sources: whom to ask; their names differ.
        on_notice: called on the loop's thread, once per distinct notice; must not block. A notice that
            a source withdraws and gives again is a new one.
        loop: runs it.
        poll_s: seconds between an answer of a source and the next question to it.
    """

    def __init__(
        self,
        sources: Sequence[NoticeSource],
        on_notice: Callable[[Notice], None],
        loop: AgentLoop,
        poll_s: float = 1.0,
    ) -> None:
        self._sources = {source.name: source for source in sources}
        if len(self._sources) != len(sources):
            raise ValueError(f"sources of the same name: {[source.name for source in sources]}")
        self._on_notice = on_notice
        self._loop = loop
        self._poll_s = poll_s
        self._asking: Future[None] | None = None
        self._stopping = asyncio.Event()

    def start(self) -> None:
        """Starts asking. Call it once, in a process that will not fork any more."""
        if self._asking is not None:
            raise RuntimeError("the watcher has been started before")
        if self._sources:
            self._asking = self._loop.run(self._ask())
            self._asking.add_done_callback(_tell_failure)

    def acknowledge(self, notice: Notice, timeout_s: float = 2.0) -> bool:
        """Tells the source of ``notice`` that this node has been left; from any thread but the loop's.

        Call it when nobody on this node needs it any more: the cloud may take it at once. Returns whether
        the source was told, within ``timeout_s`` seconds; failures are logged.
        """
        if self._asking is None or self._asking.done():
            return False
        future = self._loop.run(self._acknowledge(notice))
        try:
            return future.result(timeout_s)
        except (concurrent.futures.TimeoutError, concurrent.futures.CancelledError):
            future.cancel()
            logger.warning("%s did not take the acknowledgement within %.1f s", notice.source, timeout_s)
            return False

    def stop(self, timeout_s: float = 5.0) -> bool:
        """Asks no more and closes all connections; returns whether that took less than ``timeout_s`` seconds.

        A file system or a resolver that hangs can delay it. Further calls are allowed, but none from the
        loop's thread.
        """
        if self._asking is None:
            return True
        self._loop.call(self._stopping.set)
        done, _ = concurrent.futures.wait([self._asking], timeout_s)
        ended = bool(done) and self._loop.join(timeout_s)
        if not ended:
            logger.warning("the notices have not ended within %.1f s", timeout_s)
        return ended

    async def _ask(self) -> None:
        async with open_session() as session:
            tasks = [asyncio.create_task(self._follow(source, session)) for source in self._sources.values()]
            await self._stopping.wait()
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _follow(self, source: NoticeSource, session: aiohttp.ClientSession) -> None:
        told: set[tuple[str, str]] = set()
        health = _Health(source)
        while True:
            try:
                notice = await source.poll(session)
            except Exception as error:  # even a defect of one source must not silence the others
                health.note(error)
            else:
                health.note(None)
                if notice is None:
                    told.clear()
                elif (notice.kind, notice.key) not in told:
                    told.add((notice.kind, notice.key))
                    self._tell(notice)
            await asyncio.sleep(self._poll_s)

    def _tell(self, notice: Notice) -> None:
        try:
            self._on_notice(notice)
        except Exception:  # the next notice may be the one that counts
            logger.exception("%s could not be handled", notice)

    async def _acknowledge(self, notice: Notice) -> bool:
        source = self._sources.get(notice.source)
        if source is None:
            return False
        try:
            async with open_session() as session:
                return await source.acknowledge(session, notice)
        except SourceError as error:
            logger.warning("%s was not acknowledged: %s", notice.detail, error)
            return False


def _tell_failure(asking: Future[None]) -> None:
    if not asking.cancelled() and (error := asking.exception()) is not None:
        logger.error("no source of notices is asked any more: preemptions come without a notice", exc_info=error)


class _Health:
    """Logs how a source does, whenever that changes."""

    def __init__(self, source: NoticeSource) -> None:
        self._who = f"notice source {source.name} ({source.where})"
        self._state = "answers"

    def note(self, error: Exception | None) -> None:
        """The newest question was answered, or failed by ``error``."""
        before, self._state = self._state, self._classify(error)
        if self._state == before:
            return
        if error is None:
            logger.warning("%s answers again", self._who)
        else:
            defect = None if isinstance(error, SourceError) else error
            logger.warning(
                "%s %s, its notices are missed meanwhile: %s", self._who, self._state, error, exc_info=defect
            )

    @staticmethod
    def _classify(error: Exception | None) -> str:
        if error is None:
            return "answers"
        if not isinstance(error, SourceError):
            return "failed by a defect"
        return "breaks its protocol" if isinstance(error, SourceBroken) else "does not answer"
