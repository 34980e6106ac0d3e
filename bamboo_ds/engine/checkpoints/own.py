"""Checkpoints of the job's own: taken at boundaries after iterations, without the script's doing.

The member that leads says in the commit of an iteration that one is due after it. So all members that commit it, or
learn that others have, copy the roles that they owned then to host memory where the iteration has ended, and write them
in the background, as the script's checkpoints (:mod:`.saving`). There is no further agreement: if a member is lost
before it has written its roles, the checkpoint never gets complete, and the next one is due after the usual interval::

    iteration t, commit: due --> step, shards --> copy --> script ... iteration t + 1
                                                    |
                                            writer: files, manifest, rename
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...observe.spans import Kind
from ...state.checkpoints import inside
from ...state.intervals import interval_s
from ...topology import Plan
from ..context.shared import InContext
from ..stage.answers import ignore
from .kept import save_kept
from .saving import SaveRequest, Saves

logger = logging.getLogger("bamboo_ds")


def saving_of(
    part: InContext, folder: str, tag: str, client_state: Mapping[str, Any], exclude_frozen: bool
) -> Callable[[], None]:
    """A function that saves the bound role, with DeepSpeed's own files and what else a restart needs of it."""

    def save() -> None:
        runtime = part.binding.current
        with part.groups.acting_for(runtime.role, ignore):
            part.ds.save_files(folder, tag, dict(client_state), exclude_frozen)
        save_kept(runtime, Path(folder, tag), part.layout.rank(runtime.role), part.ds.checkpoint_engine.save)

    return save


@dataclass(eq=False)
class OwnCheckpoints(InContext):
    """Decides when the job's own checkpoints are due, and takes them."""

    saves: Saves
    #: By which this member has entered its last commit of an iteration.
    _plan: Plan = field(init=False)
    #: Seconds for which the copy to host memory has held training up.
    _pause_s: float = field(default=0.0, init=False)
    _warned: bool = field(default=False, init=False)
    #: A role could not be copied, so that no checkpoint of the job's own can be complete.
    _gave_up: bool = field(default=False, init=False)

    def due(self) -> tuple[int, bool]:
        """This member's word in the commit of an iteration.

        Returns:
            The epoch, if this member leads and a checkpoint is due, else 0; and whether this member could not take
            part.
        """
        self._plan = self.epoch.plan
        own = self.epoch.plan.epoch if self.epoch.leads and self._is_due() else 0
        return own, self._gave_up or self.saves.writes

    def _is_due(self) -> bool:
        settings = self.settings.checkpoint
        if settings.every_s == 0:
            return False
        if self.saves.own_folder() is None:
            if settings.lacks_place and not self._warned:
                self._warned = True
                logger.warning(
                    "bamboo.checkpoint.every_s = %g: the job takes no checkpoints of its own before its script calls "
                    "save_checkpoint, since there is no place for them; give one with bamboo.checkpoint.dir",
                    settings.every_s,
                )
            return False
        every_s = settings.every_s
        if isinstance(every_s, str):
            every_s = interval_s(self._pause_s, self.saves.written_s, self.progress.rate().mtbf_s)
        return time.monotonic() >= self.saves.begun + every_s

    def take(self) -> None:
        """Takes a checkpoint after an iteration, if it was agreed that one is due.

        Members that were lost since have taken their roles' files with them; this member copies those that it owned
        when it entered the commit.
        """
        if not self.progress.operation.agreed.own or self.progress.operation.agreed.own != self._plan.epoch:
            return
        folder, begin = self.saves.own_folder(), time.monotonic()
        assert folder is not None, "members have done the same operations, by the same settings"
        tag = f"step{self.progress.steps}"
        request = SaveRequest(str(folder), tag, False, saving_of(self, str(folder), tag, {}, False), own=True)
        with self.recording.span(Kind.SAVE):
            try:
                collected = self.saves.collect(request, self._plan, self.binding, self.progress)
            except Exception as error:  # what a script keeps in its stages, and torch.save does not take
                self._gave_up = True
                self.saves.give_up(inside(folder, tag), self.progress.steps, error)
                return
        if collected:
            self.saves.write()
            self.saves.follow(self.epoch.plan)
        self._pause_s = time.monotonic() - begin
