"""Snapshots over real sockets: bits survive, keys come and go, the rate is kept."""

from __future__ import annotations

import contextlib
import http.client
import logging
import socket
import subprocess
import sys
import warnings
import weakref
from urllib.parse import parse_qs, urlsplit

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bamboo_ds.errors import TransferError, UnsupportedError
from bamboo_ds.secret import NONE, JobSecret
from bamboo_ds.state import join, split
from bamboo_ds.state.fetch import Fetch, fetch
from bamboo_ds.state.server import StateServer, TokenBucket
from bamboo_ds.state.transfer import Pass, pieces

from .support.transfer import CHUNK, TOKEN, Proxy, get, nothing_left, same, server, state, wait_for

pytestmark = pytest.mark.claim("guides/elastic.md", "guides/security.md", "reference/settings.md")

__all__ = ["nothing_left", "server"]  # fixtures


# -- bits survive --------------------------------------------------------------------------------------


def test_every_dtype_and_form(server: StateServer) -> None:
    dtypes = {value for name in dir(torch) if isinstance(value := getattr(torch, name), torch.dtype)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        filled = [
            torch.randint(0, 2, (12 * d.itemsize,), dtype=torch.uint8).view(d).reshape(3, 4)
            for d in sorted(dtypes, key=str)
            if not str(d).startswith(("torch.q", "torch.quint"))
        ]
    assert {torch.bfloat16, torch.bool, torch.float8_e4m3fn, torch.complex64} <= {t.dtype for t in filled}
    forms = [
        torch.tensor(7),
        torch.tensor(float("nan")),
        torch.empty(0),
        torch.empty(2, 0, 3, dtype=torch.int64),
        torch.randn(64, 48).t(),
        torch.randn(64, 48)[::2, 1::3],
        torch.randn(3).expand(5, 3),
        torch.randn(4, 5, dtype=torch.complex64).conj(),
        torch.randn(9, requires_grad=True),
        torch.nn.Parameter(torch.randn(300, 300)),
    ]
    text = '{"ä": "☃"}\n'
    server.offer("k", text, filled + forms)
    got_text, got = get(server.url)
    assert got_text == text
    assert same(got, [t.detach().resolve_conj() for t in filled + forms])
    assert all(t.is_contiguous() and t.untyped_storage().nbytes() == t.nbytes for t in got)


def test_a_tree_and_a_text(server: StateServer) -> None:
    tree = {"optimizer": {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(70_000)}}, "lr": 0.1}
    server.offer("0,1/step 7?&=%2F+ü", *split(tree))
    again = join(*get(server.url, "0,1/step 7?&=%2F+ü"))
    assert torch.equal(again["optimizer"][0]["exp_avg"], tree["optimizer"][0]["exp_avg"])  # type: ignore[index]
    server.offer("status", "{}", ())
    assert get(server.url, "status") == ("{}", [])
    server.offer("status", "[1]", ())
    assert get(server.url, "status") == ("[1]", [])


def test_answers_are_made_when_asked_for() -> None:
    known = ["a"]
    answers = {"history/": lambda key: ",".join(known[int(key.removeprefix("history/")) :])}
    with contextlib.closing(StateServer("127.0.0.1", None, token=TOKEN, answers=answers)) as server:
        assert get(server.url, "history/0") == ("a", [])
        known.append("b")
        assert get(server.url, "history/0") == ("a,b", [])
        assert get(server.url, "history/1") == ("b", [])
        server.offer("history/1", "an offer goes first", ())
        assert get(server.url, "history/1") == ("an offer goes first", [])


def test_contiguous_host_tensors_are_not_copied(server: StateServer) -> None:
    tensor = torch.zeros(10)
    server.offer("k", "", [tensor, tensor.view(2, 5).t()])
    tensor.fill_(1)
    shared, copied = get(server.url)[1]
    assert shared.tolist() == [1.0] * 10
    assert copied.tolist() == [[0.0] * 2] * 5


def test_tensors_that_cannot_be_sent(server: StateServer) -> None:
    for tensor in (torch.eye(3).to_sparse(), torch.empty(3, device="meta")):
        with pytest.raises(UnsupportedError, match="tensor 1 of a snapshot"):
            server.offer("k", "", [torch.zeros(1), tensor])


def test_several_receivers_at_once(server: StateServer) -> None:
    tensors = state()
    server.offer("k", "t", tensors)
    fetches = [Fetch(server.url, "k", token=TOKEN, timeout_s=20) for _ in range(4)]
    assert all(same(one.result(20)[1], tensors) for one in fetches)
    assert all(one.done() and one.share == 1.0 for one in fetches)


@given(st.lists(st.integers(0, 20), max_size=12), st.integers(1, 9))
def test_pieces_are_all_bytes_in_order(sizes: list[int], piece_bytes: int) -> None:
    whole = bytes(i % 251 for i in range(sum(sizes)))
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bamboo_ds.state.transfer.PIECE_BYTES", piece_bytes)
        found = list(pieces(memoryview(whole)[e - s : e] for s, e in zip(sizes, ends, strict=True)))
    assert b"".join(found) == whole
    assert all(0 < len(piece) <= piece_bytes for piece in found)


