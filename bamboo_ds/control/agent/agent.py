"""Runs the worker of one slot to its end.

It spawns the worker, registers it as a member, tells it of plans, and makes its end known the moment that
the worker dies: its record goes, and its lease. It ends with its worker, and its worker with it. Its main thread talks
to the worker and never to etcd. What follows from what it hears is decided by :class:`.slot.Slot`.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from pydantic import ValidationError

from ...comm.places import Listener
from ...observe import logs
from ...observe.events import EventWriter
from ...processes import end_descendants
from ...topology.plan import Plan
from ...variables import ENV_LISTENER
from .. import standard_input
from ..loop import AgentLoop
from ..messages import EventReport, ExitNotice, Heartbeat, Peers, PlanPush, parse_to_agent
from ..notices import Notice
from ..registry.keys import Keys, new_member_id
from ..registry.records import LeftRecord, ProgressRecord, StopRecord, WorkerRecord
from ..reporting import forward, tell_failure
from ..settings import AgentSettings
from .command import as_local_rank, observed, worker_environment
from .data_workers import DataWorkers
from .leaving import Leaving
from .mailbox import Mailbox
from .output import WorkerOutput
from .slot import EndWorker, Slot
from .states import State
from .telling import Telling
from .timeline import TimelineWriter
from .watchdog import Watchdog
from .worker_process import WorkerProcess

if TYPE_CHECKING:
    from .coordinator import Coordinator

logger = logging.getLogger("bamboo_ds.control.agent")

#: A wait that lasts so much longer than asked for means that this process was stopped, in seconds.
_STALL_S = 0.5
#: Seconds from SIGTERM to SIGKILL when the launcher is dead: an orderly end is not waited for.
_ORPHAN_GRACE_S = 0.5
#: Seconds that a worker has to end once it has closed its channel: a script's exit handlers may upload something.
_END_S = 600.0
#: Seconds that the news of a worker's end may take to reach etcd.
_DEPARTURE_S = 60.0
_PROGRESS_INTERVAL_S = 0.5
#: Seconds that workers which only draw batches get to end at the end of the job.
_DATA_WORKERS_S = 10.0


class Agent:
    """Runs one worker to its end. Create it in the main thread of a process without other threads."""

    def __init__(self, settings: AgentSettings) -> None:
        self._settings = settings
        self._id = new_member_id(settings.slot)
        self._slot = Slot(settings, self._id)
        self._mailbox = Mailbox()
        self._events = EventWriter(settings.events)
        self._asked = False  # to leave, by SIGUSR1
        self._channel_open = True
        self._coordinator_ended = threading.Event()
        self._kill_at: float | None = None
        self._watchdog = Watchdog(settings.bamboo.membership)
        self._data_workers = DataWorkers()
        self._progress: Heartbeat | None = None
        self._written = Heartbeat()  # as far as it has been told to etcd
        self._speaks = False  # for all members, of steps
        self._progress_due: float | None = None
        self._exit_notice: ExitNotice | None = None
        self._loop = AgentLoop()
        self._leaving = Leaving(settings, self._id, self._events, self._loop)
        self._mailbox.take_signals(lambda signum, at: self._note_signal(signum))
        self._output = WorkerOutput(settings)
        self._timeline = TimelineWriter(settings.events, settings.job, self._id, settings.rank)
        environment = {**worker_environment(settings, self._id), **self._timeline.environment}
        if threading.active_count() > 1:
            names = ", ".join(thread.name for thread in threading.enumerate())
            logger.warning("threads run before the worker is started (%s): what is forked beside them may hang", names)
        listener = Listener.open(settings.address)
        self._place = str(listener.place)
        with listener.socket, standard_input.of_worker(settings) as stdin:
            self._worker = WorkerProcess(
                observed(as_local_rank(settings.command, environment["LOCAL_RANK"])),
                {**environment, ENV_LISTENER: listener.handed_on()},
                self._output.stdout,
                self._output.stderr,
                [listener.socket.fileno(), *self._timeline.fds],
                stdin,
            )
        logs.set_context(member=self._id)
        logs.begin_files()
        self._output.start(self._id, self._worker.pid)
        self._telling = Telling(self._id, self._output.say) if settings.tells else None

    def run(self) -> LeftRecord:
        """Serves until the worker has ended and etcd knows; returns how it ended."""
        self._data_workers.start_extra(self._settings)
        self._coordinator = self._make_coordinator()
        self._coordinator.start()
        self._leaving.watch(lambda notice: self._mailbox.post(partial(self._note_notice, notice)))
        with selectors.DefaultSelector() as selector:
            selector.register(self._worker.pidfd, selectors.EVENT_READ, "worker")
            selector.register(self._worker.wire, selectors.EVENT_READ, "channel")
            selector.register(self._mailbox, selectors.EVENT_READ, "mail")
            died = self._watch(selector)
        departure = self._departure(self._worker.reap(), died)
        hurries = departure.outcome == "lost"  # of others it may be awaited that they come back
        if not hurries:
            self._await_teardown()
        departure = self._announce(departure)
        self._timeline.end(lost=departure.outcome not in ("finished", "left"))
        if hurries:
            self._await_teardown()
        self._worker.close()
        if departure.outcome == "left" and self._leaving.notice is not None:
            self._leaving.report(self._slot.epoch)
        self._await_data_workers(departure)
        end_descendants()
        if self._telling is not None:
            self._telling.note_end(departure)
        self._output.close(self._mailbox.handle_next, lambda: self._slot.awaited)
        self._leaving.close(abandoned=departure.outcome == "left" and self._coordinator.last_of_host)
        self._coordinator.close(timeout_s=0.0 if self._slot.terminated else 1.0)
        self._mailbox.handle_all()
        if self._slot.state is State.REJOINING:
            from .rejoin import Rejoin

            Rejoin(self._id, self._slot).find(self._mailbox)
        self._events.close()
        return departure

    @property
    def next(self) -> AgentSettings | None:
        """The settings with which the process goes on after :meth:`run`, if it does."""
        return self._slot.next

    def _make_coordinator(self) -> Coordinator:
        from .assembly import make_coordinator
        from .callbacks import Callbacks

        callbacks = Callbacks(
            on_plan=self.on_plan,
            on_peers=self.on_peers,
            on_stop=lambda stop: self._mailbox.post(lambda: self._obey(self._slot.note_stop(stop))),
            on_leave=lambda record: self._mailbox.post(
                partial(self._note_notice, Notice("leave", record.source, record.detail, None))
            ),
            on_error=lambda error: self._mailbox.post(lambda: self._obey(self._slot.note_error(error))),
            on_evicted=lambda: self._mailbox.post(lambda: self._obey(self._slot.note_evicted())),
            on_ended=lambda: self._mailbox.post(self._coordinator_ended.set),
            on_contact=self._worker.send,
            on_settings=lambda settings: self._mailbox.post(partial(self._slot.note_settings, settings)),
        )
        return make_coordinator(
            self._settings,
            self._id,
            self._worker.pid,
            self._place,
            self._events,
            callbacks,
            self._loop,
            on_feed=self.on_feed,
            last_heartbeat=lambda: self._worker.last_sign_of_life,
        )

    # -- callbacks of the coordinator, on its thread ------------------------------------------------

    def on_plan(self, plan: Plan) -> None:
        """Hands a plan to the worker; from this thread, because every millisecond of a takeover counts."""
        self._worker.send(PlanPush(plan=plan))
        self._mailbox.post(partial(self._note_plan, plan))

    def on_peers(self, peers: tuple[tuple[str, str], ...]) -> None:
        """Tells a worker that waits to be admitted which members can tell it what the job has done."""
        self._worker.send(Peers(peers=peers))

    def on_feed(self, slot: int, rank: int) -> None:
        """Starts a worker that draws the batches of the pipeline of ``rank``."""
        self._mailbox.post(lambda: self._data_workers.start(self._slot.settings, slot, rank))

    # -- main loop ----------------------------------------------------------------------------------

    def _watch(self, selector: selectors.BaseSelector) -> float:
        """Serves the worker until it is dead; returns the monotonic time of its death."""
        while True:
            asleep = time.monotonic()
            timeout = self._timeout(asleep)
            ready = {key.data for key, _ in selector.select(timeout)}
            awake = time.monotonic()
            if "mail" in ready:
                self._mailbox.handle_all()  # first: what the worker says may be because it was told to end
            if "channel" in ready and not self._read_channel():
                selector.unregister(self._worker.wire)
                self._channel_open = False
                self._kill_after(_END_S)
            if "worker" in ready or self._worker.dead:
                return awake
            self._note_stall(time.monotonic() - asleep - timeout)
            self._meet_deadlines()
            self._data_workers.reap(self._worker.pid)
            if self._worker.lingers():
                logger.error("worker %d does not end although it was killed: it counts as lost", self._worker.pid)
                return time.monotonic()
            if self._channel_open:
                writing = selectors.EVENT_WRITE if self._worker.wire.backlog else 0
                selector.modify(self._worker.wire, selectors.EVENT_READ | writing, "channel")

    def _note_stall(self, seconds: float) -> None:
        """Excuses the worker where this process may have been stopped for so long, and has not listened."""
        if seconds <= _STALL_S:
            return
        if self._worker.last_sign_of_life is not None:
            self._worker.heard()
        else:
            self._watchdog.excuse(seconds)

    def _timeout(self, now: float) -> float:
        wakes = [now + 1.0]
        silent_at = self._watchdog.due(self._worker.last_sign_of_life, not self._channel_open)
        deadlines = silent_at, self._kill_at, self._progress_due, self._leaving.end_at, self._worker.dead_at
        wakes += [at for at in deadlines if at is not None]
        return max(0.0, min(wakes) - now)

    def _meet_deadlines(self) -> None:
        now = time.monotonic()
        if self._watchdog.silent(self._worker.last_sign_of_life, not self._channel_open):
            self._worker.kill(signal.SIGKILL)
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            logger.error("the worker has not ended in time: killing it")
            self._worker.kill(signal.SIGKILL)
        if self._progress_due is not None and now >= self._progress_due:
            self._write_progress()
        if self._leaving.end_at is not None and now >= self._leaving.end_at:
            self._leaving.end_at = None
            logger.warning("this member did not get to leave in time")
            self._terminate(grace_s=0.0)

    # -- what the slot is told ----------------------------------------------------------------------

    def _note_signal(self, signum: signal.Signals) -> None:
        if signum is signal.SIGUSR1:
            if not self._asked:  # some tell the agent and its launcher, which tells the agent
                self._asked = True
                self._note_notice(Notice("leave", "signal", signum.name, None))
        elif (
            signum is signal.SIGTERM and self._settings.guest and self._slot.may_leave and self._leaving.end_at is None
        ):
            # No launcher has started it: the host shuts down, or a user wants this member to go.
            self._leaving.end_at = time.monotonic() + self._settings.grace_s
            self._note_notice(Notice("leave", "signal", signum.name, self._settings.grace_s))
        else:
            self._terminate()

    def _terminate(self, grace_s: float | None = None) -> None:
        self._slot.terminate()
        self._coordinator.resign()
        orphan = os.getppid() != self._settings.parent_pid
        if grace_s is None:
            grace_s = _ORPHAN_GRACE_S if orphan else self._settings.grace_s
        self._obey(EndWorker(grace_s))

    def _note_notice(self, notice: Notice) -> None:
        first = self._leaving.notice is None
        if not self._leaving.take(notice, self._slot.epoch):
            return
        self._coordinator.write(Keys.notice(self._id), self._leaving.record)
        if first:
            self._coordinator.mark_leaving()
            self._data_workers.tell_to_leave()
        self._obey(self._slot.note_notice(self._leaving.reason))

    def _note_plan(self, plan: Plan) -> None:
        logs.set_context(epoch=plan.epoch)
        if self._telling is not None:
            self._telling.note_plan(plan)
        self._speaks = plan.owners[0] == self._id
        self._plan_progress()
        self._obey(self._slot.note_plan(plan))

    def _obey(self, order: EndWorker | None) -> None:
        if order is not None:
            self._kill_after(order.grace_s)
            if order.ask:
                self._worker.kill(signal.SIGTERM)

    def _kill_after(self, grace_s: float) -> None:
        """Kills the worker in ``grace_s`` seconds, unless it has ended or something else kills it before."""
        kill_at = time.monotonic() + grace_s
        self._kill_at = kill_at if self._kill_at is None else min(self._kill_at, kill_at)

    # -- the worker's messages ----------------------------------------------------------------------

    def _read_channel(self) -> bool:
        """Handles what has arrived; false when the worker has closed its end."""
        self._worker.wire.flush()
        lines = self._worker.wire.receive()
        if lines is None:
            self._worker.last_sign_of_life = None
            return False
        try:
            for line in lines:
                self._handle(line)
        except ValidationError as error:
            self._obey(self._slot.note_error(error))
        return True

    def _handle(self, line: bytes) -> None:
        message = parse_to_agent(line)
        me = self._id
        if isinstance(message, WorkerRecord):
            self._coordinator.write(message.key, message)
        elif isinstance(message, Heartbeat):
            self._worker.heard()
            self._worker.watch(lambda: self._mailbox.post(lambda: None))
            self._timeline.write()
            self._leaving.note_step(message)
            if self._telling is not None:
                self._telling.note_doing(message.doing)
            if self._watchdog.stuck(message):
                self._worker.kill(signal.SIGKILL)
            self._progress = message
            self._plan_progress()
        elif isinstance(message, EventReport):
            forward(self._events, message, self._settings.job, me, self._coordinator.timing)
        elif isinstance(message, ExitNotice):
            self._exit_notice = message
            if message.failed:
                self._kill_after(self._settings.grace_s)  # a thread of the script may keep it, and the others wait
            if message.failed and self._slot.failure_ends_job:
                why = f"the worker of {me} failed: {message.reason}"
                self._coordinator.write(Keys.STOP, StopRecord(code=message.code, reason=why, by=me))

    def _plan_progress(self) -> None:
        """Has etcd told what is new: of steps, in which all are together, by one member; of all else by each."""
        now, written = self._progress, self._written
        if now is None:
            return
        if now.checkpoint != written.checkpoint:
            self._progress_due = time.monotonic()  # a fatal loss may come next
        elif self._progress_due is None and (now.doing != written.doing or (self._speaks and now.step != written.step)):
            self._progress_due = time.monotonic() + _PROGRESS_INTERVAL_S

    def _write_progress(self) -> None:
        self._progress_due = None
        if self._progress is not None:
            self._written = self._progress
            fields = self._progress.model_dump(include={"global_step", "checkpoint", "doing"})
            record = ProgressRecord(id=self._id, step=self._progress.step or 0, **fields)
            self._coordinator.write(Keys.progress(self._id), record)

    # -- the end ------------------------------------------------------------------------------------

    def _await_teardown(self) -> None:
        self._worker.await_teardown(lambda seconds: self._mailbox.handle_next(seconds, [self._worker.pidfd]))

    def _departure(self, status: int, died: float) -> LeftRecord:
        """The meaning of the worker's end by its exit ``status``."""
        step = self._progress.step if self._progress is not None else None
        departure = self._slot.note_end(status, died, self._watchdog.hung, self._exit_notice, step)
        return departure.model_copy(update={"reaped": not self._worker.lingers()})

    def _has_failed(self, departure: LeftRecord) -> bool:
        """Whether the job ends since this worker has failed.

        It may have lingered until the job, which had been told of that, has ended it. The agent itself ends that of a
        job that is done.
        """
        stop = self._slot.stop
        return departure.outcome == "failed" or (stop is not None and stop.by == self._id and stop.code != 0)

    def _announce(self, departure: LeftRecord) -> LeftRecord:
        """Brings the news of the worker's end to etcd; gives up when told to end, or after a while.

        Returns:
            The meaning of the end, if it has turned out that the job goes on without this member.
        """
        while self._worker.wire.poll(0.0, writing=False) and self._read_channel():
            continue  # what the worker wrote before its death
        self._write_progress()
        if self._has_failed(departure):
            error = self._exit_notice.reason if self._exit_notice else None
            tell_failure(self._events, self._settings, self._slot.epoch, departure, error, self._output.path)
        self._coordinator.leave(departure, self._stop_of(departure))
        begin = time.monotonic()
        while not self._coordinator_ended.is_set():
            timeout_s = _ORPHAN_GRACE_S if self._slot.terminated else _DEPARTURE_S
            if not self._mailbox.handle_next(max(0.0, begin + timeout_s - time.monotonic())):
                logger.error("could not tell etcd within %.1f s that the worker has ended", timeout_s)
                break
        return self._slot.note_superseded(departure) if self._coordinator.superseded else departure

    def _stop_of(self, departure: LeftRecord) -> StopRecord | None:
        """The end of the job, if that is what ``departure`` means."""
        if departure.outcome != "failed":
            return None
        what = f"the worker of {self._id} failed ({departure.reason} {departure.detail})"
        why = f"{what}: {self._exit_notice.reason}" if self._exit_notice else what
        return StopRecord(code=departure.code, reason=why, by=self._id)

    def _await_data_workers(self, departure: LeftRecord) -> None:
        """Workers that draw batches end with this agent. Where its own has finished they are let finish first, or
        others take that over, too; else they are ended, and say so.
        """
        if departure.outcome not in ("finished", "left"):
            self._data_workers.terminate()
        end_at = self._leaving.end_at if departure.outcome == "left" else time.monotonic() + _DATA_WORKERS_S

        def left_s() -> float | None:
            if self._slot.terminated:
                return 0.0
            return None if end_at is None else end_at - time.monotonic()

        self._data_workers.wait(self._mailbox, left_s)
