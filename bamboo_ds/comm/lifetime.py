"""The lifetime of one epoch: its end, the callers that are blocked in it, and the meaning of its failures.

Translating what torch raises into the errors that callers handle is done here and nowhere else.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType

from ..devices.errors import is_device_error
from ..errors import BambooError, EpochChanged, PeerLost
from .c10d import dist

logger = logging.getLogger(__name__)

#: Seconds that the abort of an epoch takes at most: it does not wait for peers.
_ABORT_S = 30.0

#: What gloo, NCCL and the store's client say when a connection broke or could not be made.
_BROKEN = re.compile(
    r"connection (was )?(likely )?(closed|reset|refused|aborted|timed out)|broken pipe|"
    r"no route to host|(network|host) is unreachable|transport endpoint is not connected|"
    r"socket (was )?(unexpectedly )?closed|timed out connecting|failed to (recv|send)|"
    r"NCCL (error|communicator was aborted)|remote process exited|ncclRemoteError",
    re.IGNORECASE,
)
#: How gloo prints the remote end.
_REMOTE = re.compile(r"\[(?P<host>[0-9a-fA-F.:]+)\]:(?P<port>\d+)")


class Lifetime:
    """One epoch from its beginning to its abort. Any thread may use it.

    :meth:`abort` is the one way in which an epoch ends. What runs in the epoch asks to be called back by it: the
    links, which wake those that wait and tell the other members, the groups, and works.

    Args:
        number: the epoch's.
        on_peer_failure: as for ``Session``; called once per member.
        explain: why a connection of gloo broke, from the remote end's host and port as gloo prints them, if it did;
            ``None`` if nothing is known.

    Attributes:
        orderly: the other members leave the epoch by themselves, and finish what they are in.
    """

    def __init__(
        self,
        number: int,
        on_peer_failure: Callable[[str | None, str], None],
        explain: Callable[[str | None, int | None], EpochChanged | None] = lambda host, port: None,
    ) -> None:
        self.number = number
        self._on_peer_failure, self._explain = on_peer_failure, explain
        self._lock = threading.Lock()
        self._quiet = threading.Condition(self._lock)
        self._aborted: str | None = None
        self._loss: PeerLost | None = None
        self.orderly = False
        self._blocked = 0
        self._callbacks: dict[object, Callable[[], None]] = {}
        self._accused: set[str | None] = set()
        self._over = threading.Event()  # the thread that has aborted it is through with that

    # -- state -------------------------------------------------------------------------------------------
    @property
    def aborted(self) -> str | None:
        """The reason why the epoch was aborted, or ``None``."""
        return self._aborted

    @property
    def blocked(self) -> int:
        """The number of callers in an operation that may block."""
        return self._blocked

    def ended(self, operation: str) -> EpochChanged:
        """The error for ``operation`` after the end."""
        text = f"{operation}: epoch {self.number} ended ({self._aborted})"
        return EpochChanged(text) if self._loss is None else PeerLost(text, self._loss.member)

    def check(self, operation: str) -> None:
        """Raises ``EpochChanged`` if the epoch is aborted."""
        if self._aborted is not None:
            raise self.ended(operation)

    def calling(self, operation: str, peer: str | None = None) -> _Calling:
        """A context around every call into gloo, NCCL or the store: it may block, and its errors are translated.

        Entering raises ``EpochChanged`` if the epoch is aborted.

        Args:
            operation: for messages.
            peer: the only member that it depends on, if there is one.
        """
        return _Calling(self, operation, peer)

    def enter(self, operation: str) -> None:
        """Counts a caller that may block."""
        with self._lock:
            self.check(operation)
            self._blocked += 1

    def leave(self) -> None:
        """Counts the caller no more."""
        with self._lock:
            self._blocked -= 1
            if self._aborted is not None:
                self._quiet.notify_all()

    def quiet(self, timeout: float) -> bool:
        """Waits up to ``timeout`` seconds until no caller is blocked; returns whether none is."""
        with self._lock:
            return self._quiet.wait_for(lambda: self._blocked == 0, timeout)

    # -- the end -----------------------------------------------------------------------------------------
    def call_on_abort(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Calls ``callback`` when the epoch is aborted (at once if it is), after those before. It must not block.

        Returns:
            A function that takes the order back.
        """
        order = object()
        with self._lock:
            self._callbacks[order] = callback
            aborted = self._aborted is not None
        if aborted:
            callback()

        def take_back() -> None:
            with self._lock:
                self._callbacks.pop(order, None)

        return take_back

    def abort(self, reason: str, loss: PeerLost | None = None, orderly: bool = False) -> bool:
        """Makes every operation raise ``EpochChanged``, and calls back; from any thread. False if that was done.

        The end is noted before anything is called: communicators are aborted only once nothing calls them any more.

        Args:
            reason: for messages.
            loss: why, if that is the loss of a member.
            orderly: see above.
        """
        with self._lock:
            if self._aborted is not None:
                return False
            self._aborted, self._loss, self.orderly = reason, loss, orderly
            callbacks = list(self._callbacks.values())
            self._quiet.notify_all()
        with ExitStack() as stack:  # the last one is called first, whatever the others raise
            stack.callback(self._over.set)
            for callback in reversed(callbacks):
                stack.callback(callback)
            logger.info("epoch %d: aborted: %s", self.number, reason)
        return True

    def await_abort(self) -> None:
        """Waits until the thread that has aborted the epoch is through with that, unless it was ended in between."""
        if not self._over.wait(_ABORT_S):
            logger.error("epoch %d: its abort is not through after %.0f s", self.number, _ABORT_S)

    # -- failures ----------------------------------------------------------------------------------------
    def peer_failed(self, member: str | None, reason: str) -> None:
        """Tells the control plane, once per member, that an operation towards ``member`` failed."""
        with self._lock:
            if member in self._accused:
                return
            self._accused.add(member)
        logger.warning("epoch %d: member %s: %s", self.number, member, reason)
        self._on_peer_failure(member, reason)

    def lost(self, member: str, reason: str) -> PeerLost:
        """Reports the loss of ``member``; returns the error to raise."""
        self.peer_failed(member, reason)
        return PeerLost(f"epoch {self.number}, towards {member}: {reason}", member)

    def translate(self, error: Exception, operation: str, peer: str | None = None) -> Exception:
        """The error to raise for ``error``, which ``operation`` met.

        Runtime errors become ``EpochChanged`` if the epoch was aborted (here or, as far as known, at the other end),
        and ``PeerLost`` if a connection broke; then the session's ``on_peer_failure`` is told. Everything else (wrong
        arguments, timeouts) is returned as it is.

        Args:
            peer: the member that the operation was directed to, if it was a single one.
        """
        if isinstance(error, BambooError) or not of_transport(error):
            return error
        if self._aborted is not None:
            return self.ended(operation)
        text = str(error)
        if is_device_error(error) or not (isinstance(error, dist.DistNetworkError) or _BROKEN.search(text)):
            return error
        reason = f"{operation} failed: {text.splitlines()[0]}"
        if peer is None:
            named = _REMOTE.search(text)
            known = self._explain(named["host"], int(named["port"])) if named else self._explain(None, None)
            if known is not None:
                known.__cause__ = error
                return known
        self.peer_failed(peer, reason)
        return PeerLost(f"epoch {self.number}, towards {peer or 'an unknown member'}: {reason}", peer)


class _Calling:
    """See :meth:`Lifetime.calling`."""

    __slots__ = ("_life", "_operation", "_peer")

    def __init__(self, life: Lifetime, operation: str, peer: str | None) -> None:
        self._life = life
        self._operation = operation
        self._peer = peer

    def __enter__(self) -> None:
        self._life.enter(self._operation)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._life.leave()
        if not isinstance(error, RuntimeError):
            return
        raised = self._life.translate(error, self._operation, self._peer)
        if raised is not error:
            try:
                raise raised from error
            finally:
                # A cycle through these frames would keep gloo's objects, and their sockets, for the collector.
                del raised, error, trace


def of_transport(error: BaseException) -> bool:
    """Whether torch may have raised it for an operation: no error that a signal handler raised in the same thread."""
    return type(error) is RuntimeError or isinstance(error, dist.DistError)
