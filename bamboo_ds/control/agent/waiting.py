"""An agent between two starts of the job: a member without a worker.

It is registered and may lead, so that there is an agent that starts the job again. It goes on as an agent with a worker
when it is told which ranks to run, or as one that joins when the job has started without it.
"""

from __future__ import annotations

import logging
import os
from functools import partial

from ...observe import logs
from ...observe.events import EventWriter
from ...topology.plan import UNSTARTED
from ..loop import AgentLoop
from ..registry.keys import new_member_id
from ..registry.records import LeftRecord
from ..settings import AgentSettings
from .assembly import make_coordinator
from .callbacks import Callbacks
from .mailbox import Mailbox
from .rejoin import Rejoin
from .slot import Slot
from .states import State

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
        self._slot = Slot(settings, self._id)
        self._mailbox = Mailbox()
        self._ended = False  # the coordinator has
        logs.set_context(member=self._id)
        logs.begin_files()

    def run(self) -> LeftRecord | None:
        """Waits; returns how the member has ended, ``None`` if it goes on."""
        self._mailbox.take_signals(lambda signum, at: self._slot.note_signal(signum))
        again = "" if self._settings.generation == UNSTARTED else " again"
        logger.warning("slot %d waits until the job starts%s", self._settings.slot, again)
        with EventWriter(self._settings.events) as events:
            coordinator = make_coordinator(
                self._settings, self._id, os.getpid(), "", events, self.callbacks(), AgentLoop()
            )
            coordinator.start()
            while self._slot.state is State.WAITING and not self._ended:
                self._mailbox.handle_next()
            coordinator.leave(self._slot.departure)
            if not self._mailbox.handle_until(lambda: self._ended, _DEPARTURE_S):
                logger.error("could not tell etcd within %.0f s that this member goes", _DEPARTURE_S)
            coordinator.close(timeout_s=1.0)
        if self._slot.state is State.REJOINING:
            Rejoin(self._id, self._slot).find(self._mailbox)
        if self._slot.next is None:
            self._slot.depart("evicted", "exit", "the job has started without this member", 0)
        return self._slot.departure

    @property
    def next(self) -> AgentSettings | None:
        """The settings with which the process goes on after :meth:`run`, if it does."""
        return self._slot.next

    def callbacks(self) -> Callbacks:
        """The coordinator's calls to the slot."""
        post, slot = self._mailbox.post, self._slot
        return Callbacks(
            on_plan=lambda plan: post(partial(slot.note_plan_without, plan)),
            on_peers=lambda peers: None,
            on_stop=lambda stop: post(partial(slot.note_stop, stop)),
            on_error=lambda error: post(partial(slot.note_error, error)),
            on_ended=lambda: post(self._note_end),
            on_restart=lambda restart: post(partial(slot.note_restart, restart)),
            on_settings=lambda settings: post(partial(slot.note_settings, settings)),
            on_leave=lambda asked: post(
                partial(slot.depart, "left", "exit", f"leave, {asked.source}: {asked.detail}", 0)
            ),
        )

    def _note_end(self) -> None:
        """The coordinator has ended: where it was not asked to, by an error that it has told."""
        self._ended = True
