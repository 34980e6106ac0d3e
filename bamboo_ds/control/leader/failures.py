"""Workers that fail by themselves too often to be taken over (``bamboo.recovery.on_exception: "takeover"``). Pure.

A fault of a node does not come back when another member does the same work; an error of the script does. So a job is
given up when the same error comes again before the next step is done, or when too many workers fail meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ..registry.records import LeftRecord

#: Workers that may fail by themselves, in different ways, before the same step is committed.
MOST_PER_STEP = 3


def kind(error: str) -> str:
    """The comparable part of an error: the type of the exception, or the exit code."""
    return error.partition(":")[0]


def hopeless(departures: Iterable[LeftRecord]) -> tuple[LeftRecord, str] | None:
    """The failure that the job should end with, and why, or ``None``."""
    failures = [record for record in departures if record.outcome == "lost" and record.error is not None]
    per_step = Counter(record.step or 0 for record in failures)
    per_error = Counter((record.step or 0, kind(record.error or "")) for record in failures)
    for record in failures:
        step = record.step or 0
        where = f"in the step after step {step}"
        if per_error[step, kind(record.error or "")] > 1:
            return record, f"several workers have failed {where} in the same way ({record.error})"
        if per_step[step] >= MOST_PER_STEP:
            return record, f"{per_step[step]} workers have failed {where}, the last one by {record.error}"
    return None
