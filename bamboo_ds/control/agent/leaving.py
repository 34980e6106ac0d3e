"""An agent's part in leaving: its notices, its word to the others, and the work that remains at the end."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

from ...observe.events import EventWriter, MemberLeft, NoticeReceived
from ..loop import AgentLoop
from ..messages import Heartbeat
from ..notices import Notice, NoticeWatcher, build_sources
from ..registry.records import NoticeRecord
from ..reporting import emit_or_log
from ..settings import AgentSettings
from .command import device_of

logger = logging.getLogger("bamboo_ds.control.leaving")


class Leaving:
    """The leaving of one agent's member. All methods are for the agent's main thread.

    Args:
        settings: the agent's.
        member: its member.
        events: where it tells of notices.
        loop: asks for them.

    Attributes:
        notice: that the member leaves for, or ``None``.
        gone_at: monotonic seconds at which the node vanishes, as far as known.
        end_at: monotonic seconds at which the agent ends the worker, whether or not it has left by then.

    Raises:
        ConfigError: the settings of the sources are wrong, or one cannot be asked on this host.
    """

    def __init__(self, settings: AgentSettings, member: str, events: EventWriter, loop: AgentLoop) -> None:
        config = settings.bamboo.notices
        names = {"slot": str(settings.slot), "member": member}
        sources = build_sources(config, os.environ, names, device_of(settings, os.environ))
        for source in sources:
            source.check()
        self._watcher = NoticeWatcher(sources, lambda notice: self._tell(notice), loop, config.poll_s)
        self._tell: Callable[[Notice], None] = lambda notice: None
        self._settings, self._member, self._events = settings, member, events
        self._heard_at = 0.0
        self._step: tuple[int, float] | None = None
        self._iteration_s: float | None = None
        self._notices: list[Notice] = []
        self.notice: Notice | None = None
        self.gone_at: float | None = None
        self.end_at: float | None = None

    def watch(self, tell: Callable[[Notice], None]) -> None:
        """Starts asking the sources; ``tell`` is called on another thread and must not block."""
        self._tell = tell
        self._watcher.start()

    def take(self, notice: Notice, epoch: int) -> bool:
        """Notes and reports ``notice``; returns whether there is something new to tell the others."""
        left = "unknown time" if notice.deadline_s is None else f"{notice.deadline_s:.0f} s"
        what = "leaves" if notice.vanishes else "does not leave"
        logger.warning("%s: %s (%s, in %s): this member %s", notice.source, notice.detail, notice.kind, left, what)
        event = NoticeReceived(
            job=self._settings.job,
            member=self._member,
            epoch=epoch,
            kind=notice.kind,
            source=notice.source,
            deadline_seconds=notice.deadline_s,
            detail=notice.detail,
            leaves=notice.vanishes,
        )
        emit_or_log(self._events, event)
        if not notice.vanishes:
            return False
        self._notices.append(notice)
        now = time.monotonic()
        gone_at = None if notice.deadline_s is None else now + notice.deadline_s
        if self.notice is None:
            self._heard_at = now
        elif gone_at is None or (self.gone_at is not None and gone_at >= self.gone_at):
            return False
        self.notice, self.gone_at = notice, gone_at
        return True

    @property
    def record(self) -> NoticeRecord:
        """The record of the leaving, for the others."""
        assert self.notice is not None
        return NoticeRecord(
            id=self._member,
            kind=self.notice.kind,
            source=self.notice.source,
            detail=self.notice.detail,
            deadline_s=None if self.gone_at is None else max(0.0, self.gone_at - time.monotonic()),
            iteration_s=self._iteration_s,
        )

    @property
    def reason(self) -> str:
        """The reason why the member leaves, in words."""
        assert self.notice is not None
        return f"{self.notice.kind}, {self.notice.source}: {self.notice.detail}"

    def note_step(self, heartbeat: Heartbeat) -> None:
        """Learns from the worker's progress how long its iterations take."""
        step, now = heartbeat.step, time.monotonic()
        if step is None or (self._step is not None and step <= self._step[0]):
            return
        if self._step is not None:
            self._iteration_s = (now - self._step[1]) / (step - self._step[0])
        self._step = step, now

    # -- the end ----------------------------------------------------------------------------------------

    def report(self, epoch: int) -> None:
        """Tells that the member has left."""
        assert self.notice is not None
        event = MemberLeft(
            job=self._settings.job,
            member=self._member,
            epoch=epoch,
            member_id=self._member,
            reason=self.notice.kind,
            detail=f"{self.notice.source}: {self.notice.detail}",
            seconds=time.monotonic() - self._heard_at,
        )
        emit_or_log(self._events, event)

    def close(self, abandoned: bool) -> None:
        """Stops asking. ``abandoned``: no member on this host is needed any more, so that the cloud may take it."""
        for notice in self._notices if abandoned else ():
            self._watcher.acknowledge(notice)
        self._watcher.stop()
