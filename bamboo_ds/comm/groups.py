"""The inner groups of one epoch: torch's, of gloo or NCCL, each built by its members on first use.

gloo can be neither told to abort nor asked for its sockets, so those are found among the descriptors of the process and
shut down, as long as a caller is blocked in it.
"""

from __future__ import annotations

import logging
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch

from ..devices.accelerators import HOST, numbered
from . import sockets
from .aborts import Aborts, Guard, Guarded
from .c10d import dist
from .inner import BEHIND, GLOO, connect, create_inner
from .keyvalue import TorchStore
from .links import Links
from .sockets import Endpoint
from .work import BambooWork, ThroughHost

logger = logging.getLogger(__name__)

#: Seconds between two sweeps over the sockets of an aborted epoch while operations are still blocked in it.
_SWEEP_EVERY = 0.01
#: Seconds that the abort of a communicator may take.
_ABORT_TIMEOUT_S = 10.0


class Groups:
    """The inner groups of this member in one epoch, and what gloo opens for them.

    Args:
        links: the epoch's.
        meet: waits until members meet at a key, see :meth:`.agreement.Agreement.meet`.
        store: gives the keys with a prefix that a member keeps in the epoch.
        member: this member.
        address: the advertised address.
        timeout: default timeout of operations.

    Attributes:
        works: handles of operations.
    """

    def __init__(
        self,
        links: Links,
        meet: Callable[[str, bytes, Sequence[str], timedelta], None],
        store: Callable[[str, str], TorchStore],
        member: str,
        address: str,
        timeout: timedelta,
    ) -> None:
        self.works: weakref.WeakSet[BambooWork] = weakref.WeakSet()
        self._links, self._life, self._meet, self._store = links, links.life, meet, store
        self._member, self._address, self._timeout = member, address, timeout
        self._building = threading.RLock()
        self._groups: dict[tuple[str, str, tuple[str, ...]], Any] = {}
        self._unfinished: deque[BambooWork] = deque()  # those behind the host that their device may not be through with
        self._unfinished_lock = threading.Lock()
        self._any_behind = False
        self._stores: list[TorchStore] = []  # of the groups, which do not keep them
        self._device: Any = None
        self._listener: Endpoint | None = None
        self._endpoints: dict[Endpoint, str] = {}
        self._pairs = 0  # gloo pairs created on the device so far; gloo numbers them
        self._connecting_pairs: range = range(0)
        self._aborts = Aborts()
        self._sweeper: threading.Thread | None = None
        self._undertaker: threading.Thread | None = None
        self._life.call_on_abort(self._interrupt)

    def get(
        self,
        key: str,
        members: Sequence[str],
        kind: str,
        timeout: timedelta | None = None,
        device: torch.device | None = None,
    ) -> Any:
        """The inner group ``key`` of ``members``; built on first use, collectively.

        Args:
            timeout: for the others to come when it is built, and default of its operations; ``None``: the epoch's.
            device: of the tensors, on this member: a kind may make its communicator for it, or take them through host
                memory.

        Raises:
            EpochChanged: aborted, before or meanwhile.
            PeerLost: a connection broke.
        """
        identity = (key, kind, tuple(members))
        group = self._groups.get(identity)
        if group is None:
            with self._building:
                self._life.check(f"building group {key}")
                if identity not in self._groups:
                    self._groups[identity] = self._build(key, identity[2], kind, timeout or self._timeout, device)
                group = self._groups[identity]
        elsewhere = kind == GLOO and device is not None and device.type != HOST.type
        return ThroughHost(group) if elsewhere else group

    def _build(
        self, key: str, members: tuple[str, ...], kind: str, timeout: timedelta, device: torch.device | None
    ) -> Any:
        name = f"group/{kind}/{key}/{','.join(members)}/"
        store, size, what = self._store(members[0], name), len(members), f"building group {key} of {', '.join(members)}"
        try:
            with self._life.calling(what):
                if kind in BEHIND:
                    self._meet(what, name.encode(), members, timeout)
                if kind == GLOO:
                    self._open_device(store, members, timeout)
                    self._connecting_pairs = range(self._pairs, self._pairs + size)
                    self._pairs += size
                group = create_inner(kind, store, members.index(self._member), size, timeout, self._device)
                if kind in BEHIND:
                    group = Guarded(group, Guard(self._life.check))
                    if device is not None:
                        self._connect(group, what, members, timeout, device)
            self._life.check(f"building group {key}")
            self._stores.append(store)
            return group
        finally:
            self._connecting_pairs = range(0)

    def _connect(self, group: Any, what: str, members: Sequence[str], timeout: timedelta, device: torch.device) -> None:
        """Makes the communicator of ``group``, on a thread of its own: an abort does not wake a thread that is in that.

        All ``members`` are there. If one is lost now, the thread is left to itself. Nothing waits for the end of that
        communicator: it has no tensors.
        """
        device = numbered(device)
        made: Future[None] = Future()

        def make() -> None:
            try:
                connect(group, len(members), device)
            except BaseException as error:  # raised by the thread that waits
                made.set_exception(error)
            else:
                made.set_result(None)
            with self._links.changed:
                self._links.changed.notify_all()

        threading.Thread(target=make, name="bamboo-connect-group", daemon=True).start()
        try:
            with self._links.changed:
                if not self._links.wait(what, made.done, members, timeout):
                    raise RuntimeError(f"Timed out {what}: its communicator is not there after {timeout}")
            made.result()
        except BaseException:  # goes on up
            self._aborts.leave_alone(what, group.abort)
            raise

    def _open_device(self, store: TorchStore, members: Sequence[str], timeout: timedelta) -> None:
        """Opens a gloo device, and learns where those of ``members`` listen."""
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
        for member, address in store.exchange("place", self._member, mine, members, timeout).items():
            host, port = address.split(" ")
            self._endpoints = {**self._endpoints, (host, int(port)): member}

    def member_at(self, host: str | None, port: int | None) -> str | None:
        """The member whose gloo listens there; ``None`` if unknown, as of connections that the peer made."""
        if host is None or port is None:
            return None
        address = sockets.endpoint((host, port))[0]
        # gloo prints the port with its bytes swapped
        candidates = [self._endpoints.get((address, each)) for each in (socket.htons(port), port)]
        return candidates[0] or candidates[1]

    def work(
        self,
        inner: Any,
        operation: str,
        members: Sequence[str],
        finish: Callable[[], None] | None = None,
        kind: str = GLOO,
        limit: timedelta | None = None,
        device: torch.device | None = None,
    ) -> BambooWork:
        """The handle of an operation of an inner group, which releases its sockets with the epoch."""
        work = BambooWork(self._links, inner, operation, members, finish, kind, limit, device)
        self.works.add(work)
        if kind in BEHIND:
            self._any_behind = True
            with self._unfinished_lock:
                while self._unfinished and self._unfinished[0].through:
                    self._unfinished.popleft()
                self._unfinished.append(work)
        return work

    def confirm(self, operation: str) -> None:
        """Waits until the devices are through with all collectives of the epoch, so that their results count.

        Raises:
            EpochChanged: the epoch has ended, and it is not known which of them were cut off. Where all run on the
                host each has told by itself.
        """
        if not self._any_behind:
            return
        with self._unfinished_lock:
            works = list(self._unfinished)
            self._unfinished.clear()
        with self._life.calling(operation):
            for work in works:
                work.await_device()
        self._life.check(operation)

    # -- the end -----------------------------------------------------------------------------------------
    def _interrupt(self) -> None:
        """Aborts communicators, and shuts gloo's sockets down until no caller is in the epoch. Returns at once."""
        for (key, kind, members), group in list(self._groups.items()):
            if kind in BEHIND:  # gloo's has nothing to call: its sockets are shut down instead
                what = f"NCCL group {key} of {', '.join(members)} (epoch {self._life.number})"
                self._aborts.begin(what, group.abort)
        if self._life.blocked:
            self._shut_down()
            # A connection that was just being made escapes a single sweep.
            self._sweeper = threading.Thread(target=self._sweep, name="bamboo-abort", daemon=True)
            self._sweeper.start()

    def await_aborts(self) -> None:
        """Waits until all communicators of an aborted epoch are, before new ones are made.

        Raises:
            AbortFailed: one has failed, or blocks.
        """
        self._aborts.wait(_ABORT_TIMEOUT_S)

    @property
    def aborts_are_through(self) -> bool:
        """Whether all communicators of an aborted epoch are aborted."""
        return self._aborts.through

    def _sweep(self) -> None:
        pause = _SWEEP_EVERY
        while not self._life.quiet(pause):
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
        """Wakes gloo's construction where it waits for a peer that never connects.

        There is no socket yet that could be shut down. A connecting peer names the pair it wants by an
        8-byte number; a connection that does so and closes makes gloo fail that pair.
        """
        for pair in pairs:
            try:
                with socket.create_connection(listener, timeout=1.0) as connection:
                    connection.sendall(pair.to_bytes(8, "little"))
            except OSError as error:
                logger.debug("epoch %d: gloo's listener does not answer: %s", self._life.number, error)
                return

    def destroy(self) -> None:
        """Releases the groups of an aborted epoch, in which no caller is blocked.

        gloo's part of it happens in a thread of its own: an operation that was in the middle of its data when
        a connection ended keeps its group's threads until its timeout, whatever one does.
        """
        if self._sweeper is not None:
            self._sweeper.join()
        # Not the last to be dropped: the groups hold the device, too, and end it without the interpreter's lock.
        self._device = None
        remains: list[Any] = [*self._stores, *self._groups.values()]  # a list drops its last item first
        remains += [work.abandon() for work in list(self.works)]
        self._unfinished.clear()
        if self._groups:
            # Here and not later: what is freed now may be another port in the next epoch.
            self._shut_down()
        self._groups.clear()
        self._stores.clear()

        def release() -> None:
            self._aborts.join()
            remains.clear()

        self._undertaker = threading.Thread(target=release, name="bamboo-release", daemon=True)
        self._undertaker.start()

    def released(self, timeout: float) -> bool:
        """Waits up to ``timeout`` seconds until the destroyed groups are gone; returns whether they are."""
        if self._undertaker is None:
            return True
        self._undertaker.join(timeout)
        return not self._undertaker.is_alive()
