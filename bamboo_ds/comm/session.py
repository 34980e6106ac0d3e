"""Process-wide state of the data plane: the attached epoch, and the way to leave it at once."""

from __future__ import annotations

import atexit
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial

from ..secret import NONE, JobSecret
from ..topology import Plan
from .attachment import Attachment, publish
from .backend import BambooProcessGroup, register, register_handle
from .bulk.copying import Fetch
from .bulk.offers import Offers
from .c10d import dist
from .calls.naming import NAME
from .epoch import Epoch
from .hub import Hub
from .places import Listener
from .standing import Stand

#: Seconds that the end of a session waits for gloo to let go of its threads.
CLOSE_S = 2.0


class Session:
    """The data plane of one process. Create exactly one.

    States: *detached* (initially: collectives are no-ops that succeed), *attached* to an epoch, *aborted*.

    Args:
        member: id of this member, as it occurs in plans.
        address: the advertised address (name or IP); every socket is bound to it and only to it.
        timeout: default timeout of group operations and of group construction.
        on_peer_failure: called (from any thread) as ``on_peer_failure(member, reason)`` when an operation
            towards ``member`` failed although the epoch was not aborted; ``None`` if that is unknown.
            Called once per member and epoch. Must not block. A member that has already aborted this epoch
            looks like a failed one: the judge of accusations must drop those of an epoch that has ended.
        silence_s: seconds without any answer of a member's host after which operations towards it fail.
        awaited: called by the thread that attaches with the members that have not come to attach, and for how many
            seconds they have been waited for: after ``tell_after_s``, then after twice as long each time.
        secret: the job's; callers without it get no connection.
        listener: that of this member; ``None``: a new one at ``address``.
        host: name of the host; ``None``: the machine's. Members of one share memory.

    Attributes:
        place: where others reach this member, as plans have it.
        attachment: the view that process groups have of it.
    """

    def __init__(
        self,
        member: str,
        address: str,
        timeout: timedelta,
        on_peer_failure: Callable[[str | None, str], None],
        silence_s: float = 10.0,
        awaited: Callable[[Sequence[str], float], None] = lambda members, seconds: None,
        tell_after_s: float = 120.0,
        secret: JobSecret = NONE,
        listener: Listener | None = None,
        host: str | None = None,
    ) -> None:
        self.attachment = Attachment(timeout)
        publish(self.attachment)
        self.member, self.address, self.timeout = member, address, timeout
        self._hub = Hub(
            *(member, listener or Listener.open(address), secret, silence_s), host=host or socket.gethostname()
        )
        self.place = self._hub.place
        self._new_epoch = partial(
            Epoch,
            hub=self._hub,
            member=member,
            address=address,
            timeout=timeout,
            on_peer_failure=on_peer_failure,
            awaited=awaited,
            tell_after_s=tell_after_s,
            stand=lambda: self.stand(),
        )
        #: Tells where the script is, see :class:`.standing.Stand`; from any thread.
        self.stand: Callable[[], Stand | None] = lambda: None
        self._lock = threading.Lock()
        self._ended = 0  # the newest epoch known to have ended
        self._left: list[Epoch] = []
        self._closed = False
        self._process = os.getpid()  # one that it forks has no part in the job
        self._logical_groups: dict[tuple[str, tuple[int, ...], int], BambooProcessGroup] = {}
        # Threads blocked inside gloo must be gone before the interpreter is.
        atexit.register(self.close)

    # -- where it stands ---------------------------------------------------------------------------------
    @property
    def _epoch(self) -> Epoch | None:
        return self.attachment.epoch

    @property
    def epoch(self) -> int:
        """Number of the newest plan attached (or being attached); 0 before the first."""
        epoch = self._epoch
        return 0 if epoch is None else epoch.number

    @property
    def plan(self) -> Plan | None:
        """The newest plan attached (or being attached)."""
        epoch = self._epoch
        return None if epoch is None else epoch.plan

    @property
    def aborted(self) -> str | None:
        """The reason why the current epoch was aborted, or ``None``."""
        epoch = self._epoch
        return None if epoch is None else epoch.life.aborted

    @property
    def waiting(self) -> bool:
        """Whether the process waits for another member, or has no epoch in which it could."""
        epoch = self._epoch
        return epoch is None or epoch.waiting

    @property
    def current(self) -> Epoch:
        """The attached epoch (of use inside ``comm`` only); raises ``EpochChanged`` if there is none."""
        return self.attachment.current

    def check(self) -> None:
        """Raises ``EpochChanged`` if the current epoch is aborted."""
        epoch = self._epoch
        if epoch is not None:
            epoch.life.check("operation")

    def wait(self, operation: str, ready: Callable[[], bool], timeout_s: float) -> bool:
        """Waits until ``ready()``, which is asked ten times a second; raises as an operation with all members.

        Returns:
            Whether it is ready; ``False`` after ``timeout_s`` seconds.
        """
        epoch, often = self.current, timedelta(seconds=0.1)
        until = time.monotonic() + timeout_s
        with epoch.links.changed:
            while not epoch.links.wait(operation, ready, epoch.plan.members, often):
                if time.monotonic() >= until:
                    return False
        return True

    # -- epochs ------------------------------------------------------------------------------------------
    def attach(self, plan: Plan) -> None:
        """Enters ``plan``'s epoch, and clears the aborted state. Called by the main thread; waits for no member.

        The previous epoch is aborted if it was not, and everything of it destroyed but the connections to members
        that ``plan`` has as well.

        Raises:
            EpochChanged: this epoch is already known to have ended.
            AbortFailed: a communicator of the previous epoch is not aborted. Call again when it
                is (:attr:`aborts_are_through`), or with a newer plan.
            ValueError: ``plan`` is not newer than the current epoch, or does not list this member.
        """
        if self.member not in plan.members:
            raise ValueError(f"member {self.member} is not in the plan of epoch {plan.epoch}")
        if plan.epoch <= self.epoch:
            raise ValueError(f"epoch {plan.epoch} is not newer than the current one, {self.epoch}")
        previous = self._epoch
        if previous is not None:
            previous.life.abort(f"epoch {plan.epoch} follows", orderly=True)
            self._leave(previous)
            previous.groups.await_aborts()
            self._hub.drop(set(previous.plan.members) - set(plan.members))
        epoch = self._new_epoch(plan)
        with self._lock:
            self.attachment.epoch = epoch
            self.attachment.detached = False
            over = self._ended >= plan.epoch
        if over:
            epoch.life.abort(self.attachment.reason)
        epoch.life.check("attaching")
        epoch.enter()

    @property
    def aborts_are_through(self) -> bool:
        """Whether no communicator of an epoch that has ended hinders this member from entering the next."""
        return self._epoch is None or self._epoch.groups.aborts_are_through

    def meet(self) -> None:
        """Waits until all members of the epoch have entered it.

        Raises:
            EpochChanged, PeerLost: the epoch has ended, or a member is gone.
            NotMet: a member has not come within the session's timeout.
        """
        self.current.agreement.barrier("attaching")

    def abort(self, reason: str, epoch: int | None = None, orderly: bool = False) -> None:
        """Ends the current epoch; callable from any thread (not from a signal handler), any number of times.

        Whatever is blocked in it raises ``EpochChanged`` within 200 ms, also if the peer is merely stopped;
        every later operation raises at once until the next :meth:`attach`.

        Args:
            reason: for messages.
            epoch: the newest epoch that is known to have ended (the new plan's number minus one). If a newer
                one is attached already, nothing happens; if it is yet to be attached, its :meth:`attach` will
                raise ``EpochChanged``. Default: the current epoch.
            orderly: the other members leave the epoch by themselves, and finish what they are in.
        """
        with self._lock:
            self._ended = max(self._ended, self.epoch if epoch is None else epoch)
            self.attachment.reason = reason
            target = self._epoch
            if target is None or target.number > self._ended:
                return
        target.life.abort(reason, orderly=orderly)

    def conclude(self) -> None:
        """Makes an end of the newest epoch's channels, see :meth:`.epoch.Epoch.conclude`."""
        if self._epoch is not None:
            self._epoch.conclude()

    def _leave(self, epoch: Epoch) -> None:
        if epoch not in self._left:
            self._left = [each for each in self._left if not each.groups.released(0)]
            epoch.destroy()
            self._left.append(epoch)

    def released(self, timeout: timedelta) -> bool:
        """Waits until gloo has let go of the sockets and threads of all epochs that were left; whether it has.

        It does so at once, but for operations that had a part of their data when their connection ended: those
        keep theirs until the session's timeout.
        """
        end = time.monotonic() + timeout.total_seconds()
        return all([epoch.groups.released(max(0.0, end - time.monotonic())) for epoch in self._left])

    def close(self, grace_s: float = CLOSE_S) -> None:
        """Ends cleanly: destroys all inner groups, connections and threads; aborts what is still in flight. Idempotent.

        For a clean end let all members meet (:meth:`conclude`, or a barrier) first. Every later operation
        raises ``EpochChanged``.

        Args:
            grace_s: seconds for gloo's threads to end.
        """
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        self.attachment.detached = False
        if self._epoch is not None:
            self._leave(self._epoch)
        self.released(timedelta(seconds=grace_s))
        self._hub.close()
        publish(None)
        atexit.unregister(self.close)

    # -- copies of state ---------------------------------------------------------------------------------
    @property
    def offers(self) -> Offers:
        """The snapshots that others may copy from this member."""
        return self._hub.offers

    def fetch(self, member: str, place: str, key: str, timeout_s: float) -> Fetch:
        """Begins to copy what another member offers; see :class:`.bulk.copying.Fetch`. Needs no epoch."""
        return Fetch(self._hub.call, member, place, key, timeout_s)

    # -- groups ------------------------------------------------------------------------------------------
    def confirm(self, operation: str) -> None:
        """Makes sure that what collectives of the epoch have given so far counts; see :meth:`.groups.Groups.confirm`.

        Raises:
            EpochChanged: the epoch has ended, and with it collectives that devices were still busy with.
        """
        if self._epoch is not None:
            self._epoch.groups.confirm(operation)

    def logical_group(self, name: str, ranks: Sequence[int], rank: int) -> BambooProcessGroup:
        """A group handle made outside ``torch.distributed.new_group``.

        Used for the groups of an adopted role. The handle is registered with torch.distributed:
        ``deepspeed.comm``/``torch.distributed`` calls with ``group=handle`` work, as do ``get_world_size``,
        ``get_process_group_ranks`` and ``get_rank`` (which answers for the *process's* logical rank and
        raises ``ValueError`` if that is not in the group; ``handle.rank()`` answers for ``rank``).
        Local: no communication. Needs an initialised default group. The same arguments give the same handle.

        Handles meet at the same inner group if they have the same ``name`` and ranks. To join a group that
        other members made by ``new_group``, pass its ``group_name`` there: torch numbers groups in the order
        of their creation, equally on all ranks. Per epoch and collective each *member* calls once, whatever
        the number of its roles in the group.

        Args:
            name: key of the group, equal on all its members.
            ranks: logical (global) ranks of the group, in group order.
            rank: the logical (global) rank that this handle stands for; must be in ``ranks``.
        """
        if rank not in ranks:
            raise ValueError(f"rank {rank} is not among the group's ranks {list(ranks)}")
        identity = (name, tuple(ranks), rank)
        if identity not in self._logical_groups:  # a role may come back to this member after it has left it
            handle = BambooProcessGroup(self.attachment, name, tuple(ranks), tuple(ranks).index(rank))
            register_handle(handle, name)
            self._logical_groups[identity] = handle
        return self._logical_groups[identity]


def init_process_group(session: Session, rank: int, world_size: int) -> None:
    """Initialises torch.distributed's default group on the backend ``bamboo``.

    Args:
        session: attached, or detached for collectives that do nothing.
        rank: this process's logical rank.
        world_size: number of logical ranks (roles).
    """
    register()
    dist.init_process_group(
        backend=NAME,
        store=session.attachment.torch_store,
        rank=rank,
        world_size=world_size,
        timeout=session.timeout,
    )
