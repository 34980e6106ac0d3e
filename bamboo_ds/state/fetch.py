"""Fetches a snapshot that another member's :class:`~bamboo_ds.state.server.StateServer` offers."""

from __future__ import annotations

import contextlib
import hmac
import http.client
import io
import os
import secrets
import select
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any
from urllib.parse import urlencode, urlsplit

import torch

from ..errors import TransferError, UnsupportedError
from ..secret import NONE, JobSecret
from .transfer import CHECKSUM, NONCE, PATH, PREFIX, PROOF, Corrupt, Pass, decode_header, header_size, pieces, view

#: How often a wait looks whether it should end.
_TICK_S = 0.05
#: Tensors smaller than this are read several at a time.
_READ_BUFFER = 1 << 16


#: What a fetch brings: the text, and the tensors.
Fetched = tuple[str, list[torch.Tensor]]


def fetch(url: str, key: str, *, token: str, timeout_s: float, secret: JobSecret = NONE) -> Fetched:
    """Wait for a :class:`Fetch`; the arguments, and what is raised, are the same."""
    return Fetch(url, key, token=token, timeout_s=timeout_s, secret=secret).result()


class Fetch:
    """Fetches the snapshot under ``key`` in a daemon thread, from its construction on.

    Waits for a key that is not offered yet. A transfer that fails is not repeated: its caller knows whether it is still
    needed.

    Args:
        url: the server's ``url``.
        token: the server's.
        timeout_s: seconds without progress (an answer, or some MiB of it) until it is given up. A transfer that moves
            never times out.
        secret: the job's.

    Attributes:
        share: of the snapshot that has arrived, from 0 to 1.
    """

    def __init__(self, url: str, key: str, *, token: str, timeout_s: float, secret: JobSecret = NONE) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or not parts.port:
            raise ValueError(f"expected http://address:port as the url of a state server, not {url!r}")
        self.share = 0.0
        self._host, self._port, self._netloc = parts.hostname, parts.port, parts.netloc
        self._url, self._key, self._timeout_s = url, key, timeout_s
        self._pass, self._nonce = Pass(secret, token), secrets.token_hex(16)
        self._stop = threading.Event()
        self._moved_at = time.monotonic()
        self._outcome: Fetched | BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="bamboo-state-fetch", daemon=True)
        self._thread.start()

    def done(self) -> bool:
        """Whether :meth:`result` returns, or raises, at once."""
        return not self._thread.is_alive()

    def result(self, timeout_s: float | None = None) -> Fetched:
        """The text, and the tensors with dtype and shape of the originals, each contiguous, with memory of its own.

        Raises:
            TimeoutError: it has not ended within ``timeout_s`` seconds.
            TransferError: no progress for the fetch's own ``timeout_s``, the connection broke, as it does where the
                owner withdraws the snapshot, what came is not what was sent, the server refuses this member or speaks
                another version, or :meth:`cancel` was called.
        """
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"the fetch has not ended within {timeout_s} s")
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        assert self._outcome is not None
        return self._outcome

    def cancel(self) -> None:
        """End it as soon as possible, without waiting: :meth:`result` raises ``TransferError`` unless it was done."""
        self._stop.set()

    # -- the thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._outcome = self._fetched()
        except (OSError, http.client.HTTPException, Corrupt, UnsupportedError) as error:
            self._outcome = self._failed(f"{type(error).__name__}: {error}")
            self._outcome.__cause__ = error
        except BaseException as error:
            self._outcome = error  # result() raises it

    def _failed(self, reason: str) -> TransferError:
        return TransferError(f"the transfer of {self._key!r} from {self._url} failed: {reason}")

    def _check(self) -> None:
        """Raise if waiting any longer is pointless."""
        if self._stop.is_set():
            raise self._failed(f"it was stopped after {self.share:.0%}")
        if time.monotonic() >= self._moved_at + self._timeout_s:
            raise self._failed(f"no progress for {self._timeout_s:g} s after {self.share:.0%}")

    def _fetched(self) -> Fetched:
        while True:
            self._check()
            with self._connect() as line, self._ask(line) as response:
                if self._is_offered(response):
                    return self._receive(response)

    @contextlib.contextmanager
    def _connect(self) -> Iterator[_Line]:
        family, kind, protocol, _, name = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as sock:
            sock.setblocking(False)
            line = _Line(sock, self._check)
            line.connect(name)
            yield line

    def _ask(self, line: _Line) -> http.client.HTTPResponse:
        """Send the request; the answer is still to be read."""
        line.sendall(
            f"GET {PATH}?{urlencode({'key': self._key})} HTTP/1.1\r\nHost: {self._netloc}\r\nConnection: close\r\n"
            f"Authorization: {self._pass.authorization(self._key)}\r\n{NONCE}: {self._nonce}\r\n\r\n".encode()
        )
        return http.client.HTTPResponse(line, method="GET")  # type: ignore[arg-type]

    def _is_offered(self, response: http.client.HTTPResponse) -> bool:
        """Read the answer up to its body: a snapshot's, or that there is none yet, after the server has waited."""
        response.begin()
        if response.status == 404:
            return False
        if response.status == 403:
            raise self._failed("the server refuses us; all members of a job must have the same secret")
        if response.status != 200:
            raise self._failed(f"the server answers {response.status} {response.reason}")
        proof = response.headers.get(PROOF, "").encode(errors="replace")
        if not hmac.compare_digest(proof, self._pass.proof(self._key, self._nonce).encode()):
            raise self._failed("the server is not the owner: its answer proves nothing")
        return True

    def _receive(self, response: http.client.HTTPResponse) -> Fetched:
        length, crc = header_size(_exactly(response, PREFIX.size))
        header = decode_header(_exactly(response, length), crc)
        memory = [torch.empty(meta.nbytes, dtype=torch.uint8) for meta in header.tensors]
        received, total, crc = 0, sum(data.nbytes for data in memory), 0
        for piece in pieces(map(view, memory)):
            _fill(response, piece)
            crc, received = zlib.crc32(piece, crc), received + len(piece)
            self.share, self._moved_at = received / total, time.monotonic()
            self._check()
        (expected,) = CHECKSUM.unpack(_exactly(response, CHECKSUM.size))
        if crc != expected:
            raise Corrupt(f"the tensors have crc32 {crc:08x}, their owner sent {expected:08x}")
        self.share = 1.0
        metas = zip(memory, header.tensors, strict=True)
        return header.text, [data.view(getattr(torch, meta.dtype)).reshape(meta.shape) for data, meta in metas]


