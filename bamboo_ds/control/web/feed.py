"""What the web server tells of a job: its file of events, followed, and what etcd tells beside it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from pydantic_core import to_json

from ...errors import ProtocolError
from ...observe.events import Event
from ...observe.live import LiveJob
from ...observe.metrics import Metrics
from ...observe.tail import EventTail
from ...observe.view import LiveView, LossDetail, Overview

logger = logging.getLogger("bamboo_ds.control.web")

#: Bytes of the file that are folded at once: what stops the server need not wait for more.
_CHUNK = 1 << 20


class Feed:
    """Thread-safe; every method may take as long as it takes to fold a chunk of events.

    Args:
        job: its name.
        events: its file of events, which is read from its beginning; ``None``: there is none here.

    Attributes:
        version: grows when the view changes.
        members: number of members in it.
        on_event: is told of events of the job that were emitted after the feed was made.
    """

    def __init__(self, job: str, events: str | None) -> None:
        self._job = job
        self._live = LiveJob(job)
        self._metrics = Metrics(self._live)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self._metrics)
        self._tail = None if events is None else EventTail(events, skip=self._note_fault)
        self._since = datetime.now(timezone.utc)
        self.on_event: Callable[[Event], None] | None = None
        self._overview: Overview | None = None
        self._faults = False
        self._lock = threading.Lock()
        self._parts: dict[str, tuple[Any, int, bytes]] = {}  # by field of the view: its value, since when, as JSON
        self._started: float | None = None
        self.version = 0
        self.members = 0

    def know(self, overview: Overview) -> None:
        """Take what etcd tells; does not block."""
        self._overview = overview

    def refresh(self, enough: Callable[[], bool] = lambda: False) -> None:
        """Read what is new, of that so many chunks that there is ``enough``."""
        with self._lock:
            self._fold(enough)
            self._live.late(datetime.now(timezone.utc))
            view = self._live.view(self._overview)
            self._metrics.show(view)
            self._render(view)

    def _fold(self, enough: Callable[[], bool]) -> None:
        while self._tail is not None and not enough():
            try:
                found = self._tail.read(_CHUNK)
            except OSError as error:
                self._note_fault(error)
                return
            for _, event in found:
                self._live.add(event)
                self._metrics.add(event)
                if self.on_event is not None and event.time >= self._since and event.job == self._job:
                    self.on_event(event)
            if not found:
                return

    def _note_fault(self, error: OSError | ProtocolError) -> None:
        if not self._faults:
            logger.warning("the page and the metrics of the job may lack something: %s", error)
        self._faults = True

    def _render(self, view: LiveView) -> None:
        version = self.version + 1
        for name in LiveView.model_fields:
            value, before = getattr(view, name), self._parts.get(name)
            if before is not None and (value is before[0] or value == before[0]):
                continue
            self._parts[name] = value, version, to_json(value, inf_nan_mode="null")
            self.version = version
        self.members, self._started = len(view.members), view.started

    def view(self, since: int = 0) -> tuple[int, bytes]:
        """The version, and the fields of the view that have changed after version ``since``, as a JSON object."""
        with self._lock:
            parts = [b'"%s":%s' % (name.encode(), text) for name, (_, at, text) in self._parts.items() if at > since]
            return self.version, b"{" + b",".join(parts) + b"}"

    def loss(self, number: int) -> LossDetail | None:
        """See :meth:`.LiveJob.loss`."""
        with self._lock:
            return self._live.loss(number)

    def families(self, enough: Callable[[], bool] = lambda: False) -> tuple[float | None, list[Metric]]:
        """The metrics now, after since when they count, in seconds since 1970; ``None``: that is not known."""
        self.refresh(enough)
        with self._lock:
            return self._started, list(self._metrics.collect())

    def exposition(self, accept: str, enough: Callable[[], bool] = lambda: False) -> tuple[bytes, str]:
        """The metrics now, in the format that a scraper's header asks for, and the format's name."""
        self.refresh(enough)
        with self._lock:
            encode, content_type = choose_encoder(accept)
            return encode(self._registry), content_type
