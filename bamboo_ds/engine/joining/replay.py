"""The script's calls while it is behind the job: they return what the job computed, until script and job are together.

That is so on a member that joins (:mod:`.joining`) and on all members after a restart (:mod:`.resuming`).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...errors import ProtocolError
from ..checkpoints.saving import is_complete
from ..context.history import History, Kind
from ..context.records import Progress
from ..recovery.takeover import Takeover
from .joining import Joining
from .loading import Loader
from .resuming import Resuming

if TYPE_CHECKING:
    from ...worker.job import Job

logger = logging.getLogger("bamboo_ds")


@dataclass(eq=False)
class Replay:
    """Replays the script's calls.

    Attributes:
        position: operations of the script that were replayed.
        steps: iterations among them.
    """

    job: Job
    progress: Progress
    history: History
    joining: Joining
    resuming: Resuming
    loader: Loader
    takeover: Takeover
    report_layout: Callable[[], None]
    position: int = field(default=0, init=False)
    steps: int = field(default=0, init=False)
    _begun: float | None = field(default=None, init=False)

    def tell(self) -> str:
        """How far this is, for people; callable from any thread."""
        steps, total, begun = self.steps, self.history.steps, self._begun
        left = ""
        if steps and begun is not None:
            left = f", about {(total - steps) * (time.monotonic() - begun) / steps:.0f} s"
        return f"replays step {steps} of {total}{left}"

    @property
    def under_way(self) -> bool:
        """The script is not where the job is."""
        return self.job.replaying or self.progress.joining or self.resuming.checkpoint is not None

    def recorded(self, kind: Kind) -> Any:
        """What the job computed in the operation that the script asks for; ``None``: it has yet to be done.

        Raises:
            ProtocolError: the script does something else than the job did.
        """
        resumes = self.resuming.checkpoint is not None
        data = self._recorded(kind)
        if resumes and self.position == self.joining.target:
            self._load_own()
        return data

    def _recorded(self, kind: Kind) -> Any:
        if self.job.replaying and self._begun is None:
            self._begun = time.monotonic()
            self.job.channel.activity.telling["replay"] = self.tell
        try:
            return self._next(kind)
        finally:
            if not self.job.replaying:
                self.job.channel.activity.telling.pop("replay", None)

    def _next(self, kind: Kind) -> Any:
        while self.job.replaying:
            if self.position < len(self.history):
                done = self.history[self.position]
                if done.kind != kind:
                    raise ProtocolError(
                        f"this worker's script wants to {kind} where the job did {done.kind}: a worker that joins must "
                        "run the same script with the same arguments"
                    )
                self.position += 1
                self.steps += kind == "train"
                return done.data
            if self.joining.target is not None:
                if self.position < self.joining.target:
                    self.joining.ask()
                    continue
                logger.info("caught up with the job after %d operations", self.position)
                self.job.replaying = False
            elif not self.joining.ask():
                self._be_admitted()
        return None

    def _be_admitted(self) -> None:
        """Enter the first epoch whose plan lists this member."""
        self.report_layout()
        self.takeover.recover_between("while joining")
        self.progress.recovery = None

    # -- loading ------------------------------------------------------------------------------------------

    def load(self, load: Callable[[str], Any], folder: str, tag: str | None) -> Any:
        """The script loads a checkpoint: the one from which on its calls need not be replayed, if it begins with that.

        Args:
            load: DeepSpeed's own for the local role, called with a tag.
            folder, tag: as the script gave them.
        """
        begins = tag is None and self.position == 0
        if self.resuming.checkpoint is not None:
            if begins and os.path.abspath(folder) == os.path.abspath(self.resuming.checkpoint[0]):
                return self._load_own()
            data = self.recorded("load")
        else:
            self.joining.ask()
            for number in self.history.newest_save(os.path.abspath(folder)) if begins else ():
                result = self._load_saved(load, number)
                if result is not None:
                    return result
            data = self.recorded("load")
            if data is None:
                raise ProtocolError(
                    "the script loads a checkpoint where the job has not come to yet: a worker that joins must run the "
                    "same script with the same arguments"
                )
        return load(data["tag"]) if data["tag"] is not None else (None, {})

    def _load_saved(self, load: Callable[[str], Any], number: int) -> Any:
        """Load the checkpoint of operation ``number``; ``None``: it is not there any more."""
        save = self.history[number].data
        if not is_complete(save):
            return None
        try:
            with self.loader.own_checkpoint():
                result = load(save["tag"])
        except Exception:  # whatever DeepSpeed makes of files that vanish while it reads them
            if is_complete(save):
                raise
            logger.info("checkpoint %s was replaced or removed while it was loaded", save["tag"])
            return None
        self.position = number + 1
        self.steps = sum(self.history[i].kind == "train" for i in range(self.position))
        return result

    def _load_own(self) -> Any:
        """Load what the job goes on from; returns what DeepSpeed does."""
        assert self.resuming.checkpoint is not None
        # The script's scheduler has taken the steps that were replayed when the script was there.
        position = self.loader.local_position() if self.position else None
        with self.loader.own_checkpoint():
            result = self.loader.load(*self.resuming.checkpoint, position)
        self.resuming.checkpoint, self.job.replaying = None, False
        self.job.channel.activity.telling.pop("replay", None)
        return result
