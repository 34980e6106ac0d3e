"""The store against a real etcd: keys, races, leases, endpoints, and etcd3 itself."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from bamboo_ds.control.registry.keys import Keys
from bamboo_ds.control.registry.vacancies import claim_slot
from bamboo_ds.errors import ConfigError, LeaseExpired, StoreError, StoreUnavailable
from bamboo_ds.store.client import Store
from bamboo_ds.store.connection import Broken, EtcdAnswer, Silent
from bamboo_ds.store.records import TlsFiles
from tests.support.etcd import (
    EtcdServer,
    Proxy,
    Recorder,
    new_namespace,
    wait_until,
)
from tests.support.patience import Patience

pytestmark = [
    pytest.mark.claim(
        "concepts.md", "guides/elastic.md", "guides/observing.md", "reference/cli.md", "reference/settings.md"
    ),
    pytest.mark.usefixtures("leak_gate"),
]


def test_put_get_delete(store: Store) -> None:
    assert store.get("plan") is None
    revision = store.put("plan", "älter")
    found = store.get("plan")
    assert found is not None
    assert (found.key, found.value, found.mod_revision, found.lease) == ("plan", "älter", revision, None)
    store.put("plan", "new")
    again = store.get("plan")
    assert again is not None and again.create_revision == revision and again.mod_revision > revision
    assert store.delete("plan") and not store.delete("plan")
    assert store.ping() > 0


def test_prefix_is_a_snapshot_of_the_namespace_only(etcd: EtcdServer, store: Store) -> None:
    with Store([etcd.url], namespace=new_namespace()) as other:
        other.put("members/x", "not mine")
        for name in ("members/b", "members/a", "membership"):
            store.put(name, name.upper())
        snapshot = store.get_prefix("members/")
        assert {key: kv.value for key, kv in snapshot.entries.items()} == {
            "members/a": "MEMBERS/A",
            "members/b": "MEMBERS/B",
        }
        assert snapshot.revision >= max(kv.mod_revision for kv in snapshot.entries.values())
        assert len(store.get_prefix("").entries) == 3
        assert store.delete_prefix("members/") == 2
        assert list(store.get_prefix("").entries) == ["membership"]
        assert other.get("members/x") is not None


def test_several_prefixes_are_read_at_one_revision(own_etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two reads another client writes; once, etcd has compacted what the first one has read."""
    with Store([own_etcd.url], namespace="/bamboo/j/") as store, Store([own_etcd.url], namespace="/bamboo/j/") as other:
        call, reads = store._connection.call, 0

        def watched(method: Any, request: Any) -> EtcdAnswer:
            nonlocal reads
            answer, reads = call(method, request), reads + 1
            newest = other.put("b", str(reads))
            if reads == 1:
                own_etcd.compact(newest)
            return answer

        other.put("a", "0")
        monkeypatch.setattr(store._connection, "call", watched)
        found = store.get_prefix("a", "b")
        # The second one fails and is not counted; those after it are of the revision that the put after the first made.
        assert reads == 3 and {key: kv.value for key, kv in found.entries.items()} == {"a": "0", "b": "1"}
        assert found.revision == found.entries["b"].mod_revision


def test_clients_that_go_away_while_they_read_do_not_end_etcd(own_etcd: EtcdServer) -> None:
    """An etcd before 3.5.6 ends by that where a transaction reads (etcd#14110)."""
    with Store([own_etcd.url], namespace="/bamboo/j/") as store:
        for first in range(0, 2000, 100):
            store.put_all({f"members/{number}": "x" * 200 for number in range(first, first + 100)})
        store.get_prefix("members/", "known/")
        begin = time.monotonic()
        store.get_prefix("members/", "known/")
        whole, cut, patience = time.monotonic() - begin, 0, Patience(20)
        for part in itertools.cycle(range(20)):
            with Store([own_etcd.url], namespace="/bamboo/j/") as other, ThreadPoolExecutor(1) as pool:
                other.ping()
                reading = pool.submit(other.get_prefix, "members/", "known/")
                concurrent.futures.wait([reading], whole * part / 20)
                other.close()
                cut += isinstance(reading.exception(), StoreError)
            own_etcd.check()
            assert not patience.over(), cut
            if cut == 20:
                break
        assert len(store.get_prefix("members/").entries) == 2000


