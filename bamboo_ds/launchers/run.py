"""``bamboo run``: etcd if need be, one agent per slot, and the end of all of them."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from ..control.leader.restarts import assign
from ..control.settings import MemberOptions, in_slot
from ..errors import EXIT_FATAL_LOSS
from ..observe.events import Event, RunStarted
from ..secret import JobSecret, given
from .network import free_port
from .owning import EMBEDDED, JobOwner
from .slots import OTHERS_S

logger = logging.getLogger("bamboo_ds.launchers")


@dataclass(frozen=True)
class LocalSlots:
    """The slots that ``bamboo run`` was asked for.

    Attributes:
        workers: their number.
        ranks: number of ranks, at least one for each slot; ``None``: as many.
        pipelines: number of pipelines, if the user has said it.
        hosts: number of hosts that the slots are said to be on; ``None``: the one that they are on.
    """

    workers: int
    ranks: int | None = None
    pipelines: int | None = None
    hosts: int | None = None

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.workers if self.ranks is None else self.ranks

    def started_by(self) -> dict[int, tuple[int, ...]]:
        """The ranks whose workers each slot starts."""
        return assign(range(self.workers), self.world_size)

    def host_of(self, slot: int) -> str | None:
        """The host that ``slot`` is said to be on; ``None``: the one that it is on."""
        return None if self.hosts is None else f"emulated-{slot * self.hosts // self.workers}"


class Launcher(JobOwner):
    """Runs one job. Use it once, in the main thread.

    Args:
        options: of all members.
        slots: what they are.
        prefix_output: whether each line of output begins with its slot.
    """

    def __init__(self, options: MemberOptions, slots: LocalSlots, prefix_output: bool) -> None:
        options = replace(options, secret=given(os.environ) or JobSecret.new())
        super().__init__(options, range(slots.workers))
        self._local, self._prefix_output = slots, prefix_output
        self._embedded = options.store == EMBEDDED
        self.what = f"{slots.workers} members on this host"

    def _beginning(self) -> Sequence[Event]:
        job, command = self._options.job, list(self._options.command)
        return (RunStarted(job=job, epoch=0, members=self._local.workers, command=command),)

    def _start(self, state_file: str, stack: ExitStack) -> None:
        options, local = self._options, self._local
        port = free_port(options.address)
        further = iter(range(local.workers, local.world_size))  # slots of second workers, and so on
        for slot, ranks in local.started_by().items():
            agent = in_slot(
                replace(options, host=local.host_of(slot) or options.host),
                slot=slot,
                script_rank=None if ranks[0] == slot else ranks[0],
                device=None if local.ranks is None else slot,
                extra={rank: next(further) for rank in ranks[1:]},
                world_size=local.world_size,
                parent_pid=os.getpid(),
                master_port=port,
                pipelines=local.pipelines,
                state_file=state_file,
                generation=0,
                prefix=self._prefix_output,
            )
            self._spawn(agent)

    def _follow(self) -> None:
        self._serve()

    def _result(self) -> int:
        return self._exit_code(self._await_others())

    def _await_others(self) -> int | None:
        """Stays for members that have joined, if they need what is here; what the job has come to with them."""
        if not self._embedded and self._outcomes & {"left", "finished"}:
            return None  # the job needs nothing that is here
        ending = not self._outcomes.isdisjoint(("failed", "stopped", "fatal"))
        if (self._stopping or ending) and self._leave_at is None:
            self._leave_at = time.monotonic() + self._options.grace_s + OTHERS_S
        return self._await_joined(quiet=self._stopping or ending)

    def _end_others(self, signum: int) -> None:
        self._tell_others(signum, "the launcher")

    def _exit_code(self, of_joined: int | None) -> int:
        """See ``bamboo run --help``. ``of_joined``: what the job has come to, if members that had joined ended it."""
        if self._interrupted is not None:
            return 128 + self._interrupted
        worst = self._worst()
        if worst is not None:
            return worst
        if of_joined is not None:
            return of_joined
        all_left = len(self._departures) == self._local.workers and self._outcomes == {"left"}
        if "finished" in self._outcomes or all_left:
            return 0
        if self._outcomes == {"lost"}:  # no leader is left that tells it
            last = self._by_time[-1]
            what = f"{last.reason} {last.detail}"
            logger.error("the worker of slot %d is lost as the last one here (%s): none can take over", last.slot, what)
        return next((d.code for d in self._by_time if d.error is not None), EXIT_FATAL_LOSS)
