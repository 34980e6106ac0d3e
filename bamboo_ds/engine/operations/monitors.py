"""TensorBoard and its like, written by the member that speaks for the job."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from deepspeed.monitor.monitor import MonitorMaster

from ...variables import ENV_JOINER, ENV_RESTARTS
from ..context.shared import InContext
from ..stage.answers import ignore

if TYPE_CHECKING:
    from ...comm.session import Session


class Monitors:
    """Stands in the place of DeepSpeed's monitors, which write in the process of rank 0 only.

    DeepSpeed begins each CSV table with a head. A process that writes after another one of the job goes on with the
    tables that it finds.

    Args:
        master: DeepSpeed's, as this process has it.
        rank: that the process's script runs as.
        session: this process's data plane.
        speaks: whether this member speaks for the job now.
    """

    def __init__(self, master: Any, rank: int, session: Session, speaks: Callable[[], bool]) -> None:
        self._master: Any = master
        self._complete = rank == 0 or not master.enabled
        self._session, self._speaks = session, speaks
        self._first = rank == 0 and not (os.environ.get(ENV_JOINER) or os.environ.get(ENV_RESTARTS))

    @property
    def enabled(self) -> bool:
        """Whether the configuration asks for any."""
        return bool(self._master.enabled)

    def write_events(self, event_list: Sequence[tuple[str, Any, int]]) -> None:
        """Writes (name, value, samples) each; nothing happens on members that do not speak for the job."""
        if not self._speaks():
            return
        with self._session.attachment.acting_for(0, ignore):
            if not self._complete:
                # A second file of events in the same folder, or the same table continued.
                self._master, self._complete = MonitorMaster(self._master.monitor_config), True
            if not self._first:
                self._continue_tables(event_list)
            self._master.write_events(event_list)

    def _continue_tables(self, event_list: Sequence[tuple[str, Any, int]]) -> None:
        """Has DeepSpeed's CSV monitor write no head into tables that have one."""
        tables = getattr(self._master, "csv_monitor", None)
        if tables is None:
            return
        for name, *_ in event_list:
            table = name.replace("/", "_").replace(" ", "_")  # as DeepSpeed names the file
            if table not in tables.filenames and _has_content(os.path.join(tables.log_dir, f"{table}.csv")):
                tables.filenames.append(table)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._master, name)


def _has_content(path: str) -> bool:
    try:
        return os.path.getsize(path) > 0
    except FileNotFoundError:
        return False


@dataclass(eq=False)
class JobTags(InContext):
    """Figures of members and pauses, for DeepSpeed's monitors.

    All members measure, since each may be the next one that writes.
    """

    _seconds: float = field(default=0.0, init=False)
    _pause: float = field(default=0.0, init=False)

    @contextmanager
    def iteration(self) -> Iterator[None]:
        """The body is an iteration, with the boundary after it."""
        begin = time.monotonic()
        yield
        self._seconds, self._pause = time.monotonic() - begin, self.progress.operation.paused
        self.progress.operation.paused = 0.0

    def write(self) -> None:
        """Hands the values to the monitors, which write them on the member that speaks for the job."""
        monitor = self.ds.monitor
        if not monitor.enabled:
            return
        plan = self.epoch.plan
        shadows = plan.shadows or (None,) * len(plan.owners)
        values = {
            "members": len(plan.members),
            "unshadowed_stages": shadows.count(None),
            "step_seconds": self._seconds,
            "pause_seconds": self._pause,
        }
        monitor.write_events([(f"bamboo/{name}", value, self.ds.global_samples) for name, value in values.items()])