def test_folders_of_a_namespace(store: Store) -> None:
    """Each once, however many keys it has; one name may be the beginning of another."""
    assert store.folders() == []
    for key in ("b/plan", "b/members/x", "a/plan", "a-b/plan", "a.c/plan", "alone", "z"):
        store.put(key, "x" * 100)
    assert sorted(store.folders()) == ["a", "a-b", "a.c", "b"]


def test_compare_and_swap(store: Store) -> None:
    assert store.create("plan", "1")
    assert not store.create("plan", "1")
    first = store.get("plan")
    assert first is not None
    assert store.compare_and_swap("plan", first.mod_revision, "2")
    assert not store.compare_and_swap("plan", first.mod_revision, "3")
    assert not store.compare_and_swap("absent", 7, "3")
    assert not store.compare_and_delete("plan", first.mod_revision)
    second = store.get("plan")
    assert second is not None and second.value == "2"
    assert store.compare_and_delete("plan", second.mod_revision)
    assert store.get("plan") is None


def test_a_write_may_depend_on_other_keys(store: Store) -> None:
    store.put("plan", "1")
    plan = store.get("plan")
    assert plan is not None
    assert not store.compare_and_swap("stop", 0, "x", given={"plan": 0}) and store.get("stop") is None
    assert (
        not store.compare_and_swap("stop", 0, "x", given={"plan": plan.mod_revision, "other": 7})
        and store.get("stop") is None
    )
    assert store.compare_and_swap("stop", 0, "x", given={"plan": plan.mod_revision, "other": 0})
    store.put("plan", "2")
    assert not store.compare_and_swap("stop", 0, "y", given={"plan": plan.mod_revision})


def test_of_racing_writers_exactly_one_wins(etcd: EtcdServer) -> None:
    namespace, rounds, writers = new_namespace(), 40, 4
    with contextlib.ExitStack() as stack:
        stores = [stack.enter_context(Store([etcd.url], namespace=namespace)) for _ in range(2)]
        barrier = threading.Barrier(writers)
        stores[0].put("plan", "0")

        def write(index: int) -> list[bool]:
            mine, wins = stores[index % 2], []
            for turn in range(rounds):
                before = mine.get("plan")
                assert before is not None
                barrier.wait(20)
                wins.append(mine.compare_and_swap("plan", before.mod_revision, f"{turn} by {index}"))
                created = mine.create(f"leader/{turn}", str(index))
                wins.append(created)
                barrier.wait(20)
            return wins

        with ThreadPoolExecutor(writers) as pool:
            results = list(pool.map(write, range(writers)))
    assert [sum(turn) for turn in zip(*results, strict=True)] == [1] * (2 * rounds)


def test_a_lost_answer_is_not_taken_for_a_lost_race(own_etcd: EtcdServer) -> None:
    with (
        Proxy(own_etcd.port) as proxy,
        Store([proxy.url], namespace="/bamboo/j/", timeout_s=8.0) as mine,
        Store([own_etcd.url], namespace="/bamboo/j/") as other,
        ThreadPoolExecutor(1) as pool,
    ):
        lease = mine.lease(30)
        for action in (
            lambda: mine.create("leader", "me", lease),
            lambda: mine.compare_and_swap("leader", other.get("leader").mod_revision, "me again"),  # type: ignore[union-attr]
            lambda: mine.delete("leader"),
        ):
            proxy.swallowed = 0
            before = other.get_prefix("").revision
            proxy.set("deaf")
            future = pool.submit(action)
            proxy.wait_swallowed()
            wait_until(lambda: other.get_prefix("").revision > before, "the write whose answer is lost")  # noqa: B023
            proxy.set("cut")
            proxy.set("pass")
            assert future.result(10) is True
            assert other.get_prefix("").revision == before + 1
        # Somebody else's success stays somebody else's, also after a lost answer.
        other.put("leader", "other")
        proxy.swallowed = 0
        proxy.set("deaf")
        future = pool.submit(mine.create, "leader", "me", lease)
        proxy.wait_swallowed()
        proxy.set("cut")
        proxy.set("pass")
        assert future.result(10) is False


