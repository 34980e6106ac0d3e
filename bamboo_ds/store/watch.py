"""Watches that survive their connection."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
from tenacity import (
    Retrying,
    retry_if_exception_type,
    sleep_using_event,
    stop_when_event_set,
    wait_exponential,
    wait_random,
)

from ..errors import StoreError, StoreUnavailable
from .connection import Broken, EtcdConnection, Link, rpc
from .keyspace import Keyspace
from .records import WatchEvent

log = logging.getLogger(__name__)

#: Seconds that etcd may take for a token.
_TOKEN_S = 2.0


class Watch:
    """A running watch. Made by :meth:`Store.watch`.

    Attributes:
        error: the exception that ended the watch; ``None`` while it runs and after :meth:`cancel`.
        reconnects: how often the stream had to be opened again.
    """

    def __init__(
        self,
        connection: EtcdConnection,
        keys: Keyspace,
        prefixes: Sequence[str],
        callback: Callable[[WatchEvent], None],
        first: int,
        on_error: Callable[[BaseException], None] | None,
        on_end: Callable[[Watch], None],
    ) -> None:
        self.error: BaseException | None = None
        self.reconnects = 0
        self._connection, self._keys, self._prefixes = connection, keys, tuple(prefixes)
        self._callback, self._on_error, self._on_end = callback, on_error, on_end
        self._next = [first] * len(self._prefixes)  # revisions, by prefix
        self._cluster = 0
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._stream: _WatchStream | None = None
        self._thread = threading.Thread(target=self._run, name=f"bamboo-watch-{prefixes[0]}", daemon=True)

    def start(self) -> None:
        """Begins to deliver events."""
        self._thread.start()

    def cancel(self, wait: bool = True) -> None:
        """Ends the watch. No callback begins after the return; with ``wait`` none runs (but that which calls this)."""
        self._stop.set()
        with self._lock:
            if self._stream is not None:
                self._stream.close()
        if wait and threading.current_thread() is not self._thread and self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._ended():
                self._follow()
        except (Broken, StoreError) as error:
            if not self._ended():
                self.error = error
        except Exception as error:  # the callback's: handed to whoever is responsible, below
            self.error = error
        finally:
            self._on_end(self)
        if self.error is not None:
            defect = None if isinstance(self.error, StoreError) else self.error
            log.warning("the watch of %r has ended: %s", self._prefixes, self.error, exc_info=defect)
            if self._on_error is not None:
                self._on_error(self.error)

    def _ended(self) -> bool:
        return self._stop.is_set() or self._connection.closed.is_set()

    def _follow(self) -> None:
        """Opens one stream and deliver from it until it breaks."""
        retrying = Retrying(
            retry=retry_if_exception_type(Broken),
            stop=stop_when_event_set(self._stop) | stop_when_event_set(self._connection.closed),
            wait=wait_exponential(multiplier=0.05, max=0.5) + wait_random(0, 0.05),
            sleep=sleep_using_event(self._stop),
            reraise=True,
        )
        stream = retrying(self._open)
        try:
            for response in stream:
                if self._ended():
                    return
                if response.canceled:
                    self._canceled(stream, response)
                    break
                self._deliver(stream, response)
        except Broken as error:
            log.debug("watch of %r: %s", self._prefixes, error)
        finally:
            stream.close()
        self.reconnects += 1

    def _open(self) -> _WatchStream:
        """A stream whose watches, one for each prefix, etcd has confirmed, from their next revisions on."""
        link = self._connection.link()
        wanted = zip(self._prefixes, self._next, strict=True)
        requests = [rpc.WatchCreateRequest(**self._keys.bounds(each), start_revision=at) for each, at in wanted]
        stream = _WatchStream(self._connection, link, requests)
        try:
            with self._lock:
                self._stream = stream
                if self._stop.is_set():
                    raise Broken("canceled")
            newest = max(self._next) - 1
            while len(stream.watches) < len(self._prefixes):
                self._confirm(stream, next(stream, None), newest)
        except BaseException:
            stream.close()
            raise
        return stream

    def _confirm(self, stream: _WatchStream, response: Any, newest: int) -> None:
        """Takes an answer of a stream that begins: the next of its watches is there, or another one has news already.

        Args:
            newest: revision that was known before the stream.
        """
        if response is None:
            raise Broken("the stream ended before it began")
        if response.canceled:
            self._canceled(stream, response)
            raise Broken("the watch was refused for once")
        if not response.created:
            self._deliver(stream, response)
            return
        if response.header.revision < newest or self._cluster not in (0, response.header.cluster_id):
            # Waiting for our revision would be silence: this etcd starts from older or no data.
            raise StoreError(f"etcd at {stream.link.endpoint} has lost data or is another one; read the prefix again")
        self._cluster = response.header.cluster_id
        stream.watches[response.watch_id] = len(stream.watches)

    def _canceled(self, stream: _WatchStream, response: Any) -> None:
        """etcd has ended the watch: find out whether it may go on."""
        if response.compact_revision:
            raise StoreError(f"etcd has compacted revision {min(self._next)}; read the prefix again")
        # A token that is unknown after a restart of etcd and a missing permission look alike here: an
        # ordinary request authenticates again, or raises what is really the matter.
        log.info("etcd has ended the watch of %r: %s", self._prefixes, response.cancel_reason or "no reason given")
        stream.link.forget_token()
        try:
            for prefix in self._prefixes:
                self._connection.call(lambda link: link.kv.Range, rpc.RangeRequest(**self._keys.bounds(prefix)))
        except StoreUnavailable as error:
            raise Broken(str(error)) from error

    def _deliver(self, stream: _WatchStream, response: Any) -> None:
        number = stream.watches[response.watch_id]
        begin = newest = self._next[number]
        for event in response.events:
            if event.kv.mod_revision < begin:
                continue
            newest = max(newest, event.kv.mod_revision + 1)
            kv = self._keys.key_value(event.kv)
            if not self._ended():
                self._callback(WatchEvent("put" if event.type == event.PUT else "delete", kv.key, kv))
        self._next[number] = newest


class _WatchStream:
    """One stream of watches: iterates over etcd's responses, raises :class:`Broken` when the connection dies.

    Attributes:
        watches: by etcd's number of a watch the place of its prefix; in the order in which etcd has confirmed them.
    """

    def __init__(self, connection: EtcdConnection, link: Link, create: Sequence[Any]) -> None:
        self.link = link
        self.watches: dict[int, int] = {}
        self._connection = connection
        # The stream lasts as long as its requests do: the queue ends them.
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for each in create:
            self._requests.put(rpc.WatchRequest(create_request=each))
        self._closed = False
        try:
            # hasleader: etcd ends the watch rather than leave it silent when it is cut off from its cluster.
            metadata = (*link.metadata(_TOKEN_S), ("hasleader", "true"))
            self._call = link.watch.Watch(iter(self._requests.get, None), metadata=metadata)
        except (ValueError, Broken) as error:
            self._requests.put(None)
            raise self._broken(error) from error

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            response = next(self._call)
        except grpc.RpcError as error:
            raise self._broken(error) from error
        self.link.heard_at = time.monotonic()
        return response

    def _broken(self, error: BaseException) -> Exception:
        known = error if isinstance(error, Broken) else self.link.translate(error)
        if isinstance(known, Broken) and not self._closed:
            self._connection.abandon(self.link, known)
        # Refusals of a stream are settled by the request that follows its end.
        return known if isinstance(known, StoreError) else Broken(str(known))

    def close(self) -> None:
        """Ends the stream. Idempotent, from any thread."""
        self._closed = True
        self._requests.put(None)
        self._call.cancel()
