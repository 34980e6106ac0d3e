"""TensorBoard and its like, written by whichever member speaks for the job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from deepspeed.monitor.monitor import MonitorMaster

from .answers import ignore

if TYPE_CHECKING:
    from ..comm.session import Session


class Monitors:
    """In the place of DeepSpeed's monitors, which write in the process of rank 0 only.

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

    @property
    def enabled(self) -> bool:
        """Whether the configuration asks for any."""
        return bool(self._master.enabled)

    def write_events(self, event_list: Sequence[tuple[str, Any, int]]) -> None:
        """Write (name, value, samples) each; nothing happens on members that do not speak for the job."""
        if not self._speaks():
            return
        with self._session.acting_for(0, ignore):
            if not self._complete:
                # A second file of events in the same folder, or the same table continued.
                self._master, self._complete = MonitorMaster(self._master.monitor_config), True
            self._master.write_events(event_list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._master, name)
