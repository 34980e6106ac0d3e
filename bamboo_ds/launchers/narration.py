"""A launcher's account in the terminal: how to watch the job, what happens in it, and its summary."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone

from ..control.registry.access import open_store
from ..control.registry.keys import slot_of
from ..control.registry.mirror import Mirror
from ..control.settings import MemberOptions
from ..errors import BambooError
from ..observe.outlet import Sink
from ..observe.story import Story, printed
from ..observe.summary import ending
from ..observe.tail import EventTail
from ..store.client import Store

logger = logging.getLogger("bamboo_ds.launchers")

_POLL_S = 0.3
#: Seconds between two looks at what members are doing.
_LOOK_S = 1.0
#: Members that are named; of more only the number is told.
_NAMED = 4
#: Seconds between two lines.
SPARSE_S = 10.0
_STORE_TIMEOUT_S = 2.0
#: Seconds that the thread gets for the last lines; a terminal that is stopped takes none.
_LAST_S = 5.0


def banner(options: MemberOptions, what: str, store: str) -> list[str]:
    """The lines about a job that begins, or that a member joins; ``what`` takes part, ``store`` is where etcd is."""
    where = re.sub(r"//[^/@]*@", "//", store)  # what is before the @ is a secret
    job, events, logs, page = options.job, options.events, options.logs, options.bamboo.observe.http
    ways = [
        f"bamboo status --job {job}",
        *([f"bamboo events -f --job {job}"] if events else ()),
        *([f"bamboo logs -f --job {job}"] if logs else ()),
    ]
    lines = [f"job {job}: {what}, etcd at {where}", f"watch it with {' or '.join(ways)}"]
    if page is not None:
        lines.append(f"page at {page}; bamboo web --job {job} tells its URL and token")
    if events and (logs is None or os.path.dirname(events) != logs):
        lines.append(f"events: {events}")
    return [*lines, f"logs: {logs}"] if logs else lines


def marked(lines: Iterable[str]) -> bytes:
    """The text of ``lines`` for standard error, where the script writes, too."""
    return "".join(f"[bamboo] {line}\n" for line in lines).encode(errors="backslashreplace")


class Narration:
    """Tells the story of a job in a thread, so that neither a slow terminal nor a failure here delays the job.

    Args:
        options: of the job's members. What is in its file of events by now is not told. Without one, or with one that
            cannot be read twice, such as a pipe, only the beginning is told.
        quiet: tell nothing at all.
    """

    def __init__(self, options: MemberOptions, quiet: bool) -> None:
        self._options, self._quiet, self._sink = options, quiet, Sink(2)
        self._tail = None
        events = options.events
        if events is not None and os.path.isfile(events):
            self._tail = EventTail(events, os.path.getsize(events))
        self._story = Story()
        self._leaving, self._ended = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, lines: Sequence[str], store: str) -> None:
        """Tells ``lines``, then the story; ``store``: URLs of etcd. The caller must not fork from here on."""
        if not self._quiet:
            self._thread = threading.Thread(target=self._run, args=(lines, store), name="bamboo-story", daemon=True)
            self._thread.start()

    def leave(self) -> None:
        """etcd is about to end, perhaps: ask it nothing from here on."""
        self._leaving.set()

    def end(self) -> None:
        """Tells the rest, and the summary. Nothing happens if :meth:`begin` was not called."""
        self._leaving.set()
        self._ended.set()
        if self._thread is not None:
            self._thread.join(_LAST_S)

    def _run(self, lines: Sequence[str], store: str) -> None:
        try:
            self._sink.write(marked(lines))
            if self._tail is None:
                return
            members = Members(self._options, store, self._sink)
            while not self._ended.wait(_POLL_S):
                self._look(self._tail)
                members.look(self._story.job.unsettled and not self._leaving.is_set(), time.monotonic())
            members.look(False, time.monotonic())
            self._look(self._tail)
            self._sink.write(marked([*map(printed, self._story.end()), *ending(self._story.job)]))
        except Exception as error:  # whatever it is, the job goes on
            logger.warning("what happens in the job is not told any more: %s: %s", type(error).__name__, error)

    def _look(self, tail: EventTail) -> None:
        for _, event in tail.read():
            if event.job == self._options.job:
                self._sink.write(marked(map(printed, self._story.tell(event))))
        self._sink.write(marked(map(printed, self._story.late(datetime.now(timezone.utc)))))


class Members:
    """Tells how far members are, as etcd has it, by a line now and then."""

    def __init__(self, options: MemberOptions, urls: str, sink: Sink) -> None:
        self._options, self._urls, self._sink = options, urls, sink
        self._store: Store | None = None
        self._sparse = Sparse(time.monotonic())
        self._due = 0.0

    def look(self, wanted: bool, now: float) -> None:
        """Asks etcd if it is time, and tells; not ``wanted``: nothing is told any more."""
        if not wanted:
            self._tell(None, now)
            if self._store is not None:
                self._store.close()
                self._store = None
            return
        if now < self._due:
            return
        self._due = now + _LOOK_S
        try:
            if self._store is None:
                options = self._options
                self._store = open_store(self._urls, options.job, _STORE_TIMEOUT_S, options.secret or None)
            line = progress(Mirror(self._store.get_prefix("")))
        except BambooError as error:
            logger.info("etcd does not tell what members are doing: %s", error)
            line = None
        self._tell(line, now)

    def _tell(self, line: str | None, now: float) -> None:
        if self._sparse.due(line, now) and line is not None:
            self._sink.write(marked([line]))


# -- how far members are that build, compile, replay or copy ---------------------------------------------------------


def progress(mirror: Mirror) -> str | None:
    """The line about a job with these keys; ``None``: nothing is under way that takes long."""
    plan, parts = mirror.plan, []
    if plan is not None and plan.layout is None and plan.members:
        built = len(mirror.reports.keys() & set(plan.members))
        parts.append(f"{built} of {len(plan.members)} engines are built{_missing(mirror, plan.members)}")
    found: dict[str, list[str]] = {}
    for member in sorted(mirror.members, key=slot_of):
        record = mirror.progress.get(member)
        if record is not None and record.doing is not None:
            found.setdefault(record.doing, []).append(member.partition("-")[0])
    return "; ".join([*parts, *(f"{_listed(names)} {doing}" for doing, names in found.items())]) or None


def _missing(mirror: Mirror, members: Sequence[str]) -> str:
    """The members whose engines are not built, and where their scripts are."""
    missing = [member.partition("-")[0] for member in members if member not in mirror.reports]
    if not missing:
        return ""
    who = "all scripts are" if len(missing) == len(members) else f"the script of {_listed(missing)} is"
    return f": {who} at or before deepspeed.initialize (libraries, data, layers, extensions that DeepSpeed compiles)"


def _listed(names: list[str]) -> str:
    if len(names) > _NAMED:
        return f"each of {len(names)} members"
    return names[0] if len(names) == 1 else f"each of {', '.join(names)}"


class Sparse:
    """A filter of lines: at most one each ``SPARSE_S`` seconds, and none about what is short.

    Args:
        now: monotonic seconds.
    """

    def __init__(self, now: float) -> None:
        self._next, self._told = now + SPARSE_S, ""

    def due(self, line: str | None, now: float) -> bool:
        """Whether ``line`` is to be told."""
        if line is None:
            self._next, self._told = max(self._next, now + SPARSE_S), ""
        if line is None or now < self._next or line == self._told:
            return False
        self._next, self._told = now + SPARSE_S, line
        return True
