"""Settings of the ``"bamboo"`` block that simulated jobs go by, and those that they know nothing of."""

from __future__ import annotations

from ..config import BLOCK, BambooConfig
from ..job_settings import paths_by_name

#: What simulated jobs go by.
MODELLED = frozenset(
    {
        "redundancy.mode",
        "redundancy.sync_every",
        "membership.settle_ms",
        "recovery.max_restarts",
        "recovery.min_members",
        "checkpoint.asynchronous",
        "checkpoint.every_s",
        "standby.replicas",
        *(f"topology.{name}" for name in ("blocks", "transfer_mb_per_s", "memory_limit_mb", "min_gain", "zones_apart")),
    }
)
#: What changes nothing of what a job trains, or when.
NEUTRAL = frozenset(
    {"checkpoint.keep", "checkpoint.dir", *(path for path in paths_by_name().values() if path.startswith("observe."))}
)
#: All others: jobs are simulated as if these had their defaults, or as the terms have it.
NOT_MODELLED = tuple(path for path in paths_by_name().values() if path not in MODELLED | NEUTRAL)


def unmodelled(config: BambooConfig) -> list[str]:
    """Settings other than the default that a simulation knows nothing of, by their full names."""
    usual = BambooConfig()

    def differs(path: str) -> bool:
        part, name = path.split(".")
        return bool(getattr(getattr(config, part), name) != getattr(getattr(usual, part), name))

    return [f"{BLOCK}.{path}" for path in NOT_MODELLED if differs(path)]
