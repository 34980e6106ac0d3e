"""Everything of the data plane that lives for one epoch, and ends with it."""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import timedelta

from ..errors import EpochChanged
from ..secret import JobSecret
from ..topology import Plan
from . import sockets
from .c10d import dist
from .groups import Groups
from .keyvalue import Client, TorchStore
from .lifetime import Lifetime
from .links import Links
from .mesh import Mesh
from .p2p import Receives
from .standing import Stand

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
        stand: tells where this member's script is.

    Attributes:
        number: the plan's.
        life: whether it goes on.
        links: the connections to all members.
        receives: those posted on ``links``.
        groups: torch's groups that run its collectives.
    """

    def __init__(
        self,
        plan: Plan,
        member: str,
        address: str,
        timeout: timedelta,
        on_peer_failure: Callable[[str | None, str], None],
        silence_s: float,
        awaited: Callable[[Sequence[str], float], None],
        tell_after_s: float,
        secret: JobSecret,
        stand: Callable[[], Stand | None],
    ) -> None:
        self.plan = plan
        self.member = member
        self.timeout = timeout
        self.number = plan.epoch
        self.life = Lifetime(plan.epoch, on_peer_failure, self._explain)
        self.links = Links(self.life, plan.members, member, stand)
        self.receives = Receives(self.links)
        self.groups = Groups(self.links, self.store, member, address, timeout)
        self._mesh = Mesh(self.life, plan.members, member, secret, silence_s)
        self._address, self._silence_s, self._secret = address, silence_s, secret
        self._awaited, self._tell_after_s = awaited, tell_after_s
        self._client: Client | None = None
        self._transports = 0
        self._meetings: Counter[str] = Counter()

    # -- entering ----------------------------------------------------------------------------------------
    def open(self, store_address: tuple[str, int]) -> None:
        """Connect to the epoch's store and, through it, to all its members. Collective over all of them."""
        with self.life.calling("attaching", self.plan.store_host):
            self._connect_store(store_address)
            addresses = self._await_addresses(self._mesh.listen(self._address))
            with closing(self._mesh.connect(addresses, self.timeout)) as connected:
                for member, connection in connected:
                    self.links.add(member, connection)

    def _connect_store(self, store_address: tuple[str, int]) -> None:
        host = self.plan.store_host
        try:
            family, name = sockets.resolve(*store_address)
        except OSError as error:
            raise self.life.lost(host, f"resolving {store_address[0]!r} failed: {error}") from error
        connection = self.life.own(socket.socket(family, socket.SOCK_STREAM))
        try:
            connection.settimeout(min(self.timeout.total_seconds(), self._silence_s))
            connection.connect(name)
            sockets.watch_silence(connection, self._silence_s)
            self._client = Client(connection, self.number, self.timeout, self._secret, self.member, host)
        except OSError as error:
            self.life.check("attaching")
            raise self.life.lost(host, f"connecting to the store at {store_address} failed: {error}") from error

    def _await_addresses(self, mine: str) -> dict[str, str]:
        """Where all members listen; tells after a while, and then more and more rarely, who has not come."""
        begin, pause, limit = time.monotonic(), self._tell_after_s, self.timeout.total_seconds()
        store, members = self.store("place/"), self.plan.members
        while True:
            left = begin + limit - time.monotonic()
            try:
                wait = timedelta(seconds=max(0.0, min(pause, left)))
                return store.exchange("link", self.member, mine, members, wait)
            except dist.DistStoreError:
                if left <= pause:
                    raise
            self._awaited([m for m in members if not store.check([f"link/{m}"])], time.monotonic() - begin)
            pause *= 2

    # -- in it -------------------------------------------------------------------------------------------
    @property
    def waiting(self) -> bool:
        """Whether a caller may be blocked in it, or it has ended."""
        return self.life.aborted is not None or self.life.blocked > 0 or self.links.waiting > 0

    def store(self, prefix: str) -> TorchStore:
        """The keys with ``prefix`` of the epoch's store; raises ``EpochChanged`` if aborted or destroyed."""
        if self._client is None or self.life.aborted is not None:
            raise self.life.ended("using the store")
        return TorchStore(self._client, prefix)

    def next_transport(self) -> int:
        """Number of the transport that is being opened; equal on all members, as they open them in one order."""
        self._transports += 1
        return self._transports

    def meet(self, operation: str, group: str, members: Sequence[str], timeout: timedelta) -> None:
        """Wait until ``members`` meet this one; see :meth:`Links.meet`. They meet in one order in a ``group``."""
        self._meetings[group] += 1
        key = f"meeting/{group}/{self._meetings[group]}".encode()
        self.links.meet(operation, key, [member for member in members if member != self.member], timeout)

    def _explain(self, host: str | None, port: int | None) -> EpochChanged | None:
        """Why a connection of gloo broke, as far as our own connections tell; waits a moment for them.

        Returns:
            ``PeerLost``, or ``EpochChanged`` if the member only left the epoch; ``None`` if nothing is known.
        """
        member = self.groups.member_at(host, port)
        return self.links.await_failure(self.plan.members if member is None else [member], _PROBE)

    # -- leaving -----------------------------------------------------------------------------------------
    def abort(self, reason: str) -> None:
        """Make everything in this epoch raise ``EpochChanged``; from any thread, any number of times."""
        self.life.abort(reason, self.groups.interrupt)

    def destroy(self) -> None:
        """Release groups, sockets and threads. Called by the main thread, which is in no operation of this epoch."""
        self.abort("left")
        # Another thread may be in the middle of it, about to shut down what is released here.
        self.life.await_abort()
        self.links.close()
        self._client = None
        self.groups.destroy()
        self.life.close()
