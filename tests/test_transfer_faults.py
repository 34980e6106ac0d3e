"""Transfers whose connections, owners and receivers fail: noticed, survived, and nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
import torch

from bamboo_ds.errors import TransferError
from bamboo_ds.secret import NONE
from bamboo_ds.state.fetch import Fetch
from bamboo_ds.state.server import StateServer
from bamboo_ds.state.transfer import NONCE, PREFIX, PROOF, Header, Pass, TensorMeta

from .support.transfer import CHUNK, TOKEN, Proxy, get, is_in, nothing_left, same, server, state, wait_for

pytestmark = pytest.mark.claim("guides/elastic.md", "guides/security.md")

__all__ = ["nothing_left", "server"]  # fixtures


# -- faults --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["the header", "the first tensor", "a later one", "the checksum"])
def test_corruption_is_noticed(server: StateServer, where: str) -> None:
    tensors = state()
    server.offer("k", "landmark", tensors)
    snapshot = server._offers["k"]
    with Proxy(server.url) as proxy:
        get(proxy.url)
    lead = proxy.passed - snapshot.nbytes + len(snapshot.head)  # of HTTP and ours
    at = {
        "the header": lead - 10,
        "the first tensor": lead + 5,
        "a later one": proxy.passed - 10,
        "the checksum": proxy.passed - 2,
    }[where]
    with Proxy(server.url, "flip", at) as proxy:
        with pytest.raises(TransferError, match=r"checksum of the header|have crc32"):
            get(proxy.url)
        assert proxy.strikes == 1
        text, got = get(proxy.url)
    assert text == "landmark"
    assert same(got, tensors)


def test_a_connection_that_breaks(server: StateServer) -> None:
    tensors = state()
    server.offer("k", "t", tensors)
    with Proxy(server.url, "cut", at=10 * CHUNK) as proxy:
        with pytest.raises(TransferError, match=r"ended early|reset"):
            get(proxy.url)
        assert proxy.strikes == proxy.asked == 1
        assert same(get(proxy.url)[1], tensors)


def test_a_silent_connection_is_given_up(server: StateServer) -> None:
    server.offer("k", "t", state())
    with Proxy(server.url, "hold", at=10 * CHUNK) as proxy:
        with pytest.raises(TransferError, match="no progress for 1 s"):
            get(proxy.url, timeout_s=1)
        assert proxy.strikes == 1


def test_a_receiver_that_takes_nothing_is_cut_off(server: StateServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bamboo_ds.state.server._STALL_S", 1.5)
    tensors = state(24)  # more than all sockets on the way hold
    server.offer("k", "t", tensors)
    with Proxy(server.url, "hold", at=8 * CHUNK) as proxy:
        one = Fetch(proxy.url, "k", token=TOKEN, timeout_s=20)
        wait_for(lambda: proxy.strikes == 1)  # in the middle of a stream
        wait_for(lambda: not server._streams)
        assert not one.done()
        proxy.release.set()
        with pytest.raises(TransferError, match=r"ended early|reset"):
            one.result(20)


def test_a_tensor_that_never_arrives_whole() -> None:
    """A trickle of bytes is no progress."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        trickled = threading.Event()
        end = threading.Event()

        def trickle() -> None:
            sock, _ = listener.accept()
            with sock:
                asked = re.search(rf"{NONCE}: (\w+)", sock.recv(65536).decode())
                assert asked is not None
                proof = Pass(NONE, TOKEN).proof("k", asked[1])
                sock.sendall(f"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n{PROOF}: {proof}\r\n\r\n".encode())
                sock.sendall(Header(text="", tensors=(TensorMeta(dtype="uint8", shape=(900_000,)),)).encode())
                while not end.wait(0.02):
                    try:
                        sock.sendall(b"\0")
                    except ConnectionError:
                        return
                    trickled.set()

        thread = threading.Thread(target=trickle)
        thread.start()
        with pytest.raises(TransferError, match=r"no progress for 1 s"):
            get(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout_s=1)
        assert trickled.is_set()
        end.set()
        thread.join()


