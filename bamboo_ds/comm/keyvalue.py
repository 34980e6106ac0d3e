"""Keys and values for torch's groups, kept by one member for one epoch.

Not torch's ``TCPStore``: its client cannot be interrupted while it connects, and looks the peer's name up in the DNS
for every connection, which costs seconds where that does not answer. Requests and answers are JSON in messages of the
epoch's links; values are bytes, one character each.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

from ..errors import EpochChanged
from .c10d import dist
from .links import Links
from .wire.payloads import PeerMessage, read, written

_ASK, _ANSWER = b"store/ask", b"store/answer"


class Values:
    """Keys and values, and the requests that wait for them."""

    def __init__(self) -> None:
        self._data: dict[str, str] = {}
        self._waiting: dict[tuple[str, int], list[str]] = {}  # keys by asking member and number

    def ask(self, member: str, number: int, request: dict[str, Any]) -> list[tuple[str, int, Any]]:
        """Does what a member asks for; returns the answers that are due: member, number, value."""
        operation, key, data = request["op"], request.get("key", ""), self._data
        if operation == "get":
            self._waiting[member, number] = list(request["keys"])
            return self._answers()
        if operation == "forget":  # the member has given up
            self._waiting.pop((member, request["number"]), None)
            return []
        value: Any = True
        if operation == "check":
            value = all(each in data for each in request["keys"])
        elif operation == "count":
            value = len(data)
        elif operation == "delete":
            value = data.pop(key, None) is not None
        elif operation == "set":
            data[key] = str(request["value"])
        elif operation == "add":
            value = int(data.get(key, "0")) + int(request["value"])
            data[key] = str(value)
        elif operation == "compare_set":
            # As TCPStore: a missing key equals the empty value; the answer is what is there then.
            if data.get(key, "") == request["expected"]:
                data[key] = str(request["value"])
            value = data.get(key, request["expected"])
        else:
            raise ValueError(f"unknown operation {operation!r}")
        return [(member, number, value), *self._answers()]

    def _answers(self) -> list[tuple[str, int, Any]]:
        """Answers to the requests whose keys are all there."""
        ready = [asked for asked, keys in self._waiting.items() if all(key in self._data for key in keys)]
        return [(*asked, [self._data[key] for key in self._waiting.pop(asked)]) for asked in ready]


class Reach(Protocol):
    """Puts one request to the keeper of the keys, and waits for the answer."""

    def __call__(self, request: dict[str, Any], timeout: timedelta) -> Any:
        """The answer; raises ``TimeoutError``."""


class StoreHost:
    """Keys that this member keeps for others in one epoch, and its requests to them. For any thread."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._values = Values()
        self._number = 0
        self._answers: dict[int, Any] = {}
        links.services[_ASK] = self._serve
        links.services[_ANSWER] = self._note

    def reached_at(self, host: str) -> Reach:
        """A function that puts requests to ``host``."""

        def reach(request: dict[str, Any], timeout: timedelta) -> Any:
            return self._ask(host, request, timeout)

        return reach

    def _ask(self, host: str, request: dict[str, Any], timeout: timedelta) -> Any:
        links = self._links
        with links.changed:
            self._number += 1
            number = self._number
            self._send(_ASK, host, number, request)
            if not links.wait("using the store", lambda: number in self._answers, [host], timeout):
                self._send(_ASK, host, number, {"op": "forget", "number": number})
                raise TimeoutError
            return self._answers.pop(number)

    def _send(self, key: bytes, member: str, number: int, value: Any) -> None:
        if member == self._links.member:
            self._links.keep(key, number, written(value))
        else:
            self._links.send(member, key, number, written(value))

    def _serve(self, asked: PeerMessage) -> None:
        for member, number, value in self._values.ask(asked.source, asked.sequence, read(asked.payload())):
            with suppress(EpochChanged):  # it has gone meanwhile
                self._send(_ANSWER, member, number, value)

    def _note(self, answer: PeerMessage) -> None:
        self._answers[answer.sequence] = read(answer.payload())


class TorchStore(dist.Store):  # type: ignore[misc]
    """Keys of one member as torch's groups want them, see ``torch.distributed.Store``.

    Keep a reference: C++ keeps none. Waiting in vain raises ``RuntimeError``; the end of the epoch, or of the member,
    ``EpochChanged``.

    Args:
        reach: asks the member.
        prefix: of all keys.
        timeout: of requests that wait and say none.
    """

    def __init__(self, reach: Reach, prefix: str, timeout: timedelta) -> None:
        super().__init__()
        self._reach, self._prefix, self._timeout = reach, prefix, timeout

    def _call(self, operation: str, limit: timedelta | None = None, **fields: Any) -> Any:
        try:
            return self._reach({"op": operation, **fields}, limit or self._timeout)
        except TimeoutError as error:
            wanted = fields.get("keys", fields.get("key"))
            raise dist.DistStoreError(f"Timed out waiting for {wanted} in the store") from error

    def _prefixed(self, keys: Sequence[str]) -> list[str]:
        return [self._prefix + key for key in keys]

    def set(self, key: str, value: str | bytes) -> None:
        self._call("set", key=self._prefix + key, value=_characters(value))

    def get(self, key: str) -> bytes:
        """See ``torch.distributed.Store``; waits for the key."""
        return self.multi_get([key])[0]

    def add(self, key: str, value: int) -> int:
        return int(self._call("add", key=self._prefix + key, value=value))

    def check(self, keys: list[str]) -> bool:
        return bool(self._call("check", keys=self._prefixed(keys)))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        expected, value = _characters(expected_value), _characters(desired_value)
        return str(self._call("compare_set", key=self._prefix + key, expected=expected, value=value)).encode("latin-1")

    def delete_key(self, key: str) -> bool:
        return bool(self._call("delete", key=self._prefix + key))

    def num_keys(self) -> int:
        return int(self._call("count"))

    # The names by which torch's C++ side looks for them.
    deleteKey = delete_key
    getNumKeys = num_keys

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self.multi_get(keys, timeout)

    def multi_get(self, keys: list[str], timeout: timedelta | None = None) -> list[bytes]:
        """See ``torch.distributed.Store``; waits for the keys."""
        return [value.encode("latin-1") for value in self._call("get", timeout, keys=self._prefixed(keys))]

    def exchange(
        self, what: str, member: str, mine: str, members: Sequence[str], timeout: timedelta | None = None
    ) -> dict[str, str]:
        """Publishes a text as ``member``, and waits for those of ``members``."""
        self.set(f"{what}/{member}", mine)
        answers = self.multi_get([f"{what}/{each}" for each in members], timeout)
        return {each: answer.decode() for each, answer in zip(members, answers, strict=True)}

    def set_timeout(self, timeout: timedelta) -> None:
        """Does nothing: the session's timeout applies."""


def _characters(value: str | bytes) -> str:
    """The bytes of ``value`` as a character each."""
    return (value.encode() if isinstance(value, str) else bytes(value)).decode("latin-1")
