"""The table of what torch's ProcessGroupNCCL does, by version: ``table.toml``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tomllib


@dataclass(frozen=True)
class Row:
    """One behaviour.

    Attributes:
        key: short name; the part before the dot is its subject.
        says: the behaviour. What follows "open:" the sources leave open; what follows "guess:" was not read.
        file, function: where it was read.
        since, until: versions of torch, both inclusive; ``until`` may be empty: the newest one that was read.
    """

    key: str
    says: str
    file: str
    function: str
    since: str
    until: str = ""

    def holds_for(self, version: str) -> bool:
        """Whether it is one of torch ``version``."""
        now, first = numbers(version), numbers(self.since)
        before = not self.until or now[: len(numbers(self.until))] <= numbers(self.until)
        return before and (now >= first or first == (2, 6))


def numbers(version: str) -> tuple[int, ...]:
    """The numbers of a version, without what follows a plus."""
    return tuple(int(each) for each in version.partition("+")[0].split("."))


def rows() -> tuple[Row, ...]:
    """All rows, in the order of the file."""
    read = tomllib.loads(Path(__file__).with_name("table.toml").read_text())
    return tuple(Row(**row) for row in read["rows"])
