"""How a member that joins a running job learns what the job has done, and takes over where it stands.

Its worker runs the same script as all others, from the beginning. The engine is built without peers; then the
script's calls are *replayed* (:mod:`.replay`): they return at once with what the job computed, and batches are drawn
and dropped, until the script stands where the job stands. There the member asks to be admitted, enters the epoch whose
plan lists it, replays what the others did meanwhile, and from then on takes part. The plan gives it roles as it gives
them to any member.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..control.registry.records import PeerAddress
from ..errors import ProtocolError, TransferError
from ..schedule import Decision
from ..state.fetch import fetch
from .exactness import ExactChecks
from .flags import FLAGS, compare_flags
from .handshake import Reports, newest_of
from .history import History
from .records import Progress
from .runtime import RuntimeBinding
from .saving import Saves

if TYPE_CHECKING:
    from ..worker.job import Job

logger = logging.getLogger("bamboo_ds")

#: Seconds that one member may take to tell what the job has done before another one is asked, in rounds. The one that
#: is asked first may just have died, while the others wait for this member.
_ASK_TIMEOUTS_S = (0.5, 3.0, 10.0)


@dataclass(eq=False)
class Joining:
    """A member on its way into the job.

    Attributes:
        active: this member waits to be admitted.
        target: how many operations its script has to replay; ``None`` until it is admitted.
        sources: where what the job had done when this member was admitted can be fetched.
    """

    job: Job
    binding: RuntimeBinding
    progress: Progress
    history: History
    saves: Saves
    checks: ExactChecks
    active: bool = field(default=False, init=False)
    target: int | None = field(default=None, init=False)
    sources: Sequence[PeerAddress] = field(default=(), init=False)

    def begin(self, flags: Mapping[str, str]) -> None:
        """The engine is built; from now on the script's calls are replayed.

        Args:
            flags: this process's settings that decide how tensors are computed.

        Raises:
            ConfigError: the job's are others.
        """
        self.active = self.job.replaying = True
        self.binding.drop(self.binding.local.role)
        self.ask()
        job = "the job"
        compare_flags({job: json.loads(self.fetch(FLAGS)), "this member": flags}, job)
        rank = self.job.channel.rank
        logger.info("joining as rank %d: the job has done %d operations", rank, len(self.history))

    def ask(self) -> int:
        """Learn what the job has done since; returns how many operations."""
        return self.history.extend(self.fetch(History.key(len(self.history))))

    def fetch(self, key: str) -> str:
        """What a member of the job answers to ``key``."""
        channel, failures = self.job.channel, []
        for timeout_s in _ASK_TIMEOUTS_S:
            for place in self.sources or channel.wait_peers(self.job.settings.recovery.plan_timeout_s):
                try:
                    return fetch(place.url, key, token=place.token, timeout_s=timeout_s, secret=channel.secret)[0]
                except TransferError as error:
                    failures.append(str(error))
        raise ProtocolError(f"no worker of the job tells what it has done: {'; '.join(failures)}")

    def take_over(self, decision: Decision, reports: Reports) -> None:
        """This member is admitted: take over from the others' ``reports`` where the job stands."""
        newest, self.sources = newest_of(reports)
        self.target = newest.history
        progress = self.progress
        progress.sequence = decision.step
        progress.steps, progress.consumed, progress.seed = newest.steps, newest.consumed, newest.seed
        self.job.channel.ahead = newest.ahead
        self.saves.nonce = newest.nonce
        progress.checksums = newest.checksums
        self.checks.begin(newest.exact)
        self.active = False
