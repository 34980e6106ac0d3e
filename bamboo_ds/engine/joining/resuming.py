"""How a job goes on after a restart.

All workers run the script again, from the beginning. The newest complete checkpoint tells what the job had done before
it: those calls are *replayed* as for a member that joins (:mod:`.replay`), and where the checkpoint was saved all
members load it. A script that begins with ``load_checkpoint`` gets it there, and nothing is replayed.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from pathlib import Path

from ...state import spares
from ...state.checkpoints import MAX_DEPTH, CheckpointError, folder_of, newest_complete, read_manifest
from ...state.publish import put_back, take_over
from ..context.history import History
from ..context.records import CurrentEpoch, Progress
from .joining import Joining

logger = logging.getLogger("bamboo_ds")


@dataclass(eq=False)
class Resuming:
    """What the job goes on from.

    Attributes:
        checkpoint: its folder and tag, until it is loaded.
    """

    epoch: CurrentEpoch
    progress: Progress
    history: History
    joining: Joining
    checkpoint: tuple[str, str] | None = field(default=None, init=False)

    def find(self) -> tuple[str, str] | None:
        """Folder and tag of the newest checkpoint that is whole, if the job goes on from one; reads all of it.

        It may be an older one than that which members had told of, or a newer one. What was saved by workers that the
        job goes on without is found, or never gets its name.

        Raises:
            CheckpointError: there is none, or earlier starts cannot be kept from writing there. Training would begin
                anew then, and its checkpoints would take the place of those that are there.
        """
        channel = self.epoch.channel
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
            take_over(root, job, self.epoch.plan.lineage)
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

    def take_over(self, folder: str) -> None:
        """Earlier starts of the job publish nothing more in ``folder``, so that all members find the same there.

        Where this process cannot write the workers of earlier starts cannot, either.
        """
        plan = self.epoch.plan
        if plan.generation and self.epoch.leads and os.access(folder, os.W_OK, effective_ids=True):
            take_over(Path(folder), self.epoch.channel.job, plan.lineage)

    def begin(self, folder: str, tag: str) -> None:
        """The engine is built; from now on the script's calls are replayed up to the checkpoint.

        Raises:
            CheckpointError: the checkpoint cannot be read here.
        """
        checkpoint = Path(folder, tag)
        manifest = read_manifest(checkpoint)
        if manifest.history is None:
            raise CheckpointError(f"{checkpoint} does not tell what the job had done: it cannot be gone on from")
        self.history.extend((checkpoint / manifest.history).read_text())
        self.checkpoint, self.joining.target, self.epoch.job.replaying = (folder, tag), len(self.history), True
        progress = self.progress
        progress.seed = progress.seed if manifest.seed is None else manifest.seed
        progress.consumed = manifest.consumed or 0
        progress.steps = self.history.count("train")
        logger.warning("going on from checkpoint %s, after step %d", checkpoint, progress.steps)
