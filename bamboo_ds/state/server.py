"""Offers snapshots of state to other members over HTTP, at a bounded rate."""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch

from ..errors import TransferError
from ..forking import only_here
from ..secret import NONE, JobSecret
from ..serving import BACKLOG, abort, serve
from .transfer import CHECKSUM, NONCE, PATH, PIECE_BYTES, PROOF, Pass, StateSnapshot, Withdrawn

if TYPE_CHECKING:
    from aiohttp import web

log = logging.getLogger(__name__)

#: Longest time that an answer is held back for a key that is not offered yet.
_LONGEST_WAIT_S = 3.0
#: A receiver that takes nothing for so long is cut off.
_STALL_S = 60.0


class TokenBucket:
    """Spreads bytes over time: by any time t no more than ``burst + rate * t`` were let through.

    Args:
        rate: bytes per second.
        burst: bytes that may go at once after a pause.
        clock: seconds, monotonic.
    """

    def __init__(self, rate: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        if rate <= 0:
            raise ValueError(f"a rate of {rate} bytes per second transfers nothing; give a positive one, or None")
        self._rate, self._burst, self._clock = rate, burst, clock
        self._tokens, self._at = burst, clock()

    def reserve(self, size: int) -> float:
        """Take ``size`` bytes; they may go in the returned number of seconds. First come, first served."""
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate) - size
        self._at = now
        return max(0.0, -self._tokens / self._rate)


