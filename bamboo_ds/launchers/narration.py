"""What a launcher tells the user in the terminal: how to watch the job, what happens in it, and what came of it."""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Sequence
from datetime import datetime, timezone

from ..errors import ConfigError
from ..observe.events import EventWriter
from ..observe.story import Story
from ..observe.tail import EventTail
from ..variables import ENV_LOGS

logger = logging.getLogger("bamboo_ds.launchers")

#: Where jobs' files of events are unless the user says otherwise, below the working directory.
LOGS = "bamboo-logs"
_STDERR = 2
_POLL_S = 0.3
#: Seconds that the thread gets for the last lines; a terminal that is stopped takes none.
_LAST_S = 5.0


def default_events(job: str, logs: str | None) -> str | None:
    """The file for the events of ``job`` in the folder ``logs``; ``None``, with a warning, if the default cannot be.

    Raises:
        ConfigError: the user has named a folder that cannot be written to.
    """
    path = os.path.abspath(os.path.join(logs or LOGS, job, "events.jsonl"))
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        EventWriter(path).close()
    except OSError as error:
        if logs is not None:
            raise ConfigError(f"--logs {logs} ({ENV_LOGS}) cannot be written to ({error}): name another one") from error
        logger.warning("the job writes no events: %s; name a folder with --logs", error)
        return None
    return path


def banner(job: str, what: str, store: str, events: str | None, page: str | None = None) -> list[str]:
    """The lines about a job that begins, or that a member joins; ``what`` takes part, ``store`` is where etcd is.

    Args:
        page: the address of its page, as ``bamboo.observe.http`` names it.
    """
    where = re.sub(r"//[^/@]*@", "//", store)  # what is before the @ is a secret
    watch = f"bamboo status --job {job}" + (f" or bamboo events -f --job {job}" if events else "")
    lines = [f"job {job}: {what}, etcd at {where}", f"watch it with {watch}"]
    if page is not None:
        lines.append(f"page at {page}; bamboo web --job {job} tells its URL and token")
    return [*lines, *([f"events: {events}"] if events else ())]


def marked(lines: Sequence[str]) -> str:
    """The text of ``lines`` for stderr, where the script writes, too."""
    return "".join(f"[bamboo] {line}\n" for line in lines)


def _say(lines: Sequence[str]) -> None:
    data = marked(lines).encode()
    while data:  # past Python's buffer, which the process could not close while a terminal takes no more
        data = data[os.write(_STDERR, data) :]


class Narration:
    """Tells the story of a job in a thread, so that neither a slow terminal nor a failure here delays the job.

    Args:
        events: the file of the job's events; what is in it by now is not told. ``None``, or one that cannot be read
            twice, such as a pipe: nothing is told.
        job: its name.
        quiet: tell nothing at all.
    """

    def __init__(self, events: str | None, job: str, quiet: bool) -> None:
        self._quiet = quiet
        self._tail = None
        if events is not None and os.path.isfile(events):
            self._tail = EventTail(events, os.path.getsize(events))
        self._job = job
        self._story = Story()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, lines: Sequence[str]) -> None:
        """Tell ``lines``, then the story. The caller must not fork from here on."""
        if not self._quiet:
            self._thread = threading.Thread(target=self._run, args=(lines,), name="bamboo-story", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """Tell the rest, and the summary. Nothing happens if :meth:`begin` was not called."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(_LAST_S)

    def _run(self, lines: Sequence[str]) -> None:
        try:
            _say(lines)
            if self._tail is None:
                return
            while not self._ended.wait(_POLL_S):
                self._look(self._tail)
            self._look(self._tail)
            _say([*self._story.end(), *self._story.summary.lines()])
        except Exception as error:  # whatever it is, the job goes on
            logger.warning("what happens in the job is not told any more: %s: %s", type(error).__name__, error)

    def _look(self, tail: EventTail) -> None:
        for _, event in tail.read():
            if event.job == self._job:
                _say(self._story.tell(event))
        _say(self._story.late(datetime.now(timezone.utc)))
