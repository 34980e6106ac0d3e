"""What the tests of notices share: one question, a running watcher, what is logged."""

from __future__ import annotations

import asyncio
import logging
import queue
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import aiohttp

from bamboo_ds.control.loop import AgentLoop
from bamboo_ds.control.notices import Notice, NoticeSource, NoticeWatcher
from bamboo_ds.control.notices.transport import open_session

T = TypeVar("T")
POLL_S = 0.02


def ask(question: Callable[[aiohttp.ClientSession], Awaitable[T]]) -> T:
    """The answer to ``question``, in a session of its own."""

    async def run() -> T:
        async with open_session() as session:
            return await question(session)

    return asyncio.run(run())


def poll(source: NoticeSource) -> Notice | None:
    """What ``source`` says to one question."""
    return ask(source.poll)


class Log(logging.Handler):
    """What the package logs, whatever other tests have done to its loggers."""

    def __init__(self) -> None:
        super().__init__()
        self.records: queue.Queue[logging.LogRecord] = queue.Queue()

    def emit(self, record: logging.LogRecord) -> None:
        self.records.put(record)

    def next(self) -> logging.LogRecord:
        return self.records.get(timeout=10)

    def nothing_more(self) -> bool:
        return self.records.empty()


@contextmanager
def recorded_log() -> Iterator[Log]:
    """What the notices log meanwhile."""
    handler, logger = Log(), logging.getLogger("bamboo_ds.control.notices")
    logger.addHandler(handler)
    try:
        yield handler
    finally:
        logger.removeHandler(handler)


class Watching:
    """A running watcher and the notices that it told."""

    def __init__(self, *sources: NoticeSource) -> None:
        self.notices: queue.Queue[Notice] = queue.Queue()
        self.watcher = NoticeWatcher(sources, self.notices.put, AgentLoop(), POLL_S)

    def __enter__(self) -> Watching:
        self.watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self.watcher.stop()

    def next(self) -> Notice:
        return self.notices.get(timeout=10)
