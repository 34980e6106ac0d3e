"""The worker's end of the channel to its agent: all that a worker knows of the control plane."""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from ..comm.places import Listener
from ..control.messages import Contact, EventReport, ExitNotice, Heartbeat, Message, PlanPush, parse_to_worker
from ..control.registry.records import (
    DeviceRecord,
    LayoutRecord,
    SuspicionRecord,
    WorkerRecord,
    WorkerState,
)
from ..control.wire import LineSocket
from ..errors import Isolated
from ..forking import only_here
from ..job_settings import JobSettings
from ..observe.span_pipe import SpanWriter
from ..processes import hold_tether
from ..secret import NONE, JobSecret, taken
from ..topology.memory import StageMemory
from ..topology.plan import Plan
from ..topology.roles import Layout
from ..variables import (
    ENV_ADDRESS,
    ENV_FD,
    ENV_HOST,
    ENV_JOB,
    ENV_JOINER,
    ENV_LISTENER,
    ENV_MEMBER,
    ENV_RESTART_FROM,
    ENV_SETTINGS,
)
from .activity import Activity, Stalls

logger = logging.getLogger("bamboo_ds.control.channel")

_LONGEST_HEARTBEAT_INTERVAL_S = 0.2
#: How long close() waits for an agent that does not read.
_FLUSH_DEADLINE_S = 1.0


