"""The state of a job in etcd, kept current by a watch; still there when etcd is not."""

from __future__ import annotations

import logging
import queue

from tenacity import Retrying, retry_if_result, stop_after_delay, wait_fixed

from ..control.registry.access import open_store
from ..control.registry.mirror import Mirror
from ..control.registry.records import JobRecord
from ..errors import ConfigError, StoreError, StoreUnavailable
from ..store.records import Snapshot, WatchEvent
from .situation import JobSituation

logger = logging.getLogger("bamboo_ds.chaos")

_TIMEOUT_S = 3.0
_POLL_S = 0.1


class Observer:
    """The keys of one job. All methods belong to one thread. :meth:`close` it.

    Args:
        urls: of etcd.
        job: its name.
        timeout_s: how long to wait until etcd knows it.

    Raises:
        ConfigError: etcd knows no such job.
        StoreError: etcd cannot be reached.
    """

    def __init__(self, urls: str, job: str, timeout_s: float = 0.0) -> None:
        self._store = open_store(urls, job, _TIMEOUT_S)
        self._changes: queue.Queue[WatchEvent | BaseException] = queue.Queue()
        retrying = Retrying(
            retry=retry_if_result(lambda found: not found.entries),
            stop=stop_after_delay(timeout_s),
            wait=wait_fixed(_POLL_S),
            retry_error_callback=lambda state: None,
        )
        try:
            snapshot = retrying(self._store.get_prefix, "")
            if snapshot is None:
                raise ConfigError(f"no job {job!r} is known at {urls}")
            self._follow(snapshot)
        except BaseException:  # goes on up; only what was begun must not stay
            self._store.close()
            raise

    def _follow(self, snapshot: Snapshot) -> None:
        self._mirror = Mirror(snapshot)
        self._store.watch("", self._changes.put, snapshot.revision + 1, on_error=self._changes.put)

    @property
    def job(self) -> JobRecord:
        """The job's record, with its settings.

        Raises:
            ConfigError: etcd does not say it.
        """
        found = self._mirror.job
        if found is None:
            raise ConfigError("etcd has no record of the job that can be read: start it with this bamboo_ds")
        return found

    def look(self, timeout_s: float = 0.0) -> JobSituation:
        """The newest situation that is known here; waits up to ``timeout_s`` seconds for something to change."""
        try:
            self._apply(self._changes.get(timeout=max(0.0, timeout_s)))
            while True:
                self._apply(self._changes.get_nowait())
        except queue.Empty:
            return JobSituation.of(self._mirror)

    def fresh(self) -> JobSituation | None:
        """The situation as it is now; ``None`` if etcd does not answer."""
        try:
            snapshot = self._store.get_prefix("")
        except StoreUnavailable as error:
            logger.info("etcd does not answer: %s", error)
            return None
        return JobSituation.of(Mirror(snapshot))

    def _apply(self, change: WatchEvent | BaseException) -> None:
        if isinstance(change, WatchEvent):
            self._mirror.apply(change)
        elif isinstance(change, StoreError):
            self._follow(self._store.get_prefix(""))
        else:
            raise change  # a defect here

    def close(self) -> None:
        """Lets go of etcd. Idempotent."""
        self._store.close()