# -- who asks early, late, or without right ------------------------------------------------------------


def test_asking_before_the_offer(server: StateServer) -> None:
    with Proxy(server.url) as proxy:
        one = Fetch(proxy.url, "k", token=TOKEN, timeout_s=20)
        wait_for(lambda: proxy.asked > 0)
        server.offer("other", "", ())
        assert not one.done()
        server.offer("k", "late", [])
        assert one.result(20) == ("late", [])


def test_a_key_that_nobody_offers(server: StateServer) -> None:
    with Proxy(server.url) as proxy:
        with pytest.raises(TransferError, match=r"'nope' from http://127.*no progress for 4 s"):
            get(proxy.url, "nope", timeout_s=4)
        assert proxy.asked == 2, "the server holds its answer"


def test_withdrawn(server: StateServer) -> None:
    server.offer("k", "", [torch.zeros(1)])
    server.withdraw("k")
    server.withdraw("never offered")
    with pytest.raises(TransferError, match="no progress"):
        get(server.url, timeout_s=0.5)
    server.offer("k", "again", [])
    assert get(server.url) == ("again", [])


def test_withdrawn_on_its_way(server: StateServer) -> None:
    """Also if the receiver has stopped taking anything; and the owner may change the tensors at once."""
    memory = numpy.zeros(1 << 22, dtype=numpy.float32)
    alive = weakref.ref(memory)
    tensors = [torch.from_numpy(memory)]
    server.offer("k", "", tensors)
    with Proxy(server.url, "hold", at=8 * CHUNK) as proxy:
        one = Fetch(proxy.url, "k", token=TOKEN, timeout_s=20)
        wait_for(lambda: proxy.strikes == 1)
        assert len(server._streams) == 1
        server.withdraw("k")
        tensors[0].fill_(1)
        wait_for(lambda: not server._streams)
        del tensors, memory
        wait_for(lambda: alive() is None)
        proxy.release.set()
        with pytest.raises(TransferError, match=r"ended early|reset"):
            one.result(20)
        assert proxy.passed < 1 << 24


def test_replaced_on_its_way(server: StateServer) -> None:
    first, second = state(16), state(2)
    server.offer("k", "first", first)
    with Proxy(server.url, "hold", at=8 * CHUNK) as proxy:
        one = Fetch(proxy.url, "k", token=TOKEN, timeout_s=20)
        wait_for(lambda: proxy.strikes == 1)
        server.offer("k", "second", second)
        proxy.release.set()
        with pytest.raises(TransferError, match=r"ended early|reset"):
            one.result(20)
    text, got = get(server.url)
    assert text == "second"
    assert same(got, second)


