"""The asyncio loop of an agent, for all that it serves and asks."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

_T = TypeVar("_T")


class AgentLoop:
    """Runs coroutines on one daemon thread, ``bamboo-loop``, which is there while there are any. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = 0
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop
        self._idle: asyncio.Event

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Begins to run ``coroutine``; its result, or what it raises. Not from the loop's thread."""
        with self._lock:
            if not self._running:
                self._start()
            self._running += 1
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        future.add_done_callback(lambda _: self._note_end())
        return future

    def call(self, function: Callable[[], object]) -> None:
        """Has the loop call ``function`` soon, if it runs."""
        if self._thread is not None:
            with contextlib.suppress(RuntimeError):  # it is closed
                self._loop.call_soon_threadsafe(function)

    def join(self, timeout_s: float) -> bool:
        """Waits up to ``timeout_s`` seconds for the thread's end, if nothing runs; returns whether it has ended."""
        with self._lock:
            thread = None if self._running else self._thread
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(timeout_s)
        return not thread.is_alive()

    def _start(self) -> None:
        started: Future[asyncio.AbstractEventLoop] = Future()
        self._idle = idle = asyncio.Event()

        async def main() -> None:
            started.set_result(asyncio.get_running_loop())
            await idle.wait()

        self._thread = threading.Thread(target=lambda: asyncio.run(main()), name="bamboo-loop", daemon=True)
        self._thread.start()
        self._loop = started.result()

    def _note_end(self) -> None:
        with self._lock:
            self._running -= 1
            if not self._running:
                self._loop.call_soon_threadsafe(self._idle.set)
