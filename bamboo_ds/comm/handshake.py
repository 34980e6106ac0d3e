"""The proofs of a connection's ends that they belong to the job, before a word of the other counts.

::

    caller                              host
       | purpose, nonce, name, tag  ->    |
       |  <-  nonce, tag                  |     tag = HMAC(secret, side, purpose, token, names, nonces)
       | tag  ->                          |

A host draws its token, which members find where they find its address: in a job without a secret it is all there is to
know. The first tag has one nonce only: an eavesdropper gets an answer, and no further. A stranger gets no further
than the first message, whose size is bounded, and costs no time: hosts attend to all callers at once. What follows
on the connection carries no tags.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Collection, Generator

from ..forking import only_here
from ..secret import SETTING, TAG, JobSecret
from . import sockets
from .loop import SocketLoop

logger = logging.getLogger(__name__)

_NONCE = 32  # bytes
_MAGIC = b"bamboo-3"
#: Magic, purpose, nonce, length of the name.
_HELLO = struct.Struct(f"<{len(_MAGIC)}s8s{_NONCE}sH")
_LONGEST_NAME = 256
#: Seconds that a caller may take: a member that was stopped meanwhile, say. It delays no member.
GRACE_S = 30.0
#: Callers that a host attends to at once; one more, and the oldest has to go.
#: Those that are expected come on top, and who has not said that he is one of them has to go first.
CALLERS = 32
#: Seconds until a host tries again that has no descriptor for a caller.
_SHORTAGE_S = 0.05

#: Yields bytes to send, or a number of bytes to receive; returns the name of the other end, and the purpose.
Talk = Generator[bytes | int, bytes, tuple[str, str]]


class Refused(ConnectionError):
    """The other end has not proven that it belongs to the job."""


def calling(secret: JobSecret, purpose: str, token: str, caller: str, host: str) -> Talk:
    """The caller's part; ``host`` is the member that it expects there, and ``token`` that one's."""
    name, nonce = caller.encode(), secrets.token_bytes(_NONCE)
    hello = secret.tag("hello", purpose, token, caller, host, nonce)
    yield _HELLO.pack(_MAGIC, purpose.encode(), nonce, len(name)) + name + hello
    answer = yield _NONCE + TAG
    facts = (purpose, token, caller, host, nonce, answer[:_NONCE])
    if not secret.proves(answer[_NONCE:], "host", *facts):
        raise Refused(f"whoever answers there is not {host} of this job, or has another secret: check {SETTING}")
    yield secret.tag("caller", *facts)
    return host, purpose


def hosting(secret: JobSecret, purposes: Collection[str], token: str, host: str) -> Talk:
    """The host's part, towards any caller that comes for one of ``purposes``; ``token`` is the host's."""
    magic = yield len(_MAGIC)
    if magic != _MAGIC:
        raise Refused("it is no member of a job, or has another version of bamboo_ds")
    _, what, nonce, length = _HELLO.unpack(magic + (yield _HELLO.size - len(_MAGIC)))
    purpose = what.rstrip(b"\0").decode(errors="replace")
    if purpose not in purposes or length > _LONGEST_NAME:
        raise Refused("it wants something else")
    rest = yield length + TAG
    name, hello = rest[:length].decode(errors="replace"), rest[length:]
    if not secret.proves(hello, "hello", purpose, token, name, host, nonce):
        raise Refused(f"{name!r} does not know where {host} is, or has another secret: check {SETTING}")
    own = secrets.token_bytes(_NONCE)
    facts = (purpose, token, name, host, nonce, own)
    yield own + secret.tag("host", *facts)
    if not secret.proves((yield TAG), "caller", *facts):
        raise Refused(f"the caller is not {name}, or has another secret: check {SETTING}")
    return name, purpose


class Handshake:
    """Carries a :data:`Talk` out over a connected socket, and reads not a byte more.

    Args:
        connection: with a timeout :meth:`advance` waits for the end, else it never blocks.

    Attributes:
        answered: something has been said to the other end; by a host only to a caller with secret and token, or one
            that has overheard such a caller.
        purpose: what the connection is for, once that is proven.
    """

    def __init__(self, connection: socket.socket, talk: Talk) -> None:
        self.connection = connection
        self.purpose = ""
        self.answered = False
        self.until = time.monotonic() + GRACE_S
        self._talk = talk
        self._wanted = 0
        self._received = b""
        self._next(None)

    def _next(self, data: bytes | None) -> str | None:
        try:
            step = next(self._talk) if data is None else self._talk.send(data)
            while isinstance(step, bytes):
                if self.connection.send(step, socket.MSG_NOSIGNAL) != len(step):
                    raise Refused("it takes no answer")
                self.answered = True
                step = next(self._talk)
        except StopIteration as end:
            name, self.purpose = end.value
            return str(name)
        self._wanted, self._received = step, b""
        return None

    def advance(self) -> str | None:
        """Goes on with what has arrived; returns the name of the other end when that is proven.

        Raises:
            Refused: it is a stranger.
            OSError: the connection has ended, or nothing came within its timeout.
        """
        while True:
            try:
                piece = self.connection.recv(self._wanted - len(self._received))
            except BlockingIOError:
                return None
            if not piece:
                raise ConnectionError("closed by the other end")
            self._received += piece
            if len(self._received) == self._wanted:
                name = self._next(self._received)
                if name is not None:
                    return name


class Door:
    """Attends to all callers at a listening socket, until they have proven who they are.

    Args:
        loop: tells what is ready.
        listener: not blocking; closed by its maker.
        talk: makes the host's part of a talk with one caller.
        admit: called with a member's name, its connection and what that is for, when it has proven itself.

    Attributes:
        expected: the number of members that may call at the same time.
    """

    def __init__(
        self,
        loop: SocketLoop,
        listener: socket.socket,
        talk: Callable[[], Talk],
        admit: Callable[[str, socket.socket, str], None],
        expected: int = 0,
    ) -> None:
        sockets.allow_descriptors()
        self._loop, self._listener, self._talk, self._admit = loop, listener, talk, admit
        self.expected = expected
        self._callers: dict[socket.socket, Handshake] = {}  # oldest first
        self._refused = 0
        self._short = False
        self._again_at: float | None = None  # when it tries again to take a caller
        loop.watch(listener, select.EPOLLIN, lambda _: self._accept())
        loop.timers.append(self.grace)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._make_room(error)
            return  # else it has gone again, or the listener is shut down
        with contextlib.suppress(OSError):
            only_here(connection)
            connection.setblocking(False)
            self._callers[connection] = Handshake(connection, self._talk())
            self._loop.watch(connection, select.EPOLLIN, lambda _: self._attend(connection))
            if len(self._callers) > CALLERS + self.expected:
                self._refuse(self._stranger() or next(iter(self._callers)), "too many callers")

    def _attend(self, caller: socket.socket) -> None:
        handshake = self._callers.get(caller)
        if handshake is None:
            return  # it had to go
        try:
            name = handshake.advance()
        except OSError as error:
            self._refuse(caller, error)
            return
        if name is not None:
            self._forget(caller)
            self._admit(name, caller, handshake.purpose)

    def _stranger(self) -> socket.socket | None:
        """The oldest caller that has not been answered."""
        return next((caller for caller, handshake in self._callers.items() if not handshake.answered), None)

    def _make_room(self, shortage: OSError) -> None:
        """Frees a descriptor for the next try: the caller waits in the kernel's queue."""
        stranger = self._stranger()
        if stranger is not None:
            self._refuse(stranger, shortage)
            return
        if not self._short:
            self._short = True
            logger.error("cannot take a connection (%s): raise the limit, ulimit -n", shortage)
        self._again_at = time.monotonic() + _SHORTAGE_S
        self._loop.change(self._listener, 0)

    def grace(self) -> float | None:
        """Seconds until there is something to do besides, or ``None``. Silent callers are refused."""
        waits = []
        if self._again_at is not None:
            waits.append(self._again_at - time.monotonic())
            if waits[-1] <= 0:
                self._again_at = None
                self._loop.change(self._listener, select.EPOLLIN)
        while self._callers:
            oldest = next(iter(self._callers.values()))
            left = oldest.until - time.monotonic()
            if left > 0:
                waits.append(left)
                break
            self._refuse(oldest.connection, "it is silent")
        return min(waits, default=None)

    def _refuse(self, caller: socket.socket, why: object) -> None:
        self._forget(caller)
        caller.close()
        self._refused += 1
        # A stranger must not be able to fill the log.
        logger.log(logging.WARNING if self._refused == 1 else logging.DEBUG, "refused a connection: %s", why)

    def _forget(self, caller: socket.socket) -> None:
        del self._callers[caller]
        self._loop.forget(caller)

    def close(self) -> None:
        """Sends all callers away that are not known yet."""
        for caller in list(self._callers):
            self._forget(caller)
            caller.close()
        self._loop.forget(self._listener)