class WorkerChannel:
    """Receives plans, sends reports and heartbeats.

    One thread, ``bamboo-channel``, reads and sends heartbeats; nothing here ever blocks on the agent,
    so a stopped agent cannot stop training. All methods may be called from any thread.

    Attributes:
        member: id of the member that this process is the worker of.
        job: name of the job.
        rank: the rank that the script runs as; at the start of the job the slot's number.
        world_size: number of slots at the start of the job.
        address: IP address that other workers reach this one at; the only one to bind to.
        joiner: the job was running already when this worker was started.
        restart_from: folder of the newest checkpoint that members had told of when the job was started again.
        secret: the job's.
        listener: where other workers reach this one; ``None``: nowhere yet.
        host: the failure domain, if it is another one than the machine by its name.
        settings: the job's.
        goes_by: what this worker goes by, which is told with its layout where the job's record is open.
        ahead: by how much DeepSpeed's count of steps exceeds the job's.
        activity: what heartbeats tell of the main thread.
        contact: the newest word of etcd, see :mod:`bamboo_ds.control.fencing`.
        spans: takes the timeline; ``None``: the agent writes none.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        member: str,
        job: str,
        rank: int,
        world_size: int,
        address: str,
        joiner: bool = False,
        restart_from: str | None = None,
        secret: JobSecret = NONE,
        listener: Listener | None = None,
        host: str | None = None,
        settings: JobSettings = JobSettings(),  # noqa: B008  # immutable
        spans: SpanWriter | None = None,
    ) -> None:
        self.member = member
        self.job = job
        self.rank = rank
        self.world_size = world_size
        self.address = address
        self.joiner = joiner
        self.restart_from = restart_from
        self.secret = secret
        self.listener = listener
        self.host = host
        self.settings, self.goes_by = settings, settings.values
        self.spans = spans
        self.ahead = 0
        self._interval = min(_LONGEST_HEARTBEAT_INTERVAL_S, 0.25 * settings.values.membership.heartbeat_limit_s)
        self._wire = LineSocket(only_here(sock))
        self._changed = threading.Condition()
        self._plan: Plan | None = None
        self._peers: tuple[tuple[str, str], ...] = ()
        self.contact: Contact | None = None
        self._layout: LayoutRecord | None = None
        self._every_rank = False
        self._progress = Heartbeat()
        self.activity = Activity()
        self._stalls = Stalls()
        self._gone = False  # the agent is, or its socket
        self._failure: Exception | None = None  # of what is called for a plan
        self._closing = False
        self._thread: threading.Thread | None = None
        self._on_plan: Callable[[Plan], None] = lambda plan: None
        self._on_closed: Callable[[], None] = lambda: None

    @classmethod
    def from_environment(cls) -> WorkerChannel | None:
        """The channel that this process inherited from its agent, or ``None``.

        Its variable and the job's secret are taken out of the environment, so that child processes of the worker do
        not take themselves for workers, nor know the secret; later calls in the same process return the same channel.
        """
        global _inherited
        if _inherited is not None and _inherited[0] == os.getpid():
            return _inherited[1]
        text = os.environ.pop(ENV_FD, None)
        if text is None:
            return None
        fd = int(text)
        os.set_inheritable(fd, False)
        hold_tether(os.environ)  # before the first word: from then on the agent waits for it
        channel = cls(
            socket.socket(fileno=fd),
            member=os.environ[ENV_MEMBER],
            job=os.environ[ENV_JOB],
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            address=os.environ[ENV_ADDRESS],
            joiner=bool(os.environ.get(ENV_JOINER)),
            restart_from=os.environ.get(ENV_RESTART_FROM),
            secret=taken(os.environ),
            listener=Listener.inherited(os.environ.pop(ENV_LISTENER)),
            host=os.environ.get(ENV_HOST),
            settings=JobSettings.model_validate_json(os.environ.pop(ENV_SETTINGS, "{}")),
            spans=SpanWriter.inherited(os.environ),
        )
        _inherited = (os.getpid(), channel)
        return channel

    # -- life ---------------------------------------------------------------------------------------

    def start(self, on_plan: Callable[[Plan], None], on_closed: Callable[[], None]) -> None:
        """Starts the channel's thread.

        Args:
            on_plan: called on the channel's thread for every plan with a newer epoch, as soon as it
                arrives. It must return quickly: while it runs no heartbeat is sent. What it raises the waits
                of other threads raise as the cause of an ``Isolated``.
            on_closed: called on the channel's thread once, when the agent is gone. Not called when
                this side closes the channel.
        """
        if self._thread is not None:
            raise RuntimeError("the worker channel has been started already")
        self._on_plan = on_plan
        self._on_closed = on_closed
        self._thread = threading.Thread(target=self._run, name="bamboo-channel", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Sends what is left, the newest progress included, and ends: no thread and no fd stay behind."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
        self._send(self._progress)
        self._wire.flush_within(_FLUSH_DEADLINE_S)
        self._wire.shutdown()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._wire.close()

    # -- plans --------------------------------------------------------------------------------------

    @property
    def newest_plan(self) -> Plan | None:
        """The plan with the newest epoch that has arrived, if any."""
        return self._plan

    def wait_plan(self, after_epoch: int, timeout_s: float) -> Plan:
        """Waits for a plan with an epoch above ``after_epoch`` and returns the newest one.

        Raises ``TimeoutError`` after ``timeout_s`` seconds, ``ConnectionError`` when the agent is gone.
        """
        with self._changed:
            self._wait(
                lambda: self._plan is not None and self._plan.epoch > after_epoch,
                timeout_s,
                f"no plan with an epoch above {after_epoch}",
            )
            assert self._plan is not None
            return self._plan

    def boundary(self) -> int:
        """Epoch of the newest plan, which this member can enter at the next boundary; 0 if there is none."""
        plan = self._plan
        return 0 if plan is None else plan.epoch

    def await_boundary(self, after_epoch: int, timeout_s: float) -> None:
        """Waits for a plan with an epoch above ``after_epoch`` that can be entered, ``timeout_s`` seconds at most."""
        with self._changed:
            self._changed.wait_for(lambda: self.boundary() > after_epoch or self._gone or self._closing, timeout_s)

    def wait_peers(self, timeout_s: float) -> tuple[tuple[str, str], ...]:
        """Members that a worker that is not admitted yet can ask what the job has done, and their places.

        Waits until somebody is known.

        Raises ``TimeoutError`` after ``timeout_s`` seconds, ``ConnectionError`` when the agent is gone.
        """
        with self._changed:
            self._wait(lambda: bool(self._peers), timeout_s, "no worker of the job is known")
            return self._peers

    def _wait(self, ready: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Waits under ``_changed`` for ``ready``; see :meth:`wait_plan` for what is raised."""
        self._changed.wait_for(lambda: ready() or self._gone or self._closing or self._failure, timeout_s)
        if self._failure is not None:
            raise Isolated(f"member {self.member} cannot follow a new plan: {self._failure}") from self._failure
        if ready():
            return
        if self._gone or self._closing:
            raise ConnectionError(f"member {self.member}: the channel to the agent is closed")
        raise TimeoutError(f"member {self.member}: {what} within {timeout_s:.1f} s")

    # -- reports ------------------------------------------------------------------------------------

    def report_layout(
        self,
        layout: Layout,
        redundant: bool,
        iterators: bool = True,
        apart: bool = False,
        stage: StageMemory | None = None,
        memory: int | None = None,
        device: DeviceRecord | None = None,
    ) -> None:
        """Reports that the engine is built; see :class:`~bamboo_ds.control.registry.records.LayoutRecord`."""
        self._layout = LayoutRecord(
            id=self.member,
            layout=layout,
            redundant=redundant,
            iterators=iterators,
            apart=apart,
            every_rank=self._every_rank,
            stage=stage,
            memory=memory,
            device=device,
            settings=self.goes_by if self.settings.open else None,
        )
        self._send(self._layout)

    def need_every_rank(self) -> None:
        """Reports that the script computes what only all ranks can, each in a process of its own. Idempotent."""
        if not self._every_rank:
            self._every_rank = True
            if self._layout is not None:
                self._layout = self._layout.model_copy(update={"every_rank": True})
                self._send(self._layout)

    def report_state(self, state: WorkerState) -> None:
        """Reports what this worker is in, and what it holds."""
        self._send(state)

    def suspect(self, epoch: int, accused: Mapping[str, str]) -> None:
        """Reports that operations of ``epoch`` towards the members ``accused`` failed, with the reasons."""
        self._send(SuspicionRecord(by=self.member, epoch=epoch, accused=dict(accused)))

    def event(self, kind: str, **fields: Any) -> None:
        """Hands an event to the agent's event writer; ``fields`` must be JSON values.

        ``epoch`` is that of the newest plan, unless given; the sender may not have entered that one yet. Where there
        is a ``step`` its ``global_step`` is added.
        """
        plan = self._plan
        added = {"global_step": fields["step"] + self.ahead} if "step" in fields else {}
        self._send(EventReport(kind=kind, fields={"epoch": plan.epoch if plan else 0, **added, **fields}))

    def progress(self, step: int, checkpoint: str | None = None) -> None:
        """Notes the newest committed step, sent with the next heartbeat, or complete checkpoint, sent at once."""
        before = self._progress.checkpoint
        self._progress = Heartbeat(step=step, global_step=step + self.ahead, checkpoint=checkpoint or before)
        if self._progress.checkpoint != before:
            self._send(self._heartbeat())

    def exit_notice(self, reason: str, failed: bool = False, done: bool = False, code: int = 1) -> None:
        """Tells the agent why this worker is about to end; see :class:`~bamboo_ds.control.messages.ExitNotice`."""
        self._send(self._heartbeat())  # the newest progress: there may be no other after this
        self._send(ExitNotice(reason=reason, failed=failed, code=code, done=done, step=self._progress.step))

    def _heartbeat(self) -> Heartbeat:
        activity = self.activity
        computing = activity.busy and not activity.waiting()
        return self._progress.model_copy(
            update={
                "beats": activity.beats,
                "computing": computing,
                "hang_after_s": activity.hang_after_s,
                "doing": activity.words(),
            }
        )

    # -- the thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            closed_by_agent = self._serve()
        finally:
            with self._changed:
                self._gone = True
                self._changed.notify_all()
        if closed_by_agent:
            self._on_closed()

    def _serve(self) -> bool:
        """Reads until the channel ends; true if it was the agent that ended it."""
        next_heartbeat = time.monotonic()
        while not self._closing:
            now = time.monotonic()
            if now >= next_heartbeat:
                self._stalls.look(self.activity, now)
                self._send(self._heartbeat())
                next_heartbeat = now + self._interval
            ready = self._wire.poll(next_heartbeat - time.monotonic(), writing=self._wire.backlog > 0)
            if ready & select.POLLOUT:
                self._wire.flush()
            if ready & ~select.POLLOUT:
                lines = self._wire.receive()
                if lines is None:
                    return not self._closing
                for line in lines:
                    self._receive(line)
        return False

    def _receive(self, line: bytes) -> None:
        message = parse_to_worker(line)
        if isinstance(message, PlanPush):
            with self._changed:
                if self._plan is not None and message.plan.epoch <= self._plan.epoch:
                    return
                self._plan = message.plan
                self._changed.notify_all()
            try:
                self._on_plan(message.plan)
            except Exception as error:  # raised where the main thread waits for a plan: heartbeats go on
                logger.exception("the plan of epoch %d cannot be followed", message.plan.epoch)
                with self._changed:
                    self._failure = error
                    self._changed.notify_all()
        elif isinstance(message, Contact):
            self.contact = message
        else:
            with self._changed:
                self._peers = message.peers
                self._changed.notify_all()

    def _send(self, message: Message | WorkerRecord) -> None:
        """Queue a message; never blocks."""
        if isinstance(message, Heartbeat) and self._wire.backlog and not self._closing:
            return  # the agent does not read; another heartbeat tells it nothing
        self._wire.send(message.to_line())


#: The channel of this process, with the process's id: a forked child does not inherit the role.
_inherited: tuple[int, WorkerChannel] | None = None
