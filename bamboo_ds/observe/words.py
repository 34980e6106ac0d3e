"""Words for people about what happens in a job."""

from __future__ import annotations

from collections.abc import Sequence

from .event_base import Role

#: How a worker ended, by reason, with what is known of it.
_HOW = {
    "exit": "exited ({})",
    "signal": "died ({})",
    "heartbeat": "stopped its heartbeat ({})",
    "hang": "made no progress ({})",
    "lease": "fell silent (its lease {})",
    "suspects": "is out of reach of {}",
    "abort": "could not go on ({})",
}


def how(reason: str, detail: str) -> str:
    """The end of a worker, as a verb with what is known of it."""
    return _HOW[reason].format(f"code {detail}" if detail.isdecimal() else detail)


def counted(number: int, one: str, several: str | None = None) -> str:
    """``1 pass``, ``2 passes``."""
    return f"{number} {one if number == 1 else several or one + 's'}"


def duration(seconds: float) -> str:
    """Seconds with two significant digits below ten, whole ones from there on."""
    return f"{seconds:.0f} s" if seconds >= 9.95 else f"{seconds:.1f} s" if seconds >= 0.995 else f"{seconds:.2f} s"


def numbered(step: int, count: int | None) -> str:
    """``3``; ``3 (43 for DeepSpeed)`` where its ``count`` goes on from a checkpoint, as in folders' names."""
    return f"{step}" + (f" ({count} for DeepSpeed)" if count not in (None, step) else "")


def listed(words: Sequence[str]) -> str:
    """``a, b and c``."""
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


def stages(roles: Sequence[Role], pipelines: int) -> str:
    """``stage 1``, ``stages 1 and 2 of pipeline 0``; pipelines are named where there are several."""
    found: dict[int, list[str]] = {}
    for pipeline, stage in roles:
        found.setdefault(pipeline, []).append(str(stage))
    return listed(
        [
            f"stage{'s' * (len(each) > 1)} {listed(each)}" + (f" of pipeline {pipeline}" if pipelines > 1 else "")
            for pipeline, each in found.items()
        ]
    )
