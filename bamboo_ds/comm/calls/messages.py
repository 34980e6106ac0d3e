"""The messages that a script sends and receives itself, between the operations of its engine.

A loss does not show in them, as in its collectives (:mod:`.script`). The sender keeps a copy of each message until the
receiver has told that it has it. A member that waits for one when an epoch ends recovers, as in an operation of the
engine, and then waits in the next epoch, in which senders send again what the receivers lack.

A message to a rank that no process runs as goes nowhere: what the rank's script would do with it, another one does from
what it has itself, or it is not needed. A receive from such a rank leaves the tensor as it was, as a ``scatter`` does.
Both are told. Where the tensor may become part of a batch, only an operation can tell whether another rank has the
same batch: see :attr:`ScriptMessages.missed`.

Messages are numbered by the gap between two operations in which they are sent, and in it by their order among those
from one rank of a group to another one with one tag. So a receiver knows what it has already.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from ...bare import bare
from ...errors import EpochChanged
from ...topology import Plan
from .. import p2p
from ..epoch import Epoch
from ..wire.payloads import PeerMessage, read, written
from ..work import NO_TIMEOUT, CompletedWork
from .participants import Participants, surviving

#: Key of the messages that tell what has been received.
_HAD = b"script/p2p/had"
#: Messages of a stream in one gap, at most.
_OF_GAP = 1 << 32
#: A receive without a message makes batches doubtful in so many operations: loaders read ahead.
_DOUBTFUL = 2


class Group(Protocol):
    """The handle of a group, as messages and collectives see it; see ``BambooProcessGroup``."""

    key: str
    ranks: tuple[int, ...]
    timeout: timedelta

    def rank(self) -> int: ...


class Attached(Protocol):
    """The session, as messages and script collectives see it."""

    @property
    def member(self) -> str: ...

    @property
    def plan(self) -> Plan | None: ...

    @property
    def current(self) -> Epoch: ...


class MessageStream(NamedTuple):
    """Messages from one rank of a group to another, with one tag."""

    group: str
    source: int
    destination: int
    tag: int

    @property
    def key(self) -> bytes:
        """The key that a receiver looks for, whatever the source."""
        return f"script/p2p/{self.group}/{self.destination}/{self.tag}".encode()

    def __str__(self) -> str:
        return "/".join(map(str, self))


@dataclass
class _Kept:
    """A message that its receiver may not have yet.

    Attributes:
        number: see the module.
        ranks: of the group.
        tensor: a copy in host memory.
        member: that it was sent to, or ``None``.
        epoch: in which it was sent last.
    """

    number: int
    ranks: tuple[int, ...]
    tensor: torch.Tensor
    member: str | None = None
    epoch: int = 0


class ScriptMessages:
    """Sends and receives of the script, for one process. In other threads than the main one a loss is an error.

    Args:
        session: this process's data plane.
        absent: members whose scripts are not where the others' are.
        recover: recovers after a loss, and calls :meth:`agree` meanwhile.
        lacking: told of the operation, the ranks of its group, the lost rank, and what becomes of it; returns the place
            in the script that calls it.
    """

    def __init__(
        self,
        session: Attached,
        absent: Callable[[], Collection[str]],
        recover: Callable[[], None],
        lacking: Callable[[str, tuple[int, ...], int, str], str],
    ) -> None:
        self._session, self._absent, self._recover, self._lacking = session, absent, recover, lacking
        self._lock = threading.RLock()  # of what this member sends; what it receives is the links' condition's
        self._gap = 0
        self._turns: dict[MessageStream, int] = defaultdict(int)
        self._kept: dict[MessageStream, deque[_Kept]] = {}
        self._told: dict[str, int] = {}  # newest of each stream that its receiver has; written by another thread
        self._had: dict[str, int] = {}  # newest of each stream that this member has
        self._posted: dict[bytes, list[ScriptReceive]] = defaultdict(list)
        self._listens = 0  # epoch in which receivers can tell this member what they have
        self._missed: dict[str, tuple[str, int]] = {}  # by member: where, and how long that matters

    # -- gaps and recoveries ------------------------------------------------------------------------------

    def begin_gap(self, number: int) -> None:
        """The operation before gap ``number`` is over."""
        with self._lock:
            self._gap = number
            self._turns.clear()
            self._prune()
            for kept in self._kept.values():  # what another member has sent that runs as the same rank
                while kept and kept[-1].member is None:
                    kept.pop()
        self._missed = {member: (place, left - 1) for member, (place, left) in self._missed.items() if left > 1}

    @property
    def had(self) -> dict[str, int]:
        """Facts for the others after a loss: the newest message of each stream that this member has."""
        return dict(self._had)

    @property
    def open(self) -> int:
        """Receives that the script waits for."""
        return sum(map(len, self._posted.values()))

    @property
    def missed(self) -> str | None:
        """The place at which the script has received nothing lately, as the sender is lost, or since it replays."""
        return self.missed_by(self._session.member)

    def missed_by(self, member: str) -> str | None:
        """The same of another ``member``, as it was when all have agreed last."""
        return self._missed.get(member, ("", 0))[0] or None

    def agree(self, had: Mapping[str, Mapping[str, int]], missed: Mapping[str, str | None]) -> None:
        """Sends again what members lack that have entered a new epoch and told what they ``had`` and ``missed``.

        Raises:
            EpochChanged: another loss.
        """
        doubtful = {member: (place, _DOUBTFUL) for member, place in missed.items() if place is not None}
        self._missed = {**doubtful, **self._missed}
        with self._lock:
            self._agree(had)

    def _agree(self, had: Mapping[str, Mapping[str, int]]) -> None:
        if not any(self._kept.values()):
            return
        plan = self._session.current.plan
        for stream, kept in self._kept.items():
            for message in tuple(kept):
                member = message.member or self._among(plan, message.ranks).of_rank[stream.destination]
                gone = message.member is not None and message.member not in plan.members
                if gone or (member is not None and message.number <= had.get(member, {}).get(str(stream), -1)):
                    kept.remove(message)
        self._deliver()

    # -- sends --------------------------------------------------------------------------------------------

    def send(self, handle: Group, index: int, tensor: torch.Tensor, destination: int, tag: int) -> CompletedWork:
        """Sends from rank ``index`` of the group to rank ``destination``. The tensor may be changed at once."""
        stream = MessageStream(handle.key, index, destination, tag)
        copy = bare(tensor).to("cpu", copy=True).contiguous()
        with p2p.profiled("send", tensor), self._lock:
            number = self._gap * _OF_GAP + self._turns[stream]
            self._turns[stream] += 1
            self._prune()
            self._kept.setdefault(stream, deque()).append(_Kept(number, handle.ranks, copy))
            try:
                self._deliver()
            except EpochChanged as error:
                self._survive(error)  # which delivers
        return CompletedWork([tensor])

    def _deliver(self) -> None:
        """Sends what has not been sent in this epoch."""
        epoch = self._session.current
        for stream, kept in self._kept.items():
            for message in tuple(kept):
                if message.epoch == epoch.number:
                    continue
                among = self._among(epoch.plan, message.ranks)
                member = among.of_rank[stream.destination]
                if not among.speaks(epoch.member, stream.source):
                    continue  # the member that does sends it
                if member is None:
                    kept.remove(message)
                    self._lacking("send", message.ranks, message.ranks[stream.destination], "the message goes nowhere")
                    continue
                message.member = member
                self._listen(epoch)
                self._post(epoch, stream, message)
                message.epoch = epoch.number

    def _post(self, epoch: Epoch, stream: MessageStream, message: _Kept) -> None:
        payload = torch.tensor([message.number]), message.tensor
        if message.member == epoch.member:
            epoch.links.keep(stream.key, stream.source, payload)
        else:
            assert message.member is not None
            epoch.links.send(message.member, stream.key, stream.source, payload)

    def _listen(self, epoch: Epoch) -> None:
        """Learns in ``epoch`` what receivers have."""
        if self._listens != epoch.number:
            epoch.links.services[_HAD] = self._hear
            self._listens = epoch.number

    def _hear(self, told: PeerMessage) -> None:
        stream, number = read(told.payload())
        self._told[str(stream)] = max(int(number), self._told.get(str(stream), -1))

    def _prune(self) -> None:
        """Forgets what receivers have."""
        for stream, kept in self._kept.items():
            newest = self._told.get(str(stream), -1)
            while kept and kept[0].number <= newest:
                kept.popleft()

    # -- receives -----------------------------------------------------------------------------------------

    def receive(self, handle: Group, index: int, tensor: torch.Tensor, source: int | None, tag: int) -> ScriptReceive:
        """Receives at rank ``index`` from rank ``source``; ``None``: from the first one that has sent something."""
        work = ScriptReceive(
            self, handle, MessageStream(handle.key, -1 if source is None else source, index, tag), tensor
        )
        self._posted[work.stream.key].append(work)
        return work

    def note_missed(self, place: str) -> None:
        """The script goes on at ``place`` without the message that it was to receive."""
        self._missed[self._session.member] = place, _DOUBTFUL

    def complete(self, work: ScriptReceive, limit: timedelta) -> None:
        """Waits for the message of ``work``.

        Raises:
            RuntimeError: it has not come within ``limit``, or is of another size.
        """
        while not work.over:
            try:
                epoch = self._session.current
                if self._gone(epoch, work):
                    continue
                with epoch.links.changed:
                    if not epoch.links.wait("recv", partial(self.match, epoch, work), work.members, limit):
                        self._posted[work.stream.key].remove(work)
                        raise RuntimeError(f"Timed out waiting {limit} for recv operation to complete")
            except EpochChanged as error:
                self._survive(error)

    def _survive(self, error: EpochChanged) -> None:
        """Recovers from ``error``; raises it in other threads than the main one."""
        if threading.current_thread() is not threading.main_thread():
            raise error
        self._recover()

    def _gone(self, epoch: Epoch, work: ScriptReceive) -> bool:
        """Whether nothing will come for ``work``, which is over then; else the members that it waits for are noted."""
        among, source = self._among(epoch.plan, work.ranks), work.stream.source
        speaks = among.speaks(epoch.member, work.stream.destination)
        if source < 0:
            work.members = tuple(member for member in among.members if member != epoch.member)
            lost = not work.members
        else:
            member = among.of_rank[source]
            work.members, lost = (() if member is None else (member,)), member is None
        if speaks and not lost:
            return False
        with epoch.links.changed:
            if work.over:
                return True
            self._posted[work.stream.key].remove(work)
            work.over = True
        rank = work.ranks[work.stream.destination if source < 0 else source]
        self.note_missed(self._lacking("recv", work.ranks, rank, "the tensor stays as it was"))
        return True

    def match(self, epoch: Epoch, work: ScriptReceive) -> bool:
        """Gives what has arrived for the stream of ``work`` to those that wait for it, in turn; whether it is over.

        The caller holds the links' condition.
        """
        key = work.stream.key
        inbox, posted = epoch.links.inbox(key), self._posted[key]
        for waiting in tuple(posted):
            for message in tuple(inbox):
                stream = waiting.stream._replace(source=message.sequence)
                number = _number(message)
                if number <= self._had.get(str(stream), -1):
                    inbox.remove(message)  # sent again, and here already
                elif waiting.stream.source in (-1, message.sequence):
                    inbox.remove(message)
                    self._had[str(stream)] = number
                    posted.remove(waiting)
                    waiting.take(message)
                    self._tell_had(epoch, message.source, stream, number)
                    break
        return work.over

    def _tell_had(self, epoch: Epoch, member: str, stream: MessageStream, number: int) -> None:
        if member == epoch.member:
            self._told[str(stream)] = number
            return
        told = written([str(stream), number])
        with suppress(EpochChanged):  # the recovery tells it
            epoch.links.send(member, _HAD, 0, told)

    # -- both ---------------------------------------------------------------------------------------------

    def _among(self, plan: Plan, ranks: tuple[int, ...]) -> Participants:
        return surviving(plan, ranks, self._absent())

    @property
    def session(self) -> Attached:
        """This process's data plane."""
        return self._session