def test_children_start_beside_a_busy_connection(etcd: EtcdServer, store: Store) -> None:
    """Also those that prepare themselves between fork and exec, as launchers do."""
    seen, done = Recorder(), threading.Event()

    def write() -> None:
        while not done.is_set():
            store.put("k", "v")

    with ThreadPoolExecutor(1) as pool:
        store.watch("", seen)
        writing = pool.submit(write)
        seen.wait_for("put", "k")
        try:
            ended = [subprocess.call(["true"], preexec_fn=lambda: None) for _ in range(150)]
        finally:
            done.set()
            writing.result()
    assert not any(ended)


def test_two_comers_never_get_one_slot(own_etcd: EtcdServer) -> None:
    with (
        Proxy(own_etcd.port) as proxy,
        Store([proxy.url], namespace="/bamboo/j/", timeout_s=20.0) as mine,
        Store([own_etcd.url], namespace="/bamboo/j/") as other,
        ThreadPoolExecutor(1) as pool,
    ):
        mine.ping()
        # What is repeated has reached etcd before; or it has not, and meanwhile somebody else was there.
        for mode, first, others, own in (("deaf", 4, 5, 4), ("hole", 10, 10, 11)):
            proxy.swallowed = 0
            proxy.set(mode)
            future = pool.submit(claim_slot, mine, first)
            proxy.wait_swallowed()
            if mode == "deaf":
                wait_until(lambda: other.get(Keys.slot(4)), "the claim whose answer is lost")
            assert claim_slot(other, first) == others
            proxy.set("cut")
            proxy.set("pass")
            assert future.result(20) == own


def test_lease_expiry_deletes(store: Store) -> None:
    seen = Recorder()
    watch = store.watch("members/", seen)
    lease = store.lease(2)
    assert 0 < lease.ttl_s <= 3
    store.put("members/a", "x", lease)
    seen.wait_for("delete", "members/a")
    assert not lease.refresh()
    with pytest.raises(LeaseExpired):
        store.put("members/a", "x", lease)
    with pytest.raises(LeaseExpired):
        store.create("members/a", "x", lease)
    lease.revoke()
    watch.cancel()


def test_refresh_keeps_a_lease(store: Store) -> None:
    lease = store.lease(3)
    store.put("members/a", "x", lease)
    found = store.get("members/a")
    assert found is not None and found.lease == lease.id
    end, pause = time.monotonic() + 1.5 * lease.ttl_s, threading.Event()
    while time.monotonic() < end:
        assert lease.refresh()
        pause.wait(0.3)
    assert store.get("members/a") is not None
    lease.revoke()


def test_a_dead_endpoint_is_skipped(own_etcd: EtcdServer, etcd: EtcdServer) -> None:
    own_etcd.kill()
    with Store([own_etcd.url, etcd.url.removeprefix("http://")], namespace=new_namespace()) as store:
        assert store.create("a", "1")
        found = store.get("a")
        assert found is not None and found.value == "1"


def test_a_silent_endpoint_is_left(etcd: EtcdServer) -> None:
    with (
        Proxy(etcd.port) as proxy,
        Store([proxy.url, etcd.url], namespace=new_namespace(), timeout_s=12.0) as store,
    ):
        seen = Recorder()
        store.watch("", seen)
        store.put("a", "1")
        seen.wait_for("put", "a")
        proxy.set("hole")
        store.put("b", "2")
        seen.wait_for("put", "b", 20.0)
        assert proxy.swallowed and len(seen.seen) == 2


