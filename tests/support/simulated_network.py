"""Members of a job as threads of which one runs at a time, and a network between them.

Which member goes on, which message arrives and when a plan becomes known is drawn, so that one seed gives one course of
events. A member can be killed before any of them.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from greenlet import greenlet

from bamboo_ds.comm.calls.order import ring
from bamboo_ds.comm.wire.payloads import Payload, read, written
from bamboo_ds.errors import EpochChanged, PeerLost, ProtocolError
from bamboo_ds.topology import Plan

#: A run takes some hundreds.
_TURNS = 20_000


class Killed(BaseException):
    """The member that this is raised in is gone, as after SIGKILL."""


class _Abandoned(BaseException):
    """The simulation is over."""


class _Thread:
    """A member: a greenlet, since handing the turn over between threads takes longer than all that members do."""

    def __init__(self, name: str, target: Callable[[], None]) -> None:
        self.name, self.ready, self.ended = name, _always, False
        self.error: BaseException | None = None
        self.greenlet = greenlet(self.run)
        self._target = target

    def run(self, turns: Turns) -> None:
        try:
            if not turns.abandoned:
                self._target()
        except (Killed, _Abandoned):
            pass
        except BaseException as error:  # raised where the simulation was started
            self.error = error
        self.ended = True


def _always() -> bool:
    return True


class Turns:
    """Runs threads in turns.

    Args:
        random: draws whose turn it is.

    Attributes:
        abandoned: the threads are to end.
    """

    def __init__(self, random: Random) -> None:
        self._random = random
        self._threads: list[_Thread] = []
        self._current: _Thread | None = None
        self.abandoned = False

    def add(self, name: str, target: Callable[[], None]) -> None:
        """One more thread."""
        self._threads.append(_Thread(name, target))

    def wait(self, ready: Callable[[], bool] = _always) -> None:
        """The current thread goes on when it is its turn, not before ``ready()``."""
        me = self._current
        assert me is not None
        if not self.abandoned:
            me.ready = ready
            grads = torch.is_grad_enabled()  # torch keeps that by thread of the system
            me.greenlet.parent.switch()
            torch.set_grad_enabled(grads)
        if self.abandoned:
            raise _Abandoned

    def run(self, events: Callable[[], Sequence[Callable[[], None]]]) -> None:
        """Run all threads to their ends, and between their turns some of the ``events`` that could happen then.

        Raises:
            TimeoutError: threads wait, and nothing can happen any more, or too much has.
        """
        try:
            for turn in itertools.count():
                waiting = [thread for thread in self._threads if not thread.ended]
                if not waiting:
                    return
                choices: list[Any] = [thread for thread in waiting if thread.ready()]
                choices += events()
                if not choices or turn > _TURNS:
                    raise TimeoutError(f"{', '.join(thread.name for thread in waiting)} would wait for ever")
                chosen = self._random.choice(choices)
                if not isinstance(chosen, _Thread):
                    chosen()
                    continue
                self._let(chosen)
                if chosen.error is not None:
                    raise chosen.error
        finally:
            self.abandoned = True
            for thread in self._threads:
                if not thread.ended:
                    self._let(thread)

    def _let(self, thread: _Thread) -> None:
        self._current = thread
        if thread.greenlet:
            thread.greenlet.switch()
        else:
            thread.greenlet.switch(self)
        torch.set_grad_enabled(True)


@dataclass(eq=False)
class Attachment:
    """One member in one epoch; stands in for :class:`bamboo_ds.comm.epoch.Epoch`, and for its agreement.

    Attributes:
        inboxes: messages that have arrived, by key: sender, number, payload.
        gone: peers that have left the epoch or the world, as far as the member knows.
        undelivered: something that it sent has been lost.
        channels: those that it has opened, by name.
        concluded: the channels are at their end.
    """

    network: Network
    plan: Plan
    member: str
    aborted: str | None = None
    inboxes: dict[Any, deque[tuple[str, int, Payload]]] = field(default_factory=lambda: defaultdict(deque))
    gone: set[str] = field(default_factory=set)
    undelivered: bool = False
    channels: dict[str, SimulatedChannel] = field(default_factory=dict)
    concluded: bool = False
    rounds: Counter[Any] = field(default_factory=Counter)
    newest: dict[Any, int] = field(default_factory=dict)

    def put(self, key: Any, message: tuple[str, int, Payload]) -> None:
        """A message arrives; of some keys only so many of the newest are kept."""
        self.inboxes[key].append(message)
        if key in self.newest and len(self.inboxes[key]) > self.newest[key]:
            self.inboxes[key].popleft()

    def begin(self, what: str) -> None:
        """The member does something in the epoch."""
        self.network.before(self.member, what)
        self.check()

    def open(
        self, device: torch.device, name: str, source: str, destination: str, newest: int | None, yields: bool
    ) -> SimulatedChannel:
        self.check()
        assert name not in self.channels and {source, destination} <= set(self.plan.members)
        if newest is not None:
            self.newest[name] = newest
        channel = self.channels[name] = SimulatedChannel(self, name, source, destination)
        return channel

    def drain(self) -> None:
        self.begin("drain")
        self.network.await_delivery(self)

    @property
    def agreement(self) -> Attachment:
        return self

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self.check()
        return self.network.sum(self, "all_reduce", self.plan.members, tensor)

    def exchange(self, value: Any) -> dict[str, Any]:
        self.check()
        told = self.network.all_gather(self, "exchange", self.plan.members, written(value))
        return dict(zip(self.plan.members, map(read, told), strict=True))

    def conclude(self) -> None:
        if self.concluded:
            return
        self.concluded = True
        try:
            if self.gone:
                self.network.abort(self, "concluded after a failure")
            if self.aborted is None:
                self.network.await_delivery(self)
                self.network.all_gather(self, "conclude", self.plan.members, None)
        finally:
            for channel in self.channels.values():
                channel.clear()

    def check(self, members: Sequence[str] = ()) -> None:
        """Raise if the epoch has ended for this member, or one of ``members`` is gone."""
        if self.aborted is not None:
            raise EpochChanged(f"epoch {self.plan.epoch}: {self.aborted}")
        for member in members:
            if member in self.gone:
                raise PeerLost(f"epoch {self.plan.epoch}: {member} is gone", member)


class Network:
    """Carries messages, in order between any two members, each after any time.

    Args:
        random: draws what happens.
        turns: of the members.
        before: called before everything that a member does, with its name and what that is; may raise ``Killed``.
    """

    def __init__(self, random: Random, turns: Turns, before: Callable[[str, str], None]) -> None:
        self._random, self._turns, self.before = random, turns, before
        self._attached: dict[tuple[str, int], Attachment] = {}
        self._flying: dict[tuple[int, str, str], deque[tuple[Any, int, Payload]]] = {}
        self.dead: set[str] = set()

    # -- epochs -------------------------------------------------------------------------------------------

    def attach(self, plan: Plan, member: str, over: Callable[[], bool]) -> Attachment:
        """Enter ``plan``'s epoch with all its members; ``over``: whether it has ended already."""
        mine = self._attached[member, plan.epoch] = Attachment(self, plan, member)
        if over():
            self.abort(mine, "a newer plan is known")
        self.before(member, "attach")

        def there() -> list[Attachment | None]:
            return [self._attached.get((each, plan.epoch)) for each in plan.members]

        def failed() -> bool:
            lost = self.dead.intersection(plan.members)
            return bool(mine.aborted or lost or any(each is not None and each.aborted for each in there()))

        self._turns.wait(lambda: over() or failed() or None not in there())
        if over():
            self.abort(mine, "a newer plan is known")
        mine.check()
        if failed():
            raise PeerLost(f"epoch {plan.epoch}: not all have come")
        return mine

    def abort(self, attachment: Attachment, reason: str) -> None:
        """End an epoch for one member: some of what it has sent arrives, and then its farewell."""
        if attachment.aborted is not None:
            return
        attachment.aborted = reason
        epoch, member = attachment.plan.epoch, attachment.member
        for peer in attachment.plan.members:
            if peer == member:
                continue
            sent = self._flying.setdefault((epoch, member, peer), deque())
            for _ in range(len(sent) - self._random.randint(0, len(sent))):
                sent.pop()
            sent.append((None, 0, None))
            theirs = self._attached.get((peer, epoch))
            if self._flying.pop((epoch, peer, member), None) and theirs is not None:
                theirs.undelivered = True

    def kill(self, member: str) -> None:
        """A member is lost."""
        self.dead.add(member)
        for (name, _), attachment in list(self._attached.items()):
            if name == member:
                self.abort(attachment, "killed")

    # -- messages -----------------------------------------------------------------------------------------

    def send(self, mine: Attachment, member: str, key: Any, number: int, payload: Payload) -> None:
        """Send; tensors are read when the message arrives, as where the kernel has not taken them before."""
        mine.check([member])
        theirs = self._attached.get((member, mine.plan.epoch))
        if member in self.dead or (theirs is not None and theirs.aborted):
            mine.undelivered = True
            return
        self._flying.setdefault((mine.plan.epoch, mine.member, member), deque()).append((key, number, payload))

    def deliveries(self) -> list[Callable[[], None]]:
        """What could arrive next."""
        return [lambda pair=pair: self._deliver(*pair) for pair, sent in self._flying.items() if sent]  # type: ignore[misc]

    def _deliver(self, epoch: int, source: str, destination: str) -> None:
        key, number, payload = self._flying[epoch, source, destination].popleft()
        theirs = self._attached.get((destination, epoch))
        if theirs is None or theirs.aborted:
            return
        if key is None:
            theirs.gone.add(source)
        else:
            theirs.put(key, (source, number, copied(payload)))

    def await_delivery(self, mine: Attachment) -> None:
        """Wait until all that was sent has arrived."""

        def flying() -> bool:
            peers = (self._flying.get((mine.plan.epoch, mine.member, peer)) for peer in mine.plan.members)
            return any(peers)

        self._turns.wait(lambda: bool(mine.aborted or mine.undelivered or not flying()))
        mine.check()
        if mine.undelivered:
            raise PeerLost(f"epoch {mine.plan.epoch}: something was not delivered")

    def receive(
        self, mine: Attachment, key: Any, sources: Sequence[str], over: Callable[[], bool] = lambda: False
    ) -> None:
        """Wait for a message from each of ``sources`` at ``key``, or until ``over()``.

        What has come before one is gone still counts.
        """

        def lacking() -> list[str]:
            come = {source for source, _, _ in mine.inboxes[key]}
            return [] if over() else [source for source in sources if source not in come]

        self._turns.wait(lambda: bool(mine.aborted or not lacking() or mine.gone.intersection(lacking())))
        mine.check(lacking())

    def all_gather(self, mine: Attachment, name: Any, members: Sequence[str], value: Payload) -> list[Payload]:
        """Every member's ``value``, in the order of ``members``."""
        mine.rounds[name] += 1
        key = ("round", name, mine.rounds[name])
        for member in members:
            if member != mine.member:
                self.before(mine.member, f"{name} to {member}")
                self.send(mine, member, key, 0, value)
        mine.inboxes[key].append((mine.member, 0, copied(value)))
        self.before(mine.member, f"{name}")
        self.receive(mine, key, members)
        found = {source: payload for source, _, payload in mine.inboxes.pop(key)}
        return [found[member] for member in members]

    def sum(self, mine: Attachment, name: Any, members: Sequence[str], tensor: torch.Tensor) -> torch.Tensor:
        """The sum of ``tensor`` over ``members``, as a ring of them gives it."""
        found: list[Any] = self.all_gather(mine, name, members, tensor)
        total = torch.empty_like(tensor)
        for begin, end, (first, *others) in ring(len(found), tensor.numel(), tensor.element_size()):
            part = found[first][begin:end]
            for other in others:
                part = found[other][begin:end] + part
            total[begin:end] = part
        return total