class StateServer:
    """Serves the offered snapshots from a thread of its own. All methods may be called from any thread.

    Args:
        address: the only address to bind to; the port is chosen by the system.
        rate_mb_per_s: bound on the tensors' bytes of all answers together, in 10^6 bytes per second; ``None``: none.
        token: shared with the receivers; never logged.
        secret: the job's; requests that do not prove both are refused.
        answers: functions of a key, by what the keys begin with: requests for such a key get the text that is computed
            for each. They are called on the server's thread and must be quick.

    Raises:
        OSError: cannot listen on ``address``.

    Attributes:
        url: where :func:`~bamboo_ds.state.fetch.fetch` finds this server.
    """

    def __init__(
        self,
        address: str,
        rate_mb_per_s: float | None,
        *,
        token: str,
        secret: JobSecret = NONE,
        answers: Mapping[str, Callable[[str], str]] | None = None,
    ) -> None:
        self._pass = Pass(secret, token)
        self._bucket = None
        if rate_mb_per_s is not None:
            rate = rate_mb_per_s * 1e6
            self._bucket = TokenBucket(rate, min(PIECE_BYTES, rate))  # no more at once than in a second
        self._lock = threading.Lock()
        self._offers: dict[str, StateSnapshot] = {}
        self._answers = answers or {}
        self._closed = False
        # Of the loop's thread alone:
        self._streams: dict[asyncio.Transport, StateSnapshot] = {}
        self._proven: set[Any] = set()  # aiohttp's handlers of connections over which a request has proven itself
        self._change = asyncio.Event()
        self._end = asyncio.Event()

        family, _, _, _, name = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        self._socket = only_here(socket.create_server((str(name[0]), 0), family=family, backlog=BACKLOG))
        host, port = self._socket.getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        started: Future[asyncio.AbstractEventLoop] = Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name="bamboo-state-server", daemon=True)
        self._thread.start()
        self._loop = started.result()

    # -- offers -------------------------------------------------------------------------------------

    def offer(self, key: str, text: str, tensors: Sequence[torch.Tensor]) -> None:
        """Publish a snapshot; an earlier one under ``key`` is withdrawn.

        Contiguous tensors in host memory are not copied: none may change until :meth:`withdraw`, or another
        offer for ``key``, has returned.

        Raises:
            UnsupportedError: a tensor that cannot be sent.
            TransferError: the server is closed.
        """
        snapshot = StateSnapshot(text, tensors)
        with self._lock:
            if self._closed:
                raise TransferError(f"{key!r} cannot be offered: the server at {self.url} is closed")
            previous = self._offers.pop(key, None)
            self._offers[key] = snapshot
            self._changed(previous)

    def withdraw(self, key: str) -> None:
        """Withdraw the offer, if there is one: its transfers break off. Takes no longer than one checksum."""
        with self._lock:
            if not self._closed:
                self._changed(self._offers.pop(key, None))

    def _changed(self, previous: StateSnapshot | None) -> None:
        """Under the lock and not closed, so that the loop lives."""
        if previous is not None:
            previous.withdraw()
        self._loop.call_soon_threadsafe(self._notice, previous)

    def close(self) -> None:
        """Withdraw everything and end: no thread, task or socket stays behind. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for snapshot in self._offers.values():
                    snapshot.withdraw()
                self._offers.clear()
                self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    # -- the loop's thread --------------------------------------------------------------------------

    def _run(self, started: Future[asyncio.AbstractEventLoop]) -> None:
        with self._socket:
            try:
                asyncio.run(self._serve(started))
            except BaseException as error:
                if started.done():
                    raise
                started.set_exception(error)

    async def _serve(self, started: Future[asyncio.AbstractEventLoop]) -> None:
        loop = asyncio.get_running_loop()
        await serve(self._handle, self._socket, self._proven, lambda: started.set_result(loop), self._end)

    def _notice(self, previous: StateSnapshot | None) -> None:
        self._change.set()
        self._change = asyncio.Event()
        for transport, snapshot in list(self._streams.items()):
            if snapshot is previous:
                abort(transport)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            return await self._answer(request)
        except BaseException as error:
            _forget_locals(error)
            # Else the receiver is gone, or was cut off.
            if isinstance(error, Exception) and not isinstance(error, ConnectionError):
                log.exception("a request to the state server at %s failed", self.url)
            raise

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        from aiohttp import web

        given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        key = request.query.get("key", "")
        if not hmac.compare_digest(given, self._pass.authorization(key).encode()):
            return web.Response(status=403, text="wrong or missing proof of the job's secret")
        self._proven.add(request.protocol)
        snapshot = await self._find(key) if (request.method, request.path) == ("GET", PATH) else None
        if snapshot is None:
            return web.Response(status=404, text="not offered yet")
        return await self._send(request, key, snapshot)

    async def _find(self, key: str) -> StateSnapshot | None:
        """The snapshot under ``key``, as soon as it is offered; ``None`` after :data:`_LONGEST_WAIT_S`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _LONGEST_WAIT_S
        while True:
            change = self._change
            with self._lock:
                if key in self._offers:
                    return self._offers[key]
                text = next((text for prefix, text in self._answers.items() if key.startswith(prefix)), None)
            if text is not None:
                return StateSnapshot(text(key), ())
            try:
                await asyncio.wait_for(change.wait(), deadline - loop.time())
            except asyncio.TimeoutError:
                return None

    async def _send(self, request: web.BaseRequest, key: str, snapshot: StateSnapshot) -> web.StreamResponse:
        from aiohttp import web

        transport: Any = request.transport
        if transport is None:
            raise ConnectionResetError("the receiver is gone")
        proof = self._pass.proof(key, request.headers.get(NONCE, ""))
        response = web.StreamResponse(headers={"Content-Type": "application/octet-stream", PROOF: proof})
        response.content_length = snapshot.nbytes
        loop = asyncio.get_running_loop()
        self._streams[transport] = snapshot
        stall, crc = loop.call_later(_STALL_S, abort, transport), 0
        try:
            await response.prepare(request)
            await response.write(snapshot.head)
            for piece in snapshot.pieces():
                stall.cancel()
                if self._bucket is not None:
                    await asyncio.sleep(self._bucket.reserve(len(piece)))
                stall = loop.call_later(_STALL_S, abort, transport)
                crc = snapshot.checksum(piece, crc)
                await response.write(piece)
            await response.write(CHECKSUM.pack(crc))
            await response.write_eof()
        except Withdrawn:
            abort(transport)
            raise ConnectionResetError("withdrawn") from None
        finally:
            stall.cancel()
            del self._streams[transport]
        return response


def _forget_locals(error: BaseException | None) -> None:
    """Let go of what the functions had that ``error`` has ended: it may be kept, and with it the tensors being sent."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__
