"""What the tests of state transfer share: fixtures, a state, and a proxy that breaks connections."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

from bamboo_ds.state.fetch import Fetch, fetch
from bamboo_ds.state.server import StateServer
from bamboo_ds.worker.activity import frame_of

from .leaks import no_leaks

TOKEN = "s3cret-of-the-job"
#: Offsets in answers are multiples of it.
CHUNK = 1 << 16


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    fds = len(os.listdir("/proc/self/fd"))
    with no_leaks():
        yield
    assert len(os.listdir("/proc/self/fd")) <= fds
    assert not [t.name for t in threading.enumerate() if t.name.startswith("bamboo-state")]


@pytest.fixture
def server() -> Iterator[StateServer]:
    one = StateServer("127.0.0.1", None, token=TOKEN)
    yield one
    one.close()


def get(url: str, key: str = "k", timeout_s: float = 20.0, **kwargs: Any) -> tuple[str, list[torch.Tensor]]:
    return fetch(url, key, token=TOKEN, timeout_s=timeout_s, **kwargs)


def state(mb: float = 1.0) -> list[torch.Tensor]:
    """A large tensor and many small ones."""
    random = torch.Generator().manual_seed(1)
    large = torch.randn(int(mb * 2**18), generator=random)
    return [large, *(torch.randn(size, generator=random) for size in range(40))]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))
        for a, b in zip(one, other, strict=True)
    )


def wait_for(condition: Callable[[], bool]) -> None:
    deadline, pause = time.monotonic() + 20, threading.Event()
    while not condition():
        assert time.monotonic() < deadline
        pause.wait(0.002)


def is_in(one: Fetch, *functions: str) -> bool:
    """Whether the thread of a fetch is in ``functions``, each called somewhere below the one before."""
    frame, names = frame_of(one._thread), []
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    outer = iter(reversed(names))
    return all(name in outer for name in functions)


class Proxy:
    """Passes connections on to ``url`` and strikes once, at byte ``at`` of an answer.

    Attributes:
        strikes: how often the fault happened.
        asked: how many requests it has passed on.
        passed: bytes of answers passed on so far.
    """

    def __init__(self, url: str, fault: str = "none", at: int = 0, pattern: bytes | None = None) -> None:
        self._target = urlsplit(url)
        self._fault, self._at, self._pattern = fault, at, pattern
        self.strikes = self.passed = self.asked = 0
        self.release = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0.02)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._end = threading.Event()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self.release.set()
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while not self._end.is_set():
            try:
                client, _ = self._listener.accept()
            except TimeoutError:
                continue
            thread = threading.Thread(target=self._connection, args=(client,))
            self._threads.append(thread)
            thread.start()

    def _connection(self, client: socket.socket) -> None:
        with client:
            client.settimeout(20)
            request = b""
            while b"\r\n\r\n" not in request and (data := client.recv(65536)):
                request += data
            if not request:
                return
            self.asked += 1
            try:
                server = socket.create_connection((str(self._target.hostname), self._target.port or 0))
            except ConnectionRefusedError:
                return
            with server:
                server.sendall(request)
                self._answer(client, server)

    def _answer(self, client: socket.socket, server: socket.socket) -> None:
        done = 0
        while not self._end.is_set():
            if not select.select([server, client], [], [], 0.02)[0]:
                continue
            if select.select([client], [], [], 0)[0]:
                return  # it hung up: requests have no more to say
            try:
                data = bytearray(server.recv(16384))
            except ConnectionResetError:
                return
            if not data:
                return
            at = self._at - done if self._pattern is None else data.find(self._pattern)
            if not self.strikes and self._fault != "none" and 0 <= at < len(data):
                self.strikes += 1
                if self._fault == "flip":
                    data[at] ^= 0x10
                else:
                    client.sendall(data[:at])
                    self.passed += at
                    if self._fault == "cut":
                        return
                    assert self._fault == "hold"
                    while not self.release.wait(0.02):
                        if select.select([client], [], [], 0)[0]:
                            return
                    data = data[at:]
            try:
                client.sendall(data)
            except (BrokenPipeError, ConnectionResetError):
                return
            done += len(data)
            self.passed += len(data)
