"""The web server of a job. Its routes are in :mod:`bamboo_ds.control.web`."""

from __future__ import annotations

import asyncio
import contextlib
import html
import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from ...errors import BambooError
from ...forking import only_here
from ...observe.web import page
from ...serving import BACKLOG, serve
from .access import Access
from .feed import Feed

if TYPE_CHECKING:
    from aiohttp import web

logger = logging.getLogger("bamboo_ds.control.web")

#: Seconds between two looks at the file of events, for so many members each second more.
_TICK_S, _SLOWER = 0.5, 512
_HEARTBEAT_S = 15.0
#: Seconds that a client of the stream may take nothing.
_STALL_S = 10.0
_STREAMS = 32
_CHANGE_S = 10.0
#: Seconds that a request may wait for events to be read.
_PATIENCE_S = 3.0
_LARGEST_FORM = 4096
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

Change = Callable[[str, str], "Future[None]"]
"""Does ``stop`` or ``leave`` to the job or to a member; fails by :class:`BambooError` or ``LookupError``."""


class WebServer:
    """Serves a :class:`Feed` from a thread of its own until :meth:`close`.

    Args:
        host, port: what to listen on, and nothing else; port 0: any.
        change: carries out what users ask for; ``None``: they may only read.

    Raises:
        OSError: cannot listen there.

    Attributes:
        url: where it listens.
    """

    def __init__(self, feed: Feed, access: Access, job: str, host: str, port: int, change: Change | None) -> None:
        self._feed, self._access, self._job, self._change = feed, access, job, change
        self._page = page()
        family, _, _, _, name = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self._socket = only_here(socket.create_server((str(name[0]), port), family=family, backlog=BACKLOG))
        found, number = self._socket.getsockname()[:2]
        self.url = f"http://[{found}]:{number}" if ":" in found else f"http://{found}:{number}"
        self._streams = 0
        self._proven: set[Any] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bamboo-web", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> bool:
        """End; whether that was done within ``timeout_s`` seconds. Idempotent."""
        self._closing.set()
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended
                loop.call_soon_threadsafe(self._end.set)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def alive(self) -> bool:
        """Whether it serves."""
        return self._thread.is_alive()

    # -- its thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with self._socket:
                asyncio.run(self._serve())
        except Exception:
            logger.exception("the web server at %s has ended", self.url)

    async def _serve(self) -> None:
        self._end, self._news = asyncio.Event(), asyncio.Event()
        self._loop = asyncio.get_running_loop()
        if self._closing.is_set():
            return
        ticker = asyncio.create_task(self._tick())
        try:
            await serve(self._handle, self._socket, self._proven, lambda: None, self._end)
        finally:
            ticker.cancel()
            await asyncio.wait([ticker])

    async def _tick(self) -> None:
        """Look for what is new, and wake the streams, also where it was another one's look that has found it."""
        told = 0
        while True:
            try:
                await asyncio.to_thread(self._feed.refresh, self._closing.is_set)
                version = self._feed.version
                if version != told:
                    told = version
                    self._news.set()
                    self._news = asyncio.Event()
            except Exception:
                logger.exception("the page of the job is not brought up to date")
                await asyncio.sleep(10 * _TICK_S)
            await asyncio.sleep(_TICK_S + self._feed.members / _SLOWER)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        from aiohttp import web

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
        method, path = request.method, request.path
        if path == "/healthz" and method in ("GET", "HEAD"):
            return self._text("ok\n")
        if path == "/login":
            return await self._login(request) if method == "POST" else self._form()
        if not self._access.admits(request.headers, request.cookies):
            return self._form(401) if (method, path) == ("GET", "/") else self._error(401, "a token is needed")
        self._proven.add(request.protocol)
        if method == "POST":
            if not self._access.admits_change(request.headers, request.cookies):
                return self._error(403, "requests that change something must come from this page, or with the token")
            return await self._do(path)
        if method not in ("GET", "HEAD"):
            return self._error(405, "only GET, HEAD and POST are served")
        return await self._show(request, path)

    async def _show(self, request: web.BaseRequest, path: str) -> web.StreamResponse:
        from aiohttp import web

        if path == "/":
            return self._html(self._page)
        if path == "/api/view":
            _, text = await asyncio.to_thread(self._fresh)
            answer = self._json(text)
            answer.enable_compression()
            return answer
        if path == "/api/stream":
            return await self._stream(request)
        if path == "/api/controls":
            return self._json(json.dumps({"control": self._change is not None}).encode())
        if path.startswith("/api/losses/"):
            number = path.rpartition("/")[2]
            known = number.isascii() and number.isdecimal() and len(number) < 20
            detail = await asyncio.to_thread(self._feed.loss, int(number)) if known else None
            return self._error(404, "no such loss") if detail is None else self._json(detail.model_dump_json().encode())
        if path == "/metrics":
            accept = request.headers.get("Accept", "")
            found = await asyncio.to_thread(self._feed.exposition, accept, self._soon())
            if found is None:
                return self._error(503, "the events of the job are being read")
            body, content_type = found
            return web.Response(body=body, headers={**_HEADERS, "Content-Type": content_type})
        return self._error(404, "there is nothing here")

    def _fresh(self) -> tuple[int, bytes]:
        self._feed.refresh(self._soon())
        return self._feed.view()

    def _soon(self) -> Callable[[], bool]:
        """Whether a request has waited long enough for what is new."""
        deadline = time.monotonic() + _PATIENCE_S
        return lambda: self._closing.is_set() or time.monotonic() >= deadline

    async def _stream(self, request: web.BaseRequest) -> web.StreamResponse:
        from aiohttp import web

        if self._streams >= _STREAMS:
            return self._error(503, f"{_STREAMS} others watch already")
        self._streams += 1
        try:
            answer = web.StreamResponse(headers={**_HEADERS, "Content-Type": "text/event-stream"})
            await answer.prepare(request)
            seen = 0
            while True:
                news = self._news
                if self._feed.version != seen:
                    seen, text = await asyncio.to_thread(self._feed.view, seen)
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

    async def _login(self, request: web.BaseRequest) -> web.StreamResponse:
        from aiohttp import web

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

    async def _do(self, path: str) -> web.StreamResponse:
        from aiohttp import web

        if path == "/logout":
            forget = self._access.cookie(forget=True)
            return web.Response(status=303, headers={**_HEADERS, "Location": "login", "Set-Cookie": forget})
        member = path[len("/api/leave/") :] if path.startswith("/api/leave/") else ""
        if path != "/api/stop" and not member:
            return self._error(404, "there is nothing here")
        if self._change is None:
            return self._error(403, 'this page only shows the job: set "bamboo.observe.control" to true')
        done = self._change("leave" if member else "stop", member)
        try:
            await asyncio.wait_for(asyncio.wrap_future(done), _CHANGE_S)
        except LookupError as error:
            return self._error(404, str(error.args[0] if error.args else error))
        except asyncio.TimeoutError:
            begun = "" if done.cancel() else ", and whether it is done is not known"
            return self._error(503, f"etcd does not answer{begun}")
        except BambooError as error:
            return self._error(503, str(error))
        return self._json(b"{}")

    # -- answers --------------------------------------------------------------------------------------

    def _html(self, page: str, status: int = 200) -> web.Response:
        from aiohttp import web

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
        from aiohttp import web

        return web.Response(body=body, status=status, headers={**_HEADERS, "Content-Type": "application/json"})

    def _text(self, text: str) -> web.Response:
        from aiohttp import web

        return web.Response(text=text, headers=_HEADERS)

    def _error(self, status: int, what: str) -> web.Response:
        answer = self._json(json.dumps({"error": what}).encode(), status)
        if status == 401:
            answer.headers["WWW-Authenticate"] = "Bearer"
        return answer
