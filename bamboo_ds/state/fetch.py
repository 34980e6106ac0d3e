"""Fetches a snapshot that another member's :class:`~bamboo_ds.state.server.StateServer` offers."""

from __future__ import annotations

import contextlib
import hmac
import http.client
import io
import logging
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
from tenacity import RetryCallState, Retrying, retry_if_exception_type, sleep_using_event

from ..errors import TransferError, UnsupportedError
from ..secret import NONE, JobSecret
from .transfer import (
    CHECKSUM,
    NONCE,
    PATH,
    PREFIX,
    PROOF,
    Chunks,
    Corrupt,
    Header,
    Pass,
    decode_header,
    header_size,
    view,
)

log = logging.getLogger(__name__)

#: How often a wait looks whether it should end.
_TICK_S = 0.05
#: Longest time that a server is asked to hold its answer for a key that is not offered yet.
_LONG_POLL_S = 3.0
_BACKOFF_S = (0.02, 1.0)
#: Tensors smaller than this are read several at a time.
_READ_BUFFER = 1 << 16


#: What a fetch brings: the text, and the tensors.
Fetched = tuple[str, list[torch.Tensor]]


def fetch(url: str, key: str, *, token: str, timeout_s: float, secret: JobSecret = NONE) -> Fetched:
    """Wait for a :class:`Fetch`; the arguments, and what is raised, are the same."""
    return Fetch(url, key, token=token, timeout_s=timeout_s, secret=secret).result()


class _Broken(Exception):
    """This attempt failed; another may not."""


