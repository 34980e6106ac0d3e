"""A real etcd for tests that a test may kill, pause, restart and cut off from its clients.

Fixtures made of it are in ``fixtures.py``.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc

from bamboo_ds.store.connection import rpc
from bamboo_ds.store.embedded import etcd_command, find_etcd, wait_healthy
from bamboo_ds.store.endpoints import Endpoint
from bamboo_ds.store.records import WatchEvent
from bamboo_ds.store.supervisor import die_with_parent

from .patience import Patience
from .ports import free_port
from .processes import wait_stopped

_names = itertools.count()


class EtcdServer:
    """One etcd process with fixed ports and data directory."""

    def __init__(self, folder: Path, extra: Sequence[str] = (), scheme: str = "http") -> None:
        self.folder = folder
        self.port, self.peer_port = free_port(), free_port()
        self.endpoint = Endpoint("127.0.0.1", self.port, scheme == "https")
        self.url = str(self.endpoint)
        self._scheme, self.extra = scheme, list(extra)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> EtcdServer:
        """Start, also again on the old data, and wait until it serves."""
        self.spawn()
        if self._scheme == "http":
            wait_healthy(self.endpoint, 20.0, self.check)
        return self

    def spawn(self) -> None:
        """Start."""
        command = etcd_command(find_etcd(), str(self.folder / "data"), self.url, f"http://127.0.0.1:{self.peer_port}")
        with open(self.folder / "etcd.log", "ab") as log:
            self._process = subprocess.Popen(
                command + self.extra,
                stdout=log,
                stderr=log,
                preexec_fn=lambda: die_with_parent(signal.SIGKILL),
            )

    def check(self) -> None:
        assert self._process is not None
        assert self._process.poll() is None, (self.folder / "etcd.log").read_text()

    def status(self) -> dict[str, Any] | None:
        """What it says of itself and of its leader; ``None`` if it does not live."""
        if self._process is None or self._process.poll() is not None:
            return None
        url = f"http://127.0.0.1:{self.port}/v3/maintenance/status"
        with urllib.request.urlopen(url, b"{}", timeout=10) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def compact(self, revision: int) -> None:
        """Forget what keys were before ``revision``."""
        with grpc.insecure_channel(f"127.0.0.1:{self.port}", options=(("grpc.enable_http_proxy", 0),)) as channel:
            rpc.KVStub(channel).Compact(rpc.CompactionRequest(revision=revision, physical=True), timeout=5)

    def kill(self) -> None:
        """SIGKILL; the data stays."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def restart(self, *, empty: bool = False) -> None:
        """Kill and start on the same ports, with the old data or with none."""
        if self._scheme == "http":
            # A linearizable read: what etcd 3.5.1 has acknowledged is not on the disk yet, for a moment (etcd#14370).
            wait_healthy(self.endpoint, 20.0, self.check)
        self.kill()
        if empty:
            shutil.rmtree(self.folder / "data")
        self.start()

    def pause(self) -> None:
        """SIGSTOP: connections stay open and nothing answers. Returns when the kernel has stopped it."""
        os.kill(self.pid, signal.SIGSTOP)
        wait_stopped(self.pid)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()

    def __enter__(self) -> EtcdServer:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class EtcdCluster:
    """Three etcds that elect a leader. Use it in a ``with`` statement."""

    def __init__(self, folder: Path) -> None:
        self.servers = []
        for number in range(3):
            (folder / f"node-{number}").mkdir(parents=True)
            self.servers.append(EtcdServer(folder / f"node-{number}"))
        peers = ",".join(f"n{i}=http://127.0.0.1:{server.peer_port}" for i, server in enumerate(self.servers))
        for number, server in enumerate(self.servers):
            server.extra += ["--name", f"n{number}", "--initial-cluster", peers, "--initial-cluster-token", str(folder)]

    def leader(self) -> EtcdServer:
        """Who leads, as the living say; waits for an election."""
        found: list[EtcdServer] = []

        def elected() -> bool:
            for server in self.servers:
                status = server.status()
                if status is not None and status.get("leader") == status["header"]["member_id"]:
                    found.append(server)
            return bool(found)

        wait_until(elected, "the cluster has a leader", 20.0)
        return found[0]

    def __enter__(self) -> EtcdCluster:
        try:
            for server in self.servers:
                server.spawn()
            for server in self.servers:
                wait_healthy(server.endpoint, 30.0, server.check)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for server in self.servers:
            server.stop()


