"""Shows what agents and workers write, in a thread of the launcher, so that no slow terminal delays the launcher."""

from __future__ import annotations

import os
import re
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
#: Seconds within which equal warnings of several workers are one.
_SAME_S = 2.0
#: Characters of a warning that tell which one it is.
_TOLD = 100
#: A line of our own log: when, what, whose, and the message.
_LOG = re.compile(rb"\d\d:\d\d:\d\d\.\d{3} ([WE] bamboo) \[[^\]]*\] (.*)", re.DOTALL)
#: The first line of a warning of Python's ``warnings``; the second one is the source, if that is known.
_WARNING = re.compile(rb"[^\s:][^:]*:\d+: \w*Warning: .*", re.DOTALL)


@dataclass
class _Told:
    """A warning that was shown, and the slots that it has come from since; ``source`` is the line after it."""

    at: float
    text: bytes
    slots: list[int]
    source: bytes = b""


class Folding:
    """Leaves out warnings that another worker has just given, and tells how many have.

    Each is shown when it comes for the first time, and never held back. Pure; what is no warning of ours or of Python
    passes.
    """

    def __init__(self) -> None:
        self._told: dict[bytes, _Told] = {}
        self._following: dict[int, tuple[bytes, bool]] = {}  # by slot: what may have its source next, left out or not

    def shown(self, slot: int, line: bytes, now: float) -> bool:
        """Whether the complete ``line`` of ``slot`` is to be shown."""
        warning, folded = self._following.pop(slot, (b"", False))
        if line.startswith(b"  ") and warning in self._told:
            if not folded:
                self._told[warning].source = line
            return not folded or line != self._told[warning].source
        text = line.rstrip(b"\r\n")
        found = _LOG.fullmatch(text)
        if found is not None:
            return self._is_new(slot, b" ".join(found.groups()), found[2], now)
        if _WARNING.fullmatch(text) is not None:
            new = self._is_new(slot, text, text, now)
            self._following[slot] = text, not new
            return new
        return True

    def _is_new(self, slot: int, key: bytes, text: bytes, now: float) -> bool:
        told = self._told.get(key)
        if told is None or slot in told.slots:  # one that a worker repeats itself is news
            if told is None:
                self._told[key] = _Told(now, text, [slot])
            return True
        told.slots.append(slot)
        return False

    def due(self) -> float | None:
        """When :meth:`notes` has something to tell, if at all."""
        return min((told.at for told in self._told.values()), default=None)

    def notes(self, now: float) -> list[str]:
        """What is to be said of warnings that were left out and whose time is over by ``now``."""
        found = []
        for key, told in list(self._told.items()):
            if now < told.at + _SAME_S:
                continue
            del self._told[key]
            if len(told.slots) > 1:
                text = told.text.decode(errors="replace")
                text = text if len(text) <= _TOLD else f"{text[:_TOLD]}…"
                slots = ", ".join(map(str, sorted(told.slots)))
                found.append(f"{text} (from {len(told.slots)} workers: slots {slots})")
        return found


@dataclass
class _Source:
    """One stream of an agent.

    Attributes:
        since: when the beginning of a line came whose end did not; ``None``: there is none.
        broken: the line that is being shown was shown in part.
    """

    slot: int
    reading: int
    target: int
    prefix: bytes | None
    rest: bytes = b""
    lines: Lines = field(default_factory=Lines)
    since: float | None = None
    broken: bool = False


class Display:
    """Copies streams of agents to ``screen``.

    Args:
        prefix: begin each line with its slot.
        on_end: called in the thread when it ends.
    """

    def __init__(self, screen: Screen, prefix: bool, on_end: Callable[[], None]) -> None:
        self._screen, self._prefix, self._on_end = screen, prefix, on_end
        self._sources: list[_Source] = []
        self._folding = Folding()
        self._thread: threading.Thread | None = None
        self._waits_since: float | None = None  # for something to show

    def add(self, slot: int, reading: int, target: int) -> None:
        """Copy what comes from ``reading``, which is closed at its end, to descriptor ``target``."""
        prefix = f"[{slot}] ".encode() if self._prefix else None
        self._sources.append(_Source(slot, reading, target, prefix))

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
                    os.set_blocking(source.reading, False)
                    selector.register(source.reading, selectors.EVENT_READ, source)
                while selector.get_map():
                    self._waits_since = time.monotonic()
                    ready = selector.select(self._timeout())
                    self._waits_since = None
                    for key, _ in ready:
                        if not self._copy(key.data):
                            selector.unregister(key.fd)
                            os.close(key.fd)
                    self._show_rests(time.monotonic())
                    self._screen.say(self._folding.notes(time.monotonic()))
            self._screen.say(self._folding.notes(float("inf")))
        finally:
            self._on_end()

    def _timeout(self) -> float | None:
        due = self._folding.due()
        wakes = [] if due is None else [due + _SAME_S]
        wakes += [source.since + _REST_S for source in self._sources if source.since is not None]
        return max(0.0, min(wakes) - time.monotonic()) if wakes else None

    def _copy(self, source: _Source) -> bool:
        """Copy what has arrived; false at the end."""
        try:
            data = os.read(source.reading, _READ)
        except BlockingIOError:
            return True
        now = time.monotonic()
        if source.prefix is not None:
            lines = [line + b"\n" for line in source.lines.feed(data)]
            shown = [source.prefix + line for line in lines if self._folding.shown(source.slot, line, now)]
        else:
            *lines, rest = _divided(source.rest + data)
            shown = []
            for line in lines:
                if source.broken or self._folding.shown(source.slot, line, now):
                    shown.append(line)
                source.broken = False
            since = now if source.since is None or lines else source.since
            source.rest, source.since = rest, since if rest else None
            if not data:
                shown.append(source.rest)
                source.rest, source.since = b"", None
        self._screen.show(b"".join(shown), source.target)
        return bool(data)

    def _show_rests(self, now: float) -> None:
        """Show beginnings of lines whose ends do not come: prompts, progress bars."""
        for source in self._sources:
            if source.since is not None and now >= source.since + _REST_S:
                self._screen.show(source.rest, source.target)
                source.rest, source.since, source.broken = b"", None, True


def _divided(data: bytes) -> list[bytes]:
    """Complete lines with their ends, and the rest."""
    *lines, rest = data.split(b"\n")
    return [*(line + b"\n" for line in lines), rest]