class Fetch:
    """Fetches the snapshot under ``key`` in a daemon thread, from its construction on.

    Waits for a key that is not offered yet. After a broken connection or a chunk with a wrong checksum only the chunks
    that were not verified yet are fetched again; a snapshot that is replaced under way is fetched from its start.

    Args:
        url: the server's ``url``.
        token: the server's.
        timeout_s: seconds without a newly verified chunk (or header) until it is given up. A transfer that moves
            never times out; the server's rate should send several chunks in this time.
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
        self._incoming: _Incoming | None = None
        self._progress = time.monotonic()
        self._failures = 0
        self._reason = "the other side is silent"  # why the last attempt failed
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
            TransferError: no data for the fetch's own ``timeout_s``, the owner withdrew the snapshot, the server
                refuses this member or speaks another version, or :meth:`cancel` was called; its ``failure`` says which.
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
        retrying = Retrying(
            retry=retry_if_exception_type(_Broken),
            stop=lambda state: time.monotonic() >= self._progress + self._timeout_s,
            wait=self._backoff,
            sleep=sleep_using_event(self._stop),
            reraise=True,
        )
        try:
            self._outcome = retrying(self._attempt)
        except _Broken as error:
            reason = f"no progress for {self._timeout_s:g} s {self._position()} (last: {self._reason})"
            self._outcome = self._failed("timeout", reason)
            self._outcome.__cause__ = error
        except BaseException as error:
            self._outcome = error  # result() raises it

    def _failed(self, failure: str, reason: str) -> TransferError:
        return TransferError(self._key, self._url, failure, reason)

    def _position(self) -> str:
        if self._incoming is None:
            return "before the first chunk"
        return f"after {self._incoming.verified} of {len(self._incoming.chunks)} chunks"

    def _backoff(self, state: RetryCallState) -> float:
        """Seconds to wait, doubling with every failure since the last progress."""
        left = self._progress + self._timeout_s - time.monotonic()
        wait_s = min(_BACKOFF_S[1], _BACKOFF_S[0] * 2 ** min(self._failures, 10), max(0.0, left))
        self._failures += 1
        return float(wait_s)

    def _moved(self) -> None:
        self._progress, self._failures = time.monotonic(), 0

    def _check(self) -> None:
        """Raise if waiting any longer is pointless."""
        if self._stop.is_set():
            raise self._failed("stopped", f"the fetch was stopped {self._position()}")
        if time.monotonic() >= self._progress + self._timeout_s:
            raise _Broken(self._reason)

    def _attempt(self) -> Fetched:
        self._check()
        first = self._incoming.verified if self._incoming else 0
        try:
            with self._connect() as line, self._ask(line, first) as response:
                self._admit(response)
                return self._receive(response, first)
        except (OSError, http.client.HTTPException, Corrupt, _Broken) as error:
            reason = f"{type(error).__name__}: {error}" if not isinstance(error, (Corrupt, _Broken)) else str(error)
            self._reason = reason
            log.info("transfer of %r from %s broke %s: %s", self._key, self._url, self._position(), reason)
            raise _Broken(reason) from error
        except UnsupportedError as error:
            raise self._failed("refused", str(error)) from error

    @contextlib.contextmanager
    def _connect(self) -> Iterator[_Line]:
        family, kind, protocol, _, name = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as sock:
            sock.setblocking(False)
            # So that one dead connection leaves time for others.
            line = _Line(sock, self._check, self._timeout_s / 3)
            line.connect(name)
            yield line

    def _ask(self, line: _Line, first: int) -> http.client.HTTPResponse:
        """Send the request; the answer is still to be read."""
        query = urlencode({"key": self._key, "from": first, "wait": min(_LONG_POLL_S, self._timeout_s / 4)})
        line.sendall(
            f"GET {PATH}?{query} HTTP/1.1\r\nHost: {self._netloc}\r\nConnection: close\r\n"
            f"Authorization: {self._pass.authorization(self._key)}\r\n{NONCE}: {self._nonce}\r\n\r\n".encode()
        )
        return http.client.HTTPResponse(line, method="GET")  # type: ignore[arg-type]

    def _admit(self, response: http.client.HTTPResponse) -> None:
        """Read the answer up to its body; raises unless it is a snapshot."""
        response.begin()
        if response.status == 403:
            raise self._failed("refused", "the server refuses us; all members of a job must have the same secret")
        if response.status == 410:
            raise self._failed("withdrawn", "its owner has withdrawn it")
        if response.status == 404:
            self._failures = 0  # the server has held the answer: ask again at once
            raise _Broken("the owner has not offered it yet")
        if response.status == 416:
            self._incoming = None  # another snapshot, with fewer chunks
        if response.status != 200:
            raise _Broken(f"the server answers {response.status} {response.reason}")
        proof = response.headers.get(PROOF, "").encode(errors="replace")
        if not hmac.compare_digest(proof, self._pass.proof(self._key, self._nonce).encode()):
            raise _Broken("the server is not the owner: its answer proves nothing")

    def _receive(self, response: http.client.HTTPResponse, first: int) -> Fetched:
        length, crc = header_size(_exactly(response, PREFIX.size))
        header = decode_header(_exactly(response, length), crc)
        if self._incoming is None or self._incoming.header.identity != header.identity:
            self._incoming = _Incoming(header)
            self._moved()
            if first:
                raise _Broken("the owner has replaced the snapshot")
        incoming = self._incoming
        while incoming.verified < len(incoming.chunks):
            incoming.read(response)
            self.share = incoming.verified / len(incoming.chunks)
            self._moved()
            self._check()
        return header.text, incoming.tensors


class _Incoming:
    """The tensors of a snapshot, filled chunk by chunk."""

    def __init__(self, header: Header) -> None:
        self.header = header
        self.tensors = []
        views = []
        for meta in header.tensors:
            data = torch.empty(meta.nbytes, dtype=torch.uint8)
            views.append(view(data))
            self.tensors.append(data.view(getattr(torch, meta.dtype)).reshape(meta.shape))
        self.chunks = Chunks(views, header.chunk_bytes)
        self.verified = 0

    def read(self, response: http.client.HTTPResponse) -> None:
        """Fill the first missing chunk; raises :class:`Corrupt` or :class:`_Broken`, and can then be repeated."""
        crc = 0
        for piece in self.chunks[self.verified]:
            _fill(response, piece)
            crc = zlib.crc32(piece, crc)
        (expected,) = CHECKSUM.unpack(_exactly(response, CHECKSUM.size))
        if crc != expected:
            raise Corrupt(f"chunk {self.verified} has crc32 {crc:08x}, its owner sent {expected:08x}")
        self.verified += 1


def _fill(source: IO[bytes] | http.client.HTTPResponse, target: memoryview) -> None:
    """Read exactly ``len(target)`` bytes, directly into it."""
    done = 0
    while done < len(target):
        count = source.readinto(target[done:])  # type: ignore[union-attr]
        if not count:
            raise _Broken("the answer ended early")
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
        idle_s: seconds without a byte after which the connection counts as dead.
    """

    def __init__(self, sock: socket.socket, check: Callable[[], None], idle_s: float) -> None:
        self._sock, self._check, self._idle_s = sock, check, idle_s

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
        end = time.monotonic() + self._idle_s
        while not poller.poll(1000 * _TICK_S):
            self._check()
            if time.monotonic() >= end:
                raise _Broken(f"no byte within {self._idle_s:.1f} s")
