"""The web server of a job. Its routes are in :mod:`bamboo_ds.control.web`."""

from __future__ import annotations

import asyncio
import html
import json
import logging
import secrets
import socket
import time
from collections.abc import Callable
from concurrent import futures
from typing import Any, cast
from urllib.parse import parse_qs

from aiohttp import web

from ...errors import BambooError
from ...forking import only_here
from ...observe.web import page
from ...serving import BACKLOG, serve
from ..loop import AgentLoop
from .access import Access
from .feed import Feed

logger = logging.getLogger("bamboo_ds.control.web")

#: Seconds between two looks at the file of events, for so many members each second more.
_TICK_S, _SLOWER = 0.5, 512
_HEARTBEAT_S = 15.0
#: Seconds that a client of the stream may take nothing.
_STALL_S = 10.0
_STREAMS = 32
#: Seconds that a request may wait for events to be read.
_PATIENCE_S = 3.0
_LARGEST_FORM = 4096
#: Paths that need no token.
_OPEN = ("/healthz", "/login")
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_LOGIN = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><title>{job}</title><link rel="icon" href="data:,">
<style nonce="{{{{nonce}}}}">
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 30rem; margin: 15vh auto; padding: 0 1rem }}
input, button {{ font: inherit; padding: .5rem .7rem }} input {{ width: 100%; box-sizing: border-box; margin: .3rem 0 }}
code {{ font-size: .95em }} .wrong {{ color: #b3261e }}
</style></head><body><main><h1>{job}</h1>{wrong}
<form method="post" action="login"><label for="token">Token, as <code>bamboo web --job {job}</code> prints it</label>
<input id="token" name="token" type="password" autocomplete="current-password" autofocus required>
<button>Show the job</button></form></main></body></html>
"""

Change = Callable[[str, str], None]
"""Does ``stop`` or ``leave`` to the job or to a member; raises :class:`BambooError` or ``LookupError``."""


class WebServer:
    """Serves a :class:`Feed` until :meth:`close`.

    Args:
        access: tells holders of the job's token from others.
        address: host and port to listen on, and nothing else; port 0: any.
        change: carries out what users ask for, in a thread; ``None``: they may only read.
        loop: runs it.

    Raises:
        OSError: cannot listen there.

    Attributes:
        feed: what is known of the job.
        url: where it listens.
    """

    def __init__(
        self, feed: Feed, access: Access, job: str, address: tuple[str, int], change: Change | None, loop: AgentLoop
    ) -> None:
        self.feed, self._access, self._job, self._change, self._loop = feed, access, job, change, loop
        self._page, self._router = page(), self._routes()
        family, _, _, _, name = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
        self._socket = only_here(socket.create_server((str(name[0]), address[1]), family=family, backlog=BACKLOG))
        found, number = self._socket.getsockname()[:2]
        self.url = f"http://[{found}]:{number}" if ":" in found else f"http://{found}:{number}"
        self._streams = 0
        self._proven: set[Any] = set()
        self._end, self._news = asyncio.Event(), asyncio.Event()
        self._serving = loop.run(self._serve())

    def close(self, timeout_s: float) -> bool:
        """Ends; whether that was done within ``timeout_s`` seconds. Idempotent."""
        self._loop.call(self._end.set)
        done, _ = futures.wait([self._serving], timeout_s)
        return bool(done) and self._loop.join(timeout_s)

    @property
    def alive(self) -> bool:
        """Whether it serves."""
        return not self._serving.done()

    # -- serving --------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        ticker = asyncio.create_task(self._tick())
        try:
            with self._socket:
                await serve(self._handle, self._socket, self._proven, lambda: None, self._end)
        except Exception:
            logger.exception("the web server at %s has ended", self.url)
        finally:
            ticker.cancel()
            await asyncio.wait([ticker])

    async def _tick(self) -> None:
        """Looks for news and wakes the streams, also if another look has found the news."""
        told = 0
        while True:
            try:
                await asyncio.to_thread(self.feed.refresh, self._end.is_set)
                version = self.feed.version
                if version != told:
                    told = version
                    self._news.set()
                    self._news = asyncio.Event()
            except Exception:
                logger.exception("the page of the job is not brought up to date")
                await asyncio.sleep(10 * _TICK_S)
            await asyncio.sleep(_TICK_S + self.feed.members / _SLOWER)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            return await self._answer(request)
        except (ConnectionError, asyncio.CancelledError):
            raise
        except web.HTTPRequestEntityTooLarge:
            return self._error(413, "too large")
        except Exception:
            logger.exception("a request to the web server failed")
            return self._error(500, "the server has failed; its agent's log says how")

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Lets in who may come in, and finds what the request is for."""
        reads = request.method in ("GET", "HEAD")
        if request.path not in _OPEN:
            if not self._access.admits(request.headers, request.cookies):
                at_page = (request.method, request.path) == ("GET", "/")
                return self._form(401) if at_page else self._error(401, "a token is needed")
            self._proven.add(request.protocol)
            if request.method == "POST" and not self._access.admits_change(request.headers, request.cookies):
                return self._error(403, "requests that change something must come from this page, or with the token")
        if not reads and request.method != "POST":
            return self._error(405, "only GET, HEAD and POST are served")
        found = await self._router.resolve(cast("web.Request", request))
        if found.http_exception is not None:
            return self._error(404, "there is nothing here")
        return await found.handler(cast("web.Request", request))

    def _routes(self) -> web.UrlDispatcher:
        routes = web.UrlDispatcher()
        routes.add_get("/healthz", self._healthz)
        routes.add_get("/login", self._login)
        routes.add_post("/login", self._log_in)
        routes.add_get("/", self._show)
        routes.add_get("/api/view", self._view)
        routes.add_get("/api/stream", self._stream, allow_head=False)
        routes.add_get("/api/controls", self._controls)
        routes.add_get("/api/losses/{number:[0-9]{1,19}}", self._loss)
        routes.add_get("/metrics", self._metrics)
        routes.add_post("/api/stop", self._stop)
        routes.add_post("/api/leave/{member}", self._leave)
        return routes

    # -- what shows something -------------------------------------------------------------------------

    async def _healthz(self, _: web.BaseRequest) -> web.StreamResponse:
        return web.Response(text="ok\n", headers=_HEADERS)

    async def _show(self, _: web.BaseRequest) -> web.StreamResponse:
        return self._html(self._page)

    async def _view(self, _: web.BaseRequest) -> web.StreamResponse:
        answer = self._json((await asyncio.to_thread(self._fresh))[1])
        answer.enable_compression()
        return answer

    async def _controls(self, _: web.BaseRequest) -> web.StreamResponse:
        return self._json(json.dumps({"control": self._change is not None}).encode())

    async def _loss(self, request: web.BaseRequest) -> web.StreamResponse:
        detail = await asyncio.to_thread(self.feed.loss, int(_last(request)))
        return self._error(404, "no such loss") if detail is None else self._json(detail.model_dump_json().encode())

    async def _metrics(self, request: web.BaseRequest) -> web.StreamResponse:
        found = await asyncio.to_thread(self.feed.exposition, request.headers.get("Accept", ""), self._soon())
        if found is None:
            return self._error(503, "the events of the job are being read")
        body, content_type = found
        return web.Response(body=body, headers={**_HEADERS, "Content-Type": content_type})

    def _fresh(self) -> tuple[int, bytes]:
        self.feed.refresh(self._soon())
        return self.feed.view()

    def _soon(self) -> Callable[[], bool]:
        """Whether a request has waited long enough for what is new."""
        deadline = time.monotonic() + _PATIENCE_S
        return lambda: self._end.is_set() or time.monotonic() >= deadline

    async def _stream(self, request: web.BaseRequest) -> web.StreamResponse:
        if self._streams >= _STREAMS:
            return self._error(503, f"{_STREAMS} others watch already")
        self._streams += 1
        try:
            answer = web.StreamResponse(headers={**_HEADERS, "Content-Type": "text/event-stream"})
            await answer.prepare(request)
            seen = 0
            while True:
                news = self._news
                if self.feed.version != seen:
                    seen, text = await asyncio.to_thread(self.feed.view, seen)
                    await asyncio.wait_for(answer.write(b"data: " + text + b"\n\n"), _STALL_S)
                try:
                    await asyncio.wait_for(news.wait(), _HEARTBEAT_S)
                except asyncio.TimeoutError:
                    await asyncio.wait_for(answer.write(b": alive\n\n"), _STALL_S)
        except asyncio.TimeoutError:
            raise ConnectionResetError("the client takes nothing") from None
        finally:
            self._streams -= 1

    # -- what changes something -----------------------------------------------------------------------

    async def _login(self, _: web.BaseRequest) -> web.StreamResponse:
        return self._form()

    async def _log_in(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            await asyncio.wait_for(request.content.readexactly(_LARGEST_FORM + 1), _STALL_S)
            return self._error(413, "too large")
        except asyncio.IncompleteReadError as whole:
            body = whole.partial
        except asyncio.TimeoutError:
            return self._error(408, "the form did not come")
        token = parse_qs(body.decode(errors="replace")).get("token", [""])[0]
        if not self._access.knows(token.strip()):
            return self._form(401, wrong=True)
        return web.Response(status=303, headers={**_HEADERS, "Location": "./", "Set-Cookie": self._access.cookie()})

    async def _stop(self, _: web.BaseRequest) -> web.StreamResponse:
        return await self._do("stop", "")

    async def _leave(self, request: web.BaseRequest) -> web.StreamResponse:
        return await self._do("leave", _last(request))

    async def _do(self, what: str, member: str) -> web.StreamResponse:
        if self._change is None:
            return self._error(403, 'this page only shows the job: set "bamboo.observe.control" to true')
        try:
            await asyncio.to_thread(self._change, what, member)
        except LookupError as error:
            return self._error(404, str(error.args[0] if error.args else error))
        except BambooError as error:
            return self._error(503, str(error))
        return self._json(b"{}")

    # -- answers --------------------------------------------------------------------------------------

    def _html(self, page: str, status: int = 200) -> web.Response:
        nonce = secrets.token_urlsafe(16)
        policy = (
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src data:; "
            "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
        )
        headers = {**_HEADERS, "Content-Security-Policy": policy}
        if status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        text = page.replace("{{nonce}}", nonce)
        return web.Response(text=text, status=status, content_type="text/html", headers=headers)

    def _form(self, status: int = 200, wrong: bool = False) -> web.Response:
        told = '<p class="wrong" role="alert">That is not the token of this job.</p>' if wrong else ""
        return self._html(_LOGIN.format(job=html.escape(self._job), wrong=told), status)

    def _json(self, body: bytes, status: int = 200) -> web.Response:
        return web.Response(body=body, status=status, headers={**_HEADERS, "Content-Type": "application/json"})

    def _error(self, status: int, what: str) -> web.Response:
        answer = self._json(json.dumps({"error": what}).encode(), status)
        if status == 401:
            answer.headers["WWW-Authenticate"] = "Bearer"
        return answer


def _last(request: web.BaseRequest) -> str:
    """The name in the last part of a path."""
    return request.path.rpartition("/")[2]