@contextlib.contextmanager
def pretender(*words: bytes) -> Iterator[str]:
    """Says ``words`` to whoever connects, the last ones again and again; its URL."""
    end, threads = threading.Event(), []

    def speak(sock: socket.socket) -> None:
        with sock, contextlib.suppress(ConnectionError):
            sock.recv(65536)
            for piece in words[:-1]:
                sock.sendall(piece)
            while not end.wait(0.02):
                sock.sendall(words[-1])

    def serve() -> None:
        with contextlib.suppress(OSError):  # the listener is shut down
            while True:
                threads.append(threading.Thread(target=speak, args=(listener.accept()[0],)))
                threads[-1].start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        accepting = threading.Thread(target=serve)
        accepting.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            end.set()
            listener.shutdown(socket.SHUT_RDWR)
            for thread in (accepting, *threads):
                thread.join()


@pytest.mark.parametrize(
    "words",
    [(b"HTTP/1.1 100 Continue\r\n\r\n",), (b"HTTP/1.1 200 OK\r\nA: ", b"a"), (b"H", b"T")],
    ids=["go on", "a header", "a status"],
)
def test_an_answer_that_never_begins(words: tuple[bytes, ...]) -> None:
    """Each byte comes sooner than a wait for it looks whether it should end."""
    with pretender(*words) as url:
        one = Fetch(url, "k", token=TOKEN, timeout_s=0.5)
        with pytest.raises(TransferError, match=r"no progress for 0.5 s"):
            one.result(5.0)
        stopped = Fetch(url, "k", token=TOKEN, timeout_s=60.0)
        wait_for(lambda: is_in(stopped, "_is_offered"))
        stopped.cancel()
        with pytest.raises(TransferError, match="stopped"):
            stopped.result(5.0)


def test_a_proof_that_is_no_text() -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\nBamboo-Proof: \xff\r\n\r\n"
    with pretender(answer, b"x") as url, pytest.raises(TransferError, match="not the owner"):
        get(url, timeout_s=0.5)


def test_another_version(server: StateServer) -> None:
    server.offer("k", "", [torch.zeros(1)])
    head = server._offers["k"].head
    header = Header.model_validate_json(head[PREFIX.size :])
    tensors = (header.tensors[0].model_copy(update={"dtype": "float7"}),)
    server._offers["k"].head = header.model_copy(update={"tensors": tensors}).encode()
    with pytest.raises(TransferError, match="'float7' is unknown to this torch"):
        get(server.url)


OTHER_PROCESS = f"""
import sys, torch
from bamboo_ds.state.server import StateServer
server = StateServer("127.0.0.1", 4, token={TOKEN!r})
server.offer("k", "theirs", [torch.arange(1 << 21)])
print(server.url, flush=True)
sys.stdin.read()
"""


@pytest.mark.integration
def test_the_owner_is_killed() -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OTHER_PROCESS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdin is not None
    assert owner.stdout is not None
    second = StateServer("127.0.0.1", None, token=TOKEN)
    try:
        url = owner.stdout.readline().strip()
        one = Fetch(url, "k", token=TOKEN, timeout_s=20)
        wait_for(lambda: one.share > 0)
        owner.kill()
        assert owner.wait(20) == -signal.SIGKILL
        with pytest.raises(TransferError, match=r"ended early|reset"):
            one.result(20)
        assert one.share < 1, "it died in the middle"
        second.offer("k", "ours", [torch.arange(1 << 21)])
        assert second.url != url
        text, (got,) = get(second.url)
        assert text == "ours"
        assert torch.equal(got, torch.arange(1 << 21))
    finally:
        owner.kill()
        owner.wait()
        owner.stdin.close()
        owner.stdout.close()
        second.close()


# -- ending --------------------------------------------------------------------------------------------


