"""The summary of a job, for people: counts, goodput, and the last output of the worker that failed."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ..errors import EXIT_FATAL_LOSS
from .logfiles import last_lines
from .model import JobModel
from .words import counted, duration, how, numbered

#: Of a log.
_LINES = 20


@dataclass(frozen=True)
class Failure:
    """The failure that has ended a job; ``log``: path of the output of the worker, if that is known."""

    text: str
    log: str | None


def summary(job: JobModel) -> list[str]:
    """The counts, one thing a line."""
    done, totals, step = job.finished, job.totals, job.step
    ended = f"exit code {done.exit_code} after {duration(done.run_seconds)}" if done else "not finished"
    losses = f"losses: {totals.losses}"
    if job.losses.longest_pause is not None:
        longest, total = duration(job.losses.longest_pause), duration(totals.pause_seconds)
        redone = counted(totals.passes_redone, "pass", "passes")
        losses += f"; longest pause {longest}, all pauses {total}; {redone} done again"
    if totals.corrupt:
        losses += f"; {counted(totals.corrupt, 'wrong copy', 'wrong copies')} of stages"
    came = f"joined: {totals.joined}; left: {totals.left}"
    newest = numbered(step.step, step.global_step) if step is not None else "none"
    return [
        f"{ended}; newest step: {newest}",
        losses,
        f"{came}; checkpoints: {totals.checkpoints}; restarts: {totals.restarts}",
    ]


def failure_of(job: JobModel) -> Failure | None:
    """The failure that has ended the job, if any."""
    if job.finished is None or job.finished.exit_code == 0:
        return None
    code = job.finished.exit_code
    failed = job.failures.get(code)
    if failed is not None:
        why = "" if failed.error is None else f": {failed.error}"
        who = _who(failed.member_id, failed.rank, failed.host)
        return Failure(f"{who} {how(failed.reason, failed.detail)}{why}", failed.log)
    if code != EXIT_FATAL_LOSS or job.fatal_loss is None:
        return None
    lost = {each.id: each for loss in job.losses.views for each in loss.members}
    first = next((lost[member] for member in job.fatal_loss.members if member in lost), None)
    if first is None:
        return None
    return Failure(f"{_who(first.id, first.script_rank, first.host)} {how(first.reason, first.detail)}", None)


def ending(job: JobModel) -> list[str]:
    """The lines at the end of a job."""
    goodput = job.accountant.snapshot().goodput
    share = "unknown" if goodput is None else f"{goodput:.0%} of the member-seconds"
    lines, failure = [*summary(job), f"goodput: {share}"], failure_of(job)
    if failure is None:
        return lines
    lines.append(f"first failure: {failure.text}")
    if failure.log is None:
        return lines
    last = last_lines(failure.log, _LINES) if os.path.exists(failure.log) else []
    return [*lines, f"its output: {failure.log}", *(f"  | {line}" for line in last)]


def _who(member: str, rank: int | None, host: str | None) -> str:
    return f"worker {member}" + ("" if host is None else f", rank {rank} on host {host},")
