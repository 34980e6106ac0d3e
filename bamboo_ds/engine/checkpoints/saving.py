"""DeepSpeed's saving, with a copy to host memory in place of every file that it would write, and what follows it.

The members copy their roles in an operation (``operations.checkpointing``). Each writes what it has copied, in a
thread, and the member that leads completes the checkpoint: before the commit of the operation, or after it. Members
that are lost meanwhile: :meth:`Saves.follow`.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

from ...compat import writes_zip_files
from ...config import CheckpointConfig
from ...errors import UnsupportedError
from ...state.checkpoints import CheckpointError, Location, SaveRecord, inside, is_own, read_manifest
from ...state.hostcopy import BufferPool, HostCopy
from ...state.locations import Places
from ...state.own import newest_of, own_location
from ...state.places import CheckpointPlace
from ...state.saver import CheckpointSaver
from ...state.writer import HostFile, Save, SaveResult
from ...topology import Plan
from ..context.history import Done, History
from ..context.records import Progress
from ..stage.runtime import RuntimeBinding

if TYPE_CHECKING:
    from ...worker.job import Job

logger = logging.getLogger("bamboo_ds")

#: Seconds that a fatal loss waits for what is being written: it may be what the job goes on from.
_FATAL_WAIT_S = 60.0


class HostCopyEngine(TorchCheckpointEngine):  # type: ignore[misc]
    """Collects what DeepSpeed saves; otherwise as DeepSpeed's own checkpoint engine ``inner``.

    Takes the place of ``engine.checkpoint_engine``. While :meth:`collecting`, ``save`` copies and nothing touches the
    file system; at other times (``save_16bit_model``) files are written at once.

    Raises:
        UnsupportedError: ``inner`` is one of DeepSpeed's asynchronous or parallel writers.
    """

    def __init__(self, inner: Any) -> None:
        if type(inner) is not TorchCheckpointEngine:
            raise UnsupportedError(
                f'DeepSpeed\'s {type(inner).__name__} cannot be used together with "bamboo", which writes checkpoints '
                'in the background itself: remove "checkpoint.writer" and "datastates_ckpt" from the configuration'
            )
        self.__dict__.update(vars(inner))
        self.name = type(self).__name__
        self._pool = BufferPool()
        self._files: list[HostFile] | None = None
        self._root = Path()

    @contextmanager
    def collecting(self, checkpoint: str | Path) -> Iterator[list[HostFile]]:
        """Collects the files that are saved below ``checkpoint`` (folder and tag) into the list that it gives."""
        self._root, self._files = Path(checkpoint), []
        try:
            yield self._files
        finally:
            self._files = None

    def save(self, state_dict: Any, path: str) -> None:
        """Copies ``state_dict`` to host memory at once (while collecting), else write it."""
        if self._files is None:
            super().save(state_dict, path)
            return
        name = Path(path).relative_to(self._root).as_posix()
        copy = HostCopy(state_dict, self._pool)
        self._files.append(HostFile(name, copy, writes_zip_files(self)))

    def trim(self) -> None:
        """Frees host memory that the copies just made did not use; to be called when all roles are collected."""
        self._pool.trim()

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Does nothing while collecting: folders come with their files."""
        if self._files is None:
            super().makedirs(path, exist_ok=exist_ok)

    def preserves_storage_sharing(self) -> bool:
        """Whether DeepSpeed has to clone tensors before it saves them; a copy needs no second one."""
        return self._files is None and bool(super().preserves_storage_sharing())


@dataclass(frozen=True)
class SaveRequest:
    """A checkpoint that is to be saved.

    Attributes:
        folder, tag: as the script gave them; of one of the job's own the folder, or the URL, of these.
        latest: whether DeepSpeed's file ``latest`` is to name it.
        save: DeepSpeed's own saving of the role that is bound.
        own: it is one of the job's own.
    """

    folder: str
    tag: str
    latest: bool
    save: Callable[[], None]
    own: bool = False

    def noted(self, save_id: str | None) -> dict[str, Any]:
        """The history's note of it; ``save_id`` is ``None`` if it was left out."""
        return {"folder": os.path.abspath(self.folder), "tag": self.tag, "save_id": save_id}


