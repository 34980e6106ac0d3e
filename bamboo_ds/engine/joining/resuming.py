"""The checkpoint that a job goes on from after a restart."""

from __future__ import annotations

import os
from pathlib import Path

from ...state import spares
from ...state.checkpoints import MAX_DEPTH, CheckpointError, folder_of, newest_complete
from ...state.publish import put_back, take_over
from ..context.records import CurrentEpoch


def newest_whole(epoch: CurrentEpoch) -> tuple[str, str] | None:
    """Folder and tag of the newest checkpoint that is whole, if the job goes on from one; reads all of it.

    It may be an older one than that which members had told of, or a newer one. What was saved by workers that the
    job goes on without is found, or never gets its name.

    Raises:
        CheckpointError: there is none, or earlier starts cannot be kept from writing there. Training would begin
            anew then, and its checkpoints would take the place of those that are there.
    """
    channel = epoch.channel
    told, job = channel.restart_from, channel.job
    if told is None:
        return None
    problems = [] if Path(told).parent.is_dir() else [f"{Path(told).parent} has vanished"]
    for folder in list(Path(told).parents)[:MAX_DEPTH]:
        try:
            newest = newest_complete(folder, job)
            if newest is None and not (folder.is_dir() and (put_back(folder, job) + spares.settle(folder, job))):
                continue
            root = folder if newest is None else folder_of(newest.path)
        except (CheckpointError, OSError) as error:
            problems.append(str(error))
            continue
        take_over(root, job, epoch.plan.lineage)
        spares.settle(root, job)
        found = newest_complete(root, job, checksums=True)
        if found is not None:
            return str(root), found.tag
        problems.append(f"none in {root} is whole")
    why = "; ".join(dict.fromkeys(problems)) or "all are gone"
    raise CheckpointError(
        f"the job cannot go on from {told} nor from another one of its checkpoints: {why}. See whether their file "
        "system is mounted and readable on all hosts, and start the job again"
    )


def silence_earlier_starts(epoch: CurrentEpoch, folder: str) -> None:
    """Earlier starts of the job publish nothing more in ``folder``, so that all members find the same there.

    Where this process cannot write the workers of earlier starts cannot, either.
    """
    plan = epoch.plan
    if plan.generation and epoch.leads and os.access(folder, os.W_OK, effective_ids=True):
        take_over(Path(folder), epoch.channel.job, plan.lineage)
