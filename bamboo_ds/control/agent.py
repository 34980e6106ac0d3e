"""The agent of one slot: ``python -m bamboo_ds.control.agent --slot I … -- SCRIPT ARGS``.

It spawns the worker, registers it as a member, tells it of plans, and makes its end known: the lease is
revoked the moment the worker exits. It ends with its worker, and its worker with it. Its main thread talks
to the worker and never to etcd.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import select
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from types import FrameType
from typing import TYPE_CHECKING

from pydantic import ValidationError

from ..errors import EXIT_LEFT, ConfigError, LaunchError
from ..observe import logs
from ..observe.events import EventWriter
from ..secret import forget
from ..topology.plan import Plan
from .agent_settings import AgentSettings, observed, parse_arguments, worker_environment
from .ending import Ending
from .feeders import Feeders
from .leaving import Leaving
from .membership import Keys, LeftRecord, ProgressRecord, StopRecord, new_member_id
from .messages import EventReport, ExitNotice, Heartbeat, Place, Places, PlanPush, StoreAddress, parse_to_agent
from .notices import Notice
from .rebirth import handle_signals, reexecute
from .relay import as_record
from .reporting import forward
from .watchdog import Watchdog
from .worker_process import WorkerProcess, adopt_orphans, die_with_parent, end_descendants

if TYPE_CHECKING:
    from .coordinator import Coordinator

logger = logging.getLogger("bamboo_ds.control.agent")

#: A wait that lasts so much longer than asked for means that this process was stopped, in seconds.
_STALL_S = 0.5
#: Seconds that an evicted worker has to stop itself.
_EVICTION_GRACE_S = 5.0
#: Seconds from SIGTERM to SIGKILL when the launcher is dead: nobody waits for an orderly end.
_ORPHAN_GRACE_S = 0.5
#: Seconds that a worker gets to stop itself after a fatal loss: more than it waits for a checkpoint being written.
_FATAL_GRACE_S = 75.0
#: Seconds that a worker has to end once it has closed its channel: a script's exit handlers may upload something.
_END_S = 600.0
#: Seconds that the news of a worker's end may take to reach etcd.
_DEPARTURE_S = 60.0
_PROGRESS_INTERVAL_S = 0.5
#: Seconds that workers which only draw batches get to end at the end of the job.
_FEEDERS_S = 10.0
#: Why a worker that only drew batches, or stood in for a member, is not needed any more.
_RELIEVED = "others do its work"


class Agent:
    """Runs one worker to its end. Create it in the main thread of a process without other threads."""

    def __init__(self, settings: AgentSettings) -> None:
        self._settings = settings
        self._id = new_member_id(settings.slot)
        self._posted: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._events = EventWriter(settings.events)
        self._stop: StopRecord | None = None
        self._admitted = not settings.joins
        self._fatal: int | None = None  # epoch of the plan that some stage is lost in
        self._member_since = time.monotonic()
        self._evicted = self._restarts = False
        self._terminated = self._asked = False  # by SIGTERM, by SIGUSR1
        self._channel_open = True
        self._coordinator_ended = threading.Event()
        self._kill_at: float | None = None
        self._watchdog = Watchdog(
            settings.heartbeat_timeout_s,
            settings.start_timeout_s,
            settings.hang_timeout_s,
            settings.first_timeout_s,
        )
        self._feeders = Feeders(settings)
        self._broken: BaseException | None = None
        self._progress: Heartbeat | None = None
        self._progress_due: float | None = None
        self._exit_notice: ExitNotice | None = None
        self._epoch = self._listed = 0  # of the newest plan, and of the newest that lists this member
        self._leaving = Leaving(settings, self._id, self._events)
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        handle_signals(self._on_signal)
        self._worker = WorkerProcess(observed(settings.command), worker_environment(settings, self._id))
        logs.set_context(member=self._id)

    def run(self) -> LeftRecord:
        """Serve until the worker has ended and etcd knows; returns how it ended."""
        self._feeders.start_extra()
        self._coordinator = self._make_coordinator()
        self._coordinator.start()
        self._leaving.watch(lambda notice: self._post(partial(self._note_notice, notice)))
        with selectors.DefaultSelector() as selector:
            selector.register(self._worker.pidfd, selectors.EVENT_READ, "worker")
            selector.register(self._worker.wire, selectors.EVENT_READ, "channel")
            selector.register(self._wake_read, selectors.EVENT_READ, "wake")
            died = self._watch(selector)
        departure = self._departure(self._worker.reap(), died)
        departure = self._announce(departure)
        self._worker.close()
        if departure.outcome == "left" and self._leaving.notice is not None:
            self._leaving.report(self._epoch)
        self._await_feeders(departure)
        end_descendants()
        self._leaving.close(abandoned=departure.outcome == "left" and self._coordinator.last_of_host)
        self._coordinator.close(timeout_s=0.0 if self._terminated else 1.0)
        self._handle_posted()
        if departure.outcome == "evicted":
            self._come_back()
        self._events.close()
        return departure

    def _make_coordinator(self) -> Coordinator:
        from .assembly import make_coordinator
        from .coordinator import Callbacks

        callbacks = Callbacks(
            on_plan=self.on_plan,
            on_store=self.on_store,
            on_places=self.on_places,
            on_stop=lambda stop: self._post(partial(self._begin_stop, stop)),
            on_error=lambda error: self._post(partial(self._give_up, error)),
            on_ended=lambda: self._post(self._coordinator_ended.set),
            on_contact=self._worker.send,
        )
        return make_coordinator(
            self._settings,
            self._id,
            self._worker.pid,
            self._events,
            callbacks,
            on_feed=self.on_feed,
            last_heartbeat=lambda: self._worker.last_sign_of_life,
        )

    # -- callbacks of the coordinator, on its thread ------------------------------------------------

    def on_plan(self, plan: Plan) -> None:
        """Hand a plan to the worker; from this thread, because every millisecond of a takeover counts."""
        self._worker.send(PlanPush(plan=plan))
        self._post(partial(self._note_plan, plan))

    def on_store(self, epoch: int, host: str, port: int) -> None:
        """Hand the address of an epoch's ``TCPStore`` to the worker."""
        self._worker.send(StoreAddress(epoch=epoch, host=host, port=port))
        if self._worker.wire.backlog:
            self._post(lambda: None)  # the main thread writes the rest

    def on_places(self, places: list[Place]) -> None:
        """Hand to a worker that waits to be admitted where it can learn what the job has done."""
        self._worker.send(Places(places=places))

    def on_feed(self, slot: int, rank: int) -> None:
        """Start a worker that draws the batches of the pipeline of ``rank``."""
        self._post(partial(self._feeders.start, slot, rank))

    def _post(self, action: Callable[[], None]) -> None:
        self._posted.put(action)
        try:
            self._wake_write.send(b"\0")
        except BlockingIOError:
            return  # it is full of wake-ups

    # -- main loop ----------------------------------------------------------------------------------

    def _watch(self, selector: selectors.BaseSelector) -> float:
        """Serve the worker until it is dead; returns the monotonic time of its death."""
        while True:
            asleep = time.monotonic()
            timeout = self._timeout(asleep)
            ready = {key.data for key, _ in selector.select(timeout)}
            awake = time.monotonic()
            if "wake" in ready:
                self._handle_posted()  # first: what the worker says may be because it was told to end
            if "channel" in ready and not self._read_channel():
                selector.unregister(self._worker.wire)
                self._channel_open = False
                self._kill_after(_END_S)
            if "worker" in ready:
                return awake
            self._note_stall(time.monotonic() - asleep - timeout)
            self._meet_deadlines()
            if self._worker.lingers():
                logger.error("worker %d does not end although it was killed: it counts as lost", self._worker.pid)
                return time.monotonic()
            if self._channel_open:
                writing = selectors.EVENT_WRITE if self._worker.wire.backlog else 0
                selector.modify(self._worker.wire, selectors.EVENT_READ | writing, "channel")

    def _note_stall(self, seconds: float) -> None:
        """This process may have been stopped for so long: then it was us who did not listen."""
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

    def _handle_posted(self) -> None:
        with contextlib.suppress(BlockingIOError):  # several wake-ups may have been read together
            self._wake_read.recv(4096)
        try:
            while True:
                self._posted.get_nowait()()
        except Empty:
            return

    # -- ending the worker --------------------------------------------------------------------------

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        # The wake-up comes through the wakeup fd.
        self._posted.put(partial(self._note_signal, signal.Signals(signum)))

    def _note_signal(self, signum: signal.Signals) -> None:
        if signum is signal.SIGUSR1:
            if not self._asked:  # some tell the agent and its launcher, which tells the agent
                self._asked = True
                self._note_notice(Notice("leave", "signal", signum.name, None))
        elif signum is signal.SIGTERM and self._settings.guest and self._may_leave():
            # Nobody's child: it is the host that shuts down, or somebody who wants this member to go.
            self._leaving.end_at = time.monotonic() + self._settings.grace_s
            self._note_notice(Notice("leave", "signal", signum.name, self._settings.grace_s))
        else:
            self._terminate()

    def _terminate(self, grace_s: float | None = None) -> None:
        self._terminated = True
        self._coordinator.resign()
        orphan = os.getppid() != self._settings.parent_pid
        if grace_s is None:
            grace_s = _ORPHAN_GRACE_S if orphan else self._settings.grace_s
        self._end_worker(grace_s)

    def _may_leave(self) -> bool:
        """Whether there is an orderly way to leave that is not under way."""
        ending = self._stop or self._evicted or self._broken or self._terminated
        return self._admitted and not ending and self._leaving.end_at is None

    def _note_notice(self, notice: Notice) -> None:
        first = self._leaving.notice is None
        if not self._leaving.take(notice, self._epoch):
            return
        self._coordinator.write(Keys.notice(self._id), self._leaving.record)
        if first:
            self._coordinator.mark_leaving()
            self._feeders.tell_to_leave()
        if not self._admitted:
            # It has nothing that others could need. It may be admitted in this moment, and leaves all the same.
            self._leaving.dropped = True
            self._end_worker(self._settings.grace_s)

    def _begin_stop(self, stop: StopRecord) -> None:
        self._stop = stop
        self._end_worker(self._settings.grace_s)

    def _give_up(self, error: BaseException) -> None:
        self._broken = error
        self._end_worker(self._settings.grace_s)

    def _end_worker(self, grace_s: float) -> None:
        self._kill_after(grace_s)
        self._worker.kill(signal.SIGTERM)

    def _kill_after(self, grace_s: float) -> None:
        """Kill the worker in ``grace_s`` seconds, unless it has ended or something else kills it before."""
        kill_at = time.monotonic() + grace_s
        self._kill_at = kill_at if self._kill_at is None else min(self._kill_at, kill_at)

    def _note_plan(self, plan: Plan) -> None:
        logs.set_context(epoch=plan.epoch)
        self._epoch = plan.epoch
        # A joiner that was admitted without learning it has nothing that others could have taken over.
        concerned = self._id in plan.members or (not self._listed and self._id not in plan.lost)
        if plan.unheld and (concerned or not self._admitted):
            self._note_fatal(plan)
            return
        if self._id in plan.members:
            self._member_since = self._member_since if self._admitted else time.monotonic()
            self._admitted, self._listed = True, plan.epoch
        if not self._admitted or self._id in plan.members or self._evicted:
            return
        # A plan for the next boundary lets the worker go there; after any other it is late already.
        late = plan.immediate or plan.epoch > self._listed + 1
        if (self._leaving.notice is not None or self._settings.feeder) and self._id not in plan.lost:
            self._leaving.dropped = True
            logger.info("the plan of epoch %d goes on without this member", plan.epoch)
        else:
            self._evicted = late = True
            logger.error("the plan of epoch %d does not list this member: its worker must stop", plan.epoch)
        if late:
            self._kill_after(_EVICTION_GRACE_S)

    def _note_fatal(self, plan: Plan) -> None:
        """A stage is lost: workers that take part stop by themselves, others have nothing left to join."""
        self._fatal = plan.epoch
        if self._id not in plan.members:
            self._end_worker(self._settings.grace_s)
        else:
            self._kill_after(_FATAL_GRACE_S)

    @property
    def reborn(self) -> AgentSettings | None:
        """What this agent becomes after :meth:`run`, if it goes on."""
        settings = self._settings
        given_up = self._terminated or self._stop or self._broken or self._leaving.notice is not None
        if not settings.max_restarts or settings.feeder or given_up or not self._restarts:
            return None
        after = self._epoch if self._fatal is None else self._fatal
        return dataclasses.replace(settings, waiting=True, after_epoch=after, extra=None)

    # -- the worker's messages ----------------------------------------------------------------------

    def _read_channel(self) -> bool:
        """Handle what has arrived; false when the worker has closed its end."""
        self._worker.wire.flush()
        lines = self._worker.wire.receive()
        if lines is None:
            self._worker.last_sign_of_life = None
            return False
        try:
            for line in lines:
                self._handle(line)
        except ValidationError as error:
            self._give_up(error)
        return True

    def _handle(self, line: bytes) -> None:
        message = parse_to_agent(line)
        me = self._id
        record = as_record(message, me)
        if record is not None:
            self._coordinator.write(*record)
        elif isinstance(message, Heartbeat):
            self._worker.heard()
            self._leaving.note_step(message)
            if self._watchdog.stuck(message):
                self._worker.kill(signal.SIGKILL)
            before = self._progress
            seen = (None, None, None) if before is None else (before.step, before.checkpoint, before.doing)
            if (message.step, message.checkpoint, message.doing) != seen:
                self._progress = message
                if self._progress_due is None:
                    self._progress_due = time.monotonic() + _PROGRESS_INTERVAL_S
        elif isinstance(message, EventReport):
            forward(self._events, message, self._settings.job, me, self._coordinator.timing)
        elif isinstance(message, ExitNotice):
            self._exit_notice = message
            if message.failed:
                self._kill_after(self._settings.grace_s)  # a thread of the script may keep it, and the others wait
            stops = self._settings.on_exception == "stop" and not self._settings.joins
            spoilt = self._fatal is not None or self._terminated or self._evicted
            if message.failed and stops and not spoilt:
                why = f"the worker of {me} failed: {message.reason}"
                self._coordinator.write(Keys.STOP, StopRecord(code=message.code, reason=why, by=me))

    def _write_progress(self) -> None:
        self._progress_due = None
        if self._progress is not None:
            told = self._progress.model_dump(include={"global_step", "checkpoint", "doing"})
            record = ProgressRecord(id=self._id, step=self._progress.step or 0, **told)
            self._coordinator.write(Keys.progress(self._id), record)

    # -- the end ------------------------------------------------------------------------------------

    def _departure(self, status: int, died: float) -> LeftRecord:
        """Classify the end of the worker by its exit ``status``."""
        free = self._leaving.dropped or not self._admitted or status == EXIT_LEFT
        notice = self._exit_notice
        step = self._progress.step if self._progress is not None else None
        if notice is not None and notice.step is not None:
            step = notice.step
        ending = Ending(
            died=died,
            joined=self._settings.joins,
            fatal=self._fatal is not None,
            terminated=self._terminated,
            stop=self._stop,
            evicted=self._evicted,
            left=(self._leaving.reason if free else None) or (_RELIEVED if self._leaving.dropped else None),
            hung=self._watchdog.hung,
            broken=self._broken,
            error=notice.reason if notice is not None and notice.failed else None,
            done=notice is not None and notice.done,
            spared=self._settings.on_exception == "takeover" and self._admitted,
            step=step,
        )
        departure = ending.departure(self._id, self._settings.slot, status)
        self._restarts = departure.outcome == "fatal"
        if self._settings.feeder and departure.outcome == "fatal":
            departure = departure.model_copy(update={"outcome": "evicted"})  # it does not come back
        generation = None if self._settings.joins else self._settings.generation or 0
        reaped = not self._worker.lingers()
        return departure.model_copy(update={"generation": generation, "reaped": reaped})

    def _announce(self, departure: LeftRecord) -> LeftRecord:
        """Bring the news of the worker's end to etcd; give up when told to end, or after a while.

        Returns:
            What the end means, if it has turned out that the job goes on without this member.
        """
        while self._worker.wire.poll(0.0, writing=False) and self._read_channel():
            continue  # what the worker wrote before its death
        self._write_progress()
        self._coordinator.leave(departure, self._stop_of(departure))
        begin = time.monotonic()
        while not self._coordinator_ended.is_set():
            patience = _ORPHAN_GRACE_S if self._terminated else _DEPARTURE_S
            try:
                self._posted.get(timeout=max(0.0, begin + patience - time.monotonic()))()
            except Empty:
                logger.error("could not tell etcd within %.1f s that the worker has ended", patience)
                break
        if self._coordinator.superseded:
            departure = departure.model_copy(update={"outcome": "evicted", "code": 0})
        return departure

    def _stop_of(self, departure: LeftRecord) -> StopRecord | None:
        """The end of the job, if that is what ``departure`` means."""
        if departure.outcome != "failed":
            return None
        what = f"the worker of {self._id} failed ({departure.reason} {departure.detail})"
        why = f"{what}: {self._exit_notice.reason}" if self._exit_notice else what
        return StopRecord(code=departure.code, reason=why, by=self._id)

    def _await_feeders(self, departure: LeftRecord) -> None:
        """Workers that draw batches end with this agent: first let them finish, or others take that over, too."""
        if departure.outcome not in ("finished", "left"):
            return
        end_at = self._leaving.end_at if departure.outcome == "left" else time.monotonic() + _FEEDERS_S

        def patience() -> float | None:
            self._handle_posted()
            if self._terminated:
                return 0.0
            return None if end_at is None else end_at - time.monotonic()

        self._feeders.wait(self._wake_read.fileno(), patience)

    def _come_back(self) -> None:
        """Join the job again as somebody new; returns if there is no way, or if the agent is to end."""
        from .comeback import Comeback

        def wait(seconds: float) -> bool:
            until = time.monotonic() + seconds
            while True:
                self._handle_posted()
                if self._terminated or self._leaving.notice is not None:
                    return False
                if (left := until - time.monotonic()) <= 0:
                    return True
                select.select([self._wake_read], [], [], left)

        settings = Comeback(self._settings, self._id, time.monotonic() - self._member_since, wait).find()
        if settings is not None and wait(0.0):
            logger.warning("coming back into the job, as slot %d", settings.slot)
            reexecute(settings)