def copied(payload: Payload) -> Payload:
    """A payload whose tensors share nothing with the given one's."""
    if payload is None:
        return None
    return payload.detach().clone() if torch.is_tensor(payload) else tuple(t.detach().clone() for t in payload)


class SimulatedChannel:
    """Stands in for :class:`bamboo_ds.comm.channel.Channel` on a :class:`Network`."""

    def __init__(self, mine: Attachment, name: str, source: str, destination: str) -> None:
        self._mine, self.name, self.source, self.destination = mine, name, source, destination
        self.rate = None  # there are no times here

    def leaving(self) -> int:
        return 0

    def send(self, sequence: int, payload: Payload) -> Payload:
        assert self.source == self._mine.member
        self._mine.begin(f"send {sequence} on {self.name}")
        if self.destination == self._mine.member:
            self._mine.inboxes[self.name].append((self.source, sequence, copied(payload)))
        else:
            self._mine.network.send(self._mine, self.destination, self.name, sequence, payload)
        return payload

    def recv(self, sequence: int, parked: bool = False) -> Payload:
        assert self.destination == self._mine.member
        self._mine.begin(f"receive {sequence} on {self.name}")
        self._mine.network.receive(self._mine, self.name, [self.source])
        _, number, payload = self._mine.inboxes[self.name][0]
        if number != sequence:
            raise ProtocolError(f"channel {self.name}: expected message {sequence}, got {number}")
        self._mine.inboxes[self.name].popleft()
        return payload

    def await_either(self, over: Callable[[], bool]) -> None:
        self._mine.begin(f"wait on {self.name}")
        self._mine.network.receive(self._mine, self.name, [self.source], over)

    def take(self, parked: bool = False) -> list[tuple[int, Payload]]:
        taken = [(number, payload) for _, number, payload in self._mine.inboxes[self.name]]
        self.clear()
        return taken

    def clear(self) -> None:
        self._mine.inboxes[self.name].clear()

    def discard(self, below: int) -> bool:
        messages = self._mine.inboxes[self.name]
        while messages and messages[0][1] < below:
            messages.popleft()
        return bool(messages)

    def ready(self) -> bool:
        return bool(self._mine.inboxes[self.name])

    def arrival(self) -> float | None:
        """As of the real one; there are no times here."""
        return None
