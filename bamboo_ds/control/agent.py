"""The agent of one slot: ``python -m bamboo_ds.control.agent --slot I … -- SCRIPT ARGS``.

It spawns the worker, registers it as a member, tells it of plans, and makes its end known: the lease is
revoked the moment the worker exits. It ends with its worker, and its worker with it. Its main thread talks
to the worker and never to etcd.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from types import FrameType
from typing import TYPE_CHECKING

from pydantic import ValidationError

from ..errors import EXIT_EVICTED, EXIT_FATAL_LOSS, LaunchError
from ..observe import logs
from ..observe.events import EventWriter, parse_event
from ..topology.plan import Plan
from .access import ENV_STORE, open_store
from .agent_settings import AgentSettings, parse_arguments, worker_environment
from .membership import (
    JobRecord,
    Keys,
    LayoutRecord,
    LeftRecord,
    MemberRecord,
    ProgressRecord,
    StandingRecord,
    StopRecord,
    StoreRecord,
    SuspicionRecord,
    boot_id,
    new_member_id,
)
from .messages import (
    EventReport,
    ExitNotice,
    Heartbeat,
    LayoutReport,
    Place,
    Places,
    PlanPush,
    Standing,
    StoreAddress,
    Suspicion,
    parse_to_agent,
)
from .reporting import emit_or_log
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
#: Seconds that the news of a worker's end may take to reach etcd.
_DEPARTURE_S = 60.0
_PROGRESS_INTERVAL_S = 0.5
_STORE_TIMEOUT_S = 2.0


class Agent:
    """Runs one worker to its end. Create it in the main thread of a process without other threads."""

    def __init__(self, settings: AgentSettings) -> None:
        self._settings = settings
        self._id, self._incarnation = new_member_id(settings.slot)
        self._posted: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._events = EventWriter(settings.events)
        self._stop: StopRecord | None = None
        self._evicted = False
        self._admitted = settings.home is None
        self._terminated = False  # by SIGTERM
        self._channel_open = True
        self._coordinator_ended = False
        self._kill_at: float | None = None
        self._hung_since: float | None = None
        self._broken: BaseException | None = None
        self._progress: Heartbeat | None = None
        self._progress_due: float | None = None
        self._exit_notice: str | None = None
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, self._on_signal)
        self._worker = WorkerProcess(settings.command, worker_environment(settings, self._id))
        logs.set_context(member=self._id)

    def run(self) -> LeftRecord:
        """Serve until the worker has ended and etcd knows; returns how it ended."""
        record = MemberRecord(
            id=self._id,
            slot=self._settings.slot,
            host=self._settings.host or socket.gethostname(),
            zone=self._settings.zone,
            address=self._settings.address,
            pid=self._worker.pid,
            agent_pid=os.getpid(),
            incarnation=self._incarnation,
            home=self._settings.rank,
            joiner=self._settings.home is not None,
            feeder=self._settings.feeder,
        )
        self._coordinator = self._make_coordinator(record)
        self._coordinator.start()
        with selectors.DefaultSelector() as selector:
            selector.register(self._worker.pidfd, selectors.EVENT_READ, "worker")
            selector.register(self._worker.wire, selectors.EVENT_READ, "channel")
            selector.register(self._wake_read, selectors.EVENT_READ, "wake")
            died = self._watch(selector)
        departure = self._departure(self._worker.reap(), died)
        self._announce(departure)
        self._worker.close()
        end_descendants()
        self._coordinator.close(timeout_s=0.0 if self._terminated else 1.0)
        self._events.close()
        return departure

    def _make_coordinator(self, record: MemberRecord) -> Coordinator:
        # Loads gRPC, which a process must not have loaded when it forks: so not before the worker is there.
        from .coordinator import Callbacks, Coordinator
        from .leader import Leader

        settings = self._settings
        store = open_store(settings.store, settings.job, _STORE_TIMEOUT_S)
        leader = Leader(
            store,
            self._events,
            member=self._id,
            job=settings.job,
            world_size=settings.world_size,
            settle_s=settings.settle_s,
            patience_s=settings.lease_ttl_s / 2,
            on_feed=self.on_feed,
        )
        callbacks = Callbacks(
            on_plan=self.on_plan,
            on_store=self.on_store,
            on_places=self.on_places,
            on_stop=lambda stop: self._post(partial(self._begin_stop, stop)),
            on_error=lambda error: self._post(partial(self._give_up, error)),
            on_ended=lambda: self._post(self._note_end_of_coordinator),
        )
        coordinator = Coordinator(
            store,
            leader,
            record,
            lease_ttl_s=settings.lease_ttl_s,
            callbacks=callbacks,
            last_heartbeat=lambda: self._worker.last_sign_of_life,
        )
        if settings.slot == 0 and settings.home is None:
            spec = JobRecord(
                job=settings.job,
                world_size=settings.world_size,
                pipelines=settings.pipelines,
                command=settings.command,
            )
            coordinator.write(Keys.SPEC, spec)
        return coordinator

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
        self._post(partial(self._start_feeder, slot, rank))

    def _start_feeder(self, slot: int, rank: int) -> None:
        settings = dataclasses.replace(
            self._settings,
            slot=slot,
            home=rank,
            feeder=True,
            parent_pid=os.getpid(),
            result_fd=None,
            state_file=None,
        )
        logger.warning("starting a worker for rank %d: nobody else can draw its batches", rank)
        command = [sys.executable, "-m", "bamboo_ds.control.agent", *settings.to_arguments()]
        environment = {**os.environ, ENV_STORE: settings.store}
        # It ends with us, at the latest by `end_descendants`.
        subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)

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
            if "channel" in ready and not self._read_channel():
                selector.unregister(self._worker.wire)
                self._channel_open = False
            if "worker" in ready:
                return awake
            if "wake" in ready:
                self._handle_posted()
            if awake - asleep > timeout + _STALL_S and self._worker.last_sign_of_life is not None:
                self._worker.heard()  # it was us who did not listen
            self._meet_deadlines()
            if self._channel_open:
                writing = selectors.EVENT_WRITE if self._worker.wire.backlog else 0
                selector.modify(self._worker.wire, selectors.EVENT_READ | writing, "channel")

    def _timeout(self, now: float) -> float:
        wakes = [now + 1.0]
        last = self._worker.last_sign_of_life
        if last is not None:
            wakes.append(last + self._settings.heartbeat_timeout_s)
        wakes += [at for at in (self._kill_at, self._progress_due) if at is not None]
        return max(0.0, min(wakes) - now)

    def _meet_deadlines(self) -> None:
        now = time.monotonic()
        last = self._worker.last_sign_of_life
        if last is not None and now - last >= self._settings.heartbeat_timeout_s and self._hung_since is None:
            self._hung_since = last
            logger.error("killing worker %d: no heartbeat for %.1f s", self._worker.pid, now - last)
            self._worker.kill(signal.SIGKILL)
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            self._worker.kill(signal.SIGKILL)
        if self._progress_due is not None and now >= self._progress_due:
            self._write_progress()

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
        self._posted.put(self._terminate)  # the wake-up comes through the wakeup fd

    def _terminate(self) -> None:
        self._terminated = True
        self._coordinator.resign()
        orphan = os.getppid() != self._settings.parent_pid
        self._end_worker(_ORPHAN_GRACE_S if orphan else self._settings.grace_s)

    def _begin_stop(self, stop: StopRecord) -> None:
        self._stop = stop
        self._end_worker(self._settings.grace_s)

    def _give_up(self, error: BaseException) -> None:
        self._broken = error
        self._end_worker(self._settings.grace_s)

    def _end_worker(self, grace_s: float) -> None:
        kill_at = time.monotonic() + grace_s
        self._kill_at = kill_at if self._kill_at is None else min(self._kill_at, kill_at)
        self._worker.kill(signal.SIGTERM)

    def _note_plan(self, plan: Plan) -> None:
        logs.set_context(epoch=plan.epoch)
        self._admitted = self._admitted or self._id in plan.members
        if self._admitted and self._id not in plan.members and not self._evicted:
            self._evicted = True
            logger.error("the plan of epoch %d does not list this member: its worker must stop", plan.epoch)
            self._kill_at = time.monotonic() + _EVICTION_GRACE_S

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
        if isinstance(message, Heartbeat):
            self._worker.heard()
            if message.step is not None and message != self._progress:
                self._progress = message
                if self._progress_due is None:
                    self._progress_due = time.monotonic() + _PROGRESS_INTERVAL_S
        elif isinstance(message, LayoutReport):
            report = LayoutRecord(
                id=me, layout=message.layout, redundant=message.redundant, iterators=message.iterators
            )
            self._coordinator.write(Keys.report(me), report)
        elif isinstance(message, Standing):
            standing = StandingRecord(id=me, epoch=message.epoch, replicas=tuple(message.replicas), place=message.place)
            self._coordinator.write(Keys.standing(me), standing)
        elif isinstance(message, StoreAddress):
            address = StoreRecord(epoch=message.epoch, host=message.host, port=message.port)
            self._coordinator.write(Keys.store(message.epoch), address)
        elif isinstance(message, Suspicion):
            suspicion = SuspicionRecord(accused=message.member, by=me, epoch=message.epoch, reason=message.reason)
            self._coordinator.write(Keys.suspect(message.member, me), suspicion)
        elif isinstance(message, EventReport):
            self._forward(message)
        elif isinstance(message, ExitNotice):
            self._exit_notice = message.reason
            if message.failed and self._settings.home is None:
                why = f"the worker of {me} failed: {message.reason}"
                self._coordinator.write(Keys.STOP, StopRecord(code=1, reason=why, by=me))

    def _write_progress(self) -> None:
        self._progress_due = None
        if self._progress is not None and self._progress.step is not None:
            record = ProgressRecord(id=self._id, step=self._progress.step, checkpoint=self._progress.checkpoint)
            self._coordinator.write(Keys.progress(self._id), record)

    def _forward(self, report: EventReport) -> None:
        """Write an event of the worker, completed by what only the control plane knows."""
        fields = {"job": self._settings.job, "member": self._id, **report.fields}
        if report.kind == "recovered":
            timing = self._coordinator.timing(fields.get("epoch"))
            if timing is not None:
                known = {"detection_seconds": timing.detection_s, "plan_seconds": timing.plan_s}
                fields.update({k: v for k, v in known.items() if fields.get(k) is None})
        try:
            event = parse_event(json.dumps({"event": report.kind, **fields}))
        except ValidationError as error:
            logger.error("the worker sent an event that is none: %s", error)
            return
        emit_or_log(self._events, event)

    # -- the end ------------------------------------------------------------------------------------

    def _departure(self, status: int, died: float) -> LeftRecord:
        """Classify the end of the worker by its exit ``status``."""
        since, reason = died, "exit" if status >= 0 else "signal"
        detail = str(status) if status >= 0 else signal.Signals(-status).name
        code = status if status >= 0 else 128 - status
        if status == 0 and not (self._terminated or self._stop or self._evicted or self._broken):
            outcome = "finished"
        elif self._hung_since is not None:
            outcome, since, reason = "lost", self._hung_since, "heartbeat"
            detail = f"none for {died - since:.1f} s"
        elif self._broken is not None:
            outcome, detail, code = self._failure(), f"control plane: {self._broken}", 1
        elif self._stop is not None:
            outcome, code = "stopped", self._stop.code
        elif self._evicted or status == EXIT_EVICTED:
            outcome, code = "evicted", 0
        elif status == EXIT_FATAL_LOSS:
            outcome = "fatal"
        elif status > 0 and not self._terminated:
            outcome = self._failure()
        else:
            outcome = "lost"
        return LeftRecord.model_validate(
            {
                "id": self._id,
                "slot": self._settings.slot,
                "outcome": outcome,
                "reason": reason,
                "detail": detail,
                "code": code,
                "since": since,
                "boot": boot_id(),
            }
        )

    def _failure(self) -> str:
        """What a failure of the worker is. One that has joined costs the job only this attempt."""
        return "failed" if self._settings.home is None else "lost"

    def _announce(self, departure: LeftRecord) -> None:
        """Bring the news of the worker's end to etcd; give up when told to end, or after a while."""
        while self._worker.wire.poll(0.0, writing=False) and self._read_channel():
            continue  # what the worker wrote before its death
        self._write_progress()
        stop = None
        if departure.outcome == "failed":
            what = f"the worker of {self._id} failed ({departure.reason} {departure.detail})"
            why = f"{what}: {self._exit_notice}" if self._exit_notice else what
            stop = StopRecord(code=departure.code, reason=why, by=self._id)
        self._coordinator.leave(departure, stop)
        begin = time.monotonic()
        while not self._coordinator_ended:
            patience = _ORPHAN_GRACE_S if self._terminated else _DEPARTURE_S
            try:
                self._posted.get(timeout=max(0.0, begin + patience - time.monotonic()))()
            except Empty:
                logger.error("could not tell etcd within %.1f s that the worker has ended", patience)
                return

    def _note_end_of_coordinator(self) -> None:
        self._coordinator_ended = True


def main(argv: Sequence[str] | None = None) -> int:
    """Run an agent; returns the exit code of its worker, 128 + n for signal n."""
    settings = parse_arguments(sys.argv[1:] if argv is None else argv)
    logs.configure()
    if settings.home is None or settings.feeder:  # any other that joins a job is nobody's child
        die_with_parent(signal.SIGTERM, settings.parent_pid)
    adopt_orphans()
    try:
        departure = Agent(settings).run()
    except LaunchError as error:
        logger.error("%s", error)
        return 1
    if settings.result_fd is not None:
        try:
            os.write(settings.result_fd, departure.to_json().encode() + b"\n")
        except BrokenPipeError:
            logger.info("the launcher is gone and hears no results any more")
    if settings.state_file is not None and os.getppid() != settings.parent_pid:
        Path(settings.state_file).unlink(missing_ok=True)  # the launcher cannot do it any more
    return departure.code


if __name__ == "__main__":
    exit_code = main()
    logging.shutdown()
    # A thread may still be waiting for an etcd that is gone; nothing that it could do matters any more.
    os._exit(exit_code)
