"""How a job goes on after a restart.

All workers run the script again, from the beginning. The newest complete checkpoint tells what the job had done before
it: those calls are *replayed* as for a member that joins (:mod:`.replay`), and where the checkpoint was saved all
members load it. A script that begins with ``load_checkpoint`` gets it there, and nothing is replayed.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

from ..generations import supersede
from ..state.checkpoints import MAX_DEPTH, CheckpointError, newest_complete, read_manifest
from ..state.publish import clean, put_back
from .history import History
from .joining import Joining
from .records import CurrentEpoch, Progress

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
        """Folder and tag of the newest checkpoint that is whole, if the job has been started again; reads all of it.

        It may be an older one than that which members had told of, or a newer one. What was saved by workers that the
        job goes on without is found, or never gets its name.
        """
        told, job, lineage = self.epoch.channel.restart_from, self.epoch.channel.job, self.epoch.plan.lineage
        for folder in list(Path(told).parents)[:MAX_DEPTH] if told is not None else ():
            try:
                if newest_complete(folder, job) is None and not (folder.is_dir() and put_back(folder, job)):
                    continue
                supersede(folder, lineage)
                clean(folder, job, lineage=lineage)
                found = newest_complete(folder, job, checksums=True)
            except (CheckpointError, OSError) as error:
                logger.warning("looking for a checkpoint in %s: %s", folder, error)
                continue
            if found is not None:
                return str(folder), found.tag
        if told is not None:
            logger.error("no checkpoint is left where %s was: the job starts from the beginning", told)
        return None

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
