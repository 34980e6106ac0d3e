"""Process-wide state of the data plane: which epoch is attached, and how to leave it at once."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ..errors import EpochChanged
from ..secret import NONE, JobSecret
from ..topology import Plan
from .c10d import Store
from .epoch import Epoch
from .keyvalue import Server
from .stores import EpochStore

if TYPE_CHECKING:
    from .backend import BambooProcessGroup
    from .script import ScriptCollectives

#: Answers a collective: the logical ranks of the group, torch's name of the operation, its arguments.
Answer = Callable[[tuple[int, ...], str, tuple[Any, ...]], None]

_current: Session | None = None
#: Seconds that the end of a session waits for gloo to let go of its threads.
CLOSE_S = 2.0


def current() -> Session:
    """The session of this process; raises ``RuntimeError`` if there is none."""
    if _current is None:
        raise RuntimeError("the bamboo backend needs a Session: start the job with 'bamboo run'")
    return _current


def slices_name(ranks: Sequence[int]) -> str:
    """Name for :meth:`Session.logical_group` of the slices of a stage, whose logical ranks are ``ranks``."""
    return f"bamboo/slices/{ranks[0]}"


def group_key(name: str, ranks: Sequence[int]) -> str:
    """Key of the group ``name`` of ``ranks``, equal on all of its members."""
    return f"{name}/{'.'.join(map(str, ranks))}"


@dataclass(frozen=True)
class Acting:
    """A thread that acts for a logical rank, see :meth:`Session.acting_for`."""

    thread: int
    rank: int
    answer: Answer


@dataclass(frozen=True)
class SliceGroup:
    """The slices of a stage among which layers communicate now, see :meth:`Session.among_slices`."""

    home: tuple[int, ...]
    ranks: tuple[int, ...]

    @property
    def key(self) -> str:
        """Key of the group, equal on all of its members whatever handles they use."""
        return group_key(slices_name(self.ranks), self.ranks)


class Session:
    """The data plane of one process. Create exactly one.

    States: *detached* (initially, and after :meth:`detach`), *attached* to an epoch, *aborted*.

    Args:
        member: id of this member, as it occurs in plans.
        address: the advertised address (name or IP); every socket is bound to it and only to it.
        timeout: default timeout of group operations and of group construction.
        on_peer_failure: called (from any thread) as ``on_peer_failure(member, reason)`` when an operation
            towards ``member`` failed although the epoch was not aborted; ``None`` if it is not known who.
            Called once per member and epoch. Must not block. A member that has already aborted this epoch
            looks like a failed one: whoever judges accusations must drop those of an epoch that has ended.
        silence_s: seconds without any answer of a member's host after which operations towards it fail.
        awaited: called by the thread that attaches with the members that have not come to attach, and for how many
            seconds they have been waited for: after ``tell_after_s``, then after twice as long each time.
        secret: the job's; who does not know it gets no connection.
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
    ) -> None:
        global _current
        if _current is not None:
            raise RuntimeError("this process has a Session already; close it first")
        self._member = member
        self._address = address
        self._timeout = timeout
        self._on_peer_failure = on_peer_failure
        self._silence_s = silence_s
        self._awaited, self._tell_after_s = awaited, tell_after_s
        self._secret = secret
        self._lock = threading.Lock()
        self._epoch: Epoch | None = None
        self._detached = True
        self._ended = 0  # the newest epoch known to have ended
        self._reason = "no epoch is attached yet"
        self._left: list[Epoch] = []
        self._hosted: dict[int, Server] = {}
        self._hosting = threading.RLock()
        self._closed = False
        self._process = os.getpid()  # one that it forks has no part in the job
        self._acting: Acting | None = None
        #: Where the handles of slice groups lead now; ``None``: where they were made for.
        self.slices: SliceGroup | None = None
        #: Whether the main thread computes a pass whose layers are whole.
        self.passing = False
        self._logical_groups: dict[tuple[str, tuple[int, ...], int], BambooProcessGroup] = {}
        #: The script's own collectives, once there is an engine that recovers for them.
        self.script: ScriptCollectives | None = None
        #: What torch.distributed's groups use as their store.
        self.torch_store = EpochStore(self)
        _current = self
        # Threads blocked inside gloo must be gone before the interpreter is.
        atexit.register(self.close)

    # -- state -------------------------------------------------------------------------------------------
    @property
    def member(self) -> str:
        """Id of this member."""
        return self._member

    @property
    def address(self) -> str:
        """The advertised address."""
        return self._address

    @property
    def timeout(self) -> timedelta:
        """Default timeout of operations."""
        return self._timeout

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
        """Why the current epoch was aborted, or ``None``."""
        epoch = self._epoch
        return None if epoch is None else epoch.aborted

    @property
    def detached(self) -> bool:
        """Whether collectives are no-ops."""
        return self._detached

    @property
    def waiting(self) -> bool:
        """Whether the process waits for another member, or has no epoch in which it could."""
        epoch = self._epoch
        return epoch is None or epoch.waiting

    @property
    def current(self) -> Epoch:
        """The attached epoch (of use inside ``comm`` only); raises ``EpochChanged`` if there is none."""
        epoch = self._epoch
        if epoch is None:
            raise EpochChanged(self._reason)
        epoch.check("operation")
        return epoch

    @property
    def store(self) -> Store:
        """Client of the current epoch's store; raises ``EpochChanged`` when aborted or never attached."""
        return self.current.store("")

    def check(self) -> None:
        """Raise ``EpochChanged`` if the current epoch is aborted."""
        epoch = self._epoch
        if epoch is not None:
            epoch.check("operation")

    def wait(self, operation: str, ready: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until ``ready()``, which is asked ten times a second; raises as an operation with all members.

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
    def host_store(self, plan: Plan, address: str | None = None) -> int:
        """Create the store of ``plan``'s epoch, bound to ``address`` (default: ours) only. From any thread.

        Called by the worker that ``plan.store_host`` names, before it attaches. The server lives until
        the epoch after the next one is hosted or attached, or until :meth:`close`. Calling it again for
        the same epoch returns the same port.

        Returns:
            The server's TCP port.
        """
        with self._hosting:
            hosted = self._hosted.get(plan.epoch)
            if hosted is not None:
                return hosted.port
            self._drop_stores(plan.epoch)
            server = self._hosted[plan.epoch] = Server(
                address or self._address, plan.epoch, self._secret, self._member, plan.members
            )
            return server.port

    def _drop_stores(self, epoch: int) -> None:
        """Drop the servers of all epochs before ``epoch - 1``."""
        with self._hosting:
            for number in [number for number in self._hosted if number < epoch - 1]:
                self._hosted.pop(number).close()

    def attach(self, plan: Plan, store_address: tuple[str, int]) -> None:
        """Enter ``plan``'s epoch: connect to its store and to all its members, clear the aborted state.

        Collective over ``plan.members``: blocks (abortably) until all have come. The previous epoch is
        aborted if it was not, and everything of it destroyed. Called by the main thread.

        Raises:
            EpochChanged: aborted meanwhile, or this epoch is already known to have ended.
            PeerLost: the store host or a peer could not be reached.
            AbortFailed: a communicator of the previous epoch could not be aborted.
            ValueError: ``plan`` is not newer than the current epoch, or does not list this member.
        """
        if self._member not in plan.members:
            raise ValueError(f"member {self._member} is not in the plan of epoch {plan.epoch}")
        if plan.epoch <= self.epoch:
            raise ValueError(f"epoch {plan.epoch} is not newer than the current one, {self.epoch}")
        previous = self._epoch
        if previous is not None:
            previous.abort(f"epoch {plan.epoch} follows")
            self._leave(previous)
            previous.await_aborts()
        epoch = Epoch(
            *(plan, self._member, self._address, self._timeout, self._on_peer_failure, self._silence_s),
            awaited=self._awaited,
            tell_after_s=self._tell_after_s,
            secret=self._secret,
        )
        with self._lock:
            self._epoch = epoch
            self._detached = False
            over = self._ended >= plan.epoch
        if over:
            epoch.abort(self._reason)
        epoch.check("attaching")
        epoch.open(store_address)
        self._drop_stores(plan.epoch)

    def abort(self, reason: str, epoch: int | None = None) -> None:
        """End the current epoch; callable from any thread (not from a signal handler), any number of times.

        Whatever is blocked in it raises ``EpochChanged`` within 200 ms, also if the peer is merely stopped;
        every later operation raises at once until the next :meth:`attach`.

        Args:
            reason: for messages.
            epoch: the newest epoch that is known to have ended (the new plan's number minus one). If a newer
                one is attached already, nothing happens; if it is yet to be attached, its :meth:`attach` will
                raise ``EpochChanged``. Default: the current epoch, also one whose ``attach`` is in progress.
        """
        with self._lock:
            self._ended = max(self._ended, self.epoch if epoch is None else epoch)
            self._reason = reason
            target = self._epoch
            if target is None or target.number > self._ended:
                return
        target.abort(reason)

    def detach(self) -> None:
        """Leave the epoch; collectives become no-ops that succeed (for building an engine without peers)."""
        with self._lock:
            self._detached = True
            epoch = self._epoch
        if epoch is not None:
            epoch.abort("detached")
            self._leave(epoch)

    def _leave(self, epoch: Epoch) -> None:
        if epoch not in self._left:
            self._left = [each for each in self._left if not each.released(0)]
            epoch.destroy()
            self._left.append(epoch)

    def released(self, timeout: timedelta) -> bool:
        """Wait until gloo has let go of the sockets and threads of all epochs that were left; whether it has.

        It does so at once, but for operations that had a part of their data when their connection ended: those
        keep theirs until the session's timeout.
        """
        end = time.monotonic() + timeout.total_seconds()
        return all([epoch.released(max(0.0, end - time.monotonic())) for epoch in self._left])

    def close(self, patience_s: float = CLOSE_S) -> None:
        """End cleanly: destroy all inner groups, stores and threads; abort what is still in flight. Idempotent.

        For a clean end let all members meet (``Transport.close``, or a barrier) first. Every later operation
        raises ``EpochChanged``.

        Args:
            patience_s: seconds for gloo's threads to end.
        """
        global _current
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        self._detached = False
        if self._epoch is not None:
            self._leave(self._epoch)
        self.released(timedelta(seconds=patience_s))
        while self._hosted:
            self._hosted.popitem()[1].close()
        if _current is self:
            _current = None
        atexit.unregister(self.close)

    # -- groups ------------------------------------------------------------------------------------------
    @property
    def acting(self) -> Acting | None:
        """For whom the calling thread acts, if not for itself."""
        acting = self._acting
        return acting if acting is not None and acting.thread == threading.get_ident() else None

    @property
    def in_pass(self) -> bool:
        """Whether the calling thread computes a pass that has no collectives; autograd's threads do as the main one."""
        thread = threading.current_thread()
        return self.passing and (thread is threading.main_thread() or isinstance(thread, threading._DummyThread))

    @contextmanager
    def acting_for(self, rank: int, answer: Answer) -> Iterator[None]:
        """In the body the calling thread acts for another rank, alone.

        ``torch.distributed.get_rank()`` is ``rank``, and collectives are not run but answered.

        Args:
            rank: logical rank.
            answer: called for every collective.
        """
        before, self._acting = self._acting, Acting(threading.get_ident(), rank, answer)
        try:
            yield
        finally:
            self._acting = before

    @contextmanager
    def among_slices(self, home: Sequence[int], ranks: Sequence[int]) -> Iterator[None]:
        """In the body, the layers of another stage may run in this process.

        Layers that are cut into slices communicate in a group that they take from wherever their script has it, which
        is the group of the stage that this process began as. In the body every handle of that group is one of the
        group of the stage whose layers run; so is every handle of the latter. Holds for all threads (autograd has its
        own).

        Args:
            home: logical ranks of the slices of the stage that the process began as.
            ranks: those of the stage whose layers run, in the same order.
        """
        before, self.slices = self.slices, SliceGroup(tuple(home), tuple(ranks))
        try:
            yield
        finally:
            self.slices = before

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
        from .backend import BambooProcessGroup, register_handle

        if rank not in ranks:
            raise ValueError(f"rank {rank} is not among the group's ranks {list(ranks)}")
        identity = (name, tuple(ranks), rank)
        if identity not in self._logical_groups:  # a role may come back to this member after it has left it
            handle = BambooProcessGroup(self, name, tuple(ranks), tuple(ranks).index(rank))
            register_handle(handle, name)
            self._logical_groups[identity] = handle
        return self._logical_groups[identity]
