"""The web server's sources on a job: its file of events, followed, and the overview from etcd."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from pydantic_core import to_json

from ...errors import ProtocolError
from ...observe.events import Event
from ...observe.live import LiveJob
from ...observe.metrics import Metrics
from ...observe.tail import EventTail
from ...observe.view import LiveView, LossDetail, Overview

logger = logging.getLogger("bamboo_ds.control.web")

#: Bytes of the file that are folded at once: nobody need wait for more. No line is longer.
_CHUNK = 1 << 20
#: Seconds between two views while the file is read for the first time, and between two looks whether to wait longer.
_SHOW_S, _TICK_S = 1.0, 0.05


class Feed:
    """Thread-safe. Methods that do not read take as long as it takes to fold a chunk of events at most.

    Args:
        job: its name.
        events: its file of events, which is read from its beginning, or ``None``.

    Attributes:
        version: grows when the view changes.
        members: number of members in it.
        reading: the file is being read for the first time, and what is known is the past.
    """

    def __init__(self, job: str, events: str | None) -> None:
        self._live = LiveJob(job)
        self._metrics = Metrics(self._live)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self._metrics)
        self._tail = None if events is None else EventTail(events, skip=self._note_fault)
        self._overview: Overview | None = None
        self._faults = False
        self._reader, self._lock = threading.Lock(), threading.Lock()  # held by who reads, and by who needs the state
        self._shown_at = -_SHOW_S
        self.reading = events is not None
        self._parts: dict[str, tuple[Any, int, bytes]] = {}  # by field of the view: its value, since when, as JSON
        self.version = 0
        self.members = 0

    def know(self, overview: Overview) -> None:
        """Takes what etcd tells; does not block."""
        self._overview = overview

    def refresh(self, enough: Callable[[], bool] = lambda: False) -> None:
        """Reads what is new. A file of a long job takes a while; what is known of it meanwhile can be seen.

        Args:
            enough: whether to return early; what remains is left for the next call.
        """
        while not self._reader.acquire(timeout=_TICK_S):
            if enough():
                return
        try:
            while self._read() and not enough():
                pass
        finally:
            self._reader.release()

    def _read(self) -> bool:
        """Folds a chunk; returns whether there may be more."""
        found = []
        if self._tail is not None:
            try:
                found = self._tail.read(_CHUNK)  # without the lock: this takes longest
            except OSError as error:
                self._note_fault(error)
        with self._lock:
            for _, event in found:
                self._take(event)
            self.reading = self.reading and bool(found)
            now = time.monotonic()
            if not found or (self.reading and now >= self._shown_at + _SHOW_S):
                self._shown_at = now
                self._show()
        return bool(found)

    def _take(self, event: Event) -> None:
        try:
            self._live.add(event)
            self._metrics.add(event)
        except Exception as error:  # the others are worth showing
            self._note_fault(error)

    def _show(self) -> None:
        if not self.reading:  # else nothing is late, only not read yet
            self._live.late(datetime.now(timezone.utc))
        view = self._live.view(self._overview)
        if self.reading:
            view = view.model_copy(update={"state": "reading", "ended": None, "exit_code": None})
        self._metrics.show(view)
        self._render(view)

    def _note_fault(self, error: Exception) -> None:
        if not self._faults:
            what = str(error) if isinstance(error, OSError | ProtocolError) else repr(error)
            logger.warning("the page and the metrics of the job may lack something: %s", what)
        self._faults = True

    def _render(self, view: LiveView) -> None:
        version = self.version + 1
        for name in LiveView.model_fields:
            value, before = getattr(view, name), self._parts.get(name)
            if before is not None and (value is before[0] or value == before[0]):
                continue
            self._parts[name] = value, version, to_json(value, inf_nan_mode="null")
            self.version = version
        self.members = len(view.members)

    def view(self, since: int = 0) -> tuple[int, bytes]:
        """The version, and the fields of the view that have changed after version ``since``, as a JSON object."""
        with self._lock:
            parts = [b'"%s":%s' % (name.encode(), text) for name, (_, at, text) in self._parts.items() if at > since]
            return self.version, b"{" + b",".join(parts) + b"}"

    def loss(self, number: int) -> LossDetail | None:
        """See :meth:`.LiveJob.loss`."""
        with self._lock:
            return self._live.loss(number)

    def exposition(self, accept: str, enough: Callable[[], bool] = lambda: False) -> tuple[bytes, str] | None:
        """The metrics now, in the format that a scraper's header asks for, and the format's name.

        ``None`` while the file is read for the first time: counters that climb again look like news.
        """
        self.refresh(enough)
        with self._lock:
            encode, content_type = choose_encoder(accept)
            return None if self.reading else (encode(self._registry), content_type)
