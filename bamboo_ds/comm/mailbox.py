"""Sends and receives between two roles of one member."""

from __future__ import annotations

import threading
from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from .failures import ended
from .work import NO_TIMEOUT, CompletedWork

if TYPE_CHECKING:
    from .epoch import Epoch


class Mailboxes:
    """Queues of tensors of one epoch, by stream."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._queues: dict[str, deque[torch.Tensor]] = {}

    def put(self, stream: str, tensor: torch.Tensor) -> None:
        """Append a copy of ``tensor``."""
        with self.changed:
            self._queues.setdefault(stream, deque()).append(tensor.detach().clone())
            self.changed.notify_all()

    def take(self, stream: str) -> torch.Tensor | None:
        """Remove the first; the caller holds :attr:`changed`."""
        queue = self._queues.get(stream)
        return queue.popleft() if queue else None

    def wake(self) -> None:
        """Wake everybody who waits."""
        with self.changed:
            self.changed.notify_all()


class MailboxWork(CompletedWork):
    """A send to, or a receive from, another role of the same member."""

    def __init__(self, epoch: Epoch, stream: str, operation: str, tensor: torch.Tensor, source: int) -> None:
        super().__init__([tensor], source)
        self._epoch = epoch
        self._stream = stream
        self._operation = operation
        self._pending = operation == "recv"
        if not self._pending:
            epoch.mailboxes.put(stream, tensor)

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Wait for the other role's send.

        Raises:
            EpochChanged: the epoch ended meanwhile.
            RuntimeError: nothing came within the timeout.
        """
        if not self._pending:
            return True
        limit = (timeout if timeout != NO_TIMEOUT else self._epoch.timeout).total_seconds()
        mailboxes = self._epoch.mailboxes
        with mailboxes.changed, self._epoch.blocking():
            value: torch.Tensor | None = None

            def arrived() -> bool:
                nonlocal value
                if self._epoch.aborted is None:
                    value = mailboxes.take(self._stream)
                return value is not None or self._epoch.aborted is not None

            mailboxes.changed.wait_for(arrived, limit)
            if self._epoch.aborted is not None:
                raise ended(self._epoch, self._operation)
            if value is None:
                raise RuntimeError(f"Timed out waiting {limit} s for a send within this member")
        self._result[0].copy_(value.view_as(self._result[0]))
        self._pending = False
        return True

    def is_completed(self) -> bool:
        """Whether the receive was waited for, or this is a send."""
        return not self._pending
