"""Replicas under construction: copies of a role's state that are made while training goes on.

The owner takes a snapshot (a copy in host memory) at the boundary between two operations where the plan is entered that
names the builder, or, where that plan comes in the middle of an operation, at its end; the snapshot travels in the
background. Meanwhile the builder receives the reduced gradients of every iteration, as a shadow does, and keeps them.
When the snapshot is there it is built and the kept iterations are performed on it, in order, by the same optimizer
steps; then it is a replica like any other::

    iteration   t       t+1     t+2     t+3     t+4
    owner       step    step    step    step    step
                 |snapshot of t ......v
    builder     -       keep    keep    t+1 t+2 step
                                        t+3
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp.web  # noqa: F401  # the server's; loading it takes time that a recovery does not have
import torch

from ...control.registry.records import PeerAddress
from ...secret import JobSecret
from ...state import Tree, join, split
from ...state.fetch import Fetch
from ...state.server import StateServer
from ...topology import Role
from ..script.changes import Replacement
from ..stage.runtime import StageRuntime
from ..stage.schedulers import Pristine, SchedulerPosition

#: Seconds without any progress of a transfer until it has failed. The owner offers the snapshot at the end of an
#: operation, which may take long.
FETCH_TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class Kept:
    """What the job has done since the copy was begun, and a snapshot may not contain.

    Attributes:
        sequence: number of the operation, or of the one that it came before.
        follow: does the same to the replica.
        replacement: another scheduler, if the script has replaced it.
    """

    sequence: int
    follow: Callable[[StageRuntime], None]
    replacement: Replacement | None = None


@dataclass
class Construction:
    """A replica that this member builds.

    Attributes:
        role: whose.
        source: key of the snapshot and where it is offered.
        fetch: the transfer.
        begun: monotonic seconds.
        incoming: reduced gradients, what the layers keep, and which parameters are trainable, if that has changed
            before the current iteration.
        kept: iterations since the copy was begun, what evaluations have changed, what the script has set.
        runtime: what is built from the snapshot, once that has arrived.
        positions: of this member's own scheduler, after each operation.
        follows: whether the replica's scheduler has the position of this member's own.
    """

    role: Role
    source: tuple[str, PeerAddress]
    fetch: Fetch
    begun: float = field(default_factory=time.monotonic, init=False)
    incoming: tuple[list[torch.Tensor], Tree, list[bool]] | None = field(default=None, init=False)
    kept: deque[Kept] = field(default_factory=deque, init=False)
    runtime: StageRuntime | None = field(default=None, init=False)
    positions: dict[int, SchedulerPosition] = field(default_factory=dict, init=False)
    follows: bool = field(default=False, init=False)

    @property
    def near(self) -> bool:
        """Whether it is complete with the end of the iteration under way, unless its transfer has failed."""
        return (self.runtime is not None or self.fetch.done()) and len(self.kept) <= 1

    def forget(self, sequence: int) -> None:
        """Drop what is kept and a snapshot of ``sequence`` contains."""
        while self.kept and self.kept[0].sequence <= sequence:
            self.kept.popleft()

    def position(self, sequence: int) -> SchedulerPosition | None:
        """Position of this member's own scheduler after operation ``sequence``, if that is known."""
        known = max((s for s in self.positions if s <= sequence), default=None)
        return self.positions[known] if known is not None else None

    def scheduled_by(self, now: Pristine | None) -> Pristine | None:
        """What the snapshot's scheduler was made of, where those of later operations are made of ``now``."""
        replaced = next((each.replacement for each in self.kept if each.replacement is not None), None)
        return now if replaced is None else replaced.before

    def arrived(self) -> tuple[int, Any] | None:
        """Operation and state of the snapshot, if it is there. Raises ``TransferError`` if the transfer failed."""
        if not self.fetch.done():
            return None
        content = join(*self.fetch.result())
        return content["sequence"], content["state"]


class Snapshots:
    """What this member offers to others: snapshots to build replicas from, the history of the job to those that join.

    Args:
        address: to listen on.
        rate_mb_per_s: bound on all transfers together; ``None``: none.
        answers: what else it is asked for, by what the keys begin with.
        secret: the job's.

    Attributes:
        place: where others find it.
    """

    def __init__(
        self,
        address: str,
        rate_mb_per_s: float | None,
        answers: Mapping[str, Callable[[str], str]],
        secret: JobSecret,
    ) -> None:
        token = secrets.token_urlsafe(16)
        self._server = StateServer(address, rate_mb_per_s, token=token, secret=secret, answers=answers)
        self.place = PeerAddress(url=self._server.url, token=token)
        self._wanted: set[Role] = set()
        self._offered: dict[Role, str] = {}

    def begin(self) -> None:
        """A new epoch begins: what was offered in the one before is void."""
        for key in self._offered.values():
            self._server.withdraw(key)
        self._offered.clear()
        self._wanted.clear()

    def want(self, role: Role) -> None:
        """A snapshot of ``role`` is due at the next boundary."""
        self._wanted.add(role)

    def wanted(self) -> list[Role]:
        """Roles of which a snapshot is due now."""
        return sorted(self._wanted)

    def offer(self, role: Role, key: str, state: Tree, sequence: int) -> None:
        """Copy ``state`` as it is after operation ``sequence`` and offer it."""
        text, tensors = split({"sequence": sequence, "state": state})
        self._server.offer(key, text, [t.detach().to("cpu", copy=True).contiguous() for t in tensors])
        self._offered[role] = key
        self._wanted.discard(role)

    def close(self) -> None:
        """End the service."""
        self._server.close()


def snapshot_key(epoch: int, rank: int) -> str:
    """Name of the snapshot of a role that is taken in an epoch."""
    return f"{epoch}/{rank}"


def begin_fetch(key: str, place: PeerAddress, secret: JobSecret) -> Fetch:
    """Start to fetch the snapshot ``key`` from where its owner offers it."""
    return Fetch(place.url, key, token=place.token, timeout_s=FETCH_TIMEOUT_S, secret=secret)
