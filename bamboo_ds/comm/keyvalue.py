"""The store of an epoch: keys and values in the memory of one worker.

Not torch's ``TCPStore``: its client cannot be interrupted while it connects, and looks the peer's name up in
the DNS for every connection, which costs seconds where that does not answer.

A connection begins with a :mod:`handshake <.handshake>`. A request is an object in JSON, preceded by its length
(4 bytes, little-endian); so is the answer, which repeats the request's number. Values are bytes, one character each.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import struct
import threading
from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import Any

from ..forking import only_here
from ..secret import NONE, JobSecret
from . import sockets
from .c10d import dist
from .handshake import Door, Handshake, calling, hosting

_LENGTH = struct.Struct("<I")
_LARGEST = 1 << 26
_PURPOSE = "store"


class Server:
    """Serves one epoch's keys to its members, from a thread.

    Args:
        host: the address to listen on, and no other.
        epoch: number of the epoch; clients of another are refused.
        secret: the job's; clients that do not know it are refused.
        member: id of the member that hosts it.
        members: those that may come; ``None``: whatever their names.
    """

    def __init__(
        self,
        host: str,
        epoch: int,
        secret: JobSecret = NONE,
        member: str = "",
        members: Collection[str] | None = None,
    ) -> None:
        self._listener = only_here(sockets.listen(host))
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self._data: dict[str, str] = {}
        self._clients: dict[socket.socket, _Client] = {}
        self._selector = selectors.DefaultSelector()
        self._door = Door(
            self._selector,
            self._listener,
            lambda: hosting(secret, _PURPOSE, epoch, member, lambda name: members is None or name in members),
            0 if members is None else len(members),
        )
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="bamboo-store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the service; clients see their connections end. Idempotent."""
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        self._thread.join()
        self._wake.close()

    def _serve(self) -> None:
        try:
            while True:
                for key, events in self._selector.select(self._door.grace()):
                    if key.fileobj is self._woken:
                        return
                    if key.data is self._door:
                        self._admit(key.fileobj)  # type: ignore[arg-type]
                    elif (client := self._clients.get(key.fileobj)) is not None:  # type: ignore[call-overload]
                        self._attend(client, events)  # one before it may have found that it is gone
        finally:
            self._door.close()
            for opened in (*self._clients, self._listener, self._woken):
                opened.close()
            self._selector.close()

    def _admit(self, ready: socket.socket) -> None:
        found = self._door.attend(ready)
        if found is not None:
            _, connection = found
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._clients[connection] = _Client(connection)
            self._selector.register(connection, selectors.EVENT_READ)

    def _attend(self, client: _Client, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                for request in client.read():
                    self._handle(client, request)
            if self._clients.get(client.connection) is client:
                self._flush(client)
        except (OSError, ValueError, KeyError, TypeError, RecursionError):  # gone, or it talks nonsense
            self._drop(client)

    def _flush(self, client: _Client) -> None:
        left = client.write()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if left else 0)
        self._selector.modify(client.connection, events)

    def _drop(self, client: _Client) -> None:
        if self._clients.pop(client.connection, None) is not None:
            self._selector.unregister(client.connection)
            client.connection.close()

    def _handle(self, client: _Client, request: dict[str, Any]) -> None:
        operation, number = request["op"], request["n"]
        data = self._data
        if operation == "get":
            client.waiting[number] = list(request["keys"])
            self._tell(client)
        elif operation == "check":
            client.answer(number, all(key in data for key in request["keys"]))
        elif operation == "forget":  # the client has given up
            client.waiting.pop(request["key"], None)
        elif operation == "count":
            client.answer(number, len(data))
        elif operation == "delete":
            client.answer(number, data.pop(request["key"], None) is not None)
        else:
            client.answer(number, self._change(operation, request["key"], request))
            for other in list(self._clients.values()):
                if other.waiting:
                    self._tell(other)
                    if other is not client:
                        try:
                            self._flush(other)
                        except OSError:
                            self._drop(other)

    def _change(self, operation: str, key: str, request: dict[str, Any]) -> Any:
        data = self._data
        if operation == "set":
            data[key] = str(request["value"])
        elif operation == "add":
            data[key] = str(int(data.get(key, "0")) + int(request["value"]))
            return int(data[key])
        elif operation == "compare_set":
            # As TCPStore: a missing key equals the empty value; the answer is what is there then.
            if data.get(key, "") == request["expected"]:
                data[key] = str(request["value"])
            return data.get(key, request["expected"])
        else:
            raise ValueError(f"unknown operation {operation!r}")
        return True

    def _tell(self, client: _Client) -> None:
        """Answer those of a client's requests whose keys are all there."""
        for number, keys in list(client.waiting.items()):
            if all(key in self._data for key in keys):
                del client.waiting[number]
                client.answer(number, [self._data[key] for key in keys])


