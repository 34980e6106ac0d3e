"""Counts over the events of a job, for people. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import EXIT_FATAL_LOSS
from .events import (
    CheckpointSaved,
    Event,
    Fatal,
    MemberFailed,
    MemberJoined,
    MemberLeft,
    MemberLost,
    PlanWritten,
    Recovered,
    Restart,
    RunFinished,
    Step,
)

#: How a worker ended, by reason, with what is known of it.
HOW = {
    "exit": "exited ({})",
    "signal": "died ({})",
    "heartbeat": "stopped its heartbeat ({})",
    "hang": "made no progress ({})",
    "lease": "fell silent (its lease {})",
    "suspects": "is out of reach of {}",
}


@dataclass(frozen=True)
class Failure:
    """What has ended a job; ``log``: path of the output of the worker, if that is known."""

    text: str
    log: str | None


class Summary:
    """Counts over the events of one run of a job; every count is of distinct happenings."""

    def __init__(self) -> None:
        self._lost: dict[str, MemberLost] = {}
        self._joined: set[str] = set()
        self._left: set[str] = set()
        self._pauses: dict[int, float] = {}  # by epoch: the longest of any survivor
        self._redone = 0
        self._recovered: tuple[int, set[str | None]] = 0, set()  # the newest epoch, and who has told of it
        self._saved: set[tuple[str, int]] = set()
        self._restarts = self._step = 0
        self._planned = False
        self._failed: list[MemberFailed] = []
        self._fatal: Fatal | None = None
        self._places: dict[str, tuple[int, str]] = {}  # RANK and host, by member
        self.finished: RunFinished | None = None

    def add(self, event: Event) -> None:
        """Count ``event``."""
        if isinstance(event, Step):
            self._step = event.step
        elif isinstance(event, MemberLost):
            self._lost.setdefault(event.member_id, event)
        elif isinstance(event, MemberFailed):
            self._failed.append(event)
        elif isinstance(event, Fatal):
            self._fatal = event
        elif isinstance(event, MemberLeft):
            self._left.add(event.member_id)
        elif isinstance(event, MemberJoined):
            self._places[event.member_id] = event.rank, event.host
            if self._planned:
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
            self._restarts, self._planned, self._fatal = max(self._restarts, event.number), False, None
        elif isinstance(event, RunFinished):
            self.finished = event

    @property
    def failure(self) -> Failure | None:
        """What has ended the job, if it has failed."""
        if self.finished is None or self.finished.exit_code == 0:
            return None
        code = self.finished.exit_code
        failed = next((event for event in self._failed if event.exit_code == code), None)
        if failed is not None:
            why = "" if failed.error is None else f": {failed.error}"
            place = failed.rank, failed.host
            return Failure(f"{_who(failed.member_id, place)} {how(failed.reason, failed.detail)}{why}", failed.log)
        if code != EXIT_FATAL_LOSS or self._fatal is None:
            return None
        lost = next((self._lost[member] for member in self._fatal.members if member in self._lost), None)
        if lost is None:
            return None
        who = _who(lost.member_id, self._places.get(lost.member_id))
        return Failure(f"{who} {how(lost.reason, lost.detail)}", None)

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


def _who(member: str, place: tuple[int, str] | None) -> str:
    return f"worker {member}" + ("" if place is None else f", rank {place[0]} on host {place[1]},")


def how(reason: str, detail: str) -> str:
    """How a worker has ended, as a verb with what is known of it."""
    return HOW[reason].format(f"code {detail}" if detail.isdecimal() else detail)


def counted(number: int, one: str, several: str | None = None) -> str:
    """``1 pass``, ``2 passes``."""
    return f"{number} {one if number == 1 else several or one + 's'}"


def duration(seconds: float) -> str:
    """Seconds with two significant digits below ten, whole ones from there on."""
    return f"{seconds:.0f} s" if seconds >= 9.95 else f"{seconds:.1f} s" if seconds >= 0.995 else f"{seconds:.2f} s"