class Saves:
    """The checkpoints of one member.

    Args:
        job: this process's job.
        settings: ``bamboo.checkpoint``.
        host: takes the place of the engine's ``checkpoint_engine``.
        history: what the job has done.
        places: of checkpoints.

    Attributes:
        nonce: names this run of the job in the ids of its saves; equal on all members.
        completed: id of the save that this member has completed last.
        begun: monotonic seconds at which it has last copied its roles.
        written_s: seconds that writing the job's own checkpoint has taken that it has completed last.
    """

    def __init__(
        self, job: Job, settings: CheckpointConfig, host: HostCopyEngine, history: History, places: Places
    ) -> None:
        self.nonce = ""
        self.completed = ""
        self.begun, self.written_s = time.monotonic(), 0.0
        self._own_dir = settings.dir
        self._job, self._host, self._history, self._places = job, host, history, places
        self._saver = CheckpointSaver(
            job.channel.job,
            job.channel.member,
            keep=settings.keep,
            on_complete=self._tell_complete,
            on_failed=self._tell_failed,
            timeout_s=settings.timeout_s,
        )
        self._open = self._tentative = False
        self._ahead = 0  # by how much the step of what is written exceeds the job's
        job.find_checkpoint = self._find
        job.at_end = self._stop

    # -- a save -------------------------------------------------------------------------------------------

    def save_id(self, epoch: int, sequence: int, own: bool = False) -> str:
        """Name of the attempt in ``epoch`` at the save that is operation ``sequence``, or comes before it (``own``)."""
        return f"{self.nonce}-{epoch}-{sequence}" + ("-own" if own else "")

    def collect(self, request: SaveRequest, plan: Plan, binding: RuntimeBinding, progress: Progress) -> bool:
        """Copies the roles of this member to host memory. Waits while an earlier checkpoint is being written.

        Args:
            request: what is to be saved.
            plan: its owners take part.
            progress: that of the job.

        Returns:
            Whether this member can write; ``False``: the file system hangs in an earlier save.

        Raises:
            EpochChanged: a loss has interrupted the wait.
        """
        self._open = self._tentative = False
        self.begun = time.monotonic()
        owned = [each for each in binding.owned() if plan.owner(each.role) == self._job.channel.member]
        if not owned:
            return True
        binding.use(binding.local)
        binding.refresh()
        save_id, count = self.save_id(plan.epoch, progress.sequence, request.own), len(self._history)
        more = () if request.own else (Done("save", request.noted(save_id)),)
        origin, generation = plan.lineage
        record = SaveRecord(
            job=self._job.channel.job,
            save_id=save_id,
            tag=request.tag,
            step=binding.local.attributes["global_steps"],
            layout=plan.world,
            seed=progress.seed,
            consumed=progress.consumed,
            origin=origin,
            generation=generation,
            rate=progress.rate(),
            script_folder=self._history.place if request.own else self._mirrored(request.folder),
        )
        save = Save(self._places.of(request.folder), record, plan.owners, request.latest, own=request.own)
        save.losses, save.history = lambda: self._history.losses(count), lambda: self._history.first(count, *more)
        # Of the job's own none is due while a member writes, so there is nothing to wait for.
        if not self._saver.begin(save, interrupt=None if request.own else self._job.session.check):
            return False
        self._ahead = self._job.channel.ahead
        for runtime in owned:
            binding.use(runtime)
            with self._host.collecting(Path(request.folder, request.tag)) as files:
                request.save()
            self._saver.add(plan.world.rank(runtime.role), files)
        self._host.trim()
        self._open = True
        return True

    def _mirrored(self, folder: str) -> str | None:
        """The script's folder, by which hosts know where a checkpoint of its mirror belongs."""
        return None if self._places.mirror is None else os.path.abspath(folder)

    def write(self) -> None:
        """Begins to write what was collected: the save takes place."""
        self._tentative = False
        if self._open:
            self._open = False
            self._saver.submit()
        else:
            self._saver.skip()

    def write_and_wait(self) -> None:
        """Writes what was collected, before it is agreed that the save takes place.

        Raises:
            EpochChanged: a loss has interrupted it. It will be repeated.
        """
        self.write()
        self._tentative = True
        self.wait()

    def forget(self) -> None:
        """Drops what was collected: some member cannot write, so that the save does not take place."""
        self._tentative = False
        if self._open:
            self._open = False
            self._saver.abort("left out: a member cannot write")

    def give_up(self, path: Location, step: int, error: Exception) -> None:
        """A role could not be copied for a checkpoint of the job's own."""
        self._open = False
        self._saver.abort("a role could not be copied")
        reason = f"{type(error).__name__}: {error}"
        logger.error("the job takes no checkpoints of its own any more: a stage cannot be copied: %s", reason)
        self._job.channel.event("checkpoint_failed", step=step, path=str(path), own=True, reason=reason)

    def wait(self) -> None:
        """Waits until this member has nothing to write; one of the job's own is given up.

        Raises:
            EpochChanged: a loss has interrupted it.
        """
        self._saver.give_way()
        self._saver.wait(interrupt=self._job.session.check)

    @property
    def busy(self) -> bool:
        """Whether this member owes the script a checkpoint, or may once the save that it takes part in is agreed on."""
        return self._open or self._saver.owes

    @property
    def writes(self) -> bool:
        """Whether this member is writing a checkpoint, the script's or one of the job's own."""
        return self._saver.busy

    def poll(self) -> None:
        """Reports what has ended."""
        self._saver.poll()

    def close(self) -> None:
        """Waits for what is being written, and ends."""
        self._saver.close()

    def _stop(self) -> None:
        """The process ends."""
        self._saver.stop()
        self._places.cache.release()

    # -- losses -------------------------------------------------------------------------------------------

    def follow(self, plan: Plan) -> None:
        """Members may have been lost; another one may have to lead."""
        if self._tentative:
            # Either all had completed it, or it is repeated.
            self._saver.abort("interrupted by a loss")
        else:
            self._saver.follow(plan.members)

    def own_folder(self) -> Location | None:
        """The folder of the job's own checkpoints; ``None`` before it has one."""
        place = self._own_dir or self._places.mirror or self._history.place
        return None if place is None else own_location(place, self._job.channel.job)

    def _all(self) -> list[CheckpointPlace]:
        """The folders that the script has saved into, and those of the job's own."""
        own = self.own_folder()
        return [self._places.of(each) for each in (*self._history.save_folders(), *([] if own is None else [own]))]

    def _find(self, plan: Plan) -> str | None:
        """The newest complete checkpoint, after a fatal loss: folders tell more than what this member was told."""
        self.follow(plan)
        self._saver.wait(_FATAL_WAIT_S)
        newest = newest_of(self._all(), self._job.channel.job, plan.origin)
        return None if newest is None else str(newest[1].path)

    def drop_own(self, plan: Plan) -> None:
        """Removes, at the end of the job, those of its own that contain no more than a checkpoint of the script's.

        Args:
            plan: the last one; this member leads.
        """
        own, job = self.own_folder(), self._job.channel.job
        if own is None:
            return
        try:
            place = self._places.of(own)
            if not place.exists() or place.is_over(plan.lineage):
                return
            newest = newest_of(self._all(), job, plan.origin)
            if newest is not None and not newest[1].own:
                for info in place.checkpoints():
                    place.remove(info, job)
        except (OSError, CheckpointError) as error:
            logger.warning("the job's own checkpoints in %s were not removed: %s", own, error)

    # -- results ------------------------------------------------------------------------------------------

    def _tell_complete(self, result: SaveResult) -> None:
        self.completed, own = result.save_id, is_own(result.folder)
        if own:
            self.written_s = result.seconds
        self._job.completed(str(result.path))
        waited = self._tentative and not own
        told = {**self._steps(result), "path": str(result.path), "own": own, "waited": waited}
        self._job.channel.event("checkpoint_saved", **told, seconds=result.seconds, bytes=result.total)

    def _tell_failed(self, result: SaveResult) -> None:
        if result.aborted:
            return  # it is repeated, or the member that leads tells why
        told = {**self._steps(result), "path": str(inside(result.folder, result.tag)), "own": is_own(result.folder)}
        self._job.channel.event("checkpoint_failed", **told, reason=result.error)

    def _steps(self, result: SaveResult) -> dict[str, int]:
        """The job's step; a checkpoint has that of DeepSpeed."""
        return {"step": result.step - self._ahead, "global_step": result.step}


def is_complete(save: dict[str, Any]) -> bool:
    """Whether the checkpoint of a save in the history is there, and has not been replaced by another one."""
    if save["save_id"] is None:
        return False
    try:
        return read_manifest(Path(save["folder"], save["tag"])).save_id == save["save_id"]
    except CheckpointError:
        return False
