"""Members as a tree: what they do all together takes O(N) messages, of which nobody handles more than a few."""

from __future__ import annotations

from collections.abc import Sequence

#: Children of a member.
FAN_OUT = 4


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
        self.parent = None if own == 0 else members[(own - 1) // width]
        self.children = tuple(members[own * width + 1 : own * width + 1 + width])