class _Client:
    """The server's end of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.waiting: dict[int, list[str]] = {}
        self._received = bytearray()
        self._answers = bytearray()

    def read(self) -> list[dict[str, Any]]:
        """The requests that have arrived; raises ``OSError`` or ``ValueError`` if there will be none."""
        data = self.connection.recv(1 << 16)
        if not data:
            raise ConnectionError("closed by the client")
        self._received += data
        found = []
        while len(self._received) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received)
            if length > _LARGEST:
                raise ValueError("too large a request")
            end = _LENGTH.size + length
            if len(self._received) < end:
                break
            found.append(json.loads(self._received[_LENGTH.size : end]))
            del self._received[:end]
        return found

    def answer(self, number: int, value: Any) -> None:
        """Queue an answer."""
        data = json.dumps({"n": number, "value": value}).encode()
        self._answers += _LENGTH.pack(len(data)) + data

    def write(self) -> bool:
        """Send what can be sent; whether something is left."""
        while self._answers:
            try:
                sent = self.connection.send(self._answers)
            except BlockingIOError:
                return True
            del self._answers[:sent]
        return False


class Client:
    """A connection to a :class:`Server`. One request at a time; others wait their turn.

    Args:
        connection: connected socket; shutting it down makes every call raise ``OSError``.
        epoch: number of the epoch.
        timeout: default for calls that wait.
        secret: the job's.
        member: id of this member, and host: of the one whose server it is.

    Raises:
        OSError: the connection has ended, the server refused us, or it is not that of ``host``.
    """

    def __init__(
        self,
        connection: socket.socket,
        epoch: int,
        timeout: timedelta,
        secret: JobSecret = NONE,
        member: str = "",
        host: str = "",
    ) -> None:
        self._connection = connection
        self._timeout = timeout
        self._lock = threading.Lock()
        self._number = 0
        self._received = bytearray()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(timeout.total_seconds())
        Handshake(connection, calling(secret, _PURPOSE, epoch, member, host)).advance()

    def call(self, operation: str, timeout: timedelta | None = None, **fields: Any) -> Any:
        """The server's answer; raises ``TimeoutError`` if it takes too long, and ``OSError`` if there will be none."""
        with self._lock:
            self._number += 1
            number = self._number
            try:
                self._send({"op": operation, "n": number, **fields})
                self._connection.settimeout((timeout or self._timeout).total_seconds())
                while True:
                    answer = self._receive()
                    if answer["n"] == number:
                        return answer["value"]
            except TimeoutError:
                self._send({"op": "forget", "n": 0, "key": number})
                raise

    def _send(self, request: dict[str, Any]) -> None:
        data = json.dumps(request).encode()
        self._connection.settimeout(self._timeout.total_seconds())
        self._connection.sendall(_LENGTH.pack(len(data)) + data)

    def _receive(self) -> dict[str, Any]:
        while True:
            if len(self._received) >= _LENGTH.size:
                end = _LENGTH.size + _LENGTH.unpack_from(self._received)[0]
                if len(self._received) >= end:
                    answer: dict[str, Any] = json.loads(self._received[_LENGTH.size : end])
                    del self._received[:end]
                    return answer
            more = self._connection.recv(1 << 16)
            if not more:
                raise ConnectionError("closed by the store's host")
            self._received += more


class TorchStore(dist.Store):  # type: ignore[misc]
    """A :class:`Client` as torch's groups want it, see ``torch.distributed.Store``. Keep a reference: C++ keeps none.

    Waiting in vain raises ``RuntimeError``, a connection that ended ``DistNetworkError``.
    """

    def __init__(self, client: Client | None, prefix: str = "") -> None:
        super().__init__()
        self._client = client
        self._prefix = prefix

    def call(self, operation: str, timeout: timedelta | None = None, **fields: Any) -> Any:
        """See :meth:`Client.call`."""
        assert self._client is not None
        try:
            return self._client.call(operation, timeout, **fields)
        except TimeoutError as error:
            wanted = fields.get("keys", fields.get("key"))
            raise dist.DistStoreError(f"Timed out waiting for {wanted} in the store") from error
        except OSError as error:
            raise dist.DistNetworkError(f"the store's connection ended: {error}") from error

    def _prefixed(self, keys: Sequence[str]) -> list[str]:
        return [self._prefix + key for key in keys]

    def set(self, key: str, value: str | bytes) -> None:
        self.call("set", key=self._prefix + key, value=_characters(value))

    def get(self, key: str) -> bytes:
        """See ``torch.distributed.Store``; waits for the key."""
        return self.multi_get([key])[0]

    def add(self, key: str, value: int) -> int:
        return int(self.call("add", key=self._prefix + key, value=value))

    def check(self, keys: list[str]) -> bool:
        return bool(self.call("check", keys=self._prefixed(keys)))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        expected, value = _characters(expected_value), _characters(desired_value)
        return str(self.call("compare_set", key=self._prefix + key, expected=expected, value=value)).encode("latin-1")

    def delete_key(self, key: str) -> bool:
        return bool(self.call("delete", key=self._prefix + key))

    def num_keys(self) -> int:
        return int(self.call("count"))

    # The names by which torch's C++ side looks for them.
    deleteKey = delete_key
    getNumKeys = num_keys

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self.multi_get(keys, timeout)

    def multi_get(self, keys: list[str], timeout: timedelta | None = None) -> list[bytes]:
        """See ``torch.distributed.Store``; waits for the keys."""
        return [value.encode("latin-1") for value in self.call("get", timeout, keys=self._prefixed(keys))]

    def exchange(
        self, what: str, member: str, mine: str, members: Sequence[str], timeout: timedelta | None = None
    ) -> dict[str, str]:
        """Publish a text as ``member``, and wait for those of ``members``."""
        self.set(f"{what}/{member}", mine)
        answers = self.multi_get([f"{what}/{each}" for each in members], timeout)
        return {each: answer.decode() for each, answer in zip(members, answers, strict=True)}

    def set_timeout(self, timeout: timedelta) -> None:
        """The session's timeout applies."""


def _characters(value: str | bytes) -> str:
    """The bytes of ``value`` as a character each."""
    return (value.encode() if isinstance(value, str) else bytes(value)).decode("latin-1")
