"""Stand-ins for channels between members of one process."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Ends:
    """What a plan says of a channel."""

    name: str
    source: str
    destination: str
    newest: int | None = None
    yields: bool = False


@dataclass
class Mailboxes:
    """Messages that have been sent and not received, by channel."""

    sent: dict[str, deque[Any]] = field(default_factory=lambda: defaultdict(deque))

    def open(self, name: str, source: str, destination: str, newest: int | None = None, yields: bool = False) -> Any:
        return Mailbox(self.sent, name, source, destination)


@dataclass(eq=False)
class Mailbox:
    """A channel between members of one process."""

    _sent: dict[str, deque[Any]]
    name: str
    source: str
    destination: str

    def send(self, sequence: int, payload: Any) -> Any:
        self._sent[self.name].append((sequence, payload))
        return payload

    def recv(self, sequence: int, parked: bool = False) -> Any:
        number, payload = self._sent[self.name].popleft()
        assert number == sequence
        return payload

    def take(self) -> list[tuple[int, Any]]:
        taken = list(self._sent[self.name])
        self._sent[self.name].clear()
        return taken

    def arrival(self) -> float | None:
        return None
