"""Everything of the data plane that lives for one epoch, and ends with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch

from ..errors import EpochChanged
from ..topology import Plan
from .agreement import Agreement
from .channel import Channel
from .groups import Groups
from .hub import Hub
from .keyvalue import StoreHost, TorchStore
from .lifetime import Lifetime
from .links import Links
from .p2p import Receives
from .standing import Stand

#: Seconds to find out who is gone when a collective failed.
_PROBE = 0.1


class Epoch:
    """One epoch, to :meth:`destroy`. Only :attr:`life` may be used from any thread.

    Args:
        hub: this worker's connections.
        member: this member.
        address: the advertised address.
        timeout: default timeout of operations.
        on_peer_failure: as for ``Session``; called once per member.
        awaited, tell_after_s: as for ``Session``.
        stand: tells where this member's script is.

    Attributes:
        number: the plan's.
        life: whether it goes on, and its end.
        links: this member's messages to the others and theirs.
        agreement: collectives of all members.
        receives: those posted on ``links``.
        groups: torch's groups that run its collectives.
    """

    def __init__(
        self,
        plan: Plan,
        hub: Hub,
        member: str,
        address: str,
        timeout: timedelta,
        on_peer_failure: Callable[[str | None, str], None],
        awaited: Callable[[Sequence[str], float], None],
        tell_after_s: float,
        stand: Callable[[], Stand | None],
    ) -> None:
        self.plan = plan
        self.member = member
        self.timeout = timeout
        self.number = plan.epoch
        self.life = Lifetime(plan.epoch, on_peer_failure, self._explain)
        self.links = Links(self.life, hub, plan.members, member, plan.places, stand)
        self.agreement = Agreement(self.links, plan.members, timeout, awaited, tell_after_s)
        self.receives = Receives(self.links)
        self.reached_at = StoreHost(self.links).reached_at
        self.groups = Groups(self.links, self.agreement.meet, self.store, member, address, timeout)
        self._members = frozenset(plan.members)
        self._channels: dict[str, Channel] = {}
        self._concluded = False
        self._meetings: Counter[str] = Counter()

    def enter(self) -> None:
        """Takes part in the epoch; waits for no member."""
        self.links.enter()
        self.agreement.enter()

    @property
    def waiting(self) -> bool:
        """Whether a caller may be blocked in it, or it has ended."""
        return self.life.aborted is not None or self.life.blocked > 0 or self.links.waiting > 0

    def store(self, host: str, prefix: str) -> TorchStore:
        """The keys with ``prefix`` that ``host`` keeps in this epoch."""
        return TorchStore(self.reached_at(host), prefix, self.timeout)

    def open(
        self,
        device: torch.device,
        name: str,
        source: str,
        destination: str,
        newest: int | None = None,
        yields: bool = False,
    ) -> Channel:
        """Opens a channel, see there. Local: members connect when they first have something to send, and what arrived
        before is not lost.

        Raises:
            ValueError: the name is used twice, or an end is no member of the epoch.
        """
        if name in self._channels:
            raise ValueError(f"channel {name} is open already")
        for end in (source, destination):
            if end not in self._members:
                raise ValueError(f"channel {name}: {end} is no member of epoch {self.number}")
        channel = self._channels[name] = Channel(self.links, device, name, source, destination, newest, yields)
        return channel

    def drain(self) -> None:
        """Waits until all messages that this member has sent are in the memory of the receiving processes.

        Raises:
            EpochChanged, PeerLost: the epoch has ended, or any of them can no longer be delivered.
        """
        self.links.flush()

    def meet(self, operation: str, group: str, members: Sequence[str], timeout: timedelta) -> None:
        """Waits until ``members`` have met, see :class:`.agreement.Agreement`; in a ``group`` all meet in one order."""
        self._meetings[group] += 1
        key = f"meeting/{group}/{self._meetings[group]}".encode()
        self.agreement.meet(operation, key, members, timeout, flat=True)

    def _explain(self, host: str | None, port: int | None) -> EpochChanged | None:
        """The reason why a connection of gloo broke, as far as our own connections tell; waits a moment for them.

        Returns:
            ``PeerLost``, or ``EpochChanged`` if the member only left the epoch; ``None`` if nothing is known.
        """
        member = self.groups.member_at(host, port)
        return self.links.await_failure(self.plan.members if member is None else [member], _PROBE)

    def conclude(self) -> None:
        """Makes an end of the channels: after an abort, or as a clean end of the epoch. Idempotent.

        A clean end is collective: it waits (abortably) until all messages are delivered and all members conclude. If a
        connection failed before, the epoch is aborted instead. The connections go on.

        Raises:
            EpochChanged, PeerLost: a clean end was interrupted; nothing is left in the channels nevertheless.
        """
        if self._concluded:
            return
        self._concluded = True
        try:
            if any(self.links.failure(member) is not None for member in self.plan.members):
                self.life.abort("it is to be concluded after a failure")
            if self.life.aborted is None:
                self.links.flush()
                self.agreement.barrier("conclude")
        finally:
            for channel in self._channels.values():
                channel.clear()

    def destroy(self) -> None:
        """Releases groups and messages. Called by the main thread, which is in no operation of this epoch."""
        self.life.abort("left", orderly=True)
        # Another thread may be in the middle of it, about to shut down what is released here.
        self.life.await_abort()
        self.links.close()
        self.groups.destroy()
