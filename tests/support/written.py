"""Events of a job, written by hand."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from bamboo_ds.observe import events as ev
from bamboo_ds.observe.events import EventWriter

START = datetime(2026, 1, 1, tzinfo=timezone.utc)


def write(path: Path, events: Iterable[ev.Event]) -> Path:
    """Append ``events`` to a file."""
    with EventWriter(path) as writer:
        for event in events:
            writer.emit(event)
    return path


class Written:
    """Events of a job, written with times in seconds since its start.

    Args:
        members: are there from the beginning.
    """

    def __init__(self, *members: str) -> None:
        self.events: list[ev.Event] = []
        if members:
            self.add(ev.RunStarted, 0, 0, None, members=len(members), command=["train.py"])
            self.join(4, 1, *members)
            self.plan(4, 1, members, owners=members)

    def add(self, kind: Any, at: float, epoch: int = 1, member: str | None = "a", **fields: Any) -> None:
        time = START + timedelta(seconds=at)
        self.events.append(kind(job="gpt", time=time, epoch=epoch, member=member, **fields))

    def join(self, at: float, epoch: int, *members: str) -> None:
        for rank, member in enumerate(members):
            self.add(ev.MemberJoined, at, epoch, member_id=member, host="h", rank=rank)

    def plan(self, at: float, epoch: int, members: Any, owners: Any, shadows: Any = (), **more: Any) -> None:
        values = {"members": list(members), "owners": list(owners), "shadows": list(shadows), "lost": [], **more}
        self.add(ev.PlanWritten, at, epoch, reason="", **values)

    def step(self, at: float, number: int, seconds: float = 2.0, epoch: int = 1, **more: Any) -> None:
        self.add(ev.Step, at, epoch, step=number, loss=1.0, seconds=seconds, frc_done=0, frc_total=0, **more)

    def steps(self, first: int, last: int, at: float, epoch: int = 1) -> None:
        """Steps of 2 s, of which the first begins at ``at``."""
        for number in range(first, last + 1):
            self.step(at + 2.0 * (number - first + 1), number, epoch=epoch)

    def lose(self, at: float, member: str, detection: float | None = 0.5, epoch: int = 1) -> None:
        how = {"reason": "signal", "detail": "SIGKILL", "detection_seconds": detection}
        self.add(ev.MemberLost, at, epoch, member_id=member, **how)

    def recover(
        self, at: float, epoch: int, member: str, step: int, pause: float, redo: float, detection: float = 0.5
    ) -> None:
        values = {"plan_seconds": 0.1, "rebuild_seconds": 0.1, "forwards_redone": 0, "backwards_redone": 1}
        values |= {"pause_seconds": pause, "redo_seconds": redo, "detection_seconds": detection}
        self.add(ev.Recovered, at, epoch, member, step=step, mode="resume", **values)

    def reconfigure(self, at: float, epoch: int, pause: float, *members: str) -> None:
        for member in members:
            more = {"step": 0, "pause_seconds": pause, "previous": epoch - 1}
            self.add(ev.Reconfigured, at, epoch, member, **more)

    def finish(self, at: float) -> None:
        self.add(ev.RunFinished, at, 0, None, exit_code=0, run_seconds=at)
