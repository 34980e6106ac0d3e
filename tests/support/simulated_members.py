"""Hosts, workers and the package's processes in simulated time: whoever has them says when each of them acts."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from queue import SimpleQueue
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from bamboo_ds.control import fencing
from bamboo_ds.control.agent.agent import Agent
from bamboo_ds.control.agent.assembly import member_record, outage_s
from bamboo_ds.control.agent.callbacks import Callbacks
from bamboo_ds.control.agent.coordinator import Coordinator
from bamboo_ds.control.agent.lease import REFRESH, _raise
from bamboo_ds.control.agent.mailbox import Mailbox
from bamboo_ds.control.agent.rejoin import Rejoin
from bamboo_ds.control.agent.slot import Slot
from bamboo_ds.control.agent.states import State
from bamboo_ds.control.agent.waiting import WaitingAgent
from bamboo_ds.control.leader.leader import Leader
from bamboo_ds.control.messages import Contact, ExitNotice, Heartbeat, Message, PlanPush
from bamboo_ds.control.registry.records import LayoutRecord, SuspicionRecord, WorkerRecord, WorkerState
from bamboo_ds.control.registry.vacancies import Vacancy
from bamboo_ds.control.settings import AgentSettings, MemberOptions
from bamboo_ds.errors import (
    EXIT_EVICTED,
    EXIT_FATAL_LOSS,
    EXIT_LEFT,
    BambooError,
    ConfigError,
    JobOver,
    LaunchError,
    PlanForged,
    ProtocolError,
    StoreError,
    StoreUnavailable,
)
from bamboo_ds.launchers.join import Arrival, Starters, begin
from bamboo_ds.observe.events import EventWriter
from bamboo_ds.topology import Layout, Plan

from .simulated_etcd import TTL_S, SimStore

if TYPE_CHECKING:
    from .fencing_model import World

#: Seconds without a peer or a plan after which a worker stops (``recovery.plan_timeout_s``).
ISOLATED_S = 8.0
#: Seconds that a worker pauses at most.
PAUSED_S = 8.0
#: Seconds from an agent's request to the end of a worker.
GRACE_S = 1.0
STAGES = 2


class Broken(AssertionError):
    """An invariant does not hold."""


class Host:
    """One machine with one slot (and with those that stand in for others), its clock and its cables."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number
        self.rate, self._offset = world.rates[number % len(world.rates)], 1000.0 * number
        self.alive, self.stopped, self.etcd, self.mute = True, False, True, False
        self.hold_s, self.hold_at, self.held, self.lose = 0.0, "", False, False
        self.parties: list[Party] = []

    def clock(self) -> float:
        return self._offset + self.rate * self.world.now

    @property
    def runs(self) -> bool:
        return self.alive and not self.stopped and not self.held


