"""Watches of the store through kills, pauses, compaction, lost data and broken connections."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest

from bamboo_ds.errors import StoreError, StoreUnavailable
from bamboo_ds.store.client import Store
from tests.support.etcd import (
    EtcdServer,
    Proxy,
    Recorder,
    new_namespace,
    wait_until,
)

pytestmark = [pytest.mark.claim("concepts.md", "guides/elastic.md"), pytest.mark.usefixtures("leak_gate")]


def test_watch_from_a_snapshot_misses_and_repeats_nothing(store: Store) -> None:
    store.put("members/a", "1")
    snapshot = store.get_prefix("members/")
    store.put("members/b", "2")
    store.put("other", "3")
    seen = Recorder()
    watch = store.watch("members/", seen, snapshot.revision + 1)
    store.delete("members/a")
    seen.wait(lambda events: len(events) == 2)
    assert seen.seen == [("put", "members/b", "2"), ("delete", "members/a", "")]
    watch.cancel()
    store.put("members/c", "4")
    assert len(seen.seen) == 2 and watch.error is None


def test_a_watch_of_several_prefixes_brings_what_is_under_them_and_nothing_else(own_etcd: EtcdServer) -> None:
    """Each change once, also where etcd has been started again meanwhile and some prefixes had none for long."""
    with Store([own_etcd.url], namespace="/bamboo/j/", timeout_s=20.0) as store:
        store.put("plan", "1")
        snapshot = store.get_prefix("plan", "leave/a", "hosts/x/")
        assert snapshot.entries.keys() == {"plan"}
        for key in ("hosts/x/b", "hosts/y/b", "leave/b", "plan"):
            store.put(key, "2")
        seen = Recorder()
        watch = store.watch(("plan", "leave/a", "hosts/x/"), seen, snapshot.revision + 1)
        seen.wait(lambda events: len(events) == 2)
        own_etcd.restart()
        for key in ("members/a", "leave/a", "plan"):
            store.put(key, "3")
        store.delete("hosts/x/b")
        seen.wait(lambda events: len(events) == 5)
        assert watch.reconnects
        found = [(kind, key, value) for kind, key, value in seen.seen if key == "plan"]
        assert found == [("put", "plan", "2"), ("put", "plan", "3")]
        others = [("delete", "hosts/x/b", ""), ("put", "hosts/x/b", "2"), ("put", "leave/a", "3")]
        assert sorted(each for each in seen.seen if each[1] != "plan") == others
        watch.cancel()


def test_watch_survives_a_stopped_etcd(own_etcd: EtcdServer) -> None:
    with Store([own_etcd.url], namespace="/bamboo/j/") as store:
        seen = Recorder()
        watch = store.watch("", seen)
        store.put("a", "1")
        seen.wait_for("put", "a")
        own_etcd.pause()
        try:
            with pytest.raises(StoreUnavailable):
                store.ping()
            wait_until(lambda: watch.reconnects > 0, "the silent connection noticed", 20.0)
        finally:
            own_etcd.resume()
        store.put("b", "2")
        seen.wait_for("put", "b")
        assert seen.seen == [("put", "a", "1"), ("put", "b", "2")]


def test_watch_ends_where_it_cannot_go_on(own_etcd: EtcdServer) -> None:
    """Etcd has compacted what comes next, or lost data. Who watches reads the prefix again."""
    told: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
    with (
        Proxy(own_etcd.port) as proxy,
        Store([proxy.url], namespace="/bamboo/j/") as store,
        Store([own_etcd.url], namespace="/bamboo/j/") as other,
    ):
        seen = Recorder()
        watch = store.watch("", seen, on_error=told.put)
        other.put("a", "1")
        seen.wait_for("put", "a")
        proxy.set("cut")
        start = other.put("a", "2")
        own_etcd.compact(other.put("a", "3"))
        proxy.set("pass")
        error = told.get(timeout=20.0)
        assert isinstance(error, StoreError) and "compacted" in str(error) and watch.error is error
        store.watch("", seen, start, on_error=told.put)
        assert "read the prefix again" in str(told.get(timeout=20.0))
        assert seen.seen == [("put", "a", "1")]
        store.watch("", seen, on_error=told.put)
        own_etcd.restart(empty=True)
        error = told.get(timeout=20.0)
        assert isinstance(error, StoreError) and "has lost data" in str(error)
        assert told.empty() and len(seen.seen) == 1


def test_a_callback_that_raises_ends_its_watch_only(store: Store) -> None:
    def broken(_: object) -> None:
        raise StoreUnavailable("from the callback")

    told: list[BaseException] = []
    bad, seen = store.watch("", broken, on_error=told.append), Recorder()
    good = store.watch("", seen)
    store.put("a", "1")
    seen.wait_for("put", "a")
    wait_until(lambda: told, "on_error")
    assert isinstance(bad.error, StoreUnavailable) and told == [bad.error]
    assert good.error is None
    bad.cancel()


def test_a_callback_may_use_and_close_the_store(etcd: EtcdServer) -> None:
    store = Store([etcd.url], namespace=new_namespace())
    closed = threading.Event()

    def use(_: object) -> None:
        store.put("b/answer", "1")
        watch.cancel()
        store.close()
        closed.set()

    watch = store.watch("a/", use)
    store.put("a/question", "1")
    assert closed.wait(10)
    with pytest.raises(StoreError, match="closed"):
        store.get("a/question")


@pytest.mark.parametrize("seed", [1, 2])
def test_watch_is_exact_through_random_faults(own_etcd: EtcdServer, seed: int) -> None:
    """Each change once and in order, while the connection is cut, deaf or silent and etcd is paused or killed."""
    random = Random(seed)
    with (
        Proxy(own_etcd.port) as proxy,
        Store([proxy.url], namespace="/bamboo/j/") as store,
        Store([own_etcd.url], namespace="/bamboo/j/", timeout_s=20.0) as writer,
        ThreadPoolExecutor(1) as pool,
    ):
        seen = Recorder()
        watch = store.watch("", seen)
        done, whole = threading.Event(), threading.Lock()

        def write() -> list[tuple[str, int]]:
            pause, written, number = threading.Event(), [], 0
            while not done.is_set():
                number += 1
                with whole:
                    written.append((f"k{number % 7}", writer.put(f"k{number % 7}", str(number))))
                pause.wait(0.002)
            return written

        future, pause = pool.submit(write), threading.Event()
        for fault in random.choices(["cut", "cut", "cut", "pause", "restart", "hole"], k=8):
            pause.wait(random.random() * 0.2)
            if fault == "pause":
                own_etcd.pause()
                pause.wait(random.random() * 0.3)
                own_etcd.resume()
            elif fault == "restart":
                with whole:  # see EtcdServer.restart(): what is acknowledged must be on the disk
                    own_etcd.restart()
            else:
                proxy.set(fault)
                pause.wait(random.random() * 0.3)
                proxy.set("cut")  # what a hole has swallowed is lost: no stream can go on behind it
                proxy.set("pass")
        done.set()
        written = future.result(20)
        writer.put("end", "")
        seen.wait_for("put", "end")
        revisions = [event.kv.mod_revision for event in seen.events]
        assert revisions == sorted(set(revisions))
        # A put that was repeated after a lost answer has two revisions, of which its caller knows one.
        assert set(written) <= {(event.key, event.kv.mod_revision) for event in seen.events}
        assert revisions == list(range(revisions[0], revisions[-1] + 1)), "a change was missed"
        # Cuts that follow each other quickly are one reconnection; pauses need none.
        assert watch.reconnects >= 1
        assert watch.error is None
