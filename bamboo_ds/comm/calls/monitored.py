"""Errors of ``monitored_barrier``, in gloo's words, which scripts look for."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta


def _milliseconds(limit: timedelta) -> int:
    return round(limit.total_seconds() * 1000)


def timed_out(limit: timedelta) -> RuntimeError:
    """The error of rank 0, whose time was over before it could ask the others."""
    return RuntimeError(f"[Rank 0]: Rank 0 timed out in monitoredBarrier after {_milliseconds(limit)} ms.")


def not_passed(rank: int, late: Sequence[int], limit: timedelta, every: bool) -> RuntimeError:
    """The error of ``rank``: the ranks ``late`` have not come within ``limit``; ``every``: it names all of them."""
    if rank != 0:
        missing = ", ".join(map(str, late))
        return RuntimeError(
            f"[Rank {rank}]: Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for "
            f"send/recv from rank 0. Please check rank 0 logs for faulty rank. (Not here: {missing})"
        )
    which = f"Ranks {', '.join(map(str, late))}" if every else f"Rank {', '.join(map(str, late[:1]))}"
    return RuntimeError(f"[Rank 0]: {which} failed to pass monitoredBarrier in {_milliseconds(limit)} ms")
