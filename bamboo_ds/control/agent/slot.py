"""The view of one slot: what it is told, and what follows from that. No I/O: agents carry it out.

The states are those of :mod:`.states`; here is what is known beside the state, and what is said of the worker's end.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from ...errors import EXIT_CORRUPT, EXIT_DEVICE, EXIT_EVICTED, EXIT_FATAL_LOSS, EXIT_LEFT
from ...job_settings import JobSettings
from ...processes import boot_id
from ...topology.plan import Plan
from ..messages import ExitNotice
from ..registry.records import LeftRecord, RestartRecord, StopRecord
from ..settings import AgentSettings
from .states import AFTER, OUTCOMES, Event, Exit, State, after, first

logger = logging.getLogger("bamboo_ds.control.agent")

#: Seconds that an evicted worker has to stop itself.
_EVICTION_GRACE_S = 5.0
#: Seconds that a worker gets to stop itself after a fatal loss: more than it waits for a checkpoint being written.
_FATAL_GRACE_S = 75.0
#: Exit codes of workers that end by what their host or its device has done.
_OF_HOST = (EXIT_DEVICE, EXIT_CORRUPT)
_OWN_EXITS = {EXIT_EVICTED: Exit.EVICTED, EXIT_LEFT: Exit.EVICTED, EXIT_FATAL_LOSS: Exit.FATAL}
#: Exit codes of the outcomes that have one of their own.
_CODES = {"left": 0, "evicted": 0, "fatal": EXIT_FATAL_LOSS}
#: Workers that were told to end, for which an exit code of 0 is no sign of success.
_ASKED = (State.EVICTED, State.ADRIFT, State.STOPPED, State.BROKEN)
#: The job goes on without the member.
_OUT = (State.EVICTED, State.ADRIFT, State.REJOINING)


@dataclass(frozen=True)
class EndWorker:
    """The worker is to end within ``grace_s`` seconds, or it is killed; ``ask``: it is sent SIGTERM at once."""

    grace_s: float
    ask: bool = True


class Slot:
    """One slot in one process image. All methods are for one thread.

    Args:
        member: the member that the slot is registered as.
        clock: monotonic seconds.

    Attributes:
        settings: of the agent.
        state: see :class:`State`.
        epoch: that of the newest plan.
        stop: the job was ended.
        terminated: the agent was told to end.
        departure: its end without a worker.
    """

    def __init__(self, settings: AgentSettings, member: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.settings, self._member, self._clock = settings, member, clock
        self.state = first(settings.waiting, settings.joins)
        self.epoch = self._listed = 0  # the newest plan, and the newest that lists the member
        self._fatal: int | None = None  # epoch of the newest plan that has lost some role's state
        self._since = clock()
        self._reason: str | None = None  # that it leaves
        self._place: AgentSettings | None = None
        self.stop: StopRecord | None = None
        self._error: BaseException | None = None  # of the control plane
        self.terminated = False
        self.departure: LeftRecord | None = None

    def _note(self, event: Event) -> None:
        self.state = after(self.state, event)

    @property
    def admitted(self) -> bool:
        """Whether the job counts with the member."""
        return self._listed > 0 or not self.settings.joins

    @property
    def member_s(self) -> float:
        """Seconds for which the member has been part of the job."""
        return self._clock() - self._since

    @property
    def may_leave(self) -> bool:
        """Whether there is an orderly way to leave."""
        ends = self.terminated or self.stop is not None or self._error is not None
        return self.admitted and not ends and self.state not in _OUT

    @property
    def failure_ends_job(self) -> bool:
        """Whether the job ends if the worker's script fails now."""
        spoilt = self._fatal is not None or self.terminated or self.state in _OUT
        return self.settings.bamboo.recovery.on_exception == "stop" and not self.settings.joins and not spoilt

    @property
    def awaited(self) -> bool:
        """Whether this process is awaited once it has no worker: by the one that has told it to end, or by the job."""
        return self.terminated or self.state is not State.ENDED

    @property
    def _told(self) -> bool:
        """Whether it is to go, and does not come back."""
        return self.terminated or self._reason is not None

    @property
    def next(self) -> AgentSettings | None:
        """The settings with which the process goes on, if it does."""
        if self.state is State.WAITING and not self.settings.waiting:
            after_epoch = self.epoch if self._fatal is None else self._fatal
            return replace(self.settings, waiting=True, after_epoch=after_epoch, extra={})
        return self._place if self.state is State.PLACED else None

    def note_settings(self, settings: JobSettings) -> None:
        """The job's record is complete."""
        self.settings = replace(self.settings, settings=settings.with_credentials(self.settings.bamboo))

    # -- with a worker ------------------------------------------------------------------------------

    def note_plan(self, plan: Plan) -> EndWorker | None:
        """``plan`` is the newest."""
        self.epoch = plan.epoch
        listed, lost = self._member in plan.members, self._member in plan.lost
        # A member that was admitted without learning it has nothing that others could have taken over.
        concerned = listed or not self.admitted or not (self._listed or lost)
        if plan.lost_roles and concerned:
            # A stage is lost. Workers that take part stop by themselves, others have nothing left to join.
            self._fatal = plan.epoch
            if not self.terminated:
                self._note(Event.DOOMED)
            return EndWorker(_FATAL_GRACE_S, ask=False) if listed else EndWorker(self.settings.grace_s)
        if listed:
            self._since = self._since if self.admitted else self._clock()
            self._listed = plan.epoch
            self._note(Event.LISTED)
        if not self.admitted or listed or self.state in _OUT:
            return None
        # A plan for the next boundary lets the worker go there; after any other it is late already.
        late = plan.interrupts() or plan.epoch > self._listed + 1
        if (self._reason is not None or self.settings.feeder) and not lost:
            self._note(Event.SPARED)
            logger.info("the plan of epoch %d goes on without this member", plan.epoch)
        else:
            late = True
            self._note(Event.OUT)
            logger.error("the plan of epoch %d does not list this member: its worker must stop", plan.epoch)
        return EndWorker(_EVICTION_GRACE_S, ask=False) if late else None

    def note_stop(self, stop: StopRecord) -> EndWorker:
        """The job is to end."""
        self.stop = stop
        if self.state is State.WAITING:
            self.depart("stopped", "exit", stop.reason, stop.code)
        self._note(Event.STOP)
        return EndWorker(self.settings.grace_s)

    def note_error(self, error: BaseException) -> EndWorker:
        """The control plane has failed."""
        self._error = error
        if self.state is State.WAITING:
            self.depart("lost", "exit", f"control plane: {error}", EXIT_FATAL_LOSS)
        self._note(Event.ERROR)
        return EndWorker(self.settings.grace_s)

    def note_evicted(self) -> EndWorker:
        """The job may have gone on without the member, which has seen no such plan, and whose worker knows of none."""
        self._note(Event.OUT)
        return EndWorker(_EVICTION_GRACE_S)

    def note_notice(self, reason: str) -> EndWorker | None:
        """The member is to leave."""
        self._reason = reason
        self._note(Event.NOTICE if self.admitted else Event.WITHDRAWN)
        # One that is not admitted has nothing that others could need. It may be admitted in this moment, and leaves.
        return None if self.admitted else EndWorker(self.settings.grace_s)

    def terminate(self) -> None:
        """The agent is to end."""
        self.terminated = True
        self._note(Event.TOLD)

    def note_end(
        self,
        status: int,
        died: float,
        hung: tuple[Literal["heartbeat", "hang"], float] | None,
        notice: ExitNotice | None,
        step: int | None,
    ) -> LeftRecord:
        """The worker has ended; returns the meaning of that.

        Args:
            status: its exit status, negative for a signal.
            died: monotonic seconds of its death.
            hung: it was killed since its heartbeat stopped or since it made no progress, and when that began.
            notice: what it has told of its end.
            step: the newest that it has committed, as far as it has told.
        """
        settings = self.settings
        done = notice is not None and notice.done  # its script has ended well, and it is not needed any more
        # What its script has told of its failure, or it of its device's.
        raised = notice.reason if notice is not None and (notice.failed or status in _OF_HOST) else None
        if raised is not None and status < 0:
            status = 1  # it had failed before something killed it
        if done and status == -signal.SIGKILL:
            status = 0
        exit_ = self._exit(status, hung is not None)
        outcome = OUTCOMES[self.state, exit_]
        since, reason = died, "exit" if status >= 0 else "signal"
        detail = str(status) if status >= 0 else signal.Signals(-status).name
        code = status if status >= 0 else 128 - status
        error: str | None = None
        if hung is not None and exit_ is Exit.HUNG:
            reason, since = hung
            detail = f"none for {died - since:.1f} s"
        elif outcome == "failed" and self._error is not None:
            detail, code = f"control plane: {self._error}", 1
        elif outcome == "failed":
            outcome, detail, error = self._failure(status, detail, raised)
        elif outcome == "stopped" and self.stop is not None:
            code = self.stop.code
        elif outcome == "left":
            detail = self._reason or "others do its work"
        code = _CODES.get(outcome, code)
        if outcome == "failed" and settings.joins:
            outcome = "lost"  # it costs the job only this attempt
        restarts = settings.bamboo.recovery.max_restarts and not settings.feeder
        returns = not self._told and (outcome != "fatal" or restarts)
        self.state = AFTER.get(outcome, State.ENDED) if returns else State.ENDED
        if outcome == "fatal" and settings.feeder:
            outcome = "lost"  # a restart does not wait for its return
        step = notice.step if notice is not None and notice.step is not None else step
        abrupt = outcome == "finished" and not done and step is not None
        generation = None if settings.joins else settings.generation or 0
        more = {"error": error, "step": step, "abrupt": abrupt, "generation": generation}
        return self._left(outcome, reason, detail, code, since, **more)

    def _left(
        self, outcome: str, reason: str, detail: str, code: int, since: float, **more: int | str | None
    ) -> LeftRecord:
        fields = {"outcome": outcome, "reason": reason, "detail": detail, "code": code, "since": since, **more}
        return LeftRecord.model_validate({"id": self._member, "slot": self.settings.slot, "boot": boot_id(), **fields})

    def _exit(self, status: int, hung: bool) -> Exit:
        """The way in which a worker with ``status`` has ended; ``hung``: it was killed for that."""
        asked = self.terminated or self.state in _ASKED
        if status == 0 and not asked:
            return Exit.DONE
        if hung:
            return Exit.HUNG
        if status == EXIT_LEFT and self._reason is not None:
            return Exit.LEFT
        if status in _OWN_EXITS:
            return _OWN_EXITS[status]
        if status == -signal.SIGTERM or (status >= 0 and asked):
            return Exit.ASKED
        return Exit.FAILED if status > 0 else Exit.KILLED

    def _failure(self, status: int, detail: str, raised: str | None) -> tuple[str, str, str | None]:
        """Outcome, detail and error of a worker that has failed by itself; the job may be able to go on without it."""
        cause = raised or f"exit code {status}"
        if status == EXIT_CORRUPT:  # no error of the script, however many members are so
            return "lost", cause, None
        spared = self.settings.bamboo.recovery.on_exception == "takeover" and self.admitted
        if spared or status == EXIT_DEVICE:
            return "lost", cause, cause
        return "failed", raised if raised and self.settings.joins else detail, None

    def note_superseded(self, departure: LeftRecord) -> LeftRecord:
        """The job had gone on without the member before its worker failed."""
        if not self._told:
            self._note(Event.SUPERSEDED)
        return departure.model_copy(update={"outcome": "evicted", "code": 0})

    # -- without one --------------------------------------------------------------------------------

    def note_restart(self, restart: RestartRecord) -> None:
        """Workers are started again."""
        settings = self.settings
        old = restart.after_epoch < settings.after_epoch or restart.generation <= (settings.generation or 0)
        ranks = restart.ranks.get(settings.slot)
        if self.state is not State.WAITING or old or ranks is None:
            return
        place = replace(
            settings,
            waiting=False,
            script_rank=ranks[0],
            generation=restart.generation,
            after_epoch=restart.after_epoch,
            restart_from=restart.checkpoint,
            extra={rank: restart.extra[rank] for rank in ranks[1:]},
        )
        self.start_with(place)

    def note_plan_without(self, plan: Plan) -> None:
        """The job has started without this slot, which rejoins it; a plan that is fatal, too, changes nothing."""
        if self.state is State.WAITING and not plan.lost_roles and plan.layout is not None:
            logger.info("the job has started without slot %d, which joins it", self.settings.slot)
            self._note(Event.BEGUN)

    def end(self) -> None:
        """There is nothing to go on with."""
        self._note(Event.OVER)

    def start_with(self, settings: AgentSettings) -> None:
        """There is a place for the slot."""
        self._place = settings
        self._note(Event.PLACE)

    def note_signal(self, signum: signal.Signals) -> None:
        """The process is told to end, or to leave the job."""
        if signum is signal.SIGUSR1:
            self.depart("left", "signal", signum.name, 0)
        else:
            self.depart("lost", "signal", signum.name, 128 + signum)

    def depart(self, outcome: str, reason: str, detail: str, code: int) -> None:
        """Ends the slot, unless it has ended."""
        if self.departure is not None:
            return
        self._note(Event.OVER)
        self.departure = self._left(outcome, reason, detail, code, self._clock())
