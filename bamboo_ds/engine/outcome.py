"""How operations end."""

from __future__ import annotations

from enum import Enum


class Outcome(Enum):
    """How an attempt at an operation has ended on this member."""

    #: It has committed.
    COMMITTED = "committed"
    #: The others had committed it: it is finished with the vector that they have told.
    BEHIND = "behind"
    #: A loss has interrupted it before its commit.
    INTERRUPTED = "interrupted"
