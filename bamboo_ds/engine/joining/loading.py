"""Loading a checkpoint into all roles of all members, and the one that a job goes on from after a restart."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...addresses import is_url
from ...errors import ProtocolError
from ...state.checkpoints import MAX_DEPTH, OWN, CheckpointError, Location, folder_of, is_own, newest_complete
from ...state.locations import Places
from ...state.own import newest_of, own_location
from ...state.places import CheckpointPlace
from ...state.publish import put_back, take_over
from ...state.universal import Loading, check_loadable
from ..checkpoints.kept import keeping_types, load_kept
from ..context.records import CurrentEpoch
from ..context.shared import InContext
from ..iteration.replication import Replication
from ..recovery.copies import Copies
from ..stage.answers import ignore
from ..stage.schedulers import SchedulerPosition, settings_of

logger = logging.getLogger("bamboo_ds")


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
        """In the body the checkpoint to load is the job's, which may have begun with a universal one."""
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
        """Loads all roles of all members; returns what DeepSpeed does.

        Args:
            folder, tag, args, kwargs: as DeepSpeed's.
            position: that of the script's scheduler, if it has taken steps already.
        """
        self._check(folder, tag, self.ds.loading(_wants_state(*args, **kwargs)))
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
                if runtime.optimizer.resting:
                    runtime.optimizer.rest()  # torch loads to where parameters are
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
        self.progress.script.changed.clear()
        return result

    def _check(self, folder: str, tag: str | None, how: Loading) -> None:
        """:func:`check_loadable` on all members, one of which tells why one of them refuses. Collective.

        Raises:
            CheckpointError: one refuses.
        """
        refusal = ""
        try:
            check_loadable(folder, tag, self.layout, how)
        except CheckpointError as error:
            refusal = str(error)
        refusals = self.epoch.agreement.exchange(refusal)
        first = next((member for member, text in refusals.items() if text), None)
        if first is None:
            return
        if first == self.epoch.member:
            logger.error("%s", refusals[first])
        self.epoch.agreement.barrier()  # the end of a worker ends the others
        refused = CheckpointError(refusals[first])
        refused.told_by = first
        raise refused


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


def newest_whole(epoch: CurrentEpoch, places: Places, own: str | None = None) -> tuple[str, str] | None:
    """The place of the whole checkpoint that contains most, and its name there, if the job goes on from one.

    It is the script's or one of the job's own, and may be an older one than that which members had told of, or a newer
    one. What was saved by workers that the job goes on without is found, or never gets its name. All of it is read.

    Args:
        epoch: the first one after the restart.
        places: of checkpoints.
        own: ``bamboo.checkpoint.dir``.

    Raises:
        CheckpointError: there is none, or earlier starts cannot be kept from writing there. Training would begin
            anew then, and its checkpoints would take the place of those that are there.
    """
    channel = epoch.job.channel
    start, job = channel.restart_from, channel.job
    if start is None:
        return None
    gone = not is_url(start) and not Path(start).parent.is_dir()
    problems = [f"{Path(start).parent} has vanished"] if gone else []
    candidates = [places.of(each) for each in _locations(start, job, own, places, problems)]
    candidates = [place for place in candidates if place.exists()]
    for place in candidates:
        place.take_over(job, epoch.plan.lineage)
    newest = newest_of(candidates, job, epoch.plan.origin, checksums=True)
    if newest is not None:
        place, info = newest
        if is_url(info.path):
            where, _, name = str(info.path).rpartition("/")
            return where, name
        return str(place.location), info.tag
    problems += [f"none in {place.location} is whole" for place in candidates]
    why = "; ".join(dict.fromkeys(problems)) or "all are gone"
    raise CheckpointError(
        f"the job cannot go on from {start} nor from another one of its checkpoints: {why}. See whether their file "
        "system is mounted, or their store reached, and readable on all hosts, and start the job again"
    )


def _locations(told: str, job: str, own: str | None, places: Places, problems: list[str]) -> list[Location]:
    """The places where the job's checkpoints may be, that of ``told`` first: the script's, and the job's own.

    Args:
        told: a checkpoint.
        own: ``bamboo.checkpoint.dir``.
        places: of checkpoints.
        problems: what keeps folders from being used is added.
    """
    if is_url(told):
        place = told.rpartition("/")[0]
        scripts = _script_folders(places.of(place), problems)
        if is_own(place):
            return [place, *scripts]
        return [*(scripts or [place]), own_location(own or places.mirror or place, job)]
    own_of = next((folder for folder in Path(told).parents if folder.parent.name == OWN), None)
    if own_of is not None:
        return [own_of, *(_script_folders(places.of(own_of), problems) or [own_of.parents[1]])]
    above = list(Path(told).parents)[:MAX_DEPTH]
    for folder in above:
        try:
            newest = newest_complete(folder, job)
            if newest is None and not (folder.is_dir() and put_back(folder, job)):
                continue
            root = folder if newest is None else folder_of(Path(newest.path))
            if root not in above:
                continue  # another run has saved into a folder beside
        except (CheckpointError, OSError) as error:
            problems.append(str(error))
            continue
        return [root, own_location(own or root, job)]
    return [own_location(own or Path(told).parent, job)]


def _script_folders(own: CheckpointPlace, problems: list[str]) -> list[Location]:
    """The folders that the script saves into, as the job's own checkpoints tell, also those with damaged ones."""
    found: dict[Location, None] = {}
    try:
        for info in reversed(own.checkpoints()):
            if info.serial and (folder := own.manifest(info.path).script_folder) is not None:
                found[Path(folder)] = None
    except (CheckpointError, OSError) as error:
        problems.append(str(error))
    return list(found)


def silence_earlier_starts(epoch: CurrentEpoch, places: Places, folder: str) -> None:
    """Keeps earlier starts of the job from publishing in ``folder``, so that all members find the same there.

    Where this process cannot write the workers of earlier starts cannot, either.
    """
    plan = epoch.plan
    if not (plan.generation and epoch.leads):
        return
    if places.mirror is not None:
        places.of(folder).take_over(epoch.job.channel.job, plan.lineage)
    elif os.access(folder, os.W_OK, effective_ids=True):
        take_over(Path(folder), epoch.job.channel.job, plan.lineage)
