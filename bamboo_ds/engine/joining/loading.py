"""Loading a checkpoint into all roles of all members, and the one that a job goes on from after a restart."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import ProtocolError
from ...state import spares
from ...state.checkpoints import (
    MANIFEST,
    MAX_DEPTH,
    OWN,
    CheckpointError,
    folder_of,
    list_checkpoints,
    newest_complete,
    read_manifest,
)
from ...state.own import newest_of, own_folder
from ...state.publish import put_back, take_over
from ...state.universal import check_loadable
from ..checkpoints.kept import keeping_types, load_kept
from ..context.records import CurrentEpoch
from ..context.shared import InContext
from ..iteration.replication import Replication
from ..recovery.copies import Copies
from ..stage.answers import ignore
from ..stage.schedulers import SchedulerPosition, settings_of


@dataclass(eq=False)
class Loader(InContext):
    """Loads checkpoints.

    Attributes:
        universal: whether the checkpoint that is loaded may be a universal one.
    """

    copies: Copies
    replication: Replication
    universal: bool = field(default=True, init=False)

    @contextmanager
    def own_checkpoint(self) -> Iterator[None]:
        """What is loaded in the body the job has saved itself, which may have begun with a universal checkpoint."""
        self.universal = False
        try:
            yield
        finally:
            self.universal = True

    def local_position(self) -> SchedulerPosition | None:
        """Position of the script's own scheduler, if it has brought one."""
        self.binding.refresh()
        local = self.binding.local
        return SchedulerPosition.of(local) if local.pristine is not None else None

    def load(self, folder: str, tag: str | None, position: SchedulerPosition | None, *args: Any, **kwargs: Any) -> Any:
        """Load all roles of all members; returns what DeepSpeed does.

        Args:
            folder, tag, args, kwargs: as DeepSpeed's.
            position: that of the script's scheduler, if it has taken steps already.
        """
        check_loadable(folder, tag, self.layout, self.ds.loading(_wants_state(*args, **kwargs)))
        # The local runtime counts for the script even where others own its role.
        local = self.binding.local
        for runtime in [*(r for r in self.binding.owned() if r is not local), local]:
            self.binding.use(runtime)
            optimizer = self.ds.basic_optimizer
            if runtime.pristine is not None and position is not None:
                runtime.pristine.renew(self.ds.lr_scheduler, optimizer, self.ds.optimizer)
            keeps = nullcontext() if self.universal or optimizer is None else keeping_types(optimizer)
            with self.groups.acting_for(runtime.role, ignore), keeps:
                result: Any = self.ds.load_checkpoint(folder, tag, *args, **kwargs)
            if position is not None and len(position.groups) == len(settings_of(optimizer)):
                self.binding.refresh()
                position.restore(runtime)
            if not self.universal and tag is not None:  # it goes on from its own checkpoint
                load_kept(runtime, Path(folder, tag), self.layout.rank(runtime.role))
        if result[0] is None and tag is not None:
            raise ProtocolError(f"checkpoint {tag} in {folder} cannot be loaded")
        if self.layout.sharded:
            # Of a universal checkpoint each has brought its own shard up to date only.
            self.replication.exchange_shards()
        self.copies.copy_state(self.layout.roles)
        self.progress.changed.clear()
        return result


def _wants_state(
    load_module_strict: bool = True,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
    *_: Any,
    **__: Any,
) -> bool:
    """Whether a call of DeepSpeed's ``load_checkpoint`` loads the optimizer's state."""
    return load_optimizer_states and not load_module_only


def newest_whole(epoch: CurrentEpoch, place: str | None = None) -> tuple[str, str] | None:
    """Folder and tag of the checkpoint that is whole and contains most, if the job goes on from one; reads all of it.

    It is the script's or one of the job's own, and may be an older one than that which members had told of, or a newer
    one. What was saved by workers that the job goes on without is found, or never gets its name.

    Args:
        epoch: the first one after the restart.
        place: ``bamboo.checkpoint.dir``.

    Raises:
        CheckpointError: there is none, or earlier starts cannot be kept from writing there. Training would begin
            anew then, and its checkpoints would take the place of those that are there.
    """
    channel = epoch.channel
    told, job = channel.restart_from, channel.job
    if told is None:
        return None
    problems = [] if Path(told).parent.is_dir() else [f"{Path(told).parent} has vanished"]
    folders = _folders(told, job, place, problems)
    for folder in folders:
        take_over(folder, job, epoch.plan.lineage)
        spares.settle(folder, job)
    found = newest_of(folders, job, epoch.plan.origin, checksums=True)
    if found is not None:
        return str(found[0]), found[1].tag
    problems += [f"none in {folder} is whole" for folder in folders]
    why = "; ".join(dict.fromkeys(problems)) or "all are gone"
    raise CheckpointError(
        f"the job cannot go on from {told} nor from another one of its checkpoints: {why}. See whether their file "
        "system is mounted and readable on all hosts, and start the job again"
    )


def _folders(told: str, job: str, place: str | None, problems: list[str]) -> list[Path]:
    """Folders of the job's checkpoints, that of ``told`` first: the script's, and that of the job's own.

    Args:
        told: a checkpoint.
        job: the job.
        place: ``bamboo.checkpoint.dir``.
        problems: what keeps folders from being used is added.
    """
    own = next((folder for folder in Path(told).parents if folder.parent.name == OWN), None)
    if own is not None:
        return [folder for folder in (own, *_script_folders(own, problems)) if folder.is_dir()]
    above = list(Path(told).parents)[:MAX_DEPTH]
    for folder in above:
        try:
            newest = newest_complete(folder, job)
            if newest is None and not (folder.is_dir() and (put_back(folder, job) + spares.settle(folder, job))):
                continue
            root = folder if newest is None else folder_of(newest.path)
            if root not in above:
                continue  # another run has saved into a folder beside
        except (CheckpointError, OSError) as error:
            problems.append(str(error))
            continue
        return [each for each in (root, own_folder(place or root, job)) if each.is_dir()]
    return [each for each in (own_folder(place or Path(told).parent, job),) if each.is_dir()]


def _script_folders(own: Path, problems: list[str]) -> list[Path]:
    """Where the script saves, as the job's own checkpoints tell, also those of which something is damaged."""
    found: dict[str, None] = {}
    try:
        for info in reversed(list_checkpoints(own) if own.is_dir() else []):
            if (info.path / MANIFEST).is_file() and (folder := read_manifest(info.path).script_folder) is not None:
                found[folder] = None
    except CheckpointError as error:
        problems.append(str(error))
    return [Path(folder) for folder in found] or [own.parents[1]]


def silence_earlier_starts(epoch: CurrentEpoch, folder: str) -> None:
    """Earlier starts of the job publish nothing more in ``folder``, so that all members find the same there.

    Where this process cannot write the workers of earlier starts cannot, either.
    """
    plan = epoch.plan
    if plan.generation and epoch.leads and os.access(folder, os.W_OK, effective_ids=True):
        take_over(Path(folder), epoch.channel.job, plan.lineage)
