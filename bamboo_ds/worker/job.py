"""A job as one worker process has it: the channel to its agent, the data plane, the plan that it is in."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from ..config import BLOCK, BambooConfig
from ..errors import (
    EXIT_EVICTED,
    AbortFailed,
    ConfigError,
    EpochChanged,
    Evicted,
    FatalLoss,
    Isolated,
    Left,
    UnsupportedError,
)
from ..observe import logs
from . import HOW_TO_START
from .exit import ScriptExit

if TYPE_CHECKING:
    from ..comm.session import Session
    from ..topology import Plan
    from .channel import WorkerChannel

logger = logging.getLogger("bamboo_ds")

#: Seconds between two looks whether a communicator is aborted, or a plan there.
_LOOK_S = 0.05

_job: Job | None = None


class Job:
    """A job as one worker process has it. There is at most one per process.

    Attributes:
        channel: to the agent.
        session: the data plane.
        settings: the job's; while its record is open those of the script's block, once that is known.
    """

    def __init__(self, channel: WorkerChannel, settings: BambooConfig | None, timeout: timedelta) -> None:
        from ..comm.session import Session

        self.channel = channel
        self.settings = channel.settings.values if settings is None else channel.settings.of_script(settings)
        # Whoever reads nothing for so long has lost its lease, or been killed by its agent.
        membership = self.settings.membership
        silence_s = 2 * max(membership.lease_ttl_s, membership.heartbeat_limit_s)
        self.session: Session = Session(
            *(channel.member, channel.address, timeout, self._peer_failed, silence_s),
            awaited=self._tell_awaited,
            tell_after_s=self.settings.recovery.plan_timeout_s,
            secret=channel.secret,
            listener=channel.listener,
            host=channel.host,
        )
        #: Called at a clean exit of the script, while all peers are still there.
        self.at_finish: Callable[[], None] = lambda: None
        #: Called at any exit that runs Python's exit handlers, after ``at_finish``.
        self.at_end: Callable[[], None] = lambda: None
        #: Looks for the newest complete checkpoint after a fatal loss.
        self.find_checkpoint: Callable[[Plan], str | None] | None = None
        self.lost_at: float | None = None
        #: The script's calls return what the job has computed before this member came.
        self.replaying = False
        self._lock = threading.Lock()
        self._failures: dict[str, str] = {}
        #: An engine of this process takes part in the job, or has begun to.
        self.has_engine = False
        self.exit = ScriptExit(channel, self.session, lambda: self.at_finish(), lambda: self.at_end())
        self._step = 0
        self._iterating = False

    @property
    def settings(self) -> BambooConfig:
        """See above."""
        return self._settings

    @settings.setter
    def settings(self, values: BambooConfig) -> None:
        from ..comm.inner import use_for_cuda

        self._settings = self.channel.goes_by = values
        use_for_cuda(values.comm.cuda_backend)

    def check_first_engine(self) -> None:
        """Raises :class:`UnsupportedError` if this process has an engine that the job keeps alive."""
        if self.has_engine:
            raise UnsupportedError(
                f'this process has an engine with a "{BLOCK}" block already, and a job keeps one engine alive. Give '
                f'deepspeed.initialize a configuration without "{BLOCK}" for any further model (evaluation, reward, '
                "reference): it runs as in DeepSpeed, but without a lost rank it cannot compute, and the job starts "
                "again. Or train the models in jobs of their own"
            )

    # -- who speaks ---------------------------------------------------------------------------------

    def rank_of(self, rank: int) -> int:
        """``rank`` of the script, counted from the last one if it is negative; raises ``ValueError`` outside."""
        return _within(rank, self.channel.world_size)

    def speaks_for(self, rank: int) -> bool:
        """See :func:`bamboo_ds.speaks_for`."""
        rank, script = self.rank_of(rank), self.session.attachment.script
        if script is None:  # all are there, or this member joins
            return rank == self.channel.rank and not self.channel.joiner
        return not self.replaying and script.speaker(rank) == self.channel.member

    # -- epochs -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Joins the first epoch and creates the default process group on the ``bamboo`` backend.

        A member that joins a running job stays detached: its engine is built without peers.
        """
        from ..comm.inner import BEHIND, own_kind
        from ..comm.session import init_process_group
        from ..devices import nccl
        from ..forking import make_forks_sure

        make_forks_sure()
        logs.configure()
        logs.set_context(member=self.channel.member)
        for found in nccl.prepare(os.environ):
            if own_kind() in BEHIND:
                logger.warning("this worker may end with a loss elsewhere, or hang: the environment has %s", found)
        self.channel.activity.waiting = lambda: self.session.waiting
        self.channel.start(self._plan_arrived, self._agent_gone)
        self.exit.watch()
        if not self.channel.joiner:
            self.enter(self.channel.wait_plan(0, self._start_timeout_s))
            self.session.meet()
        with self.exit.unhooked():
            init_process_group(self.session, self.channel.rank, self.channel.world_size)

    def enter(self, plan: Plan) -> None:
        """Attaches to ``plan``'s epoch.

        Raises:
            EpochChanged: the epoch ended meanwhile.
            Evicted: ``plan`` does not list this member.
            Left: nor does it name it as lost: the member had been told to leave, and others have what it had.
            FatalLoss: a role of ``plan`` has no living holder.
            AbortFailed: this worker cannot abort its communicators, and stops.
        """
        if self.channel.member not in plan.members and self.channel.member not in plan.lost:
            self.exit.left = True
            raise Left(f"member {self.channel.member} leaves the job: it has no part in the plan of epoch {plan.epoch}")
        if self.channel.member not in plan.members:
            raise Evicted(
                f"member {self.channel.member} is not in the plan of epoch {plan.epoch}: it was taken for lost and "
                "others own its roles now; the worker stops"
            )
        if plan.lost_roles:
            roles = [plan.world.role(rank) for rank in plan.lost_roles] if plan.layout else []
            stages = [(role.pipeline, role.stage) for role in roles]
            raise FatalLoss(stages, plan.lost, self.newest_checkpoint(plan))
        with self._lock:
            self._failures.clear()
        epoch = plan.epoch
        logs.set_context(epoch=epoch)
        try:
            self.session.attach(plan)
        except AbortFailed as error:
            self._await_turn(plan, error)
            self.session.attach(plan)
        newest = self.channel.newest_plan
        if newest is not None and newest.epoch > epoch:
            # Its arrival may have found us between two epochs.
            self.session.abort(f"plan of epoch {newest.epoch} arrived", epoch=newest.epoch - 1)
            raise EpochChanged(f"epoch {epoch} ended while it was entered")

    def _await_turn(self, plan: Plan, error: AbortFailed) -> None:
        """Tells that this worker cannot enter ``plan``'s epoch, and waits until it can, or is to stop.

        The same may have happened to several workers, each of which may wait for the others' end: where they share a
        host NCCL's abort waits for all processes. So they stop in turn. The leader goes on without one of them at a
        time, as long as others hold what that one has; the next plan gives the others another chance.

        Raises:
            EpochChanged: the leader has dropped another one.
            AbortFailed: it has dropped this one; or nothing has helped for ``bamboo.recovery.plan_timeout_s``.
        """
        patience_s = self.settings.recovery.plan_timeout_s
        logger.warning(
            "%s. This worker cannot go on as long as that is so, and has asked to be replaced. Where nobody else holds "
            "what it has, it stops after %g s more",
            *(error, patience_s),
        )
        told, until, why = 0, time.monotonic() + patience_s, None
        while not self.session.aborts_are_through:
            newest = self.channel.newest_plan or plan
            if self.channel.member not in newest.members:
                why = "others take over its stages"
            elif time.monotonic() >= until:
                why = f"nothing has helped for bamboo.recovery.plan_timeout_s = {patience_s:g} s"
            elif newest.interrupts() and newest.epoch > plan.epoch:
                raise EpochChanged(f"epoch {plan.epoch} ended while it was entered") from error
            if why is not None:
                raise AbortFailed(
                    f"{error}, and its device may go on writing to what this worker computes with. The worker stops: "
                    f"{why}. Look at the device and its driver's log (dmesg, nvidia-smi -q)"
                ) from error
            if newest.epoch > told:
                told = newest.epoch
                self.channel.suspect(told, {self.channel.member: str(error)})
            with suppress(TimeoutError):
                self.channel.wait_plan(told, _LOOK_S)
        self.channel.suspect(told, {})
        logger.warning("the communicators are aborted after all: this worker goes on")

    @property
    def _start_timeout_s(self) -> float:
        """Seconds that members wait for each other at the start of the job, as in a job without the block."""
        return max(self.settings.recovery.plan_timeout_s, self.session.timeout.total_seconds())

    def next_plan(self, after_epoch: int) -> Plan:
        """The newest plan after ``after_epoch``; accuses the members that could not be reached meanwhile.

        Raises:
            Isolated: no plan came within ``bamboo.recovery.plan_timeout_s``.
        """
        recovery = self.settings.recovery
        if self.channel.joiner and not self.session.epoch:
            return self._first_plan()
        try:
            return self.channel.wait_plan(after_epoch, recovery.suspect_after_s)
        except TimeoutError:
            with self._lock:
                failures = dict(self._failures)
            if failures:
                self.channel.suspect(after_epoch, failures)
        try:
            return self.channel.wait_plan(after_epoch, recovery.plan_timeout_s)
        except TimeoutError as error:
            raise Isolated(
                f"no plan after epoch {after_epoch} within bamboo.recovery.plan_timeout_s = "
                f"{recovery.plan_timeout_s} s; operations failed towards: {failures or 'nobody in particular'}. "
                "Check that etcd is reachable from the agents. The worker stops, since others may go on without it"
            ) from error

    def await_fence(self) -> None:
        """Waits until this worker may commit: until its agent has lately read in etcd that the job goes on with it.

        Raises:
            EpochChanged: the epoch has ended.
            PeerLost: a peer is gone.
            Isolated: etcd stays away.
        """
        from ..control import fencing

        plan = self.session.plan
        assert plan is not None

        def may_commit() -> bool:
            return fencing.may_commit(plan, self.channel.contact, fencing.now())

        if may_commit():
            return
        begin, patience_s = time.monotonic(), self._outage_s
        logger.warning(
            "this worker pauses before a commit: its agent has not reached etcd for bamboo.membership.fence_s = %g s, "
            "after which others may start the job again. It ends if etcd stays away for %.0f s more",
            plan.fence_s,
            patience_s,
        )
        if not self.session.wait("waiting for etcd before a commit", may_commit, patience_s):
            raise Isolated(
                f"etcd, the store of job {self.channel.job}, has stayed away for bamboo.membership.fence_s = "
                f"{plan.fence_s:g} s and {patience_s:.0f} s more (the agent of {self.channel.member} tells its address "
                "and what is wrong). The worker stops, since nobody can say whether others go on without it; newest "
                f"complete checkpoint: {self.newest_checkpoint(plan) or 'none'}"
            )
        logger.warning("etcd is back: the worker goes on after %.1f s", time.monotonic() - begin)

    @property
    def _outage_s(self) -> float:
        """Seconds for which a worker bears that it may not commit.

        As long as its agent would look for a way back, since that is what it costs; but others of its stage may wait
        for it in a collective, whose timeout would be taken for a failure of the script.
        """
        longest = max(self.settings.membership.rejoin_s, self.settings.recovery.plan_timeout_s)
        return min(longest, self.session.timeout.total_seconds() / 2)

    @contextmanager
    def iterating(self) -> Iterator[None]:
        """The body is an iteration, which some plans interrupt that interrupt nothing else."""
        self._iterating = True
        newest = self.channel.newest_plan
        if newest is not None:
            self._plan_arrived(newest)  # it may have found this worker before the iteration
        try:
            yield
        finally:
            self._iterating = False

    def boundary(self, writing: bool) -> int:
        """Epoch of the newest plan if this member could enter it now, else 0.

        Args:
            writing: it is writing a checkpoint, which it must not leave undone when it leaves.
        """
        plan = self.channel.newest_plan
        if writing and plan is not None and self.channel.member not in plan.members:
            return 0
        return self.channel.boundary()

    def _first_plan(self) -> Plan:
        """The first plan that lists this member, which has asked to be admitted."""
        plan = self.channel.wait_plan(0, self.session.timeout.total_seconds())
        while self.channel.member not in plan.members:
            plan = self.channel.wait_plan(plan.epoch, self.session.timeout.total_seconds())
        return plan

    def newest_checkpoint(self, plan: Plan) -> str | None:
        """Directory of the newest complete checkpoint that this job wrote, after the fatal losses of ``plan``."""
        found = self.find_checkpoint(plan) if self.find_checkpoint is not None else None
        if found is not None:
            self.completed(found)
        return found

    def progressed(self, step: int) -> None:
        """Tells the agent the newest committed step."""
        self._step = step
        self.channel.progress(step)

    def completed(self, checkpoint: str) -> None:
        """Tells the agent the newest complete checkpoint."""
        self.channel.progress(self._step, checkpoint)

    # -- called on other threads ----------------------------------------------------------------------

    def _plan_arrived(self, plan: Plan) -> None:
        if plan.interrupts(self._iterating) and plan.epoch > self.session.epoch:
            if self.session.epoch and self.session.aborted is None:
                self.lost_at = time.monotonic()
            # Also if it is about to be attached.
            self.session.abort(f"plan of epoch {plan.epoch} arrived", epoch=plan.epoch - 1)

    def _peer_failed(self, member: str | None, reason: str) -> None:
        with self._lock:
            if self.lost_at is None:
                self.lost_at = time.monotonic()
            if member is not None:
                self._failures.setdefault(member, reason)

    def _tell_awaited(self, members: Sequence[str], seconds: float) -> None:
        """Names the members that keep the others waiting: a person can tell whether they are stuck or busy."""
        plan = self.session.plan
        assert plan is not None
        logger.warning(
            "epoch %d: %s did not come for %.0f s, and all others wait: see where the main thread of its worker is",
            plan.epoch,
            ", ".join(members),
            seconds,
        )
        self.channel.event("members_awaited", epoch=plan.epoch, members=list(members), seconds=seconds)

    def _agent_gone(self) -> None:
        # Without its agent a worker has no lease: others take its roles over. It must not go on.
        sys.stderr.write(f"bamboo_ds: the agent of member {self.channel.member} is gone; the worker stops\n")
        sys.stderr.flush()
        os._exit(EXIT_EVICTED)


