"""What the tests of copies of state share: members, a state, and a proxy that breaks connections."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from bamboo_ds.comm.bulk.copying import Fetch, Fetched
from bamboo_ds.comm.bulk.offers import Offers
from bamboo_ds.comm.places import Place

from .hubs import Hubs
from .leaks import no_leaks

#: Bytes of the owner's part of a handshake, of the head of a frame, and of the smallest piece: the head of an offer.
PROOF, HEAD = 64, 256


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    fds = len(os.listdir("/proc/self/fd"))
    with no_leaks():
        yield
    assert len(os.listdir("/proc/self/fd")) <= fds


@pytest.fixture
def hubs() -> Iterator[Hubs]:
    """Members a, which copies, and b, which offers."""
    both = Hubs("ab")
    yield both
    both.close()


@pytest.fixture
def offers(hubs: Hubs) -> Offers:
    return hubs["b"].offers


def fetch(hubs: Hubs, key: str = "k", timeout_s: float = 20.0, place: str | None = None) -> Fetch:
    return Fetch(hubs["a"].call, "b", place or hubs["b"].place, key, timeout_s)


def get(hubs: Hubs, key: str = "k", timeout_s: float = 20.0, place: str | None = None) -> Fetched:
    return fetch(hubs, key, timeout_s, place).result(40)


def state(mb: float = 4.0) -> list[torch.Tensor]:
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


class Proxy:
    """Passes connections on to the worker at ``place`` and strikes at byte ``at`` of what it says, so many times.

    Args:
        fault: ``flip`` a bit, ``cut`` the connection, or ``hold`` it until :attr:`release`.

    Attributes:
        place: its own.
        strikes: how often the fault has happened.
        calls: connections so far.
        passed: bytes of answers passed on so far, over all connections.
    """

    def __init__(self, place: str, fault: str = "none", at: int = 0, times: int = 1) -> None:
        self._target = Place.parse(place)
        self._fault, self._at, self._left = fault, at, times if fault != "none" else 0
        self.strikes = self.passed = self.calls = 0
        self.release, self._end = threading.Event(), threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0.02)
        self.place = str(replace(self._target, host="127.0.0.1", port=self._listener.getsockname()[1]))
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
            self.calls += 1
            self._threads.append(threading.Thread(target=self._pass_on, args=(client,)))
            self._threads[-1].start()

    def _pass_on(self, client: socket.socket) -> None:
        done = 0
        with client, socket.create_connection((self._target.host, self._target.port)) as server:
            while not self._end.is_set():
                for ready in select.select([server, client], [], [], 0.02)[0]:
                    try:
                        data = bytearray(ready.recv(1 << 14))
                        if ready is server and not self._strike(client, data, self._at - done):
                            return
                        (client if ready is server else server).sendall(data)
                    except ConnectionError:
                        return
                    if not data:
                        return
                    if ready is server:
                        done += len(data)
                        self.passed += len(data)

    def _strike(self, client: socket.socket, data: bytearray, at: int) -> bool:
        """Whether the connection goes on."""
        if not (self._left and 0 <= at < len(data)):
            return True
        self._left -= 1
        self.strikes += 1
        if self._fault == "flip":
            data[at] ^= 0x10
        elif self._fault == "hold":
            self.release.wait()
        return self._fault != "cut"
