"""Work handles that raise this package's errors."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from .c10d import dist
from .failures import ended, translate

if TYPE_CHECKING:
    from .epoch import Epoch

logger = logging.getLogger(__name__)

NO_TIMEOUT = timedelta(0)
#: Connections are shut down already, so a failing operation needs only a moment.
SETTLE = timedelta(seconds=5)


class CompletedWork(dist.Work):  # type: ignore[misc]
    """An operation that needed no peer."""

    def __init__(self, result: list[torch.Tensor] | None = None, source: int = -1) -> None:
        super().__init__()
        self._result = result or []
        self._source = source

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Always."""
        return True

    def is_success(self) -> bool:
        """Always."""
        return True

    def exception(self) -> None:
        """There is none."""

    def result(self) -> list[torch.Tensor]:
        """The operation's tensors."""
        return self._result

    def source_rank(self) -> int:
        """Group rank of the sender, of a receive."""
        return self._source

    _source_rank = source_rank

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def get_future(self) -> torch.futures.Future[Any]:
        """A completed future."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._result)
        return future


class BambooWork(dist.Work):  # type: ignore[misc]
    """A handle of one operation in one epoch.

    Args:
        epoch: where it runs.
        inner: torch's handle.
        operation: name, for messages.
        peer: member at the other end, of a send or receive.
        finish: run once, after success, by the first ``wait`` (e.g. to copy results).
        source: maps the inner source rank to a group rank.
        timeout: what ``wait`` uses by default, instead of the inner group's.
        uninterruptible: shutting sockets down does not wake torch (gloo's receive from any source, which waits
            for no socket in particular): ``wait`` then leaves a thread behind, until the timeout.
    """

    def __init__(
        self,
        epoch: Epoch,
        inner: Any,
        operation: str,
        peer: str | None = None,
        finish: Callable[[], None] | None = None,
        source: Callable[[int], int] | None = None,
        timeout: timedelta = NO_TIMEOUT,
        uninterruptible: bool = False,
    ) -> None:
        super().__init__()
        self._timeout = timeout
        self._uninterruptible = uninterruptible
        self._epoch = epoch
        self._inner = inner
        self._operation = operation
        self._peer = peer
        self._finish = finish
        self._source = source
        epoch.track(self)

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Wait for completion; for CUDA tensors on NCCL, make the current stream wait.

        Raises:
            EpochChanged: the epoch ended meanwhile or long ago.
            PeerLost: a connection of the operation broke.
            RuntimeError: as torch raises it, for timeouts and misuse.
        """
        inner = self._inner
        if inner is None:
            raise ended(self._epoch, self._operation)
        timeout = timeout if timeout != NO_TIMEOUT else self._timeout
        try:
            with self._epoch.blocking():
                if self._uninterruptible:
                    done, _ = self._epoch.detachable(self._operation, lambda: bool(inner.wait(timeout)))
                else:
                    done = bool(inner.wait(timeout) if timeout != NO_TIMEOUT else inner.wait())
        except RuntimeError as error:
            raised = translate(error, self._epoch, self._operation, self._peer)
            raise raised from (None if raised is error else error)
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()
        return done

    def is_completed(self) -> bool:
        """Whether it succeeded or failed; an ended epoch completes everything."""
        return self._inner is None or self._epoch.aborted is not None or bool(self._inner.is_completed())

    def is_success(self) -> bool:
        """Whether it completed without an error."""
        return self._inner is not None and self._epoch.aborted is None and bool(self._inner.is_success())

    def exception(self) -> Exception | None:
        """What :meth:`wait` would raise, if the operation failed."""
        if self._inner is None or self._epoch.aborted is not None:
            return ended(self._epoch, self._operation)
        error = self._inner.exception()
        return None if error is None else translate(error, self._epoch, self._operation, self._peer)

    def result(self) -> list[torch.Tensor]:
        """The operation's tensors."""
        if self._inner is None:
            raise ended(self._epoch, self._operation)
        result: list[torch.Tensor] = self._inner.result()
        return result

    def source_rank(self) -> int:
        """Group rank of the sender, of a completed receive."""
        if self._inner is None:
            raise ended(self._epoch, self._operation)
        rank = int(self._inner._source_rank())
        return rank if self._source is None else self._source(rank)

    _source_rank = source_rank

    def synchronize(self) -> None:
        """As :meth:`wait`."""
        self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        """A future that completes with the result, or with the error that :meth:`wait` would raise.

        Raises:
            RuntimeError: for sends and receives, which have none in gloo.
        """
        if self._inner is None:
            raise ended(self._epoch, self._operation)
        future: torch.futures.Future[Any] = torch.futures.Future()

        def copy(done: torch.futures.Future[Any]) -> None:
            try:
                value = done.value()
            except RuntimeError as error:
                future.set_exception(translate(error, self._epoch, self._operation, self._peer))
                return
            if self._finish is not None:
                finish, self._finish = self._finish, None
                finish()
            future.set_result(value)

        self._inner.get_future().add_done_callback(copy)
        return future

    def settle(self) -> None:
        """Wait until the failed operation of an aborted epoch has left torch's threads."""
        inner = self._inner
        if inner is None or self._uninterruptible or inner.is_completed():
            return
        try:
            inner.wait(SETTLE)
        except RuntimeError as error:
            logger.debug("epoch %d: %s ended: %s", self._epoch.number, self._operation, error)

    def abandon(self) -> None:
        """Forget torch's handle, which keeps the sockets of its epoch open."""
        self._inner = None
