"""Work handles that raise this package's errors, and whose results count.

gloo's works end or fail on the host. NCCL's run behind it: a wait returns at once, and an abort ends them like any
other, without an error, whatever is in their tensors then. So a wait here lasts until the device is through, and looks
*then* whether the epoch goes on: an abort is noted before the first communicator is told of it, so that what was
through while the epoch went on is a result.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch

from ..bare import bare
from ..devices.accelerators import HOST
from ..errors import EpochChanged, ProtocolError
from .c10d import dist
from .inner import BEHIND, GLOO, Pending
from .lifetime import of_transport
from .links import Links

NO_TIMEOUT = timedelta(0)
#: How often a wait for a gloo collective looks whether the epoch has ended: gloo never wakes an operation that
#: was in the middle of its data when the connection ended.
_POLL = timedelta(milliseconds=50)
#: After the end of the epoch: time for an operation that does fail by itself to let go of its tensors.
_GRACE = timedelta(milliseconds=100)
#: Seconds between two looks whether the device is through with a collective: at first, and at most.
_LOOK_S, _LOOK_AT_MOST_S = 2e-5, 1e-3


def future_of(tensors: Iterable[torch.Tensor | torch.device]) -> torch.futures.Future[Any]:
    """A future whose value may have ``tensors`` in it: torch asks beforehand for the devices that they are on."""
    devices = {each if isinstance(each, torch.device) else each.device for each in tensors}
    away: list[int | str | torch.device] = sorted((each for each in devices if each.type != "cpu"), key=str)
    return torch.futures.Future(devices=away) if away else torch.futures.Future()


class CompletedWork(dist.Work):  # type: ignore[misc]
    """An operation that needed no peer."""

    def __init__(self, result: list[torch.Tensor] | None = None, source: int = -1) -> None:
        super().__init__()
        self._result = result or []
        self._source = source

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Returns at once."""
        return True

    def is_completed(self) -> bool:
        """Always true."""
        return True

    def is_success(self) -> bool:
        """Always true."""
        return True

    def exception(self) -> Exception | None:
        """Always ``None``."""
        return None

    def result(self) -> list[torch.Tensor]:
        """The operation's tensors."""
        return self._result

    def source_rank(self) -> int:
        """Group rank of the sender, of a receive."""
        return self._source

    _source_rank = source_rank

    def synchronize(self) -> None:
        """Does nothing."""

    def get_future(self) -> torch.futures.Future[Any]:
        """A completed future."""
        future = future_of(self._result)
        future.set_result(self._result)
        return future


class Several(CompletedWork):
    """Several works, with their finishing touches, as one.

    Args:
        written: what they write, where that is known.
    """

    def __init__(self, pending: Sequence[Pending], written: list[torch.Tensor] | None = None) -> None:
        super().__init__(written)
        self._pending = list(pending)
        self._works = [work for work, _ in pending]

    def wait(self, *timeout: Any) -> bool:
        """Waits for all, in order."""
        while self._pending:
            work, finish = self._pending[0]
            work.wait(*timeout)
            if finish is not None:
                finish()
            self._pending.pop(0)
        return True

    def synchronize(self) -> None:
        """Does as :meth:`wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether all are completed."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Whether all succeeded."""
        return all(work.is_success() for work in self._works)

    def exception(self) -> Exception | None:
        """The first error."""
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def get_future(self) -> torch.futures.Future[Any]:
        """Refuses, as in gloo: they have none."""
        raise RuntimeError("coalesced collectives have no future")


