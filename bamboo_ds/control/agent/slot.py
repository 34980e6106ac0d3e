"""The state of one slot: what it is told, and what follows from that. No I/O: agents carry it out.

::

    starting --> running --> leaving          with a worker: :mod:`.agent`
        |           |           |
        +-----------+-----------+--> ended
        |           |
        |           +--> rejoining            evicted: the job goes on without it; :mod:`.rejoin`
        |           |       ^    |
        +-----------+--> waiting |            a fatal loss: the job is about to start again; :mod:`.waiting`
        ^                   |    |
        +-------------------+----+            as a new process image: :mod:`.reexec`

``waiting`` and ``rejoining`` end as well, when the slot is told to or finds no way on.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

from ...errors import EXIT_CORRUPT, EXIT_DEVICE, EXIT_EVICTED, EXIT_FATAL_LOSS, EXIT_LEFT
from ...job_settings import JobSettings
from ...processes import boot_id
from ...topology.plan import Plan
from ..messages import ExitNotice
from ..registry.records import LeftRecord, RestartRecord, StopRecord
from ..settings import AgentSettings

logger = logging.getLogger("bamboo_ds.control.agent")

#: Seconds that an evicted worker has to stop itself.
_EVICTION_GRACE_S = 5.0
#: Seconds that a worker gets to stop itself after a fatal loss: more than it waits for a checkpoint being written.
_FATAL_GRACE_S = 75.0
#: Exit codes of workers that end by what their host or its device has done.
_OF_HOST = (EXIT_DEVICE, EXIT_CORRUPT)
#: Why a worker that only drew batches, or stood in for a member, is not needed any more.
_RELIEVED = "others do its work"


class State(Enum):
    """What a slot is in."""

    STARTING = "starting"  #: no plan has listed the member
    RUNNING = "running"
    LEAVING = "leaving"  #: on notice
    WAITING = "waiting"  #: for the job's restart, without a worker
    REJOINING = "rejoining"  #: looking for a way back into the job, without a worker
    ENDED = "ended"


_NEXT = {
    State.STARTING: {State.RUNNING, State.LEAVING, State.WAITING, State.REJOINING, State.ENDED},
    State.RUNNING: {State.LEAVING, State.WAITING, State.REJOINING, State.ENDED},
    State.LEAVING: {State.ENDED},
    State.WAITING: {State.STARTING, State.REJOINING, State.ENDED},
    State.REJOINING: {State.STARTING, State.ENDED},
    State.ENDED: {State.REJOINING},  # it turns out that the job has gone on without it before
}


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
        state: see above.
        epoch: that of the newest plan.
        fatal: epoch of the plan that some stage is lost in.
        stop: the job was ended.
        broken: the control plane failed.
        evicted: the plan has gone on without the member.
        terminated: the agent was told to end.
        dropped: the plan goes on without the member, which had to leave or was there for others only.
        departure: how it has ended without a worker.
    """

    def __init__(self, settings: AgentSettings, member: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.settings, self._member, self._clock = settings, member, clock
        self.state = State.WAITING if settings.waiting else State.STARTING
        self.epoch = self._listed = 0  # the newest plan, and the newest that lists the member
        self._since = clock()
        self._reason: str | None = None  # that it leaves
        self._found: AgentSettings | None = None
        self.fatal: int | None = None
        self.stop: StopRecord | None = None
        self.broken: BaseException | None = None
        self.evicted = self.terminated = self.dropped = False
        self.departure: LeftRecord | None = None

    def _go(self, state: State) -> None:
        assert state in _NEXT[self.state], f"{self.state} -> {state}"
        self.state = state

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
        return self.admitted and not (self.stop or self.evicted or self.broken or self.terminated)

    @property
    def failure_ends_job(self) -> bool:
        """Whether the job ends if the worker's script fails now."""
        spoilt = self.fatal is not None or self.terminated or self.evicted
        return self.settings.bamboo.recovery.on_exception == "stop" and not self.settings.joins and not spoilt

    @property
    def awaited(self) -> bool:
        """Whether somebody waits for this process once it has no worker: who has told it to end, or the job."""
        return self.terminated or self.state is not State.ENDED

    @property
    def next(self) -> AgentSettings | None:
        """What the process goes on with, if it does."""
        if self.state is State.WAITING and not self.settings.waiting:
            after = self.epoch if self.fatal is None else self.fatal
            return replace(self.settings, waiting=True, after_epoch=after, extra={})
        return self._found if self.state is State.STARTING else None

    def note_settings(self, settings: JobSettings) -> None:
        """The job's record is complete."""
        self.settings = replace(self.settings, settings=settings.with_credentials(self.settings.bamboo))

    # -- with a worker ------------------------------------------------------------------------------

    def note_plan(self, plan: Plan) -> EndWorker | None:
        """``plan`` is the newest."""
        self.epoch = plan.epoch
        listed = self._member in plan.members
        # A member that was admitted without learning it has nothing that others could have taken over.
        concerned = listed or not self.admitted or (not self._listed and self._member not in plan.lost)
        if plan.lost_roles and concerned:
            # A stage is lost. Workers that take part stop by themselves, others have nothing left to join.
            self.fatal = plan.epoch
            return EndWorker(_FATAL_GRACE_S, ask=False) if listed else EndWorker(self.settings.grace_s)
        if listed:
            self._since = self._since if self.admitted else self._clock()
            self._listed = plan.epoch
            if self.state is State.STARTING and self._found is None:
                self._go(State.RUNNING)
        if not self.admitted or listed or self.evicted:
            return None
        # A plan for the next boundary lets the worker go there; after any other it is late already.
        late = plan.interrupts() or plan.epoch > self._listed + 1
        if (self._reason is not None or self.settings.feeder) and self._member not in plan.lost:
            self.dropped = True
            logger.info("the plan of epoch %d goes on without this member", plan.epoch)
        else:
            self.evicted = late = True
            logger.error("the plan of epoch %d does not list this member: its worker must stop", plan.epoch)
        return EndWorker(_EVICTION_GRACE_S, ask=False) if late else None

    def note_stop(self, stop: StopRecord) -> EndWorker:
        """The job is to end."""
        self.stop = stop
        if self.state is State.WAITING:
            self.depart("stopped", "exit", stop.reason, stop.code)
        return EndWorker(self.settings.grace_s)

    def note_error(self, error: BaseException) -> EndWorker:
        """The control plane has failed."""
        self.broken = error
        if self.state is State.WAITING:
            self.depart("lost", "exit", f"control plane: {error}", EXIT_FATAL_LOSS)
        return EndWorker(self.settings.grace_s)

    def note_evicted(self) -> EndWorker:
        """The job may have gone on without the member, which has seen no such plan, and whose worker knows of none."""
        self.evicted = True
        return EndWorker(_EVICTION_GRACE_S)

    def note_notice(self, reason: str) -> EndWorker | None:
        """The member is to leave."""
        self._reason = reason
        self._end_without_worker()
        if self.state in (State.STARTING, State.RUNNING):
            self._go(State.LEAVING)
        if self.admitted:
            return None
        # It has nothing that others could need. It may be admitted in this moment, and leaves all the same.
        self.dropped = True
        return EndWorker(self.settings.grace_s)

    def terminate(self) -> None:
        """The agent is to end."""
        self.terminated = True
        self._end_without_worker()

    def _end_without_worker(self) -> None:
        """Does not go on, also if there is a place already; a slot with a worker stays as it is."""
        if self.state in (State.WAITING, State.REJOINING) or (self.state is State.STARTING and self._found):
            self._go(State.ENDED)

    def note_end(
        self,
        status: int,
        died: float,
        hung: tuple[Literal["heartbeat", "hang"], float] | None,
        notice: ExitNotice | None,
        step: int | None,
    ) -> LeftRecord:
        """The worker has ended; returns what that means.

        Args:
            status: its exit status, negative for a signal.
            died: monotonic seconds of its death.
            hung: it was killed since its heartbeat stopped or since it made no progress, and when that began.
            notice: what it has told of its end.
            step: the newest that it has committed, as far as it has told.
        """
        settings = self.settings
        departure = self._meaning(status, died, hung, notice, step)
        told = self.terminated or self._reason is not None
        restarts = settings.bamboo.recovery.max_restarts and not (self.stop or self.broken)
        if departure.outcome == "fatal" and restarts and not told and not settings.feeder:
            self._go(State.WAITING)
        elif departure.outcome == "evicted" and not told:
            self._go(State.REJOINING)
        else:
            self._go(State.ENDED)
        if departure.outcome == "fatal" and settings.feeder:
            departure = departure.model_copy(update={"outcome": "lost"})  # a restart does not wait for its return
        return departure

    def _meaning(
        self,
        status: int,
        died: float,
        hung: tuple[Literal["heartbeat", "hang"], float] | None,
        notice: ExitNotice | None,
        step: int | None,
    ) -> LeftRecord:
        """Classify the end of the worker; the arguments are those of :meth:`note_end`."""
        settings = self.settings
        done = notice is not None and notice.done  # its script has ended well, and nobody needs it any more
        # What its script has told of its failure, or it of its device's.
        raised = notice.reason if notice is not None and (notice.failed or status in _OF_HOST) else None
        if raised is not None and status < 0:
            status = 1  # it had failed before something killed it
        if done and status == -signal.SIGKILL:
            status = 0
        # It was free to go because it had been told to leave: by whom and why.
        free = self.dropped or not self.admitted or status == EXIT_LEFT
        left = (self._reason if free else None) or (_RELIEVED if self.dropped else None)
        # Its failure counts as a loss, since the job may be able to go on without it.
        spared = settings.bamboo.recovery.on_exception == "takeover" and self.admitted
        # A failure of one that has joined costs the job only this attempt.
        failed = "lost" if settings.joins else "failed"
        since, reason = died, "exit" if status >= 0 else "signal"
        detail = str(status) if status >= 0 else signal.Signals(-status).name
        code = status if status >= 0 else 128 - status
        error: str | None = None
        if status == 0 and not (self.terminated or self.stop or self.evicted or self.broken):
            outcome = "finished"
        elif hung is not None:
            outcome, (reason, since) = "lost", hung
            detail = f"none for {died - since:.1f} s"
        elif self.broken is not None:
            outcome, detail, code = failed, f"control plane: {self.broken}", 1
        elif self.stop is not None:
            outcome, code = "stopped", self.stop.code
        elif left is not None and (status >= 0 or status == -signal.SIGTERM):
            outcome, detail, code = "left", left, 0
        elif self.fatal is not None and not self.terminated:
            outcome, code = "fatal", EXIT_FATAL_LOSS
        elif self.evicted or status in (EXIT_EVICTED, EXIT_LEFT):
            outcome, code = "evicted", 0
        elif status == EXIT_FATAL_LOSS:
            outcome = "fatal"
        elif status > 0 and not self.terminated:
            outcome, detail = failed, raised if raised and settings.joins else detail
            if status == EXIT_CORRUPT:  # no error of the script, however many members are so
                outcome, detail = "lost", raised or f"exit code {status}"
            elif spared or status == EXIT_DEVICE:
                outcome, error = "lost", raised or f"exit code {status}"
                detail = error
        else:
            outcome = "lost"
        step = notice.step if notice is not None and notice.step is not None else step
        return LeftRecord.model_validate(
            {
                "id": self._member,
                "slot": settings.slot,
                "outcome": outcome,
                "reason": reason,
                "detail": detail,
                "code": code,
                "error": error,
                "step": step,
                "abrupt": outcome == "finished" and not done and step is not None,
                "since": since,
                "boot": boot_id(),
                "generation": None if settings.joins else settings.generation or 0,
            }
        )

    def note_superseded(self, departure: LeftRecord) -> LeftRecord:
        """The job had gone on without the member before its worker failed."""
        if self.state is State.ENDED and not (self.terminated or self._reason is not None):
            self._go(State.REJOINING)
        return departure.model_copy(update={"outcome": "evicted", "code": 0})

    # -- without one --------------------------------------------------------------------------------

    def note_restart(self, restart: RestartRecord) -> None:
        """Workers are started again."""
        settings = self.settings
        old = restart.after_epoch < settings.after_epoch or restart.generation <= (settings.generation or 0)
        ranks = restart.ranks.get(settings.slot)
        if self.state is not State.WAITING or old or ranks is None:
            return
        found = replace(
            settings,
            waiting=False,
            script_rank=ranks[0],
            generation=restart.generation,
            after_epoch=restart.after_epoch,
            restart_from=restart.checkpoint,
            extra={rank: restart.extra[rank] for rank in ranks[1:]},
        )
        self.start_with(found)

    def note_plan_without(self, plan: Plan) -> None:
        """The job has started without this slot, which rejoins it; a plan that is fatal, too, changes nothing."""
        if self.state is State.WAITING and not plan.lost_roles and plan.layout is not None:
            logger.info("the job has started without slot %d, which joins it", self.settings.slot)
            self._go(State.REJOINING)

    def end(self) -> None:
        """There is nothing to go on with."""
        self._go(State.ENDED)

    def start_with(self, settings: AgentSettings) -> None:
        """There is a place for the slot."""
        self._found = settings
        self._go(State.STARTING)

    def note_signal(self, signum: signal.Signals) -> None:
        """The process is told to end, or to leave the job."""
        if signum is signal.SIGUSR1:
            self.depart("left", "signal", signum.name, 0)
        else:
            self.depart("lost", "signal", signum.name, 128 + signum)

    def depart(self, outcome: str, reason: str, detail: str, code: int) -> None:
        """End, unless it has ended."""
        if self.departure is not None:
            return
        if self.state is not State.ENDED:
            self._go(State.ENDED)
        values = {"outcome": outcome, "reason": reason, "detail": detail, "code": code, "boot": boot_id()}
        self.departure = LeftRecord.model_validate(
            {"id": self._member, "slot": self.settings.slot, "since": self._clock(), **values}
        )
