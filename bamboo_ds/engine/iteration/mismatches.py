"""Replicas that differed from their owner when they were last compared.

A replica that differs is copied again, which mends what a memory error has done once. One that differs at the next
comparison too will differ for ever: something that the optimizer step depends on is not part of a role's state. It is
not copied again, and is no holder of the state any more.
"""

from __future__ import annotations

from ...topology import Role


class Mismatches:
    """What all members know of them alike: it follows from the commits of one epoch.

    Args:
        every: iterations between two comparisons.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._last: dict[Role, int] = {}

    def begin(self) -> None:
        """An epoch begins: a replica that differed is dropped, and its role gets a new one."""
        self._last.clear()

    def has(self, role: Role, step: int) -> bool:
        """Whether ``role``'s comparison before the one in iteration ``step`` has found a difference."""
        # What is copied after an iteration cannot be compared in the next one.
        return role in self._last and step <= self._last[role] + self._every + 1

    def note(self, role: Role, step: int) -> bool:
        """The replica of ``role`` differed in iteration ``step``; whether it will not be mended."""
        lasting = self.has(role, step)
        self._last[role] = step
        return lasting