class ScriptReceive(CompletedWork):
    """A receive of the script.

    Attributes:
        stream: that it is of; source -1: any.
        ranks: of the group.
        members: that it depends on.
        over: the message is in the tensor, or none will come.
    """

    def __init__(self, messages: ScriptMessages, handle: Group, stream: MessageStream, tensor: torch.Tensor) -> None:
        super().__init__([tensor])
        self.stream, self.ranks = stream, handle.ranks
        self.members: tuple[str, ...] = ()
        self.over = False
        self._messages, self._timeout = messages, handle.timeout
        self._error: RuntimeError | None = None
        self._source = -1

    def take(self, message: PeerMessage) -> None:
        """Copies ``message`` into the tensor; what is wrong with it comes with :meth:`wait`."""
        self.over, self._source = True, message.sequence
        try:
            p2p.put(self._result[0], message.tensors[1], message.sequence)
        except RuntimeError as error:
            self._error = error

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Waits for the message.

        Raises:
            FatalLoss, Evicted, Left, Isolated: as ``train_batch``.
            RuntimeError: not within the timeout (the receive is withdrawn then), or of another size.
        """
        with p2p.profiled("recv" if self.stream.source >= 0 else "recvAnySource", self._result[0]):
            self._messages.complete(self, timeout if timeout != NO_TIMEOUT else self._timeout)
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Whether :meth:`wait` would return, or raise, at once."""
        if self.over:
            return True
        try:
            epoch = self._messages.session.current
            with epoch.links.changed:
                return self._messages.match(epoch, self)
        except EpochChanged:
            return False

    def source_rank(self) -> int:
        """Group rank of the sender, after :meth:`wait`."""
        return self._source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """Refuses, as in gloo: receives have none."""
        raise RuntimeError("a receive has no future")


def _number(message: PeerMessage) -> int:
    return int(message.tensors[0].data.view(torch.int64)[0])
