"""Everything of the data plane that lives for one epoch: store client, links, gloo device, inner groups."""

from __future__ import annotations

import logging
import socket
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any

from ..errors import EpochChanged, PeerLost
from ..forking import only_here
from ..secret import NONE, JobSecret
from ..topology import Plan
from . import sockets
from .aborts import Aborts
from .c10d import dist
from .failures import ended, translate
from .inner import GLOO, NCCL, create_inner
from .keyvalue import Client, TorchStore
from .links import Links
from .p2p import Receives
from .sockets import Endpoint
from .work import BambooWork

logger = logging.getLogger(__name__)

#: Seconds between two sweeps over the sockets of an aborted epoch while operations are still blocked in it.
_SWEEP_EVERY = 0.01
#: Seconds that the abort of a communicator may take.
_ABORT_PATIENCE_S = 10.0
#: Seconds to find out who is gone when a collective failed.
_PROBE = 0.1


class Epoch:
    """One epoch, from :meth:`open` to :meth:`destroy`. Only :meth:`abort` may be called from any thread.

    Args:
        plan: its plan.
        member: this member.
        address: the advertised address.
        timeout: default timeout of operations.
        on_peer_failure: as for ``Session``; called once per member.
        silence_s, awaited, tell_after_s: as for ``Session``.
        secret: the job's.
    """

    def __init__(
        self,
        plan: Plan,
        member: str,
        address: str,
        timeout: timedelta,
        on_peer_failure: Callable[[str | None, str], None],
        silence_s: float,
        awaited: Callable[[Sequence[str], float], None] = lambda members, seconds: None,
        tell_after_s: float = 120.0,
        secret: JobSecret = NONE,
    ) -> None:
        self.plan = plan
        self.secret = secret
        self._awaited, self._tell_after_s = awaited, tell_after_s
        self.member = member
        self.timeout = timeout
        self.silence_s = silence_s
        self.number = plan.epoch
        self.links = Links(self)
        self.receives = Receives(self)
        self._address = address
        self._on_peer_failure = on_peer_failure
        self._lock = threading.Lock()
        self._quiet = threading.Condition(self._lock)
        self._building = threading.RLock()
        self._aborted: str | None = None
        self._blocked = 0
        self._callbacks: dict[object, Callable[[], None]] = {self.links: self.links.leave}
        self._works: weakref.WeakSet[BambooWork] = weakref.WeakSet()
        self._sweeper: threading.Thread | None = None
        self._undertaker: threading.Thread | None = None
        self._aborts = Aborts()
        self._accused: set[str | None] = set()
        self._client: Client | None = None
        self._stores: list[TorchStore] = []  # of the groups, which do not keep them
        self._sockets: set[socket.socket] = set()
        self._device: Any = None
        self._listener: Endpoint | None = None
        self._endpoints: dict[Endpoint, str] = {}
        self._groups: dict[tuple[str, str, tuple[str, ...]], Any] = {}
        self._transports = 0
        self._meetings: Counter[str] = Counter()
        self._pairs = 0  # gloo pairs created on the device so far; gloo numbers them
        self._connecting_pairs: range = range(0)

    # -- entering ----------------------------------------------------------------------------------------
    def open(self, store_address: tuple[str, int]) -> None:
        """Connect to the epoch's store and, through it, to all its members. Collective over all of them."""
        with self.calling("attaching", self.plan.store_host):
            self._connect_store(store_address)
            self.links.connect(self._await_places(self.links.listen(self._address)), self.timeout)

    def _await_places(self, mine: str) -> dict[str, str]:
        """Where all members listen; tells after a while, and then more and more rarely, who has not come."""
        begin, pause, limit = time.monotonic(), self._tell_after_s, self.timeout.total_seconds()
        while True:
            left = begin + limit - time.monotonic()
            try:
                return self._exchange("link", mine, self.plan.members, timedelta(seconds=max(0.0, min(pause, left))))
            except dist.DistStoreError:
                if left <= pause:
                    raise
            store = self.store("place/")
            missing = [member for member in self.plan.members if not store.check([f"link/{member}"])]
            self._awaited(missing, time.monotonic() - begin)
            pause *= 2

    def _connect_store(self, store_address: tuple[str, int]) -> None:
        host = self.plan.store_host
        try:
            family, name = sockets.resolve(*store_address)
        except OSError as error:
            raise self.lost(host, f"resolving {store_address[0]!r} failed: {error}") from error
        connection = self.own(socket.socket(family, socket.SOCK_STREAM))
        try:
            connection.settimeout(min(self.timeout.total_seconds(), self.silence_s))
            connection.connect(name)
            sockets.watch_silence(connection, self.silence_s)
            self._client = Client(connection, self.number, self.timeout, self.secret, self.member, host)
        except OSError as error:
            self.check("attaching")
            raise self.lost(host, f"connecting to the store at {store_address} failed: {error}") from error

    def own(self, opened: socket.socket) -> socket.socket:
        """Shut a socket of ours down with the epoch (at once if it has been aborted), and close it in the end."""
        only_here(opened)
        with self._lock:
            self._sockets.add(opened)
            aborted = self._aborted is not None
        if aborted:
            sockets.shut(opened)
        return opened

    def _exchange(
        self, what: str, mine: str, members: Sequence[str], timeout: timedelta | None = None
    ) -> dict[str, str]:
        """Publish a text in the store, and wait for those of ``members``."""
        store = self.store("place/")
        store.set(f"{what}/{self.member}", mine)
        answers = store.multi_get([f"{what}/{member}" for member in members], timeout)
        return {member: answer.decode() for member, answer in zip(members, answers, strict=True)}

    def _open_device(self, members: Sequence[str], timeout: timedelta) -> None:
        """Have a gloo device, and know where those of ``members`` listen."""
        if self._listener is None:
            host = sockets.endpoint(sockets.resolve(self._address, 0)[1])[0]
            for _ in range(3):  # another thread may open a listening socket at the same moment
                before = sockets.socket_descriptors()
                self._device = dist.ProcessGroupGloo.create_device(hostname=self._address)
                self._listener = sockets.new_listener(before, host)
                if self._listener is not None:
                    break
            else:
                raise RuntimeError(f"cannot tell which socket of this process gloo listens on at {self._address}")
        mine = f"{self._listener[0]} {self._listener[1]}"
        for member, place in self._exchange("gloo", mine, members, timeout).items():
            host, port = place.split(" ")
            self._endpoints = {**self._endpoints, (host, int(port)): member}

    # -- state -------------------------------------------------------------------------------------------
    @property
    def aborted(self) -> str | None:
        """Why the epoch was aborted, or ``None``."""
        return self._aborted

    @property
    def waiting(self) -> bool:
        """Whether a caller may be blocked in it, or it has ended."""
        return self._aborted is not None or self._blocked > 0 or self.links.waiting > 0

    def store(self, prefix: str) -> TorchStore:
        """The keys with ``prefix`` of the epoch's store; raises ``EpochChanged`` if aborted or destroyed."""
        if self._client is None or self._aborted is not None:
            raise ended(self, "using the store")
        return TorchStore(self._client, prefix)

    def check(self, operation: str) -> None:
        """Raise ``EpochChanged`` if the epoch is aborted."""
        if self._aborted is not None:
            raise ended(self, operation)

    def calling(self, operation: str, peer: str | None = None) -> _Calling:
        """A context around every call into gloo, NCCL or the store: it may block, and its errors are translated.

        Entering raises ``EpochChanged`` if the epoch is aborted. An abort sweeps until all have been left.

        Args:
            operation: for messages.
            peer: the member on whom alone it depends, if there is one.
        """
        return _Calling(self, operation, peer)

    def enter(self, operation: str) -> None:
        """Count a caller that may block."""
        with self._lock:
            if self._aborted is not None:
                raise ended(self, operation)
            self._blocked += 1

    def leave(self) -> None:
        """Take the caller back."""
        with self._lock:
            self._blocked -= 1
            if self._aborted is not None:
                self._quiet.notify_all()

    def track(self, work: BambooWork) -> None:
        """Remember a work handle, to release its sockets with the epoch."""
        self._works.add(work)

    def call_on_abort(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call ``callback`` when the epoch is aborted (at once if it is). It must not block.

        Returns:
            What takes the order back.
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

    def explain(self, host: str | None, port: int | None) -> EpochChanged | None:
        """Why a connection of gloo broke, as far as our own connections tell; waits a moment for them.

        Args:
            host, port: the remote end as gloo prints it, if it did.

        Returns:
            ``PeerLost``, or ``EpochChanged`` if the member only left the epoch; ``None`` if nothing is known.
        """
        members: Sequence[str] = self.plan.members
        if host is not None and port is not None:
            place = sockets.endpoint((host, port))[0]
            for candidate in (port, socket.htons(port)):  # gloo prints the port with its bytes swapped,
                # and of connections that the peer made only a passing one
                members = [self._endpoints[place, candidate]] if (place, candidate) in self._endpoints else members
        return self.links.await_failure(members, _PROBE)

    def peer_failed(self, member: str | None, reason: str) -> None:
        """Tell the control plane, once per member, that an operation towards ``member`` failed."""
        with self._lock:
            if member in self._accused:
                return
            self._accused.add(member)
        logger.warning("epoch %d: member %s: %s", self.number, member, reason)
        self._on_peer_failure(member, reason)

    def lost(self, member: str, reason: str) -> PeerLost:
        """Report the loss of ``member``; returns the error to raise."""
        self.peer_failed(member, reason)
        return PeerLost(f"epoch {self.number}, towards {member}: {reason}", member)

    def next_transport(self) -> int:
        """Number of the transport that is being opened; equal on all members, as they open them in one order."""
        self._transports += 1
        return self._transports

    def meet(self, operation: str, group: str, members: Sequence[str], timeout: timedelta) -> None:
        """Wait until ``members`` meet this one; see :meth:`Links.meet`. They meet in one order in a ``group``."""
        self._meetings[group] += 1
        key = f"meeting/{group}/{self._meetings[group]}".encode()
        self.links.meet(operation, key, [member for member in members if member != self.member], timeout)

    # -- groups ------------------------------------------------------------------------------------------
    def group(self, key: str, members: Sequence[str], kind: str, timeout: timedelta | None = None) -> Any:
        """The inner group ``key`` of ``members``; built on first use, collectively.

        Args:
            timeout: for the others to come when it is built, and default of its operations; ``None``: the epoch's.

        Raises:
            EpochChanged: aborted, before or meanwhile.
            PeerLost: a connection broke.
        """
        identity = (key, kind, tuple(members))
        group = self._groups.get(identity)
        if group is not None:
            return group
        with self._building:
            self.check(f"building group {key}")
            if identity not in self._groups:
                self._groups[identity] = self._build(key, identity[2], kind, timeout or self.timeout)
            return self._groups[identity]

    def _build(self, key: str, members: tuple[str, ...], kind: str, timeout: timedelta) -> Any:
        store = self.store(f"group/{kind}/{key}/{','.join(members)}/")
        size = len(members)
        try:
            with self.calling(f"building group {key} of {', '.join(members)}"):
                if kind == GLOO:
                    self._open_device(members, timeout)
                    self._connecting_pairs = range(self._pairs, self._pairs + size)
                    self._pairs += size
                group = create_inner(kind, store, members.index(self.member), size, timeout, self._device)
            self.check(f"building group {key}")
            self._stores.append(store)
            return group
        finally:
            self._connecting_pairs = range(0)

    # -- leaving -----------------------------------------------------------------------------------------
    def abort(self, reason: str) -> None:
        """Make everything in this epoch raise ``EpochChanged``; from any thread, any number of times."""
        with self._lock:
            if self._aborted is not None:
                return
            self._aborted = reason
            callbacks = list(self._callbacks.values())
            for (key, kind, members), group in self._groups.items():
                if kind == NCCL:  # gloo's has nothing to call: its sockets are shut down instead
                    self._aborts.begin(f"NCCL group {key} of {', '.join(members)} (epoch {self.number})", group.abort)
            own = list(self._sockets)
            self._quiet.notify_all()
        logger.info("epoch %d: aborted: %s", self.number, reason)
        for callback in callbacks:
            callback()
        for opened in own:
            sockets.shut(opened)
        with self._lock:
            if not self._blocked:
                return
        self._shut_down()
        # A connection that was just being made escapes a single sweep.
        with self._lock:
            self._sweeper = threading.Thread(target=self._sweep, name="bamboo-abort", daemon=True)
            self._sweeper.start()

    def _sweep(self) -> None:
        pause = _SWEEP_EVERY
        while True:
            with self._lock:
                if self._quiet.wait_for(lambda: self._blocked == 0, pause):
                    return
            self._shut_down()
            pause = min(0.1, pause * 1.5)

    def _shut_down(self) -> None:
        listener, peers = self._listener, self._endpoints
        if listener is None:
            return

        def ours(local: Endpoint, remote: Endpoint) -> bool:
            return local == listener or (remote in peers and remote != listener)

        sockets.shut_down(ours)
        pairs = self._connecting_pairs
        if pairs:
            self._answer_for_peers(listener, pairs)

    def _answer_for_peers(self, listener: Endpoint, pairs: range) -> None:
        """Wake gloo's construction where it waits for a peer that never connects.

        There is no socket yet that could be shut down. A connecting peer names the pair it wants by an
        8-byte number; a connection that does so and closes makes gloo fail that pair.
        """
        for pair in pairs:
            try:
                with socket.create_connection(listener, timeout=1.0) as connection:
                    connection.sendall(pair.to_bytes(8, "little"))
            except OSError as error:
                logger.debug("epoch %d: gloo's listener does not answer: %s", self.number, error)
                return

    def destroy(self) -> None:
        """Release groups, sockets and threads. Called by the main thread, which is in no operation of this epoch.

        gloo's part of it happens in a thread of its own: an operation that was in the middle of its data when
        a connection ended keeps its group's threads until its timeout, whatever one does.
        """
        self.abort("left")
        self.links.close()
        if self._sweeper is not None:
            self._sweeper.join()
        # Not the last to be dropped: the groups hold the device, too, and end it without the interpreter's lock.
        self._device = None
        remains: list[Any] = [*self._stores, *self._groups.values()]  # a list drops its last item first
        remains += [work.abandon() for work in list(self._works)]
        if self._groups:
            # Here and not later: what is freed now may be somebody's port in the next epoch.
            self._shut_down()
        self._groups.clear()
        self._stores.clear()
        self._client = None
        with self._lock:
            self._callbacks.clear()
            own = list(self._sockets)
            self._sockets.clear()
        for opened in own:
            opened.close()

        def release() -> None:
            self._aborts.join()
            remains.clear()

        self._undertaker = threading.Thread(target=release, name="bamboo-release", daemon=True)
        self._undertaker.start()

    def await_aborts(self) -> None:
        """Wait until all communicators of an aborted epoch are, before new ones are made.

        Raises:
            AbortFailed: one is not, and will not be.
        """
        self._aborts.wait(_ABORT_PATIENCE_S)

    def released(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds until gloo's groups of a destroyed epoch are gone; whether they are."""
        if self._undertaker is None:
            return True
        self._undertaker.join(timeout)
        return not self._undertaker.is_alive()


class _Calling:
    """See :meth:`Epoch.calling`."""

    __slots__ = ("_epoch", "_operation", "_peer")

    def __init__(self, epoch: Epoch, operation: str, peer: str | None) -> None:
        self._epoch = epoch
        self._operation = operation
        self._peer = peer

    def __enter__(self) -> None:
        self._epoch.enter(self._operation)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._epoch.leave()
        if not isinstance(error, RuntimeError):
            return
        raised = translate(error, self._epoch, self._operation, self._peer)
        if raised is not error:
            try:
                raise raised from error
            finally:
                # A cycle through these frames would keep gloo's objects, and their sockets, for the collector.
                del raised, error, trace
