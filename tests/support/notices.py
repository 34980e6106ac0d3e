"""What the tests of notices share: one question, a running watcher, what is logged."""

from __future__ import annotations

import asyncio
import logging
import queue
from collections.abc import Iterator
from contextlib import contextmanager

from bamboo_ds.control.loop import AgentLoop
from bamboo_ds.control.notices import Notice, NoticeSource, NoticeWatcher
from bamboo_ds.control.notices.transport import open_session

POLL_S = 0.02


def poll(source: NoticeSource) -> Notice | None:
    """What ``source`` says to one question."""

    async def run() -> Notice | None:
        async with open_session() as session:
            return await source.poll(session)

    return asyncio.run(run())


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
