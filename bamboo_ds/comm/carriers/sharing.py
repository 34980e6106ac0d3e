"""The agreement of a connection's two ends to share memory, by control frames in its stream.

The end that has called creates the memory and says where it is: its process id, the descriptor's number, and the random
token that the memory begins with. The other end opens it, maps it, and says so. Where the two are on different hosts,
by their names (which ``--emulate-hosts`` sets) or their addresses, and where anything fails, all goes in the stream.
"""

from __future__ import annotations

import json
import logging
import os
import socket

from ...errors import ProtocolError
from .. import sockets, wire
from .carrier import Carrier
from .slabs import Slabs, created, opened
from .stream import InStream

logger = logging.getLogger(__name__)

#: What is said: "there is memory", "I use it", "I do not".
_OFFERED, _ACCEPTED, _REFUSED = range(3)


class Sharing:
    """The carriers of one connection.

    Args:
        member: at the other end.
        sock: the connection's.
        host: name of this one; ``None`` if it shares no memory.

    Attributes:
        memory: shared with the other end, if there is any.
    """

    def __init__(self, member: str, sock: socket.socket, host: str | None) -> None:
        self.memory: Slabs | None = None
        self._member, self._socket, self._host = member, sock, host
        self._stream = InStream()
        # The first that is ready has a segment; memory is among them once both ends have mapped it.
        self._senders: tuple[Carrier, ...] = (self._stream,)
        self._descriptor = -1

    def sender(self, size: int) -> Carrier:
        """The carrier of a segment of ``size`` bytes."""
        return next(each for each in self._senders if each.ready(size))

    def receiver(self, mark: int) -> Carrier:
        """The carrier of the segment that ``mark`` tells of."""
        if mark == wire.HERE[0]:
            return self._stream
        if self.memory is None:
            raise ProtocolError(f"{self._member} sends by memory that is not shared")
        return self.memory

    # -- the agreement -----------------------------------------------------------------------------------
    def offer(self) -> wire.Segments | None:
        """The offer of the end that has called, once the connection is open; ``None`` to an end on another host."""
        try:
            if self._host is None or not self._same_address():
                return None
            self._descriptor = created()
            self.memory = Slabs(self._descriptor, caller=True)
        except (OSError, RuntimeError) as error:  # torch's, where memory cannot be mapped
            self._give_up(str(error))
            return None
        facts = [self._host, os.getpid(), self._descriptor, self.memory.token.hex()]
        return wire.control(wire.SHARE, _OFFERED, wire.EVERY, json.dumps(facts).encode())

    def hear(self, what: int, said: bytes) -> wire.Segments | None:
        """Takes what the other end has said; returns the answer, if there is one.

        Raises:
            ProtocolError: there is no sense in it.
        """
        if what == _OFFERED and self.memory is None:
            return self._answer(said)
        if what == _OFFERED or self._descriptor < 0:
            raise ProtocolError(f"{self._member} speaks of memory once more, or of none")
        if what == _ACCEPTED and self.memory is not None:
            self._use(self.memory)
        else:
            self._give_up(said.decode(errors="replace"))
        return None

    def _answer(self, said: bytes) -> wire.Segments:
        try:
            host, pid, descriptor, token = json.loads(said)
            if host != self._host or not self._same_address():
                raise OSError(f"they are on {host} and {self._host}")
            self._descriptor = opened(int(pid), int(descriptor), bytes.fromhex(token))
            self.memory = Slabs(self._descriptor, caller=False)
        except (OSError, RuntimeError, ValueError, TypeError) as error:
            self._give_up(str(error))
            return wire.control(wire.SHARE, _REFUSED, wire.EVERY, str(error).encode()[:1024])
        self._use(self.memory)
        return wire.control(wire.SHARE, _ACCEPTED, wire.EVERY)

    def _use(self, memory: Slabs) -> None:
        """Uses the memory, which both ends have mapped."""
        self._close()
        self._senders = (memory, self._stream)
        logger.info("%s and this member share memory", self._member)

    def _same_address(self) -> bool:
        own, other = self._socket.getsockname(), self._socket.getpeername()
        return sockets.endpoint(own)[0] == sockets.endpoint(other)[0]

    def _give_up(self, reason: str) -> None:
        logger.info("%s and this member share no memory: %s", self._member, reason)
        self.end()

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def end(self) -> None:
        """Lets go of everything."""
        self._close()
        self._senders = (self._stream,)
        if self.memory is not None:
            self.memory.abort()
            self.memory = None