def _serve(settings: AgentSettings) -> LeftRecord:
    """Run one worker, or wait for the job's restart; begins anew where the job does."""
    if settings.waiting:
        from .waiting import WaitingAgent

        result = WaitingAgent(settings).run()
        if isinstance(result, AgentSettings):
            reexecute(result)
        return result
    departure = (agent := Agent(settings)).run()
    if agent.reborn is not None:
        reexecute(agent.reborn)
    return departure


def main(argv: Sequence[str] | None = None) -> int:
    """Run an agent; returns the exit code of its worker, 128 + n for signal n."""
    settings = parse_arguments(sys.argv[1:] if argv is None else argv)
    logs.configure()
    if not settings.guest:
        die_with_parent(signal.SIGTERM, settings.parent_pid)
    adopt_orphans()
    try:
        departure = _serve(settings)
    except (ConfigError, LaunchError) as error:
        logger.error("%s", error)
        return 1
    if settings.result_fd is not None:
        try:
            os.write(settings.result_fd, departure.to_json().encode() + b"\n")
        except BrokenPipeError:
            logger.info("the launcher is gone and hears no results any more")
    if settings.state_file is not None and os.getppid() != settings.parent_pid:
        forget(settings.job, Path(settings.state_file), settings.parent_pid)  # the launcher cannot do it any more
    return departure.code


if __name__ == "__main__":
    exit_code = main()
    logging.shutdown()
    # A thread may still be waiting for an etcd that is gone; nothing that it could do matters any more.
    os._exit(exit_code)
