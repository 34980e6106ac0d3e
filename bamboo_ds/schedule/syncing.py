"""Sums that are sent in the middle of an iteration: of which roles, and how often (``redundancy.sync_every``)."""

from __future__ import annotations

from ..topology import Plan, Role

#: Share of the time of the micro-batches between two of them that sending sums may take, where passes run elsewhere.
NETWORK_SHARE = 0.3
#: The same where it takes the time from the passes: of the main thread, and on processors.
PROCESSOR_SHARE = 0.03
#: Seconds that it takes however little is sent.
_FIXED_S = 0.005


def syncs(plan: Plan, role: Role) -> bool:
    """Whether anybody could use sums of ``role``: its shadow, who copies it; and slices go back to their own."""
    learned = any(rank == plan.world.rank(role) for rank, _ in plan.builders)
    return plan.shadow(role) is not None or learned or plan.world.slices > 1


def affordable(seconds: float, micro_batches: int, micro_batch_s: float, share: float) -> int:
    """The fewest micro-batches after which sums can be sent.

    A power of two, so that slices of a stage, which measure for themselves, have sums of some same micro-batches.

    Args:
        seconds: that the sums of all of a member's roles take on the network.
        micro_batches: of an iteration.
        micro_batch_s: seconds of one.
        share: :data:`NETWORK_SHARE` or :data:`PROCESSOR_SHARE`.

    Returns:
        The number; 0: none that is less than ``micro_batches``.
    """
    every = 1
    while every < micro_batches and seconds + _FIXED_S > every * share * micro_batch_s:
        every *= 2
    return every if every < micro_batches else 0
