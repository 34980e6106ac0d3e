"""An etcd in simulated time, and the store through which each host sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bamboo_ds.control.registry.keys import Keys
from bamboo_ds.errors import LeaseExpired, StoreError, StoreUnavailable
from bamboo_ds.store.records import KeyValue, Snapshot, WatchEvent

if TYPE_CHECKING:
    from .fencing_model import World
    from .simulated_members import Host

TTL_S = 2.0


class Etcd:
    """Keys, revisions, leases, and all changes in order."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.revision = 1
        self.up = True
        self.keys: dict[str, KeyValue] = {}
        self.leases: dict[int, float] = {}
        self.changes: list[WatchEvent] = []
        self.compacted = 0  # changes up to this revision are gone
        self.refusals = 0  # times that all watches were refused
        self._ids = 0

    def grant(self) -> int:
        self._ids += 1
        self.leases[self._ids] = self._world.now + TTL_S
        return self._ids

    def expire(self) -> None:
        """End what has run out, unless etcd is away: then nobody's time passes, and all begin anew at its return."""
        if self.up:
            for lease in [lease for lease, end in self.leases.items() if end <= self._world.now]:
                self.revoke(lease)

    def revoke(self, lease: int) -> None:
        if self.leases.pop(lease, None) is not None:
            for key in [key for key, entry in self.keys.items() if entry.lease == lease]:
                self.delete(key)

    def put(self, key: str, value: str, lease: int | None, by: str) -> int:
        if lease is not None and lease not in self.leases:
            raise LeaseExpired("gone")
        self.revision += 1
        before = self.keys.get(key)
        created = before.create_revision if before else self.revision
        entry = KeyValue(key, value, self.revision, created, lease)
        self._world.check_write(key, value, by)
        self.keys[key] = entry
        self.changes.append(WatchEvent("put", key, entry))
        return self.revision

    def delete(self, key: str) -> bool:
        if self.keys.pop(key, None) is None:
            return False
        self.revision += 1
        self.changes.append(WatchEvent("delete", key, KeyValue(key, "", self.revision, 0)))
        return True

    def mod(self, key: str) -> int:
        entry = self.keys.get(key)
        return entry.mod_revision if entry else 0


class SimLease:
    """As :class:`bamboo_ds.store.Lease`."""

    def __init__(self, store: SimStore, number: int) -> None:
        self.id, self._store = number, store

    def refresh(self) -> bool:
        etcd = self._store.etcd

        def again() -> bool:
            if self.id in etcd.leases:
                etcd.leases[self.id] = self._store.world.now + TTL_S
            return self.id in etcd.leases

        return bool(self._store.request(again))

    def revoke(self) -> None:
        self._store.request(lambda: self._store.etcd.revoke(self.id))


