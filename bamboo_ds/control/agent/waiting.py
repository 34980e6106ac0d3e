"""An agent between two starts of the job: a member without a worker.

It is registered and may lead, so that there is somebody who starts the job again. It goes on as an agent with a worker
when it is told which ranks to run, or as a joiner when the job has started without it.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue
from types import FrameType

from ...errors import EXIT_FATAL_LOSS
from ...observe import logs
from ...observe.events import EventWriter
from ...processes import boot_id
from ...topology.plan import Plan
from ..registry.keys import new_member_id
from ..registry.records import LeftRecord, RestartRecord, StopRecord
from ..settings import AgentSettings
from .assembly import make_coordinator
from .coordinator import Callbacks, Coordinator
from .reexec import handle_signals
from .rejoin import Comeback

logger = logging.getLogger("bamboo_ds.control.waiting")

#: Seconds that the news of this member's end may take to reach etcd.
_DEPARTURE_S = 30.0


class WaitingAgent:
    """Waits for the job's restart. Create it in the main thread.

    Args:
        settings: of the agent; plans up to ``after_epoch`` and restarts up to ``generation`` are over.
    """

    def __init__(self, settings: AgentSettings) -> None:
        self._settings = settings
        self._id = new_member_id(settings.slot)
        self._posted: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._next: AgentSettings | None = None
        self._departure: LeftRecord | None = None
        self._assigned: RestartRecord | None = None
        self._over = self._ended = self._joins = False
        logs.set_context(member=self._id)

    def run(self) -> LeftRecord | AgentSettings:
        """Wait; returns how the member has ended, or the settings with which it goes on."""
        handle_signals(self._on_signal)
        settings = self._settings
        logger.warning("slot %d waits until the job starts again", settings.slot)
        with EventWriter(settings.events) as events:
            coordinator = self._make_coordinator(events)
            coordinator.start()
            while not self._over:
                self._posted.get()()
            coordinator.leave(self._departure)
            deadline = time.monotonic() + _DEPARTURE_S
            while not self._ended:
                try:
                    self._posted.get(timeout=max(0.0, deadline - time.monotonic()))()
                except Empty:
                    logger.error("could not tell etcd within %.0f s that this member goes", _DEPARTURE_S)
                    break
            coordinator.close(timeout_s=1.0)
        if self._joins:
            self._over = False  # signals count again
            self._next = Comeback(settings, self._id, math.inf, self._wait).find()
            if self._next is None:
                self._depart("evicted", "exit", "the job has started again without this member", 0)
        if self._departure is not None:
            return self._departure
        assert self._next is not None
        return self._next

    def _wait(self, seconds: float) -> bool:
        """Wait for so many seconds; false, at once, when this member is to end."""
        until = time.monotonic() + seconds
        try:
            while not self._over:
                self._posted.get(timeout=max(0.0, until - time.monotonic()))()
        except Empty:
            return True
        return False

    def _make_coordinator(self, events: EventWriter) -> Coordinator:
        return make_coordinator(self._settings, self._id, os.getpid(), events, self._callbacks())

    def _callbacks(self) -> Callbacks:
        return Callbacks(
            on_plan=lambda plan: self._posted.put(partial(self._note_plan, plan)),
            on_store=lambda record: None,
            on_peers=lambda peers: None,
            on_stop=lambda stop: self._posted.put(partial(self._stop, stop)),
            on_error=lambda error: self._posted.put(partial(self._break, error)),
            on_ended=lambda: self._posted.put(self._note_end),
            on_restart=lambda restart: self._posted.put(partial(self._begin, restart)),
        )

    # -- what may happen ------------------------------------------------------------------------------------

    def _begin(self, restart: RestartRecord) -> None:
        settings = self._settings
        old = restart.after_epoch < settings.after_epoch or restart.generation <= (settings.generation or 0)
        ranks = restart.ranks.get(settings.slot)
        if self._over or old or ranks is None:
            return
        self._over = True
        self._next = replace(
            settings,
            waiting=False,
            home=ranks[0],
            generation=restart.generation,
            after_epoch=restart.after_epoch,
            restart_from=restart.checkpoint,
            extra=",".join(f"{rank}:{restart.extra[rank]}" for rank in ranks[1:]) or None,
        )

    def _note_plan(self, plan: Plan) -> None:
        """The job has started without this member, so it joins; a plan that is fatal, too, changes nothing."""
        if self._over or plan.unheld or plan.layout is None:
            return
        self._over = True
        logger.info("the job has started again without slot %d, which joins it", self._settings.slot)
        self._joins = True

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self._posted.put(partial(self._signalled, signal.Signals(signum)))

    def _signalled(self, signum: signal.Signals) -> None:
        leaves = signum is signal.SIGUSR1
        if self._next is not None or self._joins:
            # It was about to go on.
            self._over, self._next, self._joins = False, None, False
        self._depart("left" if leaves else "lost", "signal", signum.name, 0 if leaves else 128 + signum)

    def _stop(self, stop: StopRecord) -> None:
        self._depart("stopped", "exit", stop.reason, stop.code)

    def _break(self, error: BaseException) -> None:
        self._depart("lost", "exit", f"control plane: {error}", EXIT_FATAL_LOSS)

    def _note_end(self) -> None:
        self._over = self._ended = True

    def _depart(self, outcome: str, reason: str, detail: str, code: int) -> None:
        if self._over:
            return
        self._over = True
        self._departure = LeftRecord.model_validate(
            {
                "id": self._id,
                "slot": self._settings.slot,
                "outcome": outcome,
                "reason": reason,
                "detail": detail,
                "code": code,
                "since": time.monotonic(),
                "boot": boot_id(),
            }
        )
