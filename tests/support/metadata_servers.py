"""Metadata services of the clouds on 127.0.0.1, as strict as the real ones, for tests of notices.

Each runs aiohttp's server on a thread of its own, counts every request by ``"METHOD /path"``, can be stopped
and started again on its port, made to hold its answers back, and made to answer nonsense.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any

from aiohttp import web
from typing_extensions import Self

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class MetadataServer:
    """One HTTP server. Attributes may be changed at any time, by :meth:`change` where somebody waits for it.

    ``date`` is that of answers, if it is not this host's.
    """

    date: str | None = None

    def __init__(self) -> None:
        self.port = 0
        self.counts: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()
        self.held = 0  # requests without an answer yet
        self.instead: dict[str, tuple[int, dict[str, str], bytes]] = {}  # by path: answers that are none
        self._holding = False
        self._news = threading.Condition()
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def start(self) -> None:
        """Serve, on the port of the last time if there was one."""
        ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(ready)), name="metadata-server")
        self._thread.start()
        assert ready.wait(10), "the server did not start"

    def stop(self) -> None:
        """Close the port and every connection; whoever waits for an answer gets none."""
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(10)
            assert not self._thread.is_alive()
            self._thread = None

    def change(self, **values: Any) -> None:
        """Set attributes and wake the requests that wait for a change."""

        async def apply() -> None:
            for name, value in values.items():
                assert hasattr(self, name), name
                setattr(self, name, value)
            async with self._changed:
                self._changed.notify_all()

        asyncio.run_coroutine_threadsafe(apply(), self._loop).result(10)

    def hold(self) -> None:
        """From now on answer nobody."""
        self._holding = True

    def release(self) -> None:
        """Answer again, those who waited too."""
        self._holding = False
        self.change()

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
        """Wait until ``condition``, asked after every request's arrival and answer, holds."""
        with self._news:
            assert self._news.wait_for(condition, timeout_s), f"counts {self.counts}, statuses {self.statuses}"

    def wait_for_requests(self, key: str, more: int = 1) -> None:
        """Wait for ``more`` further requests of ``key``."""
        target = self.counts[key] + more
        self.wait_for(lambda: self.counts[key] >= target)

    def routes(self) -> dict[str, Handler]:
        """Handlers by ``"METHOD /path"``."""
        raise NotImplementedError

    async def _serve(self, ready: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        self._changed = asyncio.Condition()
        app = web.Application(middlewares=[self._middleware])
        for key, handler in self.routes().items():
            method, _, path = key.partition(" ")
            app.router.add_route(method, path, handler)
        runner = web.AppRunner(app, shutdown_timeout=0.1, handle_signals=False, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", self.port)
        await site.start()
        self.port = runner.addresses[0][1]
        ready.set()
        await self._stopping.wait()
        await runner.cleanup()

    @web.middleware
    async def _middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self._note(lambda: self.counts.update([f"{request.method} {request.path}"]))
        self.held += 1
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: not self._holding)
            if request.path in self.instead:
                status, headers, body = self.instead[request.path]
                response: web.StreamResponse = web.Response(status=status, headers=headers, body=body)
            else:
                response = await handler(request)
        except web.HTTPException as error:
            response = web.Response(status=error.status, text=error.text)
        finally:
            self._note(lambda: setattr(self, "held", self.held - 1))
        if self.date is not None:
            response.headers["Date"] = self.date
        self._note(lambda: self.statuses.update([response.status]))
        return response

    def _note(self, action: Callable[[], None]) -> None:
        with self._news:
            action()
            self._news.notify_all()


class AwsMetadata(MetadataServer):
    """IMDSv2: nothing without a token that is known and has not expired.

    Attributes:
        action: ``spot/instance-action``, or ``None``.
        rebalance: ``events/recommendations/rebalance``, or ``None``.
    """

    ACTION = "GET /latest/meta-data/spot/instance-action"
    REBALANCE = "GET /latest/meta-data/events/recommendations/rebalance"
    TOKEN = "PUT /latest/api/token"

    def __init__(self) -> None:
        super().__init__()
        self.action: dict[str, str] | None = None
        self.rebalance: dict[str, str] | None = None
        self._tokens: dict[str, float] = {}

    def routes(self) -> dict[str, Handler]:
        return {self.TOKEN: self._token, self.ACTION: self._action, self.REBALANCE: self._rebalance}

    def expire_tokens(self) -> None:
        """All tokens have reached the end of their life."""
        self._tokens = dict.fromkeys(self._tokens, 0.0)

    async def _token(self, request: web.Request) -> web.Response:
        if "X-Forwarded-For" in request.headers:
            raise web.HTTPForbidden
        ttl = request.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
        if not ttl.isdigit() or not 1 <= int(ttl) <= 21600:
            raise web.HTTPBadRequest
        # The answer must not leave the instance: one hop is all that it may make.
        assert request.transport is not None
        request.transport.get_extra_info("socket").setsockopt(socket.IPPROTO_IP, socket.IP_TTL, 1)
        token = secrets.token_urlsafe(40)
        self._tokens[token] = time.monotonic() + int(ttl)
        return web.Response(text=token, headers={"X-aws-ec2-metadata-token-ttl-seconds": ttl})

    def _answer(self, request: web.Request, value: dict[str, str] | None) -> web.Response:
        token = request.headers.get("X-aws-ec2-metadata-token", "")
        if self._tokens.get(token, 0.0) <= time.monotonic():
            raise web.HTTPUnauthorized
        if value is None:
            raise web.HTTPNotFound
        return web.Response(text=json.dumps(value), content_type="text/plain")

    async def _action(self, request: web.Request) -> web.Response:
        return self._answer(request, self.action)

    async def _rebalance(self, request: web.Request) -> web.Response:
        return self._answer(request, self.rebalance)


class GoogleMetadata(MetadataServer):
    """The metadata server of a Compute Engine instance.

    Attributes:
        preempted: ``instance/preempted``.
        maintenance: ``instance/maintenance-event``.
        told: how often each value was answered.
    """

    PREEMPTED = "GET /computeMetadata/v1/instance/preempted"
    MAINTENANCE = "GET /computeMetadata/v1/instance/maintenance-event"

    def __init__(self) -> None:
        super().__init__()
        self.preempted = "FALSE"
        self.maintenance = "NONE"
        self.told: Counter[str] = Counter()

    def routes(self) -> dict[str, Handler]:
        return {self.PREEMPTED: self._preempted, self.MAINTENANCE: self._maintenance}

    def wait_for_told(self, value: str) -> None:
        """Wait until ``value`` is answered once more."""
        target = self.told[value] + 1
        self.wait_for(lambda: self.told[value] >= target)

    async def _preempted(self, request: web.Request) -> web.Response:
        return self._answer(request, self.preempted)

    async def _maintenance(self, request: web.Request) -> web.Response:
        return self._answer(request, self.maintenance)

    def _answer(self, request: web.Request, value: str) -> web.Response:
        if request.headers.get("Metadata-Flavor") != "Google" or "X-Forwarded-For" in request.headers:
            raise web.HTTPForbidden
        self._note(lambda: self.told.update([value]))
        return web.Response(text=value, headers={"Metadata-Flavor": "Google"}, content_type="application/text")


class AzureMetadata(MetadataServer):
    """Scheduled Events and the name of an Azure virtual machine.

    Attributes:
        name: of the machine.
        events: the events that are scheduled, as the service describes them.
        acknowledged: ids of the events that were started by request.
    """

    NAME = "GET /metadata/instance/compute/name"
    EVENTS = "GET /metadata/scheduledevents"
    START = "POST /metadata/scheduledevents"

    def __init__(self, name: str = "trainer_0") -> None:
        super().__init__()
        self.name = name
        self.events: list[dict[str, Any]] = []
        self.acknowledged: list[str] = []
        self._incarnation = 0

    def routes(self) -> dict[str, Handler]:
        return {self.NAME: self._name, self.EVENTS: self._list, self.START: self._start}

    @staticmethod
    def event(event_id: str, kind: str, not_before: str, *resources: str, **more: Any) -> dict[str, Any]:
        """An event as the service describes it."""
        return {
            "EventId": event_id,
            "EventType": kind,
            "ResourceType": "VirtualMachine",
            "Resources": list(resources),
            "EventStatus": "Scheduled",
            "NotBefore": not_before,
            "Description": "",
            "EventSource": "Platform",
            "DurationInSeconds": -1,
            **more,
        }

    def _check(self, request: web.Request, *versions: str) -> None:
        if request.headers.get("Metadata", "").lower() != "true" or "X-Forwarded-For" in request.headers:
            raise web.HTTPBadRequest(text='{"error": "Bad request. Required metadata header not specified"}')
        if request.query.get("api-version") not in versions:
            raise web.HTTPBadRequest(text='{"error": "Bad request. api-version is invalid or was not specified"}')

    async def _name(self, request: web.Request) -> web.Response:
        self._check(request, "2021-02-01")
        if request.query.get("format") != "text":
            raise web.HTTPBadRequest(text='{"error": "Bad request. A leaf is served as text only"}')
        return web.Response(text=self.name)

    async def _list(self, request: web.Request) -> web.Response:
        self._check(request, "2020-07-01")
        self._incarnation += 1
        return web.json_response({"DocumentIncarnation": self._incarnation, "Events": self.events})

    async def _start(self, request: web.Request) -> web.Response:
        self._check(request, "2020-07-01")
        wanted = [item["EventId"] for item in (await request.json())["StartRequests"]]
        known = {event["EventId"]: event for event in self.events}
        if not wanted or any(event_id not in known for event_id in wanted):
            raise web.HTTPBadRequest(text='{"error": "Unknown EventId"}')
        for event_id in wanted:
            known[event_id].update(EventStatus="Started", NotBefore="")
        self._note(lambda: self.acknowledged.extend(wanted))
        return web.Response()


class HookServer(MetadataServer):
    """Somebody's own server: answers ``GET /notice`` with ``status`` and ``body``."""

    NOTICE = "GET /notice"

    def __init__(self) -> None:
        super().__init__()
        self.status = 204
        self.body: str | None = None

    def routes(self) -> dict[str, Handler]:
        return {self.NOTICE: self._answer}

    def say(self, **payload: Any) -> None:
        """From now on there is this notice."""
        self.change(status=200, body=json.dumps(payload))

    async def _answer(self, request: web.Request) -> web.Response:
        return web.Response(status=self.status, text=self.body)