def begin(job: Job) -> None:
    """Starts ``job`` as that of this process."""
    global _job
    job.start()
    _job = job


def script_ends_by(error: BaseException) -> None:
    """Tells this process's job, if there is one, what has come out of the script."""
    if _job is not None:
        _job.exit.note(error)


def current_job() -> Job:
    """This process's job.

    Raises:
        ConfigError: the process groups are not bamboo's.
    """
    if _job is None:
        raise ConfigError(
            f'the configuration has a "{BLOCK}" block, but the process groups are not bamboo\'s: {HOW_TO_START}'
        )
    return _job


def job_if_any() -> Job | None:
    """This process's job, if it has one."""
    return _job


def is_replaying() -> bool:
    """See :func:`bamboo_ds.is_replaying`."""
    return _job is not None and _job.replaying


def job_of_main_thread() -> Job | None:
    """This process's job, or ``None``, also for another thread than the main one."""
    return _job if threading.current_thread() is threading.main_thread() else None


def speaks_for(rank: int) -> bool:
    """See :func:`bamboo_ds.speaks_for`."""
    if _job is not None:
        return _job.speaks_for(rank)
    own, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    return _within(rank, size) == own


def _within(rank: int, size: int) -> int:
    if not -size <= rank < size:
        raise ValueError(f"there is no rank {rank} in a job of {size} ranks")
    return rank % size