class Worker:
    """Enters plans, commits, publishes. Nothing else of training is there."""

    pid = 1

    def __init__(self, host: Host, member: str, joiner: bool, tell: Callable[[Message | WorkerRecord], None]) -> None:
        self.host, self.member, self.joiner, self._tell = host, member, joiner, tell
        self.world = host.world
        self.status: int | None = None
        self.stopped = False
        self.stopped_at: float | None = None
        self.contact: Contact | None = None
        self.newest: Plan | None = None
        self.plan: Plan | None = None  # that it has entered
        self.entering: Plan | None = None
        self.step = 0
        self.alone_since: float | None = None
        self.paused_since: float | None = None
        self._accused = SuspicionRecord(by=member, epoch=-1, accused={})
        self.last_sign_of_life: float | None = None
        if joiner:
            self.tell(LayoutRecord(id=self.member, layout=Layout(1, STAGES), redundant=True, iterators=False))

    @property
    def runs(self) -> bool:
        return self.status is None and not self.stopped and self.host.alive and not self.host.stopped

    def tell(self, message: Message | WorkerRecord) -> None:
        self.world.at_once.append(lambda: self._tell(message))

    # as WorkerProcess
    def send(self, message: Message) -> None:
        if isinstance(message, PlanPush):
            self.newest = message.plan
        elif isinstance(message, Contact):
            self.contact = message

    def kill(self, signum: int) -> None:
        if self.status is None:
            self.status = -signum

    def lingers(self) -> bool:
        return False

    # training
    def exit(self, status: int, failed: bool = False) -> None:
        if self.status is None:
            if failed:
                self.tell(ExitNotice(reason="ValueError", failed=True))
            self.status = status

    def look(self) -> None:
        """Follow the newest plan."""
        plan = self.newest
        if plan is None or plan.epoch <= max(self.plan.epoch if self.plan else 0, self._going):
            return
        if self.member in plan.members and plan.lost_roles:
            self.exit(EXIT_FATAL_LOSS)
        elif plan.interrupts() or (self.plan is None and self.member in plan.members):
            self.enter(plan)

    @property
    def _going(self) -> int:
        return self.entering.epoch if self.entering else 0

    def enter(self, plan: Plan) -> None:
        if self.member in plan.members:
            self.entering = plan
        elif self.plan is not None or not self.joiner:
            self.exit(EXIT_EVICTED if self.member in plan.lost else EXIT_LEFT)

    def may_commit(self) -> bool:
        assert self.plan is not None
        contact, off = self.contact, self.world.off
        if "pause" in off:
            return True
        if "lineage" in off and contact is not None:
            contact = Contact(origin=self.plan.origin, generation=self.plan.generation, at=contact.at)
        return fencing.may_commit(self.plan, contact, self.host.clock())

    def await_fence(self) -> bool:
        """Whether it may commit; it stops when it has paused for too long."""
        if self.may_commit():
            self.paused_since = None
            return True
        self.paused_since = self.world.now if self.paused_since is None else self.paused_since
        if self.world.now - self.paused_since > PAUSED_S:
            self.world.happened["gave up"] += 1
            self.exit(EXIT_EVICTED)
        return False

    def entered(self, plan: Plan) -> None:
        self.plan, self.entering, self.alone_since = plan, None, None
        if plan.layout is None:
            self.tell(LayoutRecord(id=self.member, layout=Layout(1, STAGES), redundant=True, iterators=False))
            return
        held = [rank for rank, shadow in enumerate(plan.shadows) if shadow == self.member]
        held += [rank for rank, builder in plan.builders if builder == self.member]
        self.tell(WorkerState(id=self.member, epoch=plan.epoch, replicas=tuple(sorted(held))))

    def miss(self, peers: Sequence[str]) -> None:
        """Some peers cannot be reached."""
        plan = self.entering or self.plan
        assert plan is not None
        if not peers:
            self.alone_since = None
            return
        now = self.world.now
        self.alone_since = now if self.alone_since is None else self.alone_since
        if now - self.alone_since > ISOLATED_S:
            self.exit(EXIT_EVICTED)
        elif now - self.alone_since > TTL_S:
            before = self._accused if self._accused.epoch == plan.epoch else None
            accused = {**(before.accused if before else {}), **dict.fromkeys(peers, "silent")}
            if before is None or accused != before.accused:
                self._accused = SuspicionRecord(by=self.member, epoch=plan.epoch, accused=accused)
                self.tell(self._accused)


# -- the package's processes ------------------------------------------------------------------------------


class SimCoordinator(Coordinator):
    """Without threads: whoever has it calls :meth:`wake` and :meth:`stay`."""

    due: float | None = 0.0
    ended = False

    def __init__(self, store: Any, *others: Any, **more: Any) -> None:
        super().__init__(store, *others, **more)
        self._inbox.close()
        self._inbox = SimMailbox()
        if "unseen" in store.world.off:
            member: Any = self._membership
            member.may_register = lambda plan, forged: not member.is_out(plan)

    def _keep_lease(self) -> None:
        return

    def _attend_neighbours(self, mirror: Any) -> None:
        return

    def wake(self) -> None:
        if self.ended:
            return
        try:
            self._drain(self._clock())
            self.due = self._turn()
        except BambooError as error:  # anything else is a defect
            self._ending.set()
            self._callbacks.on_error(error)
        if self._ending.is_set():
            self.ended = True
            self._store.close()
            self._callbacks.on_ended()

    def stay(self) -> None:
        if self._membership.state is not State.LOOKING and not self.ended:
            try:
                self._keeper.stay()
            except StoreUnavailable as error:
                if self._gives_up(self._keeper.silent_s):
                    self._inbox.post(partial(_raise, error))
            except PlanForged:
                return  # as on the lease's thread, which tells it in the log

    @property
    def pending(self) -> bool:
        return not self._inbox._actions.empty() or (self.due is not None and self.due <= self._clock())


