"""A job whose members come one by one, by ``bamboo join --start``, without a launcher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from .jobs import RunningJob, start_bamboo
from .processes import Process


class MembersJob(RunningJob):
    """Use it in a ``with`` statement; all members end with it.

    Args:
        folder: for logs, events and results.
        name: of the job.
        variables: more environment variables.
    """

    def __init__(self, folder: Path, name: str, variables: Mapping[str, str]) -> None:
        self._prepare(folder, name, {"BAMBOO_EVENTS": str(folder / "events.jsonl"), **variables})

    def member(self, arguments: Sequence[str], **variables: str) -> Process:
        """One more member, by the ``arguments`` of ``bamboo``. The job is over when the first one is."""
        number = len(self.joiners)
        self.joiners.append(start_bamboo(arguments, self.env | variables, self.folder / f"member-{number}.log"))
        self.process = self.joiners[0]
        return self.joiners[-1]

    def __enter__(self) -> MembersJob:
        return self