def _fill(source: IO[bytes] | http.client.HTTPResponse, target: memoryview) -> None:
    """Read exactly ``len(target)`` bytes, directly into it."""
    done = 0
    while done < len(target):
        count = source.readinto(target[done:])  # type: ignore[union-attr]
        if not count:
            raise ConnectionError("the answer ended early")
        done += count


def _exactly(source: http.client.HTTPResponse, size: int) -> bytes:
    data = bytearray(size)
    _fill(source, memoryview(data))
    return bytes(data)


class _Line(io.RawIOBase):
    """Minimal HTTP connection whose blocking calls can be interrupted.

    Args:
        sock: not blocking; the caller closes it.
        check: called while waiting; its exception ends the wait.
    """

    def __init__(self, sock: socket.socket, check: Callable[[], None]) -> None:
        self._sock, self._check = sock, check

    def connect(self, name: Any) -> None:
        """Connect to a socket address."""
        try:
            self._sock.connect(name)
        except BlockingIOError:
            self._wait(select.POLLOUT)
            error = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                raise OSError(error, os.strerror(error)) from None

    def sendall(self, request: bytes) -> None:
        """Send a request, which a new connection takes at once."""
        self._sock.sendall(request)

    def makefile(self, mode: str) -> io.BufferedReader:
        """The file that ``http.client`` reads from; reads above the buffer's size bypass the buffer."""
        return io.BufferedReader(self, _READ_BUFFER)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._check()  # also if there is always a byte to be had
        while True:
            try:
                return self._sock.recv_into(buffer)
            except BlockingIOError:
                self._wait(select.POLLIN)

    def _wait(self, event: int) -> None:
        poller = select.poll()  # unlike select(), also for descriptors above 1023
        poller.register(self._sock, event)
        while not poller.poll(1000 * _TICK_S):
            self._check()