class SimStore:
    """As :class:`bamboo_ds.store.Store`, on one host."""

    def __init__(self, world: World, host: Host) -> None:
        self.world, self.etcd, self.host = world, world.etcd, host
        self.by = ""
        self.closed = self._seen = False
        self._next = 0
        self._watched: tuple[str, ...] = ()
        self._observe: Callable[[WatchEvent], None] | None = None
        self._on_error: Callable[[BaseException], None]
        self._refused = 0

    def request(self, action: Callable[[], Any], key: str = "") -> Any:
        host, world = self.host, self.world
        if host.hold_s and not host.held and host.hold_at in ("", key):
            seconds, host.hold_s = host.hold_s, 0.0
            world.happened["hold"] += 1
            host.held = True
            world.advance(seconds)
            host.held = False
        if not self.etcd.up or not host.etcd or not host.alive:
            raise StoreUnavailable("no answer")
        result = action()
        if host.lose:
            host.lose = False
            world.happened["lose"] += 1
            raise StoreUnavailable("the answer was lost")
        return result

    def ping(self) -> float:
        return self.request(lambda: 0.0)  # type: ignore[no-any-return]

    def get(self, key: str) -> KeyValue | None:
        return self.request(lambda: self.etcd.keys.get(key))  # type: ignore[no-any-return]

    def get_prefix(self, *prefixes: str) -> Snapshot:
        def read() -> Snapshot:
            found = {key: entry for key, entry in self.etcd.keys.items() if key.startswith(prefixes)}
            return Snapshot(found, self.etcd.revision)

        return self.request(read)  # type: ignore[no-any-return]

    def put(self, key: str, value: str, lease: SimLease | None = None) -> int:
        return self.request(lambda: self.etcd.put(key, value, lease.id if lease else None, self.by))  # type: ignore[no-any-return]

    def put_all(self, values: Mapping[str, str], erase: Iterable[str] = ()) -> None:
        def write() -> None:
            for key, value in values.items():
                self.etcd.put(key, value, None, self.by)
            for key in erase:
                self.etcd.delete(key)

        self.request(write)

    def create(
        self, key: str, value: str, lease: SimLease | None = None, given: Mapping[str, int] | None = None
    ) -> bool:
        return self.compare_and_swap(key, 0, value, lease, given)

    def compare_and_swap(
        self,
        key: str,
        mod_revision: int,
        value: str,
        lease: SimLease | None = None,
        given: Mapping[str, int] | None = None,
        also: Mapping[str, str] | None = None,
    ) -> bool:
        expected = {key: mod_revision, **({} if "stop" in self.world.off else given or {})}
        if "swap" in self.world.off and key == Keys.PLAN:
            expected = {}

        def swap() -> bool:
            if any(self.etcd.mod(each) != revision for each, revision in expected.items()):
                return False
            for other, text in (also or {}).items():
                self.etcd.put(other, text, None, self.by)
            self.etcd.put(key, value, lease.id if lease else None, self.by)
            return True

        return self.request(swap, key)  # type: ignore[no-any-return]

    def delete(self, key: str) -> bool:
        return self.request(lambda: self.etcd.delete(key))  # type: ignore[no-any-return]

    def compare_and_delete(self, key: str, mod_revision: int) -> bool:
        return self.request(lambda: self.etcd.mod(key) == mod_revision and self.etcd.delete(key))  # type: ignore[no-any-return]

    def delete_keys(self, keys: Iterable[str]) -> None:
        self.request(lambda: [self.etcd.delete(key) for key in keys])

    def lease(self, ttl_s: float) -> SimLease:
        return SimLease(self, self.request(self.etcd.grant))

    def watch(
        self, prefixes: Sequence[str], callback: Callable[[WatchEvent], None], start: int, *, on_error: Any
    ) -> SimStore:
        self._observe, self._on_error, self._refused = callback, on_error, self.etcd.refusals
        self._watched = tuple(prefixes)
        changes = self.etcd.changes
        self._next = next((n for n, event in enumerate(changes) if event.kv.mod_revision >= start), len(changes))
        return self

    def deliver(self) -> bool:
        """Hand over what has changed since the last time; whether there was anything."""
        changes = self.etcd.changes
        if self._observe is None or self._next == len(changes) or self.host.mute:
            return False
        if not self.etcd.up or not self.host.etcd:
            return False
        if self._refused < self.etcd.refusals:
            self.world.happened["watch refused"] += 1
            self._observe = None
            self._on_error(StoreError("the watch was refused"))
            return True
        if changes[self._next].kv.mod_revision <= self.etcd.compacted:
            self.world.happened["compacted"] += 1
            self._observe = None
            self._on_error(StoreError("etcd has compacted what comes next"))
            return True
        for event in changes[self._next :]:
            if event.key.startswith(self._watched):
                self._observe(event)
        self._next = len(changes)
        return True

    def cancel(self, wait: bool = True) -> None:
        """As of the watch that is running."""
        self._observe = None

    def close(self) -> None:
        self.closed, self._observe = True, None

    def __enter__(self) -> SimStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
