"""How a job goes on after a restart.

All workers run the script again, from the beginning. The newest complete checkpoint tells what the job had done before
it: those calls are *replayed* as for a member that joins (:mod:`.joining`), and where the checkpoint was saved all
members load it. A script that begins with ``load_checkpoint`` gets it there, and nothing is replayed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from ..errors import ProtocolError
from ..state.checkpoints import MAX_DEPTH, CheckpointError, folder_of, newest_complete, read_manifest
from ..state.publish import put_back, take_over
from .answers import ignore
from .history import Kind
from .joining import JoiningExecutor
from .kept import keeping_types, load_kept
from .schedulers import Standing

logger = logging.getLogger("bamboo_ds")


class ResumingExecutor(JoiningExecutor):
    """Replays what the job had done before its restart, and loads the checkpoint that it goes on from.

    Attributes:
        _resumed: that checkpoint's folder and tag, until it is loaded.
    """

    _resumed: tuple[str, str] | None = None

    def _find_resumed(self) -> list[str] | None:
        """Folder and tag of the newest checkpoint that is whole, if the job goes on from one; reads all of it.

        It may be an older one than that which members had told of, or a newer one. What was saved by workers that the
        job goes on without is found, or never gets its name.

        Raises:
            CheckpointError: there is none, or earlier starts cannot be kept from writing there. Training would begin
                anew then, and its checkpoints would take the place of those that are there.
        """
        told, job = self._job.channel.restart_from, self._job.channel.job
        if told is None:
            return None
        problems = [] if Path(told).parent.is_dir() else [f"{Path(told).parent} has vanished"]
        for folder in list(Path(told).parents)[:MAX_DEPTH]:
            try:
                newest = newest_complete(folder, job)
                if newest is None and not (folder.is_dir() and put_back(folder, job)):
                    continue
                root = folder if newest is None else folder_of(newest.path)
            except (CheckpointError, OSError) as error:
                problems.append(str(error))
                continue
            take_over(root, job, self._plan.lineage)
            found = newest_complete(root, job, checksums=True)
            if found is not None:
                return [str(root), found.tag]
            problems.append(f"none in {root} is whole")
        why = "; ".join(dict.fromkeys(problems)) or "all are gone"
        raise CheckpointError(
            f"the job cannot go on from {told} nor from another one of its checkpoints: {why}. See whether their file "
            "system is mounted and readable on all hosts, and start the job again"
        )

    def _take_over(self, folder: str) -> None:
        """Earlier starts of the job publish nothing more in ``folder``, so that all members find the same there.

        Where this process cannot write the workers of earlier starts cannot, either.
        """
        if self._plan.generation and self._leads() and os.access(folder, os.W_OK, effective_ids=True):
            take_over(Path(folder), self._job.channel.job, self._plan.lineage)

    def _begin_resuming(self, folder: str, tag: str) -> None:
        """The engine is built; from now on the script's calls are replayed up to the checkpoint.

        Raises:
            CheckpointError: the checkpoint cannot be read here.
        """
        checkpoint = Path(folder, tag)
        manifest = read_manifest(checkpoint)
        if manifest.history is None:
            raise CheckpointError(f"{checkpoint} does not tell what the job had done: it cannot be gone on from")
        self._history.extend((checkpoint / manifest.history).read_text())
        self._resumed, self._target, self._job.replaying = (folder, tag), len(self._history), True
        self._seed = self._seed if manifest.seed is None else manifest.seed
        self._consumed = manifest.consumed or 0
        self._committed_steps = self._history.count("train")
        logger.warning("going on from checkpoint %s, after step %d", checkpoint, self._committed_steps)

    def _recorded(self, kind: Kind) -> Any:
        if self._resumed is None:
            return super()._recorded(kind)
        data = super()._recorded(kind)
        if self._position == self._target:
            self._load_own(*self._resumed)
        return data

    def _load_resumed(self, load: Callable[..., Any], folder: str, tag: str | None) -> Any:
        """The script loads a checkpoint before the job has come to where it goes on from.

        Args:
            load: DeepSpeed's own for the bound role, called with a tag.
            folder, tag: as the script gave them.
        """
        assert self._resumed is not None
        if tag is None and self._position == 0 and os.path.abspath(folder) == os.path.abspath(self._resumed[0]):
            return self._load_own(*self._resumed)
        data = self._recorded("load")
        return load(data["tag"]) if data["tag"] is not None else (None, {})

    def _load_own(self, folder: str, tag: str) -> Any:
        """Load what the job goes on from; returns what DeepSpeed does."""
        # The script's scheduler has taken the steps that were replayed when the script was there.
        self._binding.refresh()
        standing = Standing.of(self._home) if self._pristine is not None and self._position else None
        with self._own_checkpoint():
            result = self._load_roles(folder, tag, standing)
        self._resumed, self._job.replaying = None, False
        return result

    def _load_roles(self, folder: str, tag: str | None, standing: Standing | None, *args: Any, **kwargs: Any) -> Any:
        """Load all roles of all members; returns what DeepSpeed does.

        Args:
            folder, tag, args, kwargs: as DeepSpeed's.
            standing: where the script's scheduler stands already.
        """
        # The home runtime counts for the script even where others own its role.
        for runtime in [*(r for r in self._binding.owned() if r is not self._home), self._home]:
            self._binding.use(runtime)
            if self._pristine is not None and standing is not None:
                self._pristine.renew(self.lr_scheduler, self.basic_optimizer)
            keeps = nullcontext() if self._universal else keeping_types(self.basic_optimizer)
            with self._answering(runtime, ignore), keeps:
                result: Any = super().load_checkpoint(folder, tag, *args, **kwargs)
            if standing is not None and len(standing.groups) == len(self.basic_optimizer.param_groups):
                standing.give(runtime, self._pristine)
            if not self._universal and tag is not None:  # it goes on from its own checkpoint
                load_kept(runtime, Path(folder, tag), self._plan.world.rank(runtime.role))
        if result[0] is None and tag is not None:
            raise ProtocolError(f"checkpoint {tag} in {folder} cannot be loaded")
        if self._plan.world.sharded:
            # Of a universal checkpoint each has brought its own shard up to date only.
            self._exchange_shards()
        self._copy_state(self._plan.world.roles)
        self._changed.clear()
        return result