def make(
    settings: AgentSettings, member: str, host: Host, events: EventWriter, callbacks: Callbacks, **more: Any
) -> Any:
    """As :func:`bamboo_ds.control.agent.assembly.make_coordinator`."""
    store: Any = SimStore(host.world, host)
    store.by = member
    return SimCoordinator(
        store,
        Leader(store, events, settings, member, clock=host.clock),
        member_record(settings, member, 1, f"{member} 1 token").model_copy(
            update={"agent_started": None, "process_space": ""}
        ),
        lease_ttl_s=settings.bamboo.membership.lease_ttl_s,
        callbacks=callbacks,
        last_heartbeat=more.get("last_heartbeat", lambda: None),
        after_epoch=settings.after_epoch,
        outage_s=outage_s(settings),
        clock=host.clock,
        fence_clock=host.clock,
    )


class SimMailbox(Mailbox):
    """Without sockets: whoever has it handles what is posted."""

    def __init__(self) -> None:
        self._actions = SimpleQueue()

    def post(self, action: Callable[[], None]) -> None:
        self._actions.put(action)

    def handle_all(self) -> None:
        while self.handle_next(0.0):
            continue


class SimAgent(Agent):
    """The handlers of an agent, without its process, sockets and signals."""

    def __init__(self, settings: AgentSettings, host: Host) -> None:
        self._settings, self.host = settings, host
        self._id = host.world.new_id(settings.slot)
        self._slot = Slot(settings, self._id, host.clock)
        self._mailbox = SimMailbox()
        self._events = EventWriter(None)
        self._kill_at = self._progress = self._progress_due = self._exit_notice = None
        self._written, self._speaks = Heartbeat(), False
        self._leaving: Any = SimpleNamespace(notice=None, end_at=None)
        self._watchdog: Any = SimpleNamespace(hung=None)
        self._telling = None
        self.over = False
        self.departed: Any = None
        self._worker: Any = Worker(host, self._id, settings.joins, self._hear)
        slot, post = self._slot, self._mailbox.post
        callbacks = Callbacks(
            on_plan=self.on_plan,
            on_peers=lambda peers: None,
            on_stop=lambda stop: post(lambda: self._obey(slot.note_stop(stop))),
            on_error=lambda error: post(lambda: self._obey(slot.note_error(error))),
            on_evicted=lambda: post(lambda: self._obey(slot.note_evicted())),
            on_ended=lambda: post(self._note_over),
            on_contact=self._worker.send,
        )
        self._coordinator: Any = make(
            settings, self._id, host, self._events, callbacks, last_heartbeat=self._last_heartbeat
        )

    def _last_heartbeat(self) -> float | None:
        return self.host.clock() if self._worker.runs else None

    def _note_over(self) -> None:
        self.over = True

    def _kill_after(self, grace_s: float) -> None:
        self._kill_at = self._kill_at or self.host.clock() + GRACE_S

    def _hear(self, message: Message | WorkerRecord) -> None:
        if isinstance(message, WorkerRecord):
            self._coordinator.write(message.key, message)
        elif isinstance(message, ExitNotice):
            self._handle(message.to_line())


class SimWaiting(WaitingAgent):
    """The same of an agent that waits."""

    def __init__(self, settings: AgentSettings, host: Host) -> None:
        self._settings, self.host = settings, host
        self._id = host.world.new_id(settings.slot)
        self._slot = Slot(settings, self._id, host.clock)
        self._mailbox = SimMailbox()
        self._ended = False
        self._coordinator: Any = make(settings, self._id, host, EventWriter(None), self.callbacks())


class SimRejoin(Rejoin):
    """Asks this host's store."""

    def __init__(self, agent: SimAgent | SimWaiting) -> None:
        super().__init__(agent._id, agent._slot, agent.host.clock)
        self._host = agent.host

    def _open(self) -> Any:
        return SimStore(self._host.world, self._host)


class Comer:
    """As ``bamboo join``, brought again by a cluster whenever it ends with a code that does not mean the end.

    Args:
        options: of the member.
        start: who starts the job.
    """

    def __init__(self, host: Host, options: MemberOptions, start: Starters | None) -> None:
        self._host, self._options, self._start = host, options, start
        self._store: Any = SimStore(host.world, host)
        self._arrival: Arrival | None = None

    def look(self) -> Vacancy | None:
        """As :func:`bamboo_ds.launchers.join.prepare`, but once. Raises where that is the end."""
        try:
            if self._arrival is None:
                if self._start is not None:
                    begin(self._store, self._options, self._start)
                self._arrival = Arrival(self._store, self._options, self._start, True, self._host.clock)
            return self._arrival.look()
        except (ConfigError, JobOver):
            raise
        except (LaunchError, StoreError, ProtocolError):
            self._arrival = None
            return None