class BambooWork(dist.Work):  # type: ignore[misc]
    """A handle of one operation in one epoch.

    Args:
        links: of the epoch in which it runs.
        inner: torch's handle.
        operation: name, for messages.
        members: that it depends on.
        finish: run once, after success, by the first ``wait`` (e.g. to copy results).
        kind: of the inner group.
        limit: timeout of a ``wait`` without one; ``None``: that of the inner group.
        device: that of its tensors.

    Attributes:
        deferred: only the device goes on with the result for now, so that ``wait`` need not wait for it on the host;
            see :meth:`.groups.Groups.confirm`. Of works that run behind the host.
    """

    def __init__(
        self,
        links: Links,
        inner: Any,
        operation: str,
        members: Sequence[str],
        finish: Callable[[], None] | None = None,
        kind: str = GLOO,
        limit: timedelta | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        if inner is None:
            raise ProtocolError(
                f"torch's {kind} group has given no work of {operation}, so that it cannot be waited for"
            )
        self.deferred = False
        self._links, self._life = links, links.life
        self._inner = inner
        self._operation = operation
        self._members = members
        self._finish = finish
        self._behind = kind in BEHIND
        self._limit = limit
        self._devices = [] if device is None else [device]

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Waits until the result is there, on the host and for the current stream of its device.

        Raises:
            EpochChanged: the epoch ended meanwhile or long ago.
            PeerLost: a connection of the operation broke.
            RuntimeError: as torch raises it, for timeouts and misuse.
        """
        inner = self._inner
        if inner is None:
            raise self._life.ended(self._operation)
        limit = self._limit if timeout == NO_TIMEOUT else timeout
        with self._life.calling(self._operation):
            done = self._wait_behind(inner, limit) if self._behind else self._wait_polling(inner, limit)
        self._finish_once()
        return done

    def _finish_once(self) -> None:
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()

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

    def _wait_behind(self, inner: Any, timeout: timedelta | None) -> bool:
        self._check_error(inner)
        inner.wait()
        if not self.deferred:
            self.await_device(timeout)
        return True

    def await_device(self, timeout: timedelta | None = None) -> None:
        """Waits on the host until the device is through with a work that runs behind it; raises as :meth:`wait`."""
        limit = self._limit if timeout is None else timeout
        deadline = None if limit is None else time.monotonic() + limit.total_seconds()
        inner, pause = self._inner, _LOOK_S
        while not inner.is_completed():
            gone = self._gone()
            if gone is not None:
                raise gone
            if deadline is not None and time.monotonic() >= deadline:
                raise RuntimeError(f"Timed out waiting {limit} for {self._operation} to complete")
            time.sleep(pause)
            pause = min(2 * pause, _LOOK_AT_MOST_S)
        self._life.check(self._operation)  # not before
        inner.is_completed()  # which looks for an error of before the end, as it did not in the look that saw the end
        self._check_error(inner)

    def _check_error(self, inner: Any) -> None:
        """Raises what torch has found. Its own ``wait`` would abort the communicator first, and may block in that."""
        error = inner.exception()
        if error is not None:
            raise error

    @property
    def through(self) -> bool:
        """Whether the device is through with it, or the epoch has ended; false if it has failed."""
        inner = self._inner
        try:
            return inner is None or (bool(inner.is_completed()) and inner.exception() is None)
        except EpochChanged:
            return True

    def _gone(self) -> EpochChanged | None:
        """The reason why the operation cannot complete any more, if so."""
        if self._life.aborted is not None:
            return self._life.ended(self._operation)
        return self._links.await_failure(self._members, 0)

    def is_completed(self) -> bool:
        """Whether it succeeded or failed; an ended epoch completes everything."""
        try:
            return self._inner is None or self._life.aborted is not None or bool(self._inner.is_completed())
        except EpochChanged:
            return True

    def is_success(self) -> bool:
        """Whether it completed without an error."""
        if self._behind:  # NCCL's cannot be asked for it
            return self.through and self._life.aborted is None
        return self._inner is not None and self._life.aborted is None and bool(self._inner.is_success())

    def exception(self) -> Exception | None:
        """The error that :meth:`wait` would raise, if the operation failed."""
        if self._inner is None or self._life.aborted is not None:
            return self._life.ended(self._operation)
        try:
            error = self._inner.exception()
        except EpochChanged as ended:
            return ended
        return None if error is None else self._life.translate(error, self._operation)

    def result(self) -> list[torch.Tensor]:
        """The operation's tensors."""
        if self._inner is None:
            raise self._life.ended(self._operation)
        return self._inner.result()

    def synchronize(self) -> None:
        """Does as :meth:`wait`."""
        self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        """A future that completes with the result, or with the error that :meth:`wait` would raise.

        That of a work that runs behind the host is complete: it waits here.

        Raises:
            RuntimeError: for sends and receives, which have none in gloo.
        """
        if self._inner is None:
            raise self._life.ended(self._operation)
        future, settled = future_of(self._devices), threading.Lock()
        if self._behind:
            self.wait()
            future.set_result(self._inner.result())
            return future

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
            self._finish_once()
            settle(lambda: future.set_result(value))

        inner_future = self._inner.get_future()
        take_back = self._life.call_on_abort(end)
        inner_future.add_done_callback(copy)
        return future

    def abandon(self) -> Any:
        """Forgets torch's handle, which keeps the sockets of its epoch open; returns it."""
        inner, self._inner = self._inner, None
        return inner


class ThroughHost:
    """A group of gloo for tensors on devices of any kind: its collectives run on copies in host memory.

    The same sums in the same order as of tensors on CPUs. Everything else is the group's.
    """

    def __init__(self, group: Any) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._group, name)

        def call(*arguments: Any) -> Any:
            copies = _HostCopies()
            result = method(*map(copies.of, arguments))
            return ThroughHostWork(result, copies.pairs(arguments[0])) if copies else result

        return call if callable(method) else method


class _HostCopies(dict[int, tuple[torch.Tensor, torch.Tensor]]):
    """Tensors and their copies in host memory, by the tensors' ids."""

    def of(self, value: Any) -> Any:
        """``value``, an argument of a collective, with copies in the place of tensors."""
        if isinstance(value, torch.Tensor):
            if id(value) not in self:
                self[id(value)] = value, value.detach().to(HOST, copy=True)
            return self[id(value)][1]
        return [self.of(each) for each in value] if isinstance(value, (list, tuple)) else value

    def pairs(self, value: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The pairs of the tensors in ``value``."""
        if isinstance(value, torch.Tensor):
            return [self[id(value)]]
        return [pair for each in value for pair in self.pairs(each)]


class ThroughHostWork:
    """A work of gloo on copies in host memory, which are copied back once, when it has succeeded.

    Args:
        work: torch's.
        written: the tensors that the collective writes, each with its copy.
    """

    def __init__(self, work: Any, written: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._work = work
        self._written = written
        self._result = [tensor for tensor, _ in written]
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def wait(self, *timeout: Any) -> bool:
        """Waits as torch's; then the results are on the device."""
        done = bool(self._work.wait(*timeout))
        self._copy_back()
        return done

    def result(self) -> list[torch.Tensor]:
        """The tensors that the collective writes."""
        return self._result

    def get_future(self) -> torch.futures.Future[Any]:
        """A future that completes with them, when they are on the device."""
        future = future_of(self._result)

        def settle(done: torch.futures.Future[Any]) -> None:
            try:
                done.value()
            except RuntimeError as error:
                future.set_exception(error)  # type: ignore[no-untyped-call]
                return
            self._copy_back()
            future.set_result(self._result)

        self._work.get_future().add_done_callback(settle)
        return future

    def _copy_back(self) -> None:
        with self._lock:
            for tensor, copy in self._written:
                bare(tensor).copy_(copy)
            self._written = []
