"""Operations: what all members do together between two boundaries, and how it ends.

An *operation* is an iteration, an evaluation, saving a checkpoint, or the end of the script. It ends with one
all-reduce over all members, its commit.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Protocol

from ...schedule import RoleProgress
from ...topology import Role


class Outcome(Enum):
    """The end of an attempt at an operation on this member."""

    #: It has committed.
    COMMITTED = "committed"
    #: The others had committed it: it is finished with the vector that they have told.
    BEHIND = "behind"
    #: A loss has interrupted it before its commit.
    INTERRUPTED = "interrupted"


class Operation(Protocol):
    """One operation.

    Attributes:
        call: what the script has called for it.
        watched: it consists of many short instructions, so that one that does not end is a hang.
        draws: it needs batches.
        takes_steps: optimizers step in it.
        goes_on: members may change their plan after it.
    """

    call: str
    watched: bool
    draws: bool
    takes_steps: bool
    goes_on: bool

    def run(self, progress: Mapping[Role, RoleProgress] | None) -> None:
        """Does the operation, from ``progress`` if it was interrupted, up to and including the commit."""

    def commit(self) -> None:
        """Does the commit alone: all members had entered it."""

    def repeatable(self) -> bool:
        """Whether this member, which has entered the commit, could enter it again under the current plan."""

    def finish(self, outcome: Outcome) -> None:
        """Finishes after the commit, without communication that a peer has to take part in at once.

        Args:
            outcome: ``COMMITTED``, or ``BEHIND``: the others have committed already and are in the next operation.
        """
