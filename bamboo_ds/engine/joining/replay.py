"""The calls of a script that is behind its job: they return what the job computed, until the two are together.

All workers run the script from its beginning, also those that come to a running job and those that start a job again.
Where a script stands is a :class:`~..context.records.ScriptPhase`::

    the script begins ---+--> TOGETHER <----------------------------------------------------+
                         |                                                                  |
      a member joins     +--> JOINING ---admitted---> CATCHING_UP ---all is replayed--------+
                         |    its engine is built     it has roles; the others wait for it  |
                         |    without peers           where it takes part for the first time|
                         |                                                                  |
      after a restart    +--> RESUMING ---all is replayed: it loads the checkpoint----------+
                              up to the newest checkpoint that is whole, the script's or the job's own

Calls return at once while the script is behind, and batches are drawn and dropped. A member that joins is admitted by
a recovery (:mod:`~..recovery.protocol`) where nothing is left to replay, and then replays what the others did
meanwhile. A script that begins with ``load_checkpoint`` gets a checkpoint there that it has saved since, and what
came before it need not be replayed.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import ProtocolError, TransferError
from ...state.checkpoints import CheckpointError, read_manifest
from ..checkpoints.saving import is_complete
from ..context.history import History, Kind
from ..context.records import ScriptPhase
from ..context.shared import InContext
from ..recovery.takeover import Takeover
from ..script.flags import FLAGS, compare_flags
from ..stage.answers import ignore
from .loading import Loader

logger = logging.getLogger("bamboo_ds")

#: Seconds that one member may take to tell what the job has done before another one is asked, in rounds. The one that
#: is asked first may just have died, while the others wait for this member.
_ASK_TIMEOUTS_S = (0.5, 3.0, 10.0)
#: Seconds between two questions to all.
_ASK_AGAIN_S = 0.5


@dataclass(eq=False)
class Replay(InContext):
    """Replays the script's calls.

    Attributes:
        report_layout: tells the leader that this member waits to be admitted.
        position: operations of the script that were replayed.
        steps: iterations among them.
    """

    loader: Loader
    takeover: Takeover
    report_layout: Callable[[], None]
    position: int = field(default=0, init=False)
    steps: int = field(default=0, init=False)
    #: Folder and tag of what the job goes on from.
    _checkpoint: tuple[str, str] = field(init=False)
    _begun: float | None = field(default=None, init=False)

    def _enter(self, phase: ScriptPhase) -> None:
        self.progress.script.phase, self.job.replaying = phase, phase is not ScriptPhase.TOGETHER
        if not self.job.replaying:
            self.job.channel.activity.telling.pop("replay", None)

    def join(self, flags: Mapping[str, str]) -> None:
        """The engine of a member that joins is built.

        Args:
            flags: this process's settings that decide how tensors are computed.

        Raises:
            ConfigError: the job's are others.
        """
        self._enter(ScriptPhase.JOINING)
        self.binding.drop(self.binding.local.role)
        self._ask()
        job = "the job"
        compare_flags({job: json.loads(self._told(FLAGS)), "this member": flags}, job)
        rank, done = self.job.channel.rank, len(self.history)
        logger.info("joining as rank %d: the job has done %d operations", rank, done)

    def resume(self, location: str, name: str) -> None:
        """The engine is built in a job that goes on from a checkpoint.

        Args:
            location: a folder, or the URL of a store.
            name: of the checkpoint there.

        Raises:
            CheckpointError, OSError: the checkpoint cannot be read here.
        """
        folder, tag = self.places.fetched(location, name)
        checkpoint = Path(folder, tag)
        manifest = read_manifest(checkpoint)
        if manifest.history is None:
            raise CheckpointError(f"{checkpoint} does not tell what the job had done: it cannot be gone on from")
        self.history.extend((checkpoint / manifest.history).read_text())
        self._enter(ScriptPhase.RESUMING)
        self._checkpoint, progress = (folder, tag), self.progress
        progress.script.target = len(self.history)
        progress.seed = progress.seed if manifest.seed is None else manifest.seed
        progress.consumed = manifest.consumed or 0
        progress.steps = self.history.count("train")
        progress.seen = manifest.rate.plus(0.0, 1)
        where = f"{location.rstrip('/')}/{name}"
        logger.warning("going on from checkpoint %s, after step %d", where, progress.steps)

    def tell(self) -> str:
        """The progress of the replay, for people; callable from any thread."""
        steps, total, begun = self.steps, self.history.steps, self._begun
        left = ""
        if steps and begun is not None:
            left = f", about {(total - steps) * (time.monotonic() - begun) / steps:.0f} s"
        return f"replays step {steps} of {total}{left}"

    def recorded(self, kind: Kind) -> Any:
        """The job's results of the operation that the script asks for; ``None`` if it has yet to be done.

        Where a checkpoint may follow the operation, which is then the last one to be replayed after a restart, the
        caller says when it has followed what was recorded: :meth:`arrive`.

        Raises:
            ProtocolError: the script does something else than the job did.
        """
        if self.progress.script.behind and self._begun is None:
            self._begun = time.monotonic()
            self.job.channel.activity.telling["replay"] = self.tell
        return self._next(kind)

    def arrive(self) -> None:
        """The script is behind the operation that it has just replayed: if that was the last one, load."""
        if self.progress.script.phase is ScriptPhase.RESUMING and self.position == self.progress.script.target:
            self._load_own()

    def _next(self, kind: Kind) -> Any:
        progress = self.progress
        while progress.script.behind:
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
            if progress.script.phase is ScriptPhase.RESUMING:
                break
            if progress.script.phase is ScriptPhase.JOINING:
                if not self._ask():
                    self._be_admitted()
            elif self.position < (progress.script.target or 0):
                self._ask()
            else:
                logger.info("caught up with the job after %d operations", self.position)
                self._enter(ScriptPhase.TOGETHER)
        return None

    def _ask(self) -> int:
        """Learns what the job has done since; returns how many operations."""
        return self.history.extend(self._told(History.key(len(self.history)), self.progress.script.sources))

    def _be_admitted(self) -> None:
        """Enters the first epoch whose plan lists this member."""
        self.report_layout()
        self.takeover.recover_between("while joining")
        self.progress.operation.recovery = None

    # -- loading ------------------------------------------------------------------------------------------

    def load(self, load: Callable[[str], Any], folder: str, tag: str | None) -> Any:
        """The script loads a checkpoint: the one from which on its calls need not be replayed, if it begins with that.

        Args:
            load: DeepSpeed's own for the local role, called with a tag.
            folder, tag: as the script gave them.
        """
        begins = tag is None and self.position == 0
        if self.progress.script.phase is not ScriptPhase.RESUMING:
            self._ask()
        elif begins and os.path.abspath(folder) == os.path.abspath(self._checkpoint[0]):
            return self._load_own()
        for number in self.history.newest_save(os.path.abspath(folder)) if begins else ():
            result = self._load_saved(load, number)
            if result is not None:
                self.arrive()
                return result
        data = self.recorded("load")
        if data is None:
            raise ProtocolError(
                "the script loads a checkpoint where the job has not come to yet: a worker that joins must run the "
                "same script with the same arguments"
            )
        if data["tag"] is None:
            return None, {}
        self.places.bring(folder, data["tag"])
        return load(data["tag"])

    def _load_saved(self, load: Callable[[str], Any], number: int) -> Any:
        """Loads the checkpoint of operation ``number``; returns ``None`` if it is not there any more."""
        save = self.history[number].data
        if save["save_id"] is not None:
            self.places.bring(save["folder"], save["tag"], save["save_id"])
        if not is_complete(save):
            return None
        try:
            # After a restart all members are connected, and each loads what its script's own role has saved.
            local = self.binding.local.role
            with self.loader.own_checkpoint(), self.groups.acting_for(local, ignore):
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
        """Loads what the job goes on from; returns what DeepSpeed does."""
        # The script's scheduler has taken the steps that were replayed when the script was there.
        position = self.loader.local_position() if self.position else None
        with self.loader.own_checkpoint():
            result = self.loader.load(*self._checkpoint, position)
        self.places.cache.release()
        self._enter(ScriptPhase.TOGETHER)
        return result

    # -- what members of the job tell ---------------------------------------------------------------------

    def _told(self, key: str, sources: Sequence[tuple[str, str]] = ()) -> str:
        """The answer to ``key`` of a member of the job, one of ``sources``; if there are none, of any member.

        Args:
            sources: members and their places.

        Raises:
            ProtocolError: no member answers.
        """
        failures, job = [], self.job
        for timeout_s in _ASK_TIMEOUTS_S:
            end = time.monotonic() + timeout_s
            while time.monotonic() < end:
                for member, place in sources or job.channel.wait_peers(self.settings.recovery.plan_timeout_s):
                    try:
                        return job.session.fetch(member, place, key, timeout_s).result()[0]
                    except TransferError as error:
                        failures.append(str(error))
                time.sleep(_ASK_AGAIN_S)  # those that refuse may be on their way
        raise ProtocolError(f"no worker of the job tells what it has done: {'; '.join(dict.fromkeys(failures))}")
