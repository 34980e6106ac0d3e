"""Checkpoints that the script saves and loads."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...comm.standing import END
from ...errors import EpochChanged
from ...observe.spans import Kind
from ...schedule import RoleProgress
from ...state.checkpoints import MANIFEST
from ...state.publish import check_tag
from ...topology import Role
from ..checkpoints.own import saving_of
from ..checkpoints.saving import SaveRequest, Saves
from ..context.operation import Outcome
from ..context.shared import InContext
from ..iteration.committing import Commits
from ..joining.loading import Loader, silence_earlier_starts
from ..joining.replay import Replay
from ..recovery.copies import Copies
from ..recovery.takeover import Takeover

logger = logging.getLogger("bamboo_ds")


@dataclass(eq=False)
class Checkpoints(InContext):
    """``save_checkpoint`` and ``load_checkpoint``, and a save as an :class:`~..context.operation.Operation`.

    A save copies all roles' state. The members write the copies before its commit, which waits for the complete
    checkpoint; a loss while they write makes them repeat all of it. With ``bamboo.checkpoint.asynchronous`` they write
    after the commit, while training goes on.
    """

    replay: Replay
    takeover: Takeover
    commits: Commits
    copies: Copies
    loader: Loader
    saves: Saves
    _request: SaveRequest = field(init=False)
    _attempt: int = field(default=0, init=False)
    _left_out: bool = field(default=False, init=False)
    _complete: bool = field(default=False, init=False)
    _succeeded: bool = field(default=False, init=False)

    call = "save_checkpoint"
    draws = watched = takes_steps = False
    goes_on = True

    def save(
        self, folder: str, tag: Any, client_state: dict[str, Any] | None, latest: bool, exclude_frozen: bool
    ) -> bool:
        """See :meth:`..pipeline_engine.BambooPipelineEngine.save_checkpoint`."""
        if not folder:
            raise ValueError(f"save_dir must be a non-empty string, got {folder!r}")
        name = check_tag(str(tag) if tag is not None else f"global_step{self.ds.global_steps}")
        recorded = self.replay.recorded("save")
        if recorded is not None:
            self.replay.arrive()
            return recorded["save_id"] is not None
        save = saving_of(self, folder, name, client_state or {}, exclude_frozen)
        self._request = SaveRequest(folder, name, latest, save)
        self._attempt, self._left_out, self._complete = 0, False, False
        self.takeover.run(self)
        del self._request  # it has what the script saves with the checkpoint
        return self._succeeded

    def load(self, folder: str, tag: str | None, *args: Any, **kwargs: Any) -> Any:
        """See :meth:`..pipeline_engine.BambooPipelineEngine.load_checkpoint`."""
        if self.progress.script.behind:
            return self.replay.load(lambda name: self.ds.load_checkpoint(folder, name, *args, **kwargs), folder, tag)
        if self.history.save_folders() or self.epoch.plan.generation:
            # It may be the one that is being written, by this start of the job or an earlier one.
            self.saves.wait()
            silence_earlier_starts(self.epoch, self.places, folder)
            self.epoch.agreement.barrier()
        if self.places.mirror is not None:
            tag = self.places.bring(folder, tag)
            self.epoch.agreement.barrier()  # hosts that share the folder have all looked into it
        result = self.loader.load(folder, tag, None, *args, **kwargs)
        self.copies.iteration.exchanged.loaded()
        name = os.path.relpath(os.path.dirname(result[0]), folder) if result[0] is not None else None
        ours = result[0] is None or Path(folder, str(name), MANIFEST).exists()
        self.history.add("load", {"folder": os.path.abspath(folder), "tag": name, "ours": ours})
        return result

    # -- the operation ------------------------------------------------------------------------------------

    def run(self, progress: Mapping[Role, RoleProgress] | None) -> None:
        plan, saves = self.epoch.plan, self.saves
        self._attempt, self._complete = plan.epoch, False
        with self.recording.span(Kind.SAVE):
            self._left_out = not saves.collect(self._request, plan, self.binding, self.progress)
            if not (self.settings.checkpoint.asynchronous or self._left_out):
                saves.write_and_wait()
                self._complete = saves.completed == saves.save_id(self._attempt, self.progress.sequence)
        self.commit()

    def commit(self) -> None:
        self.progress.operation.entered = True
        attempt = self._attempt if self.epoch.leads else 0
        self.commits.agree(torch.tensor([attempt, self._left_out, self._complete], dtype=torch.float64))

    def repeatable(self) -> bool:
        """The copies of a role that was taken over died with its owner."""
        return not any(runtime.role in self.progress.operation.taken_over for runtime in self.binding.owned())

    def finish(self, outcome: Outcome) -> None:
        saves = self.saves
        assert self.progress.vector is not None
        attempt, left_out, complete = map(int, self.progress.vector)
        if left_out:
            saves.forget()
        else:
            saves.write()
        self._succeeded = not left_out if self.settings.checkpoint.asynchronous else bool(complete)
        name = saves.save_id(attempt, self.progress.sequence) if self._succeeded else None
        self.history.add("save", self._request.noted(name))
        saves.poll()
        self.copies.advance(stepped=False)


@dataclass(eq=False)
class End(InContext):
    """The end of the script as an operation: all members wait until all have finished and written their checkpoints.

    It needs no word of etcd: it changes nothing, and what all have done before was committed.
    """

    commits: Commits
    saves: Saves

    call = END
    draws = watched = takes_steps = goes_on = False

    def run(self, progress: Mapping[Role, RoleProgress] | None) -> None:
        self.saves.wait()
        self.commit()

    def commit(self) -> None:
        self.progress.operation.entered = True
        self.commits.agree(torch.zeros(1, dtype=torch.float64), fenced=False)

    def repeatable(self) -> bool:
        return True

    def finish(self, outcome: Outcome) -> None:
        if self.epoch.leads:
            self.saves.drop_own(self.epoch.plan)
        try:
            self.epoch.session.conclude()
        except EpochChanged as error:
            logger.info("a member was lost after all had finished: %s", error)