class Proxy:
    """A TCP proxy in front of etcd, to break connections in chosen ways.

    ``mode``: ``pass`` forwards; ``cut`` closes all connections and refuses new ones; ``deaf`` forwards
    requests and swallows every answer; ``hole`` swallows everything; ``slow`` delivers answers ``delay_s`` seconds
    late, and counts them in ``delayed``. ``accepted`` counts connections.
    """

    delay_s = 0.0

    def __init__(self, port: int) -> None:
        self._target = port
        self.mode = "pass"
        self.swallowed = self.delayed = self.accepted = 0
        self._changed = threading.Condition()
        self._ends: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="test-proxy")
        self._thread.start()
        self._server = self._run(asyncio.start_server(self._connected, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    def set(self, mode: str) -> None:
        """Change the mode; in force at the return."""

        async def change() -> None:
            self.mode = mode
            if mode == "cut":
                self._drop(self._ends)

        self._run(change())

    def wait_swallowed(self, timeout_s: float = 10.0) -> None:
        """Wait until an answer has been swallowed: the fault has happened."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.swallowed > 0, timeout_s), "no answer was swallowed"

    @staticmethod
    def _drop(ends: Iterable[asyncio.StreamWriter]) -> None:
        for end in ends:
            end.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        ends = {writer}
        try:
            answers, server = await asyncio.open_connection("127.0.0.1", self._target)
            ends.add(server)
            if self.mode == "cut":
                return
            self._ends |= ends
            passing = [asyncio.ensure_future(self._pass(*way)) for way in ((reader, server), (answers, writer, True))]
            await asyncio.wait(passing, return_when=asyncio.FIRST_COMPLETED)
            self._drop(ends)
            await asyncio.gather(*passing, return_exceptions=True)
        except OSError:
            return  # nobody listens behind it
        finally:
            self._drop(ends)
            self._ends -= ends

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answers: bool = False) -> None:
        due = 0.0
        while data := await reader.read(65536):
            if self.mode == "hole" or (self.mode == "deaf" and answers):
                with self._changed:
                    self.swallowed += 1
                    self._changed.notify_all()
            elif answers and (self.mode == "slow" or due > self._loop.time()):
                self.delayed += 1
                due = max(due, self._loop.time() + (self.delay_s if self.mode == "slow" else 0.0))
                self._loop.call_at(due, writer.write, data)
            else:
                writer.write(data)
                await writer.drain()

    def close(self) -> None:
        async def end() -> None:
            self.mode = "cut"
            self._server.close()
            self._drop(self._ends)
            await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)

        self._run(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Recorder:
    """A watch callback that remembers, and lets a test wait."""

    def __init__(self) -> None:
        self.events: list[WatchEvent] = []
        self._changed = threading.Condition()

    def __call__(self, event: WatchEvent) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    @property
    def seen(self) -> list[tuple[str, str, str]]:
        with self._changed:
            return [(event.kind, event.key, event.kv.value) for event in self.events]

    def wait(self, predicate: Callable[[list[tuple[str, str, str]]], Any], timeout_s: float = 10.0) -> None:
        """Wait until ``predicate(seen)``; fails with what was seen."""
        with self._changed:
            done = self._changed.wait_for(
                lambda: predicate([(event.kind, event.key, event.kv.value) for event in self.events]),
                timeout_s,
            )
            assert done, f"saw only {self.events}"

    def wait_for(self, kind: str, key: str, timeout_s: float = 10.0) -> None:
        self.wait(lambda seen: any(event[:2] == (kind, key) for event in seen), timeout_s)


def wait_until(predicate: Callable[[], Any], what: str, timeout_s: float = 10.0) -> float:
    """Poll ``predicate`` until true, with a deadline; returns the seconds it took."""
    begin, patience, pause = time.monotonic(), Patience(timeout_s), threading.Event()
    while not predicate():
        assert not patience.over(), f"not within {timeout_s} s: {what}"
        pause.wait(0.01)
    return time.monotonic() - begin


def new_namespace() -> str:
    """A namespace that no other test uses."""
    return f"/bamboo/test-{os.getpid()}-{next(_names)}/"
