"""Serves HTTP such that strangers cannot use up a process's connections, and that the end leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aiohttp import web

#: Connections that have proven nothing; one more, and the oldest has to go.
STRANGERS = 32
#: Connections that wait to be accepted.
BACKLOG = 128
_CLOSING_TICK_S = 0.02
#: Turns of the loop until a connection that asyncio has accepted is among the server's; three as it is written.
_ARRIVAL_TURNS = 10


async def serve(
    handle: Callable[[Any], Awaitable[web.StreamResponse]],
    listener: socket.socket,
    proven: set[Any],
    ready: Callable[[], None],
    end: asyncio.Event,
) -> None:
    """Answers requests by ``handle`` until ``end``.

    Args:
        handle: makes the response to a request. It is cancelled when the client hangs up.
        proven: protocols of requests (``request.protocol``) over which a request has proven itself; ``handle`` adds to
            it. The other connections are bounded by :data:`STRANGERS`.
        ready: is called when connections are accepted.
    """
    from aiohttp import web

    # Its logger would show headers, and with them what proves, of requests that it cannot parse.
    silent = logging.Logger("silent", logging.CRITICAL + 1)

    class Bounded(web.Server):
        """Lets strangers hold no more than so many connections open."""

        def connection_made(self, handler: Any, transport: asyncio.Transport) -> None:
            super().connection_made(handler, transport)
            strangers = [each.transport for each in self.connections if each not in proven]
            for one in strangers[:-STRANGERS]:  # the oldest
                if one is not None:
                    abort(one)

        def connection_lost(self, handler: Any, exc: BaseException | None = None) -> None:
            proven.discard(handler)
            super().connection_lost(handler, exc)

    handling: set[asyncio.Task[Any]] = set()

    async def noted(request: Any) -> web.StreamResponse:
        task = asyncio.current_task()
        assert task is not None
        handling.add(task)
        task.add_done_callback(handling.discard)
        return await handle(request)

    server = Bounded(noted, handler_cancellation=True, access_log=None, logger=silent)
    runner = web.ServerRunner(server, shutdown_timeout=0.1)
    await runner.setup()
    await web.SockSite(runner, listener, backlog=BACKLOG).start()
    ready()
    await end.wait()
    # asyncio loses connections that it is accepting while its server closes: let them arrive first.
    asyncio.get_running_loop().remove_reader(listener)
    with contextlib.suppress(OSError):  # a copy in a forked child must not go on accepting
        listener.shutdown(socket.SHUT_RDWR)
    for _ in range(_ARRIVAL_TURNS):
        await asyncio.sleep(0)
    while handling or server.connections:
        for connection in server.connections:
            if connection.transport is not None:
                abort(connection.transport)
        if handling:
            await asyncio.wait(handling, timeout=_CLOSING_TICK_S)
        else:
            await asyncio.sleep(0)
    await runner.cleanup()


def abort(transport: asyncio.Transport) -> None:
    """Ends a connection at once, also where a forked child holds a copy of its socket."""
    with contextlib.suppress(OSError):  # it has ended already
        transport.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
    transport.abort()
