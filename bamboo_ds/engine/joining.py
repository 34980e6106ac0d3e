"""How a member joins a job that is running.

Its worker runs the same script as all others, from the beginning. The engine is built without peers; then the
script's calls are *replayed*: they return at once with what the job computed, and batches are drawn and dropped, until
the script stands where the job stands. There the member asks to be admitted, enters the epoch whose plan lists it,
replays what the others did meanwhile, and from then on takes part. The plan gives it roles as it gives them to anybody.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ..control.messages import Place
from ..errors import EpochChanged, ProtocolError, TransferError
from ..schedule import Decision, RoleProgress
from ..state.fetch import fetch
from .commit import Committed
from .flags import FLAGS, compare_flags
from .handshake import Reports, newest_of
from .history import History, Kind
from .recovery import RecoveringExecutor
from .saving import is_complete

logger = logging.getLogger("bamboo_ds")

#: Seconds that one member may take to tell what the job has done before another one is asked, in rounds. Whoever is
#: asked first may just have died, while the others wait for this member.
_ASK_TIMEOUTS_S = (0.5, 3.0, 10.0)


class JoiningExecutor(RecoveringExecutor):
    """Replays what the job has done before this member came.

    Attributes:
        _position: operations of the script that this member has replayed.
        _target: how many it has to replay; ``None`` until it is admitted.
        _tellers: who can tell what the job had done when this member was admitted.
        _universal: whether the checkpoint that is loaded may be a universal one.
    """

    _position = 0
    _universal = True
    _tellers: Sequence[Place] = ()
    _target: int | None = None

    def _begin_joining(self) -> None:
        """The engine is built; from now on the script's calls are replayed."""
        self._joining, self._job.replaying = True, True
        self._binding.drop(self._home.role)
        self._ask()
        job = "the job"
        compare_flags({job: json.loads(self._fetch(FLAGS)), "this member": self._flags}, job)
        logger.info("joining as rank %d: the job has done %d operations", self.global_rank, len(self._history))

    @contextmanager
    def _own_checkpoint(self) -> Iterator[None]:
        """What is loaded in the body the job has saved itself, which may have begun with a universal checkpoint."""
        self._universal = False
        try:
            yield
        finally:
            self._universal = True

    def load_universal_checkpoint(self) -> bool:
        """As DeepSpeed's: whether checkpoints are universal ones."""
        return self._universal and bool(super().load_universal_checkpoint())

    def _recorded(self, kind: Kind) -> Any:
        """What the job computed in the operation that the script asks for; ``None``: it has yet to be done.

        Raises:
            ProtocolError: the script does something else than the job did.
        """
        while self._job.replaying:
            if self._position < len(self._history):
                done = self._history[self._position]
                if done.kind != kind:
                    raise ProtocolError(
                        f"this worker's script wants to {kind} where the job did {done.kind}: a worker that joins must "
                        "run the same script with the same arguments"
                    )
                self._position += 1
                return done.data
            if self._target is not None:
                if self._position < self._target:
                    self._ask()
                    continue
                logger.info("caught up with the job after %d operations", self._position)
                self._job.replaying = False
            elif not self._ask():
                self._be_admitted()
        return None

    def _ask(self) -> int:
        """Learn what the job has done since; returns how many operations."""
        return self._history.extend(self._fetch(History.key(len(self._history))))

    def _fetch(self, key: str) -> str:
        """What a member of the job answers to ``key``."""
        timeout_s = self._job.settings.recovery.plan_timeout_s
        failures = []
        for patience_s in _ASK_TIMEOUTS_S:
            for place in self._tellers or self._job.channel.wait_places(timeout_s):
                try:
                    secret = self._job.channel.secret
                    return fetch(place.url, key, token=place.token, timeout_s=patience_s, secret=secret)[0]
                except TransferError as error:
                    failures.append(str(error))
        raise ProtocolError(f"no worker of the job tells what it has done: {'; '.join(failures)}")

    def _be_admitted(self) -> None:
        """Enter the first epoch whose plan lists this member."""
        self._job.channel.report_layout(self._layout, self._mode.replicas, self._dataset is None)
        while True:
            try:
                decision = self._recover()
                break
            except EpochChanged as error:
                logger.info("interrupted while joining: %s", error)
        self._recovery = None
        if decision.behind or any(done != RoleProgress() for done in decision.progress.values()):
            self._pending = decision

    def _joined(self, decision: Decision, reports: Reports) -> None:
        """Take over from the others' ``reports`` where the job stands."""
        newest, self._tellers = newest_of(reports)
        self._target = newest.history
        self._sequence = decision.step
        self._committed_steps, self._consumed, self._seed = newest.steps, newest.consumed, newest.seed
        self._job.channel.ahead = newest.ahead
        self._saves.nonce = newest.nonce
        self._accounts.follow(newest.nonce, newest.accounts)
        self._exact = self._check_of(newest.exact)
        self._joining = False

    # -- the script's calls -------------------------------------------------------------------------------

    def _drop_batches(self, iterator: Any, count: int) -> None:
        """Draw what the others drew from their iterators."""
        if self._is_end() and iterator is not None and iterator is not self._dataset_iterator:
            for _ in range(count):
                next(iterator)

    def _is_end(self) -> bool:
        return self._home.role.stage in (0, self.num_stages - 1)

    def _replay_iteration(self, done: Mapping[str, Any], data_iter: Any) -> Any:
        """An iteration that the job has done."""
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        self._drop_batches(self.data_iterator, self.micro_batches)
        self._count_home_step(done["skipped"])
        self._committed = Committed(tuple(tuple(x) for x in done["losses"]), (), 0, ())
        self.agg_train_loss = self._aggregate_total_loss()
        return self.agg_train_loss

    def _replay_load(self, load: Any, folder: str, tag: str | None) -> Any:
        """Load what makes the script go on where it can be replayed from: the newest checkpoint of the job.

        Args:
            load: DeepSpeed's own, called with a tag.
            folder: as the script gave it.
            tag: the same.
        """
        self._ask()
        first = tag is None and self._position == 0  # else the script does not begin with what it loads
        saves = self._history.newest_save(os.path.abspath(folder)) if first else []
        for number in saves:
            save = self._history[number].data
            if not is_complete(save):
                continue
            try:
                with self._own_checkpoint():
                    result = load(save["tag"])
            except Exception:  # whatever DeepSpeed makes of files that vanish while it reads them
                if is_complete(save):
                    raise
                logger.info("checkpoint %s was replaced or removed while it was loaded", save["tag"])
                continue
            self._position = number + 1
            return result
        data = self._recorded("load")
        if data is None:
            raise ProtocolError(
                "the script loads a checkpoint where the job has not come to yet: a worker that joins must run the "
                "same script with the same arguments"
            )
        return load(data["tag"]) if data["tag"] is not None else (None, {})
