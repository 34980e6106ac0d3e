"""Where the time of the test suite goes: ``make test-times``.

While the suite runs with :data:`ENV_TIMES` set, every test, job, undisturbed run and server appends what it has taken.
This module's program makes tables of it, and keeps the durations that tests are ordered by.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

#: File that the times are appended to.
ENV_TIMES = "BAMBOO_TEST_TIMES"
#: Seconds that tests took when they were last measured, for those that took longer than :data:`_SHORT_S`.
DURATIONS = Path(__file__).parents[1] / "durations.json"
_SHORT_S = 1.0
TEST = "test"


def note(cause: str, wall_s: float, cpu_s: float = 0.0, test: str | None = None) -> None:
    """Append that ``cause`` has taken so long, and so many CPU-seconds of processes that have ended by now."""
    path = os.environ.get(ENV_TIMES)
    if path is None:
        return
    test = test or os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    line = json.dumps({"cause": cause, "test": test, "wall": wall_s, "cpu": cpu_s})
    with open(path, "a") as file:
        file.write(line + "\n")


def note_phases(events: Iterable[Mapping[str, Any]], wall_s: float, cpu_s: float) -> None:
    """Append the phases of a job that has taken so long from the start of its launcher to its end."""
    if ENV_TIMES not in os.environ:
        return
    note("job", wall_s, cpu_s)
    times: dict[str, list[datetime]] = defaultdict(list)
    for event in events:
        times[event["event"]].append(datetime.fromisoformat(event["time"].replace("Z", "+00:00")))
    steps, begun = times["step"], times["run_started"] or times["plan"]
    if not steps or not begun:
        return
    # What comes before the first event is the launcher's start, too.
    trained = (steps[-1] - steps[0]).total_seconds()
    end = (max(moment for moments in times.values() for moment in moments) - steps[-1]).total_seconds()
    note("job: start, to the first step", wall_s - trained - end)
    note("job: steps", trained)
    note("job: end", end)


def durations() -> dict[str, float]:
    """The durations that were kept, by test."""
    kept: dict[str, float] = json.loads(DURATIONS.read_text())
    return kept


def processors() -> tuple[float, float, float]:
    """Seconds of the clock, and those that all processors of this machine have been busy and idle."""
    now = psutil.cpu_times()
    idle = now.idle + now.iowait
    return time.monotonic(), sum(now) - idle - now.guest - now.guest_nice, idle


def _print(lines: list[dict[str, Any]], console: Console) -> None:
    tests = [line for line in lines if line["cause"] == TEST]
    files: dict[str, list[float]] = defaultdict(list)
    for line in tests:
        files[line["test"].partition("::")[0]].append(line["wall"])
    table = Table("file", "tests", "s", "longest s", title="Tests by file")
    for file, seconds in sorted(files.items(), key=lambda item: -sum(item[1])):
        table.add_row(file, str(len(seconds)), f"{sum(seconds):.1f}", f"{max(seconds):.1f}")
    table.add_row("all", str(len(tests)), f"{sum(line['wall'] for line in tests):.1f}", "", style="bold")
    console.print(table)
    causes: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for line in lines:
        if line["cause"] != TEST:
            causes[line["cause"]].append((line["wall"], line["cpu"]))
    table = Table("cause", "times", "s", "CPU-s", title="Time by cause")
    for cause, spent in sorted(causes.items(), key=lambda item: -sum(wall for wall, _ in item[1])):
        cpu = sum(seconds for _, seconds in spent)
        table.add_row(cause, str(len(spent)), f"{sum(wall for wall, _ in spent):.1f}", f"{cpu:.1f}" if cpu else "")
    console.print(table)


def main(path: str) -> None:
    """Print the tables of a file of times, and keep the durations in it."""
    lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
    _print(lines, Console())
    long = {line["test"]: round(line["wall"], 1) for line in lines if line["cause"] == TEST}
    kept = {test: seconds for test, seconds in sorted(long.items()) if seconds >= _SHORT_S}
    DURATIONS.write_text(json.dumps(kept, indent=0) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
