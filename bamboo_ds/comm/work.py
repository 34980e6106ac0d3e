"""Work handles that raise this package's errors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from ..errors import EpochChanged
from .c10d import dist
from .lifetime import of_transport
from .links import Links

NO_TIMEOUT = timedelta(0)
#: How often a wait for a gloo collective looks whether the epoch has ended: gloo never wakes an operation that
#: was in the middle of its data when the connection ended.
_POLL = timedelta(milliseconds=50)
#: After the end of the epoch: time for an operation that does fail by itself to let go of its tensors.
_GRACE = timedelta(milliseconds=100)


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
        links: of the epoch in which it runs.
        inner: torch's handle.
        operation: name, for messages.
        members: on whom it depends.
        finish: run once, after success, by the first ``wait`` (e.g. to copy results).
        poll: whether ``inner.wait`` may be called with a short timeout again and again without harm; so with
            gloo's collectives.
        limit: timeout of a ``wait`` without one, where it polls; ``None``: that of the inner group.
    """

    def __init__(
        self,
        links: Links,
        inner: Any,
        operation: str,
        members: Sequence[str],
        finish: Callable[[], None] | None = None,
        poll: bool = False,
        limit: timedelta | None = None,
    ) -> None:
        super().__init__()
        self._links, self._life = links, links.life
        self._inner = inner
        self._operation = operation
        self._members = members
        self._finish = finish
        self._poll = poll
        self._limit = limit

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Wait for completion; for CUDA tensors on NCCL, make the current stream wait.

        Raises:
            EpochChanged: the epoch ended meanwhile or long ago.
            PeerLost: a connection of the operation broke.
            RuntimeError: as torch raises it, for timeouts and misuse.
        """
        inner = self._inner
        if inner is None:
            raise self._life.ended(self._operation)
        with self._life.calling(self._operation):
            if self._poll:
                done = self._wait_polling(inner, self._limit if timeout == NO_TIMEOUT else timeout)
            else:
                done = _wait(inner, timeout)
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()
        return done

    def _wait_polling(self, inner: Any, timeout: timedelta | None) -> bool:
        deadline = None if timeout is None else time.monotonic() + timeout.total_seconds()
        while True:
            step = _POLL
            if deadline is not None:
                step = min(step, timedelta(seconds=max(0.001, deadline - time.monotonic())))
            gone = self._gone()
            if gone is not None:
                step = _GRACE
            try:
                return bool(inner.wait(step))
            except RuntimeError as error:
                if not of_transport(error):
                    raise
                if inner.is_completed():
                    # Either its own error, or it completed just after the step.
                    return bool(inner.wait())
                if gone is not None:
                    raise gone from None
                if deadline is not None and time.monotonic() >= deadline:
                    raise RuntimeError(f"Timed out waiting {timeout} for {self._operation} to complete") from error

    def _gone(self) -> EpochChanged | None:
        """Why the operation cannot complete any more, if so."""
        if self._life.aborted is not None:
            return self._life.ended(self._operation)
        return self._links.await_failure(self._members, 0)

    def is_completed(self) -> bool:
        """Whether it succeeded or failed; an ended epoch completes everything."""
        return self._inner is None or self._life.aborted is not None or bool(self._inner.is_completed())

    def is_success(self) -> bool:
        """Whether it completed without an error."""
        return self._inner is not None and self._life.aborted is None and bool(self._inner.is_success())

    def exception(self) -> Exception | None:
        """What :meth:`wait` would raise, if the operation failed."""
        if self._inner is None or self._life.aborted is not None:
            return self._life.ended(self._operation)
        error = self._inner.exception()
        return None if error is None else self._life.translate(error, self._operation)

    def result(self) -> list[torch.Tensor]:
        """The operation's tensors."""
        if self._inner is None:
            raise self._life.ended(self._operation)
        return self._inner.result()

    def source_rank(self) -> int:
        """Group rank of the sender, of a completed receive."""
        if self._inner is None:
            raise self._life.ended(self._operation)
        return int(self._inner._source_rank())

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
            raise self._life.ended(self._operation)
        future: torch.futures.Future[Any] = torch.futures.Future()
        settled = threading.Lock()

        def settle(action: Callable[[], None]) -> None:
            """The first of the two, the operation's end or the epoch's."""
            if settled.acquire(blocking=False):
                action()

        def end() -> None:
            settle(lambda: future.set_exception(self._life.ended(self._operation)))

        def copy(done: torch.futures.Future[Any]) -> None:
            take_back()
            try:
                value = done.value()
            except RuntimeError as error:
                raised = self._life.translate(error, self._operation)
                settle(lambda: future.set_exception(raised))
                return
            if self._finish is not None:
                finish, self._finish = self._finish, None
                finish()
            settle(lambda: future.set_result(value))

        inner_future = self._inner.get_future()
        take_back = self._life.call_on_abort(end)
        inner_future.add_done_callback(copy)
        return future

    def abandon(self) -> Any:
        """Forget torch's handle, which keeps the sockets of its epoch open; returns it."""
        inner, self._inner = self._inner, None
        return inner


def _wait(inner: Any, timeout: timedelta) -> bool:
    return bool(inner.wait(timeout) if timeout != NO_TIMEOUT else inner.wait())
