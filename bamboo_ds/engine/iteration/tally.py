"""What members have compared in the check of a job's first steps, and how they put it together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...topology import Role


@dataclass
class Tally:
    """What this member has compared, and the seconds that it has taken.

    ``changed``: roles that it has left out after their scripts had changed them; ``exhausted``: those whose rehearsal
    has exhausted the memory, which it leaves out from then on.
    """

    steps: int = 0
    rehearsals: int = 0
    tensors: int = 0
    differing: int = 0
    seconds: float = 0.0
    roles: set[Role] = field(default_factory=set)
    changed: set[Role] = field(default_factory=set)
    exhausted: set[Role] = field(default_factory=set)

    def told(self) -> dict[str, Any]:
        """The same as JSON has it; roles as pipeline and stage."""
        values = vars(self).items()
        return {
            name: sorted((role.pipeline, role.stage) for role in value) if isinstance(value, set) else value
            for name, value in values
        }


def total(told: Iterable[dict[str, Any]], name: str) -> int:
    """The sum of what all members have counted."""
    return sum(each[name] for each in told)


def union(told: Iterable[dict[str, Any]], name: str) -> set[tuple[int, int]]:
    """Pipeline and stage of the roles that any member names."""
    return {(pipeline, stage) for each in told for pipeline, stage in each[name]}


def in_words(roles: Iterable[Sequence[int]]) -> str:
    """Roles, given as pipeline and stage, in words."""
    return ", ".join(f"stage {stage} of pipeline {pipeline}" for pipeline, stage in roles)
