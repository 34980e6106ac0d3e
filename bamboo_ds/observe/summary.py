"""Counts over the events of a job, for people. Pure."""

from __future__ import annotations

from .events import (
    CheckpointSaved,
    Event,
    MemberJoined,
    MemberLeft,
    MemberLost,
    PlanWritten,
    Recovered,
    Restart,
    RunFinished,
    Step,
)


class Summary:
    """Counts over the events of one run of a job; every count is of distinct happenings."""

    def __init__(self) -> None:
        self._lost: set[str] = set()
        self._joined: set[str] = set()
        self._left: set[str] = set()
        self._pauses: dict[int, float] = {}  # by epoch: the longest of any survivor
        self._redone = 0
        self._recovered: tuple[int, set[str | None]] = 0, set()  # the newest epoch, and who has told of it
        self._saved: set[tuple[str, int]] = set()
        self._restarts = self._step = 0
        self._planned = False
        self.finished: RunFinished | None = None

    def add(self, event: Event) -> None:
        """Count ``event``."""
        if isinstance(event, Step):
            self._step = event.step
        elif isinstance(event, MemberLost):
            self._lost.add(event.member_id)
        elif isinstance(event, MemberLeft):
            self._left.add(event.member_id)
        elif isinstance(event, MemberJoined) and self._planned:
            self._joined.add(event.member_id)
        elif isinstance(event, PlanWritten):
            self._planned = True
        elif isinstance(event, Recovered):
            self._pauses[event.epoch] = max(event.pause_seconds, self._pauses.get(event.epoch, 0.0))
            if event.epoch > self._recovered[0]:
                self._recovered = event.epoch, set()
            if event.member not in self._recovered[1]:
                self._redone += event.forwards_redone + event.backwards_redone
                self._recovered[1].add(event.member)
        elif isinstance(event, CheckpointSaved):
            self._saved.add((event.path, event.step))
        elif isinstance(event, Restart):
            self._restarts, self._planned = max(self._restarts, event.number), False
        elif isinstance(event, RunFinished):
            self.finished = event

    def lines(self) -> list[str]:
        """The summary, one thing a line."""
        done = self.finished
        ended = f"exit code {done.exit_code} after {duration(done.run_seconds)}" if done else "not finished"
        lines = [f"{ended}; newest step: {self._step or 'none'}"]
        pauses, redone = self._pauses.values(), self._redone
        losses = f"losses: {len(self._lost)}"
        if pauses:
            longest, total = duration(max(pauses)), duration(sum(pauses))
            losses += f"; longest pause {longest}, all pauses {total}; {counted(redone, 'pass', 'passes')} done again"
        lines.append(losses)
        came = f"joined: {len(self._joined)}; left: {len(self._left)}"
        return [*lines, f"{came}; checkpoints: {len(self._saved)}; restarts: {self._restarts}"]


def counted(number: int, one: str, several: str | None = None) -> str:
    """``1 pass``, ``2 passes``."""
    return f"{number} {one if number == 1 else several or one + 's'}"


def duration(seconds: float) -> str:
    """Seconds with two significant digits below ten, whole ones from there on."""
    return f"{seconds:.0f} s" if seconds >= 9.95 else f"{seconds:.1f} s" if seconds >= 0.995 else f"{seconds:.2f} s"
