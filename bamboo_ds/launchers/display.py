"""Shows what agents and workers write, in a thread of the launcher, so that no slow terminal delays the launcher."""

from __future__ import annotations

import os
import selectors
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ..observe.logfiles import Lines
from .screen import Screen

_READ = 1 << 16
#: Seconds that the rest of a line may take to arrive until it is shown without.
_REST_S = 0.05
#: Seconds without output after the agents' end until no more is waited for.
_END_S = 2.0


@dataclass
class _Source:
    """One stream of an agent.

    Attributes:
        rest: the beginning of a line whose end has not come.
        since: when that came; ``None``: there is none.
    """

    reading: int
    target: int
    prefix: bytes | None
    rest: bytes = b""
    lines: Lines = field(default_factory=Lines)
    since: float | None = None

    def take(self, data: bytes, now: float) -> bytes:
        """What is to be shown when ``data`` has come (``b""``: the end): whole lines, so that they are not mixed."""
        if self.prefix is not None:
            return b"".join(self.prefix + line + b"\n" for line in self.lines.feed(data))
        whole, end, rest = (self.rest + data).rpartition(b"\n")
        self.since = now if self.since is None or end else self.since
        self.rest = rest
        return whole + end if data else whole + end + self.take_rest()

    def take_rest(self) -> bytes:
        """The beginning of a line whose end takes long: a prompt, a progress bar."""
        rest, self.rest, self.since = self.rest, b"", None
        return rest


class Display:
    """Copies streams of agents to ``screen``.

    Args:
        prefix: begin each line with its slot.
        on_end: called in the thread when it ends.
    """

    def __init__(self, screen: Screen, prefix: bool, on_end: Callable[[], None]) -> None:
        self._screen, self._prefix, self._on_end = screen, prefix, on_end
        self._sources: list[_Source] = []
        self._thread: threading.Thread | None = None
        self._waits_since: float | None = None  # for something to show

    def add(self, slot: int, reading: int, target: int) -> None:
        """Copy what comes from ``reading``, which is closed at its end, to descriptor ``target``."""
        self._sources.append(_Source(reading, target, f"[{slot}] ".encode() if self._prefix else None))

    def start(self) -> None:
        """Begin. The caller must not fork from here on."""
        if self._sources:
            self._thread = threading.Thread(target=self._run, name="bamboo-display", daemon=True)
            self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether something is being shown, or may still come, now that the agents are gone.

        A process that a worker has left behind may keep its output open, and write nothing.
        """
        since = self._waits_since
        late = since is not None and time.monotonic() - since > _END_S
        return self._thread is not None and self._thread.is_alive() and not late

    def _run(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                for source in self._sources:
                    selector.register(source.reading, selectors.EVENT_READ, source)
                while selector.get_map():
                    self._waits_since = time.monotonic()
                    ready = selector.select(self._timeout())
                    self._waits_since = None
                    for key, _ in ready:
                        data = os.read(key.fd, _READ)
                        self._screen.show(key.data.take(data, time.monotonic()), key.data.target)
                        if not data:
                            selector.unregister(key.fd)
                            os.close(key.fd)
                    for source in self._sources:
                        if source.since is not None and time.monotonic() >= source.since + _REST_S:
                            self._screen.show(source.take_rest(), source.target)
        finally:
            self._on_end()

    def _timeout(self) -> float | None:
        wakes = [source.since + _REST_S for source in self._sources if source.since is not None]
        return max(0.0, min(wakes) - time.monotonic()) if wakes else None
