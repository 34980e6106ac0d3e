"""Channels: ordered messages of tensors from one member to another, about one thing, in one epoch."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from datetime import timedelta

import torch

from ..devices.staging import StreamMark
from ..errors import ProtocolError
from .links import Links, Ticket
from .wire.payloads import Payload, PeerMessage, Staged, aside

logger = logging.getLogger(__name__)


class Channel:
    """One directed stream of messages, as this member sees it in one epoch.

    Sends are asynchronous; everything that arrives is read at once. Every blocking call raises ``EpochChanged`` when
    the epoch ends, or the member that it waits for has left it, and ``PeerLost`` when that one is gone. The methods are
    for one thread at a time, the main thread.

    Args:
        links: the epoch's.
        device: of this member; tensors that their senders have on theirs are received on it.
        name: unique among the channels of the epoch, equal at both ends, e.g. ``"activation (0,2) from a to b"``.
        source: member that sends.
        destination: member that receives; equal to ``source`` for a mailbox.
        newest: so many messages that have arrived are kept, and older ones dropped; ``None``: all.
        yields: its messages let those of other channels to the same member pass.
    """

    def __init__(
        self,
        links: Links,
        device: torch.device,
        name: str,
        source: str,
        destination: str,
        newest: int | None = None,
        yields: bool = False,
    ) -> None:
        self.name, self.source, self.destination = name, source, destination
        self._links, self._device, self._yields = links, device, yields
        self._key = f"channel/{name}".encode()
        self._leaving: deque[Ticket] = deque()
        self._inbox: deque[PeerMessage] | None = None
        if destination == links.member:
            with links.changed:
                self._inbox = links.inbox(self._key, newest)

    # -- sending -----------------------------------------------------------------------------------------
    def send(self, sequence: int, payload: Payload | Staged) -> Payload | Staged:
        """Sends ``payload`` as message ``sequence``; returns at once.

        The tensors are detached. Contiguous host tensors are not copied and are kept until the kernel has taken them:
        they must not be changed until the epoch is drained. Tensors of a device are not copied yet when this returns,
        and the same holds for them. (Other tensors, and payloads of mailboxes, are copied.)

        Returns:
            A payload to be sent again, which takes no memory of a device unless this member is the receiver.

        Raises:
            EpochChanged, PeerLost: see the class.
            ValueError: the channel does not start at this member.
            TypeError: ``payload`` cannot be sent.
        """
        links = self._links
        links.life.check(f"send on channel {self.name}")
        if self.source != links.member:
            raise ValueError(f"channel {self.name} does not start at member {links.member}")
        if self.destination == links.member:
            links.keep(self._key, sequence, payload)
            return payload
        payload = aside(payload)
        ticket = links.send(self.destination, self._key, sequence, payload, self._yields)
        if self._yields:
            self.leaving()
            self._leaving.append(ticket)
        return payload

    def leaving(self) -> int:
        """The number of messages of a channel that yields which are not out yet: their memory is in use."""
        while self._leaving and self._leaving[0].written:
            self._leaving.popleft()
        return len(self._leaving)

    @property
    def rate(self) -> float | None:
        """Bytes per second that a large message to the receiver has taken last; ``None`` before the first."""
        return self._links.rate(self.destination)

    # -- receiving ---------------------------------------------------------------------------------------
    def recv(self, sequence: int, timeout: timedelta | None = None, parked: bool = False) -> Payload:
        """The next message; blocks abortably.

        Args:
            sequence: number of the message.
            timeout: of the wait; ``None``: as long as it takes.
            parked: what its sender has on its device stays in host memory here.

        Raises:
            ProtocolError: the next message is not number ``sequence``; it is not consumed.
            TimeoutError: nothing arrived within ``timeout``; nothing is consumed.
            EpochChanged, PeerLost: see the class. What arrived before the peer was lost is delivered first.
            ValueError: the channel does not end at this member.
        """
        messages, operation = self._arrived(), f"receive on channel {self.name}"
        self._links.life.check(operation)
        with self._links.changed:
            if not self._links.wait(operation, lambda: bool(messages), [self.source], timeout):
                raise TimeoutError(f"no message on channel {self.name} from {self.source} within {timeout}")
            if messages[0].sequence != sequence:
                raise ProtocolError(f"channel {self.name}: expected message {sequence}, got {messages[0].sequence}")
            message = messages.popleft()
        return message.payload(self._device, parked)

    def take(self, parked: bool = False) -> list[tuple[int, Payload]]:
        """Messages that have arrived, each with its number; also after an abort of the epoch, until it is concluded.

        What the device has no room for stays in host memory.

        Args:
            parked: see :meth:`recv`.
        """
        messages = self._arrived()
        with self._links.changed:
            taken = list(messages)
            messages.clear()
        return [(message.sequence, self._brought(message, parked)) for message in taken]

    def _brought(self, message: PeerMessage, parked: bool) -> Payload:
        try:
            return message.payload(self._device, parked)
        except torch.OutOfMemoryError as error:
            logger.warning("what has arrived stays in host memory: %s", str(error).splitlines()[0])
        return message.payload(self._device, parked=True)

    def discard(self, below: int) -> bool:
        """Drops what has arrived with a smaller number than ``below``, without a copy to its device.

        Returns:
            Whether anything is left. A :meth:`ready` after this may be of a message below that has come meanwhile.
        """
        messages = self._arrived()
        with self._links.changed:
            while messages and messages[0].sequence < below:
                messages.popleft()
            return bool(messages)

    def clear(self) -> None:
        """Drops all that has arrived here."""
        if self._inbox is not None:
            with self._links.changed:
                self._inbox.clear()

    def ready(self) -> bool:
        """Whether :meth:`recv` would return at once (an undelivered message is there)."""
        return bool(self._arrived())

    def await_message(self, mark: StreamMark) -> None:
        """Waits until a message is there, or ``mark`` is reached.

        Raises:
            EpochChanged, PeerLost: see the class.
        """
        self._links.notify_at(mark)
        self.await_either(mark.query)

    def await_either(self, over: Callable[[], bool]) -> None:
        """Waits until a message is there, or ``over()``.

        That is asked anew whenever a message has arrived or a connection has ended, as that of a copy does.

        Raises:
            EpochChanged, PeerLost: see the class.
        """
        messages, operation = self._arrived(), f"wait for a message on channel {self.name}"
        self._links.life.check(operation)
        with self._links.changed:
            self._links.wait(operation, lambda: bool(messages) or over(), [self.source])

    def arrival(self) -> float | None:
        """``time.monotonic()`` at which the next undelivered message arrived, if it has."""
        messages = self._arrived()
        with self._links.changed:
            return messages[0].arrival if messages else None

    def _arrived(self) -> deque[PeerMessage]:
        if self._inbox is None:
            raise ValueError(f"channel {self.name} does not end at member {self._links.member}")
        return self._inbox
