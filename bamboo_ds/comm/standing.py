"""The places at which scripts of members are, which members that wait for long ask each other.

Between two operations of the engine all scripts make the same calls, or none of them gets on. A member in operation N
cannot have passed it while another one is not in it, so two members that are in operation N by different calls wait for
each other for ever. The same holds for a member in a collective of its script before operation N and one of that
collective's members that is in operation N without having come out of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from ..errors import CallsDiffer
from .wire.payloads import Payload, read, written

#: What a script's end is called as an operation.
END = "end"

#: Seconds of one wait until the others are asked where they are; each next time comes after twice as many.
ASK_AFTER_S = 3.0


@dataclass(frozen=True)
class Stand:
    """The place at which the script of a member is.

    Attributes:
        rank: that the script runs as.
        number: of the operation that it is in, or that would come next.
        call: what it has called: the operation's name, or the collective's.
        steps: iterations committed so far.
        group: of the collective; empty in an operation.
        turn: the collective's number in its group since the last operation.
        ranks: of the collective.
        done: collectives by group that the script has come out of since the last operation; ``None``: it takes no part
            in these.
    """

    rank: int
    number: int
    call: str
    steps: int
    group: str = ""
    turn: int = 0
    ranks: tuple[int, ...] = ()
    done: Mapping[str, int] | None = None

    def words(self) -> str:
        """The same for people."""
        if self.group:
            return f"rank {self.rank} has called the collective {self.call}, after step {self.steps}"
        if self.call == END:
            return f"the script of rank {self.rank} has ended, after step {self.steps}"
        return f"rank {self.rank} has called {self.call}, after step {self.steps}"


def differ(one: Stand, other: Stand) -> bool:
    """Whether two members wait for each other for ever."""
    if one.number != other.number or (one.group and other.group):
        return False
    if not (one.group or other.group):
        return one.call != other.call
    inside, beyond = (one, other) if one.group else (other, one)
    if beyond.done is None or beyond.rank not in inside.ranks:
        return False
    return beyond.done.get(inside.group, 0) < inside.turn


class Standings:
    """The stands of other members, as far as this one knows them.

    Args:
        own: tells where this member's script is; ``None`` where others could not wait for it. From any thread.

    Attributes:
        difference: of another member's stand, once one is known; see :func:`differ`.
    """

    #: Of messages that ask, and those that answer.
    ASK, ANSWER = b"stand/ask", b"stand/answer"

    def __init__(self, own: Callable[[], Stand | None]) -> None:
        self._own = own
        self.difference: str | None = None

    def tell(self) -> Payload:
        """This member's stand, as a message's payload."""
        own = self._own()
        return None if own is None else written(asdict(own))

    def hear(self, told: Payload) -> None:
        """Learns another member's stand, by what it tells. From any thread."""
        own = self._own()
        if own is None:
            return
        other = Stand(**read(told))
        if differ(own, other):
            self.difference = f"{other.words()}, while {own.words()}"

    def check(self) -> None:
        """Raises :class:`CallsDiffer` if another member's script makes other calls."""
        if self.difference is not None:
            raise CallsDiffer(self.difference)
