"""Translating what torch raises into the errors that callers handle. The only place where it is done."""

from __future__ import annotations

import re
from typing import Protocol

from ..errors import BambooError, EpochChanged, PeerLost
from .c10d import dist

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


class FailingEpoch(Protocol):
    """What the translation asks of the epoch in which an operation failed."""

    @property
    def number(self) -> int: ...

    @property
    def aborted(self) -> str | None: ...

    def explain(self, host: str | None, port: int | None) -> EpochChanged | None: ...

    def peer_failed(self, member: str | None, reason: str) -> None: ...


def ended(epoch: FailingEpoch, operation: str) -> EpochChanged:
    """The error for ``operation`` in an epoch that was aborted."""
    return EpochChanged(f"{operation}: epoch {epoch.number} ended ({epoch.aborted})")


def of_transport(error: BaseException) -> bool:
    """Whether torch may have raised it for an operation: no error that a signal handler raised in the same thread."""
    return type(error) is RuntimeError or isinstance(error, dist.DistError)


def translate(error: Exception, epoch: FailingEpoch, operation: str, peer: str | None = None) -> Exception:
    """The error to raise for ``error``, which ``operation`` met.

    Runtime errors become ``EpochChanged`` if the epoch was aborted (here or, as far as known, at the other end),
    and ``PeerLost`` if a connection broke; then the session's ``on_peer_failure`` is told. Everything else (wrong
    arguments, timeouts) is returned as it is.

    Args:
        peer: the member that the operation was directed to, if it was a single one.
    """
    if isinstance(error, BambooError) or not of_transport(error):
        return error
    if epoch.aborted is not None:
        return ended(epoch, operation)
    text = str(error)
    if not (isinstance(error, dist.DistNetworkError) or _BROKEN.search(text)):
        return error
    reason = f"{operation} failed: {text.splitlines()[0]}"
    if peer is None:
        named = _REMOTE.search(text)
        known = epoch.explain(named["host"], int(named["port"])) if named else epoch.explain(None, None)
        if known is not None:
            known.__cause__ = error
            return known
    epoch.peer_failed(peer, reason)
    return PeerLost(f"epoch {epoch.number}, towards {peer or 'an unknown member'}: {reason}", peer)
