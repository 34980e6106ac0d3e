"""Watches that survive their connection."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
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
        prefix: str,
        callback: Callable[[WatchEvent], None],
        first: int,
        on_error: Callable[[BaseException], None] | None,
        on_end: Callable[[Watch], None],
    ) -> None:
        self.error: BaseException | None = None
        self.reconnects = 0
        self._connection, self._keys, self._prefix = connection, keys, prefix
        self._callback, self._on_error, self._on_end = callback, on_error, on_end
        self._next = first
        self._cluster = 0
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._stream: _WatchStream | None = None
        self._thread = threading.Thread(target=self._run, name=f"bamboo-watch-{prefix}", daemon=True)

    def start(self) -> None:
        """Begin to deliver events."""
        self._thread.start()

    def cancel(self) -> None:
        """End the watch. No callback runs after the return (unless called from the callback itself)."""
        self._stop.set()
        with self._lock:
            if self._stream is not None:
                self._stream.close()
        if threading.current_thread() is not self._thread and self._thread.ident is not None:
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
            log.warning("the watch of %r has ended: %s", self._prefix, self.error, exc_info=defect)
            if self._on_error is not None:
                self._on_error(self.error)

    def _ended(self) -> bool:
        return self._stop.is_set() or self._connection.closed.is_set()

    def _follow(self) -> None:
        """Open one stream and deliver from it until it breaks."""
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
                self._deliver(response)
        except Broken as error:
            log.debug("watch of %r: %s", self._prefix, error)
        finally:
            stream.close()
        self.reconnects += 1

    def _open(self) -> _WatchStream:
        """A stream whose watch etcd has confirmed, from the next revision on."""
        link = self._connection.link()
        request = rpc.WatchCreateRequest(**self._keys.bounds(self._prefix), start_revision=self._next)
        stream = _WatchStream(self._connection, link, request)
        try:
            with self._lock:
                self._stream = stream
                if self._stop.is_set():
                    raise Broken("canceled")
            first = next(stream, None)
            if first is None:
                raise Broken("the stream ended before it began")
            if first.canceled:
                self._canceled(stream, first)
                raise Broken("the watch was refused for once")
            if first.header.revision < self._next - 1 or self._cluster not in (0, first.header.cluster_id):
                # Waiting for our revision would be silence: this etcd starts from older or no data.
                raise StoreError(f"etcd at {link.endpoint} has lost data or is another one; read the prefix again")
            self._cluster = first.header.cluster_id
        except BaseException:
            stream.close()
            raise
        return stream

    def _canceled(self, stream: _WatchStream, response: Any) -> None:
        """etcd has ended the watch: find out whether it may go on."""
        if response.compact_revision:
            raise StoreError(f"etcd has compacted revision {self._next}; read the prefix again")
        # A token that is unknown after a restart of etcd and a missing permission look alike here: an
        # ordinary request authenticates again, or raises what is really the matter.
        log.info("etcd has ended the watch of %r: %s", self._prefix, response.cancel_reason or "no reason given")
        stream.link.forget_token()
        try:
            self._connection.call(lambda link: link.kv.Range, rpc.RangeRequest(**self._keys.bounds(self._prefix)))
        except StoreUnavailable as error:
            raise Broken(str(error)) from error

    def _deliver(self, response: Any) -> None:
        newest = self._next - 1
        for event in response.events:
            if event.kv.mod_revision < self._next:
                continue
            newest = max(newest, event.kv.mod_revision)
            kv = self._keys.key_value(event.kv)
            if not self._ended():
                self._callback(WatchEvent("put" if event.type == event.PUT else "delete", kv.key, kv))
        self._next = newest + 1


class _WatchStream:
    """One watch stream: iterates over etcd's responses, raises :class:`Broken` when the connection dies."""

    def __init__(self, connection: EtcdConnection, link: Link, create: Any) -> None:
        self.link = link
        self._connection = connection
        # The stream lasts as long as its requests do: the queue ends them.
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._requests.put(rpc.WatchRequest(create_request=create))
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
        """End the stream. Idempotent, from any thread."""
        self._closed = True
        self._requests.put(None)
        self._call.cancel()