def test_token(server: StateServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    server.offer("k", "secret", [])
    for wrong in ("wrong", TOKEN + "x"):
        with pytest.raises(TransferError, match="refuses us") as caught:
            fetch(server.url, "k", token=wrong, timeout_s=20)
        assert wrong not in str(caught.value)
    for impossible in ("", "a\nb", "ü"):
        with pytest.raises(ValueError, match="printable ASCII") as refused:
            fetch(server.url, "k", token=impossible, timeout_s=20)
        assert not impossible or impossible not in str(refused.value)
    address = urlsplit(server.url)
    with socket.create_connection((str(address.hostname), address.port or 0)) as sock:
        sock.sendall(f"GET /state HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\nbad header {TOKEN}\r\n\r\n".encode())
        assert b" 400 " in sock.recv(4096)
    with Proxy(server.url, "flip", pattern=b"secret") as proxy:
        with pytest.raises(TransferError, match="checksum of the header"):
            get(proxy.url)
        assert proxy.strikes == 1
    assert TOKEN not in caplog.text
    assert TOKEN not in repr(server)


def test_whoever_knows_the_token_alone_gets_nothing_and_gives_nothing() -> None:
    """Tokens are in etcd. What they open without the job's secret is nothing, and their server is nobody's owner."""
    ours, other = JobSecret.new(), JobSecret.new()
    with (
        contextlib.closing(StateServer("127.0.0.1", None, token=TOKEN, secret=ours)) as server,
        contextlib.closing(StateServer("127.0.0.1", None, token=TOKEN)) as false,
    ):
        for one in (server, false):
            one.offer("k", "weights", [torch.ones(3)])
        for secret in (NONE, other):
            with pytest.raises(TransferError, match="refuses us"):
                get(server.url, secret=secret)
        assert fetch(server.url, "k", token=TOKEN, timeout_s=20, secret=ours)[0] == "weights"

        class Credulous(Pass):
            """Would take the word of a server that does not know the secret."""

            def authorization(self, key: str) -> str:
                return Pass(NONE, self.token).authorization(key)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("bamboo_ds.state.fetch.Pass", Credulous)
            with pytest.raises(TransferError, match="not the owner"):
                get(false.url, timeout_s=0.5, secret=ours)
    with pytest.raises(TransferError):
        get(server.url, timeout_s=0.5, secret=ours)


def test_silent_connections_are_bounded(server: StateServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bamboo_ds.serving.STRANGERS", 8)
    server.offer("k", "weights", [torch.ones(3)])
    address = urlsplit(server.url)
    with contextlib.ExitStack() as stack:
        silent = []
        for _ in range(20):
            silent.append(stack.enter_context(socket.create_connection((str(address.hostname), address.port or 0))))
            silent[-1].settimeout(20)
        for one in silent[:12]:
            assert one.recv(1) == b""
        assert get(server.url)[0] == "weights"


@pytest.mark.parametrize(
    ("method", "target", "status"),
    [
        ("GET", "/state?key=k", 200),
        ("GET", "/state?key=missing", 404),
        ("GET", "/other?key=k", 404),
        ("GET", "/state", 404),
        ("POST", "/state?key=k", 404),
    ],
)
def test_requests(server: StateServer, method: str, target: str, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bamboo_ds.state.server._LONGEST_WAIT_S", 0.1)
    server.offer("k", "", ())
    connection = http.client.HTTPConnection(str(urlsplit(server.url).hostname), urlsplit(server.url).port)
    try:
        connection.request(method, target)
        response = connection.getresponse()
        assert response.status == 403, "without the token nothing is told"
        response.read()
        key = parse_qs(urlsplit(target).query).get("key", [""])[0]
        other = Pass(NONE, TOKEN).authorization(f"{key}x")
        connection.request(method, target, headers={"Authorization": other})
        response = connection.getresponse()
        assert response.status == 403, "what opens one key opens no other"
        response.read()
        connection.request(method, target, headers={"Authorization": Pass(NONE, TOKEN).authorization(key)})
        assert connection.getresponse().status == status
    finally:
        connection.close()


def test_bound_to_the_address_only() -> None:
    server = StateServer("127.0.0.2", None, token=TOKEN)
    server.offer("k", "here", ())
    assert urlsplit(server.url).hostname == "127.0.0.2"
    assert get(server.url)[0] == "here"
    with pytest.raises(TransferError, match="refused"):
        get(server.url.replace("127.0.0.2", "127.0.0.1"), timeout_s=1)
    server.close()
    with pytest.raises(OSError, match="assign"):
        StateServer("192.0.2.1", None, token=TOKEN)


# -- rate ----------------------------------------------------------------------------------------------


class Clock:
    now = 5.0

    def __call__(self) -> float:
        return self.now


@given(
    st.floats(1, 1e9),
    st.integers(1, 10_000),
    st.lists(st.tuples(st.integers(0, 30_000), st.floats(0, 5)), min_size=1, max_size=30),
)
def test_rate(rate: float, burst: int, requests: list[tuple[int, float]]) -> None:
    """Never more than burst + rate * t; and what has to wait goes at exactly that rate."""
    clock = Clock()
    bucket = TokenBucket(rate, burst, clock)
    sent = []
    for size, pause_s in requests:
        wait_s = bucket.reserve(size)
        assert wait_s >= 0
        sent.append((clock.now + wait_s, size, wait_s))
        clock.now += pause_s
    for first in range(len(sent)):
        start = sent[first][0]
        total = 0
        for at, size, _ in sent[first:]:
            total += size
            # The first of a window may have gathered its tokens before it.
            assert total <= sent[first][1] + burst + rate * (at - start) + 1e-6 * (1 + total + rate * at)
    greedy = TokenBucket(rate, burst, clock)
    waits = [greedy.reserve(burst) for _ in range(10)]
    assert waits == pytest.approx([n * burst / rate for n in range(10)])


def test_a_rate_that_is_none() -> None:
    for rate in (0, -1.0):
        with pytest.raises(ValueError, match="positive"):
            StateServer("127.0.0.1", rate, token=TOKEN)


def test_one_bucket_for_all_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    reserved: list[tuple[int, int]] = []
    reserve = TokenBucket.reserve

    def recording(self: TokenBucket, size: int) -> float:
        reserved.append((id(self), size))
        return reserve(self, size)

    monkeypatch.setattr(TokenBucket, "reserve", recording)
    server = StateServer("127.0.0.1", 20, token=TOKEN)
    tensors = state()
    server.offer("k", "t", tensors)
    fetches = [Fetch(server.url, "k", token=TOKEN, timeout_s=20) for _ in range(2)]
    assert all(same(one.result(20)[1], tensors) for one in fetches)
    server.close()
    assert len({bucket for bucket, _ in reserved}) == 1
    assert sum(size for _, size in reserved) == 2 * sum(t.nbytes for t in tensors)


@pytest.mark.integration
def test_importing_is_cheap() -> None:
    """A worker that moves no state must not load an HTTP server."""
    code = "import sys, bamboo_ds.state.server, bamboo_ds.state.fetch; print('aiohttp' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"