def test_stopping_in_a_read(server: StateServer) -> None:
    server.offer("k", "t", state())
    with Proxy(server.url, "hold", at=5 * CHUNK) as proxy:
        one = Fetch(proxy.url, "k", token=TOKEN, timeout_s=600)
        wait_for(lambda: proxy.strikes == 1 and is_in(one, "_receive", "_wait"))
        assert not one.done()
        with pytest.raises(TimeoutError):
            one.result(0)
        one.cancel()
        with pytest.raises(TransferError, match=r"stopped after 0%"):
            one.result(20)
        assert one.done()


def test_stopping_while_it_waits_for_the_offer(server: StateServer) -> None:
    with Proxy(server.url) as proxy:
        one = Fetch(proxy.url, "k", token=TOKEN, timeout_s=600)
        wait_for(lambda: proxy.asked > 0)
        one.cancel()
        with pytest.raises(TransferError, match="stopped"):
            one.result(20)


def test_stopping_in_a_connect() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.listen(0)
        first = socket.create_connection(listener.getsockname())  # fills the queue: others are not answered
        one = Fetch(url, "k", token=TOKEN, timeout_s=600)
        wait_for(lambda: is_in(one, "_connect", "connect", "_wait"))
        with pytest.raises(TimeoutError):
            one.result(0)
        one.cancel()
        with pytest.raises(TransferError, match="stopped after 0%"):
            one.result(20)
        first.close()


def test_closing_with_everything_in_flight() -> None:
    server = StateServer("127.0.0.1", None, token=TOKEN)
    server.offer("k", "t", [torch.zeros(1 << 22)])
    idle = socket.create_connection((str(urlsplit(server.url).hostname), urlsplit(server.url).port or 0))
    with Proxy(server.url, "hold", at=5 * CHUNK) as held, Proxy(server.url) as waiting:
        fetches = [
            Fetch(held.url, "k", token=TOKEN, timeout_s=60),
            Fetch(waiting.url, "absent", token=TOKEN, timeout_s=60),
        ]
        wait_for(lambda: held.strikes == waiting.asked == 1)
        server.close()
        server.close()
        assert idle.recv(1) == b""
        held.release.set()
        for one in fetches:
            with pytest.raises(TransferError, match=r"ended early|reset|RemoteDisconnected"):
                one.result(20)
    idle.close()
    server.withdraw("k")
    with pytest.raises(TransferError, match="closed"):
        server.offer("k", "", ())


def test_closing_while_connections_arrive() -> None:
    for number in range(60):
        server = StateServer("127.0.0.1", None, token=TOKEN)
        address = (str(urlsplit(server.url).hostname), urlsplit(server.url).port or 0)
        arriving = [socket.create_connection(address) for _ in range(1 + number % 4)]
        for sock in arriving:
            sock.sendall(f"GET /state?key=k&wait=5 HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
        server.close()
        port = f":{address[1]:04X} "
        with open("/proc/self/net/tcp") as table:  # inode 0: no longer a descriptor of anybody
            left = [line for line in table if port in line.split()[1] + " " and line.split()[9] != "0"]
        assert not left
        for sock in arriving:
            sock.close()


@pytest.mark.integration
def test_a_forked_child_keeps_nothing_open() -> None:
    """A DataLoader's worker inherits all sockets; the owner's receivers must still see its end."""
    server = StateServer("127.0.0.1", None, token=TOKEN)
    idle = socket.create_connection((str(urlsplit(server.url).hostname), urlsplit(server.url).port or 0))
    server.offer("k", "", ())
    get(server.url)  # the idle connection, which came before, has been accepted
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    try:
        server.close()
        assert idle.recv(1) == b""
        with pytest.raises(TransferError, match="refused"):
            get(server.url, timeout_s=1)
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "it lived all the time"
    finally:
        os.close(writing)
        os.close(reading)
        os.waitpid(child, 0)
        idle.close()
