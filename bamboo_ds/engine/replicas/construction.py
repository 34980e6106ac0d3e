"""Replicas under construction: copies of a role's state that are made while training goes on.

The owner takes a snapshot (a copy in host memory) where the plan is entered that names the builder: at the boundary
between two operations, or, after a loss, in the middle of an iteration, throughout which the state is the same. Where
members are at different places then, it does so at the operation's end. The snapshot travels in the background.
Meanwhile the builder receives the reduced gradients of every iteration, as a shadow does, and keeps them.
When the snapshot is there it is built and the kept iterations are performed on it, in order, by the same optimizer
steps; then it is a replica like any other. A loss of others changes nothing of that: what an interrupted iteration has
brought is not kept before its commit::

    iteration   t       t+1     t+2     t+3     t+4
    owner       step    step    step    step    step
                 |snapshot of t ......v
    builder     -       keep    keep    t+1 t+2 step
                                        t+3
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...bare import bare
from ...comm.bulk.copying import Fetch
from ...comm.bulk.offers import Offers
from ...state import join, split
from ...topology import Role
from ..script.changes import Replacement
from ..stage.runtime import StageRuntime
from ..stage.schedulers import Pristine, SchedulerPosition
from ..stage.work import Results

#: Seconds without any progress of a transfer until it has failed. The owner offers the snapshot at the end of an
#: operation, which may take long.
FETCH_TIMEOUT_S = 1800.0


#: After which operation, and whether after what scripts do before the next one: in the iteration that follows.
Moment = tuple[int, bool]


@dataclass(frozen=True)
class OfferedState:
    """The state that an owner offers.

    Attributes:
        moment: when it was taken.
        begins: the iteration can be begun with it; else the layers are as passes of it have left them, and right only
            after its step.
        state: of the role.
    """

    moment: Moment
    begins: bool
    state: Any


@dataclass(frozen=True)
class Kept:
    """Something that the job has done since the copy was begun, and that a snapshot may not contain.

    Attributes:
        moment: when it was done: a snapshot of that moment contains it.
        follow: does the same to the replica.
        replacement: another scheduler, if the script has replaced it.
    """

    moment: Moment
    follow: Callable[[StageRuntime], None]
    replacement: Replacement | None = None


@dataclass
class Construction:
    """A replica that this member builds.

    Attributes:
        role: whose.
        source: the member that offers the snapshot, and its key.
        begun: monotonic seconds.
        incoming: results of the current iteration, and which parameters are trainable, if that has changed before it.
        kept: iterations since the copy was begun, what evaluations have changed, what the script has set.
        runtime: what is built from the snapshot, once that has arrived.
        positions: of this member's own scheduler, after each operation, and in iterations in which snapshots are taken.
        follows: whether the replica's scheduler has the position of this member's own.
    """

    role: Role
    source: tuple[str, str]
    fetch: Fetch
    begun: float = field(default_factory=time.monotonic, init=False)
    incoming: tuple[Results, list[bool]] | None = field(default=None, init=False)
    kept: deque[Kept] = field(default_factory=deque, init=False)
    runtime: StageRuntime | None = field(default=None, init=False)
    positions: dict[Moment, SchedulerPosition] = field(default_factory=dict, init=False)
    _arrived: OfferedState | None = field(default=None, init=False)
    follows: bool = field(default=False, init=False)

    @property
    def near(self) -> bool:
        """Whether it is complete with the end of the iteration under way, unless its transfer has failed."""
        return (self.runtime is not None or self.fetch.done()) and len(self.kept) <= 1

    @property
    def serves(self) -> bool:
        """Whether what has arrived serves in the middle of an iteration."""
        found = self.arrived() if self.fetch.complete else None
        return self.runtime is not None or (found is not None and found.begins)

    def forget(self, moment: Moment) -> None:
        """Drops what is kept and a snapshot of ``moment`` contains."""
        while self.kept and self.kept[0].moment <= moment:
            self.kept.popleft()

    def position(self, moment: Moment) -> SchedulerPosition | None:
        """Position of this member's own scheduler at that time, if that is known."""
        known = max((each for each in self.positions if each <= moment), default=None)
        return self.positions[known] if known is not None else None

    def scheduled_by(self, now: Pristine | None) -> Pristine | None:
        """The template of the snapshot's scheduler, where those of later operations are made of ``now``."""
        replaced = next((each.replacement for each in self.kept if each.replacement is not None), None)
        return now if replaced is None else replaced.before

    def arrived(self) -> OfferedState | None:
        """The snapshot, if it is there. Raises ``TransferError`` if the transfer failed."""
        if self._arrived is None and self.fetch.done():
            self._arrived = OfferedState(**join(*self.fetch.result()))
        return self._arrived


class Snapshots:
    """Snapshots that this member offers to others, to build replicas from.

    Args:
        offers: all that it offers.
    """

    def __init__(self, offers: Offers) -> None:
        self._offers = offers
        self._offered: set[str] = set()
        self._due: dict[str, Role] = {}

    def want(self, wanted: Mapping[str, Role]) -> None:
        """A new epoch begins, in which these snapshots are wanted, by key: those that are not offered yet are due."""
        for key in self._offered - wanted.keys():
            self._offers.withdraw(key)
        self._offered &= wanted.keys()
        self._due = {key: role for key, role in wanted.items() if key not in self._offered}

    def due(self) -> list[tuple[str, Role]]:
        """Keys and roles of the snapshots that are due at the next boundary."""
        return sorted(self._due.items())

    def offer(self, key: str, snapshot: OfferedState) -> None:
        """Copies ``snapshot`` as it is now and offers it under ``key``."""
        text, tensors = split(vars(snapshot))
        self._offers.offer(key, text, [bare(t).to("cpu", copy=True).contiguous() for t in tensors])
        self._offered.add(key)
        del self._due[key]

    def close(self) -> None:
        """Stops offering."""
        self._offers.close()


def snapshot_key(epoch: int, rank: int) -> str:
    """Name of the snapshot of a role for the copies that begin in an epoch."""
    return f"{epoch}/{rank}"
