"""The tree of members for their collectives."""

from __future__ import annotations

from collections.abc import Sequence

#: Children of a member.
FAN_OUT = 4
#: Members that a message names where any of them may be meant.
_NAMED = 8


class Tree:
    """The place of ``member`` among ``members``, whose first one is the root.

    Args:
        fan_out: children of a member at most; default :data:`FAN_OUT`.

    Attributes:
        parent: ``None`` of the root.
        children: in the order of ``members``.
    """

    def __init__(self, members: Sequence[str], member: str, fan_out: int | None = None) -> None:
        width, own = FAN_OUT if fan_out is None else max(1, fan_out), members.index(member)
        self._members, self._width, self._own = members, width, member
        self.parent = None if own == 0 else members[(own - 1) // width]
        self.children = self._below(own)

    def _below(self, place: int) -> tuple[str, ...]:
        return tuple(self._members[place * self._width + 1 : (place + 1) * self._width + 1])

    def beyond(self, neighbour: str) -> list[str]:
        """The members of which this one hears by ``neighbour``, its parent or one of its children."""
        below = list(self.children if neighbour == self.parent else [neighbour])
        for each in below:  # which grows meanwhile
            below += self._below(self._members.index(each))
        if neighbour != self.parent:
            return below[1:]
        return [each for each in self._members if each not in (*below, neighbour, self._own)]

    def told(self, neighbour: str) -> str:
        """``neighbour`` in words: it may have come, and wait itself for others of which this member hears by it."""
        beyond = self.beyond(neighbour)
        more = f" and {len(beyond) - _NAMED} more" if len(beyond) > _NAMED else ""
        others = f"{', '.join(beyond[:_NAMED])}{more}"
        return f"{neighbour} (or for {others}, for whom it may wait)" if beyond else neighbour