def test_a_slow_etcd_keeps_its_connection_and_its_leases(etcd: EtcdServer) -> None:
    """As under load: what a member asks is answered late, and its watch and its lease go on."""
    namespace, done = new_namespace(), threading.Event()
    with (
        Proxy(etcd.port) as proxy,
        Store([proxy.url] * 3, namespace=namespace, timeout_s=2.0) as store,
        Store([etcd.url], namespace=namespace) as other,
        ThreadPoolExecutor(1) as pool,
    ):
        seen = Recorder()
        watch, lease = store.watch("", seen), store.lease(60)

        def write() -> None:
            while not done.wait(0.1):
                other.put("a", "")

        writer = pool.submit(write)
        try:
            proxy.delay_s = 1.1
            proxy.set("slow")
            assert lease.refresh() and lease.refresh()
            # Too late for a request, but the watch hears of others' writes.
            proxy.delay_s = 2.5
            with pytest.raises(StoreUnavailable, match="deadline exceeded"):
                store.get("a")
        finally:
            done.set()
        writer.result(10)
        assert proxy.delayed and proxy.accepted == 1 and watch.reconnects == 0


def test_it_says_why_it_was_refused_rather_than_that_time_was_up(
    etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons = iter([Silent("no answer"), Broken("the handshake failed")])

    def attempt(*_: object) -> None:
        raise next(reasons, Silent("time was up"))

    with Store([etcd.url], namespace=new_namespace(), timeout_s=0.5) as store:
        monkeypatch.setattr(store._connection, "attempt", attempt)
        with pytest.raises(StoreUnavailable, match=r"last: the handshake failed"):
            store.get("a")
    assert next(reasons, None) is None


def test_unreachable_names_the_endpoints(own_etcd: EtcdServer) -> None:
    own_etcd.kill()
    with Store([own_etcd.url, "127.0.0.1:1"], namespace="/bamboo/j/", timeout_s=1.0) as store:
        begin = time.monotonic()
        with pytest.raises(StoreUnavailable, match=f"(?s){own_etcd.url}.*127.0.0.1:1.*--store"):
            store.get("a")
        assert 0.8 < time.monotonic() - begin < 15
    with (
        Store([own_etcd.url], namespace="/bamboo/j/", timeout_s=20.0) as store,
        ThreadPoolExecutor(1) as pool,
    ):
        future = pool.submit(store.get, "a")
        wait_until(lambda: store._connection._next > 0, "the first attempt")
        store.close()
        with pytest.raises(StoreError, match="closed"):
            future.result(3)


@pytest.mark.integration
def test_bad_settings_are_named(tmp_path: Path) -> None:
    text = tmp_path / "text.pem"
    text.write_text("hello")
    cases: list[tuple[dict[str, object], str]] = [
        ({"endpoints": []}, r"--store \(BAMBOO_STORE\)"),
        ({"endpoints": "http://a:1"}, r"--store \(BAMBOO_STORE\).*list"),
        ({"endpoints": ["http://a"]}, r"--store \(BAMBOO_STORE\).*port"),
        ({"endpoints": ["ftp://a:1"]}, r"--store \(BAMBOO_STORE\).*ftp"),
        ({"endpoints": ["a:99999"]}, r"--store \(BAMBOO_STORE\).*http://host:port"),
        ({"endpoints": ["http://a b:1"]}, r"--store \(BAMBOO_STORE\)"),
        ({"endpoints": ["http://a:1"], "tls": TlsFiles(ca=text)}, r"plain text"),
        ({"tls": TlsFiles(ca=tmp_path / "no")}, r"BAMBOO_STORE_CA.*cannot read"),
        ({"tls": TlsFiles(ca=text)}, r"BAMBOO_STORE_CA.*PEM"),
        ({"tls": TlsFiles(cert=text)}, r"BAMBOO_STORE_KEY is not set"),
        ({"user": "u"}, r"store\.password"),
        ({"namespace": "bamboo"}, r"namespace"),
        ({"timeout_s": 0}, r"timeout_s"),
    ]
    for change, message in cases:
        settings: dict[str, object] = {"endpoints": ["a:1"], "namespace": "/bamboo/j/", **change}
        with pytest.raises(ConfigError, match=message):
            Store(**settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as caught:
        Store(["http://root:geheim@a:1"], namespace="/bamboo/j/")
    assert "geheim" not in str(caught.value)


def run_python(code: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONPATH": str(Path(__file__).parents[2]), **environment},
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.integration
def test_shim_leaves_protobuf_default_pool_alone() -> None:
    out = run_python("""
        from google.protobuf import descriptor_pb2, descriptor_pool
        foreign = descriptor_pb2.FileDescriptorProto(name="rpc.proto", package="foreign")
        descriptor_pool.Default().AddSerializedFile(foreign.SerializeToString())
        from bamboo_ds.store.protobuf_shim import load_etcdrpc
        rpc = load_etcdrpc()
        assert load_etcdrpc() is rpc
        import etcd3
        assert etcd3.etcdrpc is rpc
        request = rpc.TxnRequest(compare=[rpc.Compare(target=rpc.Compare.MOD, key=b"k", mod_revision=3)])
        assert rpc.TxnRequest.FromString(request.SerializeToString()) == request
        print(rpc.Event.PUT if hasattr(rpc, "Event") else "ok")
    """)
    assert out


@pytest.mark.integration
def test_shim_leaves_a_working_etcd3_alone(tmp_path: Path) -> None:
    package = tmp_path / "etcd3" / "etcdrpc"
    package.mkdir(parents=True)
    (tmp_path / "etcd3" / "__init__.py").touch()
    (package / "__init__.py").write_text("from .rpc_pb2 import *\n")
    for name in ("kv_pb2", "auth_pb2"):
        (package / f"{name}.py").write_text("DESCRIPTOR = None\n")
    (package / "rpc_pb2.py").write_text("ORIGINAL = True\n")
    run_python(f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        from bamboo_ds.store.protobuf_shim import load_etcdrpc
        assert load_etcdrpc().ORIGINAL
    """)


@pytest.mark.integration
@pytest.mark.parametrize("fault", ["missing", "foreign"])
def test_shim_says_what_is_wrong(tmp_path: Path, fault: str) -> None:
    package = tmp_path / "etcd3"
    package.mkdir()
    (package / "__init__.py").write_text("raise TypeError('Descriptors cannot be created directly')\n")
    block = "sys.modules['etcd3'] = None" if fault == "missing" else f"sys.path.insert(0, {str(tmp_path)!r})"
    out = run_python(f"""
        import sys
        {block}
        from bamboo_ds.errors import StoreError
        from bamboo_ds.store.protobuf_shim import load_etcdrpc
        try:
            load_etcdrpc()
        except StoreError as error:
            print(error)
    """)
    assert "pip install" in out


class _RpcError(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        self._code, self._details = code, details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details


def test_a_cluster_that_changes_its_leader_does_not_refuse(store: Store) -> None:
    """A member answers so that has just lost the leader, or its own lead; other answers are refusals."""
    link = store._connection.link()
    for code, details, kind in (
        (grpc.StatusCode.UNKNOWN, "Post http://10.0.0.1:2380/leases: dial tcp: connection refused", Broken),
        (grpc.StatusCode.UNKNOWN, "raft proposal dropped", Broken),
        (grpc.StatusCode.UNAVAILABLE, "etcdserver: leader changed", Broken),
        (grpc.StatusCode.FAILED_PRECONDITION, "etcdserver: not leader", Broken),
        (grpc.StatusCode.INVALID_ARGUMENT, "etcdserver: request is too large", StoreError),
    ):
        assert type(link.translate(_RpcError(code, details))) is kind