class Party:
    """One agent's process, whatever it is at the moment.

    Args:
        comes: what it was asked for that comes by ``bamboo join``; its settings follow from the job.
    """

    def __init__(
        self, host: Host, settings: AgentSettings | None, comes: tuple[MemberOptions, Starters | None] | None = None
    ) -> None:
        self.host, self.world = host, host.world
        self.over = False
        self._stay_at = 0.0
        self._come_at = 0.0
        self.rejoin: SimRejoin | None = None
        self.process: SimAgent | SimWaiting | None = None
        self._comer = None if comes is None else Comer(host, *comes)
        if settings is not None:
            self._become(settings)
        host.parties.append(self)

    def _become(self, settings: AgentSettings) -> None:
        self.rejoin = self._comer = None
        self._told = False
        if settings.waiting:
            self.process = SimWaiting(settings, self.host)
            return
        self.process = SimAgent(settings, self.host)
        for rank, slot in settings.extra.items():
            Party(self.host, replace(settings, slot=slot, script_rank=rank, extra={}))
        self.world.workers[self.process._id] = self.process._worker

    @property
    def worker(self) -> Worker | None:
        return self.process._worker if isinstance(self.process, SimAgent) else None

    def act(self) -> None:
        """What it does in one tick."""
        if self.over or not self.host.runs:
            return
        if self._comer is not None:
            self._arrive(self._comer)
            return
        if self.rejoin is not None:
            self._look(self.rejoin)
            return
        assert self.process is not None
        coordinator = self.process._coordinator
        clock = self.host.clock()
        if clock >= self._stay_at:
            self._stay_at = clock + REFRESH * TTL_S
            coordinator.stay()
        for _ in range(4):
            delivered = not coordinator.ended and coordinator._store.deliver()
            if not (delivered or coordinator.pending) or coordinator.ended:
                break
            coordinator.wake()
        self.process._mailbox.handle_all()
        if isinstance(self.process, SimAgent):
            self._agent(self.process)
        else:
            self._waiting(self.process)

    def _agent(self, agent: SimAgent) -> None:
        worker: Worker = agent._worker
        if worker.status is None:
            if worker.stopped_at is not None and self.world.now - worker.stopped_at > TTL_S:
                agent._watchdog.hung = ("heartbeat", 0.0)
                worker.kill(signal.SIGKILL)
            if agent._kill_at is not None and self.host.clock() >= agent._kill_at:
                worker.kill(signal.SIGKILL)
        elif not self._told:
            self._told = True
            agent.departed = agent._departure(worker.status, self.host.clock())
            agent._coordinator.leave(agent.departed, agent._stop_of(agent.departed))
        elif agent.over:
            if agent._coordinator.superseded:
                agent._slot.note_superseded(agent.departed)
            self._go_on(agent)

    def _waiting(self, waiting: SimWaiting) -> None:
        if waiting._slot.state is State.WAITING and not waiting._ended:
            return
        if not self._told:
            self._told = True
            waiting._coordinator.leave(waiting._slot.departure)
            waiting._coordinator.wake()
            waiting._mailbox.handle_all()
        if waiting._ended:
            self._go_on(waiting)

    def _go_on(self, agent: SimAgent | SimWaiting) -> None:
        if agent.next is not None:
            self._become(agent.next)
        elif agent._slot.state is State.REJOINING:
            self.rejoin = SimRejoin(agent)
        else:
            self.over = True

    def _arrive(self, comer: Comer) -> None:
        if self.world.now < self._come_at:
            return
        self._come_at = self.world.now + 1.0
        try:
            vacancy = comer.look()
        except (ConfigError, JobOver):
            self.over = True
            return
        if vacancy is not None and self.host.alive:
            self._become(self.world.settings(**asdict(vacancy)))

    def _look(self, rejoin: SimRejoin) -> None:
        if self.world.now < self._come_at:
            return
        self._come_at = self.world.now + 1.0
        rejoin.look()
        assert self.process is not None
        if self.process._slot.state is not State.REJOINING:
            self.rejoin = None
            self._go_on(self.process)
