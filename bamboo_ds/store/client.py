"""The store: a namespace in etcd, with reconnection, failover and watches that do not go silent."""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..errors import ConfigError, LeaseExpired, StoreError
from ..secret import ENV_SECRET_FILE, NONE, JobSecret
from .connection import Credentials, EtcdAnswer, EtcdConnection, Link, rpc
from .endpoints import parse_endpoints, read_certificates
from .keyspace import Keyspace
from .records import KeyValue, Snapshot, TlsFiles, WatchEvent
from .watch import Watch

log = logging.getLogger(__name__)

#: What etcd takes in one transaction by default (its option max-txn-ops).
_TXN_OPERATIONS = 128


class Store:
    """One namespace of an etcd cluster. Thread-safe.

    Connects on first use, to the first endpoint that answers. Every method that talks to etcd
    retries on connection errors, over all endpoints in turn, until ``timeout_s`` has passed, and then
    raises :class:`StoreUnavailable`; after that error a write may or may not have taken place, or may
    still do so. A request that etcd refuses (permissions, sizes) raises :class:`StoreError` at once.

    Args:
        endpoints: ``http://host:port``, ``https://host:port`` or ``host:port`` of cluster members, or the URL of an
            :class:`~.embedded.EmbeddedEtcd`.
        namespace: prefix of all keys, such as ``/bamboo/<job>/``.
        tls: certificate files; ``None`` for plain text, or for the system's roots with ``https``.
        user: name to authenticate with; needs ``password``.
        password: never logged.
        secret: the job's: it opens the job's own etcd; values are written with a tag by it, and not genuine without.
        timeout_s: seconds that a request may take, with all its retries.

    Raises:
        ConfigError: an endpoint, a TLS file or a pair of credentials cannot be right, or the secret is missing.

    Importing this module raises :class:`StoreError` if ``etcd3`` cannot be used with the installed protobuf.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        namespace: str,
        tls: TlsFiles | None = None,
        user: str | None = None,
        password: str | None = None,
        secret: JobSecret = NONE,
        timeout_s: float = 5.0,
    ) -> None:
        if (user is None) != (password is None):
            missing = "password" if password is None else "user"
            raise ConfigError(f"store.{missing} is not set: set store.user and the password, or neither")
        if timeout_s <= 0:
            raise ConfigError(f"store.timeout_s is {timeout_s:g}; it must be positive")
        self._keys = Keyspace(namespace, secret)
        places = parse_endpoints(endpoints, tls)
        if user is not None and any(not place.secure and not place.loopback for place in places):
            log.warning("the store's password goes over the network in plain text: use https endpoints")
        own = None
        for place in [place for place in places if place.own]:
            if not secret:
                raise ConfigError(
                    f"{place} is the etcd of a job with a secret: set {ENV_SECRET_FILE} to a copy of that"
                )
            from .certificates import certificates_of

            own = certificates_of(secret, namespace)
        self._connection = EtcdConnection(places, Credentials(read_certificates(tls), own, user, password), timeout_s)
        self._lock = threading.Lock()
        self._watches: set[Watch] = set()

    def ping(self) -> float:
        """Seconds that a linearizable read takes; raises like every request."""
        begin = time.monotonic()
        self._connection.call(_range, rpc.RangeRequest(key=self._keys.absolute("ping"), count_only=True))
        return time.monotonic() - begin

    def get(self, key: str) -> KeyValue | None:
        """The newest value of ``key``, ``None`` if absent (linearizable)."""
        response = self._connection.call(_range, rpc.RangeRequest(key=self._keys.absolute(key))).message
        return self._keys.key_value(response.kvs[0]) if response.kvs else None

    def get_prefix(self, *prefixes: str) -> Snapshot:
        """All keys that start with one of ``prefixes`` at one revision (linearizable).

        Each is read by a request of its own: a client that goes away while a transaction reads for it ends an etcd
        before 3.5.6 (etcd#14110).
        """
        while True:
            try:
                return self._at_one_revision(prefixes)
            except StoreError as error:
                if "required revision" not in str(error):
                    raise
                log.info("etcd no longer has the revision that was read first: %s", error)

    def _at_one_revision(self, prefixes: Sequence[str]) -> Snapshot:
        """Does as :meth:`get_prefix`. It fails where etcd has compacted or lost what it has told of the first one."""
        revision, found = 0, []
        for prefix in prefixes:
            request = rpc.RangeRequest(**self._keys.bounds(prefix), revision=revision)
            response = self._connection.call(_range, request).message
            revision = revision or response.header.revision
            found += response.kvs
        return Snapshot({kv.key: kv for kv in map(self._keys.key_value, found)}, revision)

    def folders(self) -> list[str]:
        """The beginnings of the namespace's keys up to their first slash, each once."""
        request = rpc.RangeRequest(**self._keys.bounds(""), keys_only=True)
        response = self._connection.call(_range, request).message
        parts = (self._keys.key_value(kv).key.partition("/") for kv in response.kvs)
        return list(dict.fromkeys(name for name, slash, _ in parts if slash))

    def put(self, key: str, value: str, lease: Lease | None = None) -> int:
        """Sets ``key``; returns the revision. Raises :class:`LeaseExpired` if ``lease`` is gone."""
        request = self._put_request(key, value, lease)
        return int(self._connection.call(lambda link: link.kv.Put, request).message.header.revision)

    def put_all(self, values: Mapping[str, str], erase: Iterable[str] = ()) -> None:
        """Sets all ``values`` by key, and deletes the keys of ``erase``, in one write."""
        puts = [rpc.RequestOp(request_put=self._put_request(key, value, None)) for key, value in values.items()]
        request = rpc.TxnRequest(success=[*puts, *map(self._erase, erase)])
        self._connection.call(lambda link: link.kv.Txn, request)

    def create(self, key: str, value: str, lease: Lease | None = None) -> bool:
        """Sets ``key`` only if it is absent; same as ``compare_and_swap(key, 0, value, lease)``."""
        return self.compare_and_swap(key, 0, value, lease)

    def compare_and_swap(
        self,
        key: str,
        mod_revision: int,
        value: str,
        lease: Lease | None = None,
        given: Mapping[str, int] | None = None,
        also: Mapping[str, str] | None = None,
    ) -> bool:
        """Sets ``key`` only if its ``mod_revision`` still is the given one (0: only if absent).

        With ``given`` only if those other keys have these ``mod_revision``s (0: are absent), too. With ``also`` other
        keys are set in the same write, before it.

        True if this call wrote. If the connection broke before the answer came, the write is repeated
        under the same condition, and finding exactly ``value`` and ``lease`` in place then counts as
        own success. False therefore means that another process wrote since: read again. Raises
        :class:`LeaseExpired` if ``lease`` is gone.
        """
        puts = [self._put_request(other, text, None) for other, text in (also or {}).items()]
        puts.append(self._put_request(key, value, lease))
        writes = [rpc.RequestOp(request_put=put) for put in puts]
        answer = self._transaction(key, mod_revision, writes, given)
        if answer.message.succeeded:
            return True
        # An attempt whose answer was lost may have written already, and so have failed its own repetition.
        found = answer.message.responses[0].response_range.kvs
        if not answer.ambiguous or not found:
            return False
        present = self._keys.key_value(found[0])
        mine = (value, lease.id if lease else None)
        newer = present.genuine and present.mod_revision > mod_revision
        return newer and (present.value, present.lease) == mine

    def delete(self, key: str) -> bool:
        """Deletes ``key``; True if it existed (or if the connection broke and it is gone now)."""
        answer = self._connection.call(_delete, rpc.DeleteRangeRequest(key=self._keys.absolute(key)))
        return bool(answer.message.deleted) or answer.ambiguous

    def compare_and_delete(self, key: str, mod_revision: int) -> bool:
        """Deletes ``key`` only if its ``mod_revision`` still is the given one; True if this call has deleted it."""
        answer = self._transaction(key, mod_revision, [self._erase(key)])
        if answer.message.succeeded:
            return True
        return answer.ambiguous and not answer.message.responses[0].response_range.kvs

    def delete_keys(self, keys: Iterable[str]) -> None:
        """Deletes these keys, as many in one transaction as etcd takes."""
        erase = [self._erase(key) for key in keys]
        for first in range(0, len(erase), _TXN_OPERATIONS):
            request = rpc.TxnRequest(success=erase[first : first + _TXN_OPERATIONS])
            self._connection.call(lambda link: link.kv.Txn, request)

    def delete_prefix(self, prefix: str) -> int:
        """Deletes all keys that start with ``prefix``; returns how many the last attempt found."""
        request = rpc.DeleteRangeRequest(**self._keys.bounds(prefix))
        return int(self._connection.call(_delete, request).message.deleted)

    def lease(self, ttl_s: float) -> Lease:
        """A new lease; etcd counts whole seconds (rounded up) and may grant more than asked for."""
        if ttl_s <= 0:
            raise ConfigError(f"the time to live of a lease must be positive, not {ttl_s:g} s")
        # Numbered here, so that a repetition after a lost answer does not make a second one.
        lease_id = secrets.randbelow(2**63 - 1) + 1
        request = rpc.LeaseGrantRequest(TTL=math.ceil(ttl_s), ID=lease_id)
        try:
            response = self._connection.call(lambda link: link.lease.LeaseGrant, request).message
        except StoreError as error:
            if "lease already exists" not in str(error):
                raise
            lease = Lease(self._connection, lease_id, 0)
            if not lease.refresh():
                raise LeaseExpired("the new lease ran out before it was in use: etcd is overloaded") from error
            return lease
        return Lease(self._connection, response.ID, response.TTL)

    def watch(
        self,
        prefix: str | Sequence[str],
        callback: Callable[[WatchEvent], None],
        start_revision: int | None = None,
        *,
        on_error: Callable[[BaseException], None] | None = None,
    ) -> Watch:
        """Calls ``callback`` for every change under ``prefix``, in order, each once.

        With several prefixes changes under each are in order; those under different ones may come in another order.

        Usual order: ``snapshot = get_prefix(p)``, handle it, ``watch(p, callback, snapshot.revision + 1)``.
        The watch outlives broken connections and restarts of etcd: it goes on after the last revision
        it saw. That a connection is silently dead is noticed by requests alone: whoever watches has to make some.

        Callbacks run one at a time in the watch's own thread; they may call any method of the store.
        It ends by a callback that raises, by a refusal of etcd (permission withdrawn), and where it cannot go on: etcd
        has compacted what comes next, or lost data. The exception is kept in :attr:`Watch.error`, logged, and passed to
        ``on_error``; after a :class:`StoreError` read the prefix again.

        Args:
            prefix: keys to watch; an exact key is a prefix too. None of several begins with another one.
            callback: called from the watch's thread.
            start_revision: first revision to report; ``None`` for changes after this call.
            on_error: called once, from the watch's thread, if the watch ends by an error.
        """
        prefixes = (prefix,) if isinstance(prefix, str) else tuple(prefix)
        if start_revision is None:
            start_revision = self.get_prefix(*prefixes).revision + 1
        watch = Watch(self._connection, self._keys, prefixes, callback, start_revision, on_error, self._forget)
        with self._lock:
            if self._connection.closed.is_set():
                raise StoreError("the store is closed")
            self._watches.add(watch)
        watch.start()
        return watch

    def close(self) -> None:
        """Ends all watches, threads and connections; leases stay. Idempotent."""
        self._connection.close()
        with self._lock:
            watches = list(self._watches)
        for watch in watches:
            watch.cancel()

    def _put_request(self, key: str, value: str, lease: Lease | None) -> Any:
        data = self._keys.value(key, value)
        return rpc.PutRequest(key=self._keys.absolute(key), value=data, lease=lease.id if lease else 0)

    def _erase(self, key: str) -> Any:
        return rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=self._keys.absolute(key)))

    def _transaction(
        self, key: str, mod_revision: int, operations: Sequence[Any], given: Mapping[str, int] | None = None
    ) -> EtcdAnswer:
        """Carries out ``operations`` if ``key`` is still at ``mod_revision``, and others as ``given``; else read it."""
        name = self._keys.absolute(key)
        equal, mod = rpc.Compare.EQUAL, rpc.Compare.MOD
        compare = [
            rpc.Compare(result=equal, target=mod, key=self._keys.absolute(each), mod_revision=revision)
            for each, revision in {**(given or {}), key: mod_revision}.items()
        ]
        read = rpc.RequestOp(request_range=rpc.RangeRequest(key=name))
        request = rpc.TxnRequest(compare=compare, success=operations, failure=[read])
        return self._connection.call(lambda link: link.kv.Txn, request)

    def _forget(self, watch: Watch) -> None:
        with self._lock:
            self._watches.discard(watch)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Lease:
    """A time to live shared by the keys put under it. Made by :meth:`Store.lease`. Thread-safe.

    It is never refreshed by itself: the holder calls :meth:`refresh` to show that it is alive.

    Attributes:
        id: etcd's number of the lease.
        ttl_s: seconds granted, counted from each refresh.
    """

    def __init__(self, connection: EtcdConnection, lease_id: int, ttl_s: float) -> None:
        self.id = lease_id
        self.ttl_s = float(ttl_s)
        self._connection = connection

    def refresh(self) -> bool:
        """Starts the time to live anew. False if the lease is gone (its keys too); make a new one then.

        Raises :class:`StoreUnavailable` if etcd does not answer; the lease may be alive then.
        """
        request = rpc.LeaseKeepAliveRequest(ID=self.id)
        ttl = float(self._connection.call(lambda link: link.keep_alive, request).message.TTL)
        if ttl <= 0:
            return False
        self.ttl_s = ttl
        return True

    def revoke(self) -> None:
        """Ends the lease and deletes its keys at once. No error if it is gone already."""
        try:
            self._connection.call(lambda link: link.lease.LeaseRevoke, rpc.LeaseRevokeRequest(ID=self.id))
        except LeaseExpired:
            log.debug("lease %x was gone before it was revoked", self.id)


def _range(link: Link) -> Any:
    return link.kv.Range


def _delete(link: Link) -> Any:
    return link.kv.DeleteRange
