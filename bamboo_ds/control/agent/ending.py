"""What the end of a worker means. Pure."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Literal

from ...errors import EXIT_DEVICE, EXIT_EVICTED, EXIT_FATAL_LOSS, EXIT_LEFT
from ...processes import boot_id
from ..registry.records import LeftRecord, StopRecord


@dataclass(frozen=True)
class Ending:
    """What an agent knows of its worker's end besides the exit status.

    Attributes:
        died: monotonic seconds of its death.
        joined: it has joined a running job, which its failure must not end.
        fatal: a stage is lost, so that no worker can go on.
        error: what its script has told of its failure, or it of its device's.
        done: its script has ended well, and nobody needs it any more.
        spared: its failure counts as a loss, since the job may be able to go on without it.
        step: newest step that it has committed, as far as known.
        terminated: it was ended because the agent was.
        stop: the job was ended.
        evicted: the plan went on without it.
        left: it was free to go because it had been told to leave: by whom and why.
        hung: it was killed since its heartbeat stopped or since it made no progress, and when that began.
        broken: the control plane failed.
    """

    died: float
    joined: bool
    fatal: bool
    terminated: bool
    stop: StopRecord | None
    evicted: bool
    left: str | None
    hung: tuple[Literal["heartbeat", "hang"], float] | None
    broken: BaseException | None
    error: str | None = None
    done: bool = False
    spared: bool = False
    step: int | None = None

    def departure(self, member: str, slot: int, status: int) -> LeftRecord:
        """Classify the end of the worker of ``member`` by its exit ``status``, negative for a signal."""
        if self.error is not None and status < 0:
            status = 1  # it had failed before something killed it
        if self.done and status == -signal.SIGKILL:
            status = 0
        since, reason = self.died, "exit" if status >= 0 else "signal"
        detail = str(status) if status >= 0 else signal.Signals(-status).name
        code = status if status >= 0 else 128 - status
        # A failure of one that has joined costs the job only this attempt.
        failed = "lost" if self.joined else "failed"
        error: str | None = None
        if status == 0 and not (self.terminated or self.stop or self.evicted or self.broken):
            outcome = "finished"
        elif self.hung is not None:
            outcome, (reason, since) = "lost", self.hung
            detail = f"none for {self.died - since:.1f} s"
        elif self.broken is not None:
            outcome, detail, code = failed, f"control plane: {self.broken}", 1
        elif self.stop is not None:
            outcome, code = "stopped", self.stop.code
        elif self.left is not None and (status >= 0 or status == -signal.SIGTERM):
            outcome, detail, code = "left", self.left, 0
        elif self.fatal and not self.terminated:
            outcome, code = "fatal", EXIT_FATAL_LOSS
        elif self.evicted or status in (EXIT_EVICTED, EXIT_LEFT):
            outcome, code = "evicted", 0
        elif status == EXIT_FATAL_LOSS:
            outcome = "fatal"
        elif status > 0 and not self.terminated:
            outcome = failed
            if self.spared or status == EXIT_DEVICE:
                outcome, error = "lost", self.error or f"exit code {status}"
                detail = error
        else:
            outcome = "lost"
        return LeftRecord.model_validate(
            {
                "id": member,
                "slot": slot,
                "outcome": outcome,
                "reason": reason,
                "detail": detail,
                "code": code,
                "error": error,
                "step": self.step,
                "abrupt": outcome == "finished" and not self.done and self.step is not None,
                "since": since,
                "boot": boot_id(),
            }
        )
