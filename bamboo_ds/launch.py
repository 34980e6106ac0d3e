"""Start and end of a bamboo job in a worker process: channel to the agent, data plane, process groups."""

from __future__ import annotations

import atexit
import builtins
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any

from .config import BLOCK, BambooConfig, bamboo_config, config_path_from_argv, load_config
from .errors import (
    EXIT_EVICTED,
    EXIT_FATAL_LOSS,
    EXIT_LEFT,
    AbortFailed,
    ConfigError,
    EpochChanged,
    Evicted,
    FatalLoss,
    Isolated,
    Left,
    UnsupportedError,
)
from .observe import logs

if TYPE_CHECKING:
    from .comm.session import Session
    from .control.channel import WorkerChannel
    from .topology import Plan

logger = logging.getLogger("bamboo_ds")

#: Default of DeepSpeed and torch for operations of a process group.
_DEFAULT_TIMEOUT = timedelta(minutes=30)
#: Seconds that a worker whose script has failed gives its threads to end: the others wait for its end.
_FAILED_CLOSE_S = 0.2

#: Of the flags of a process in Linux.
_PF_EXITING = 0x4

#: ``control.channel.ENV_FD``; looked at without importing the module, which a stock job has no use for.
_CHANNEL_VARIABLE = "BAMBOO_CHANNEL_FD"

_HOW_TO_START = (
    "start the job with `bamboo run -n WORKERS SCRIPT ARGS`, `bamboo launch`, deepspeed, torchrun or srun, and let "
    "deepspeed.init_distributed() create the process groups (or bamboo_ds.init_distributed(config) if the "
    "configuration is a dict in the script)"
)

_job: Job | None = None


class Job:
    """What one worker process has of its job. There is at most one per process.

    Attributes:
        channel: to the agent.
        session: the data plane.
        settings: the block, once it is known.
    """

    def __init__(self, channel: WorkerChannel, settings: BambooConfig | None, timeout: timedelta) -> None:
        from .comm.session import Session

        self.channel = channel
        self.settings = settings or BambooConfig()
        # Whoever reads nothing for so long has lost its lease, or been killed by its agent.
        silence_s = 2 * max(self.settings.membership.lease_ttl_s, channel.heartbeat_timeout_s)
        self.session: Session = Session(
            *(channel.member, channel.address, timeout, self._peer_failed, silence_s),
            awaited=self._tell_awaited,
            tell_after_s=self.settings.recovery.plan_timeout_s,
            secret=channel.secret,
        )
        #: Called at a clean exit of the script, while all peers are still there.
        self.at_finish: Callable[[], None] | None = None
        #: Called at any exit that runs Python's exit handlers, after ``at_finish``.
        self.at_end: Callable[[], None] | None = None
        #: Looks for the newest complete checkpoint after a fatal loss.
        self.find_checkpoint: Callable[[Plan], str | None] | None = None
        self.lost_at: float | None = None
        #: The script's calls return what the job has computed before this member came.
        self.replaying = False
        self._lock = threading.Lock()
        self._failures: dict[str, str] = {}
        self._exit_code: int | None = None
        #: An engine of this process takes part in the job, or has begun to.
        self.has_engine = False
        self._left = False
        self._process = os.getpid()
        self._hook_before = sys.excepthook

    def check_first_engine(self) -> None:
        """Raise :class:`UnsupportedError` if this process has an engine that the job keeps alive."""
        if self.has_engine:
            raise UnsupportedError(
                f'this process has an engine with a "{BLOCK}" block already, and a job keeps one engine alive. Give '
                f'deepspeed.initialize a configuration without "{BLOCK}" for any further model (evaluation, reward, '
                "reference): it runs as in DeepSpeed, and a loss while it computes ends the job. Or train the models "
                "in jobs of their own"
            )

    # -- who speaks ---------------------------------------------------------------------------------

    def rank_of(self, rank: int) -> int:
        """``rank`` of the script, counted from the last one if it is negative; raises ``ValueError`` outside."""
        size = self.channel.world_size
        if not -size <= rank < size:
            raise ValueError(f"there is no rank {rank} in a job of {size} ranks")
        return rank % size

    def speaks_for(self, rank: int) -> bool:
        """See :func:`bamboo_ds.speaks_for`."""
        rank, script = self.rank_of(rank), self.session.script
        if script is None:  # all are there, or this member joins
            return rank == self.channel.rank and not self.channel.joiner
        return not self.replaying and script.speaker(rank) == self.channel.member

    # -- epochs -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Join the first epoch and create the default process group on the ``bamboo`` backend.

        A member that joins a running job stays detached: its engine is built without peers.
        """
        from .comm.backend import init_process_group
        from .forking import make_forks_sure

        make_forks_sure()
        logs.configure()
        logs.set_context(member=self.channel.member)
        self.channel.activity.waiting = lambda: self.session.waiting
        self.channel.start(self._plan_arrived, self._agent_gone)
        self._watch_exit()
        if not self.channel.joiner:
            self.enter(self.channel.wait_plan(0, self._start_timeout_s))
        # Torch puts a hook around the one that it finds, and takes what that prints to its own end.
        sys.excepthook = self._hook_before
        init_process_group(self.session, self.channel.rank, self.channel.world_size, self.session.timeout)
        self._hook_before, sys.excepthook = sys.excepthook, self._note_exception

    def enter(self, plan: Plan) -> None:
        """Attach to ``plan``'s epoch.

        Raises:
            EpochChanged: the epoch ended meanwhile.
            Evicted: ``plan`` does not list this member.
            Left: nor does it name it as lost: the member had been told to leave, and others have what it had.
            FatalLoss: a role of ``plan`` has no living holder.
            Isolated: nobody said where its members meet.
        """
        if self.channel.member not in plan.members and self.channel.member not in plan.lost:
            self._left = True
            raise Left(f"member {self.channel.member} leaves the job: it has no part in the plan of epoch {plan.epoch}")
        if self.channel.member not in plan.members:
            raise Evicted(
                f"member {self.channel.member} is not in the plan of epoch {plan.epoch}: it was taken for lost and "
                "others own its roles now; the worker stops"
            )
        if plan.unheld:
            roles = [plan.world.role(rank) for rank in plan.unheld] if plan.layout else []
            stages = [(role.pipeline, role.stage) for role in roles]
            raise FatalLoss(stages, plan.lost, self.newest_checkpoint(plan))
        with self._lock:
            self._failures.clear()
        epoch = plan.epoch
        logs.set_context(epoch=epoch)
        self._host_store(plan)
        host, port = self._store_of(plan)
        self.session.attach(plan, (host, port))
        newest = self.channel.newest_plan
        if newest is not None and newest.epoch > epoch:
            # Its arrival may have found us between two epochs.
            self.session.abort(f"plan of epoch {newest.epoch} arrived", epoch=newest.epoch - 1)
            raise EpochChanged(f"epoch {epoch} ended while it was entered")

    def _host_store(self, plan: Plan) -> None:
        if plan.store_host == self.channel.member and not plan.unheld:
            port = self.session.host_store(plan, self.channel.address)
            self.channel.publish_store(plan.epoch, self.channel.address, port)

    def _store_of(self, plan: Plan) -> tuple[str, int]:
        """Where the ``TCPStore`` of ``plan``'s epoch is."""
        setting, timeout_s = "bamboo.recovery.plan_timeout_s", self.settings.recovery.plan_timeout_s
        error_type: type[Exception] = Isolated
        if not self.session.epoch:
            # Its script may be far from creating the process groups: it prepares the data of all, say.
            setting, timeout_s = "the timeout of init_distributed", self._start_timeout_s
            error_type = TimeoutError
        try:
            return self.channel.wait_store(plan.epoch, timeout_s)
        except TimeoutError as error:
            raise error_type(
                f"member {plan.store_host} has not said within {setting} = {timeout_s} s where those of epoch "
                f"{plan.epoch} meet. Check that etcd is reachable from the agents"
            ) from error

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
            for member, reason in failures.items():
                self.channel.suspect(after_epoch, member, reason)
        try:
            return self.channel.wait_plan(after_epoch, recovery.plan_timeout_s)
        except TimeoutError as error:
            raise Isolated(
                f"no plan after epoch {after_epoch} within bamboo.recovery.plan_timeout_s = "
                f"{recovery.plan_timeout_s} s; operations failed towards: {failures or 'nobody in particular'}. "
                "Check that etcd is reachable from the agents. The worker stops, since others may go on without it"
            ) from error

    def await_fence(self) -> None:
        """Wait until this worker may commit: until its agent has lately read in etcd that the job goes on with it.

        Raises:
            EpochChanged: the epoch has ended.
            PeerLost: a peer is gone.
            Isolated: etcd stays away.
        """
        from .control import fencing

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

    _step = 0

    def progressed(self, step: int) -> None:
        """Tell the agent the newest committed step."""
        self._step = step
        self.channel.progress(step)

    def completed(self, checkpoint: str) -> None:
        """Tell the agent the newest complete checkpoint."""
        self.channel.progress(self._step, checkpoint)

    # -- called on other threads ----------------------------------------------------------------------

    def _plan_arrived(self, plan: Plan) -> None:
        if plan.immediate and plan.epoch > self.session.epoch:
            if self.session.epoch and self.session.aborted is None:
                self.lost_at = time.monotonic()
            # Also if it is about to be attached.
            self.session.abort(f"plan of epoch {plan.epoch} arrived", epoch=plan.epoch - 1)
        # Others may enter long before the script of this member calls again. Of a plan for the next boundary all know
        # the store's address by then, so that entering the epoch does not depend on etcd.
        self._host_store(plan)

    def _peer_failed(self, member: str | None, reason: str) -> None:
        with self._lock:
            if self.lost_at is None:
                self.lost_at = time.monotonic()
            if member is not None:
                self._failures.setdefault(member, reason)

    def _tell_awaited(self, members: Sequence[str], seconds: float) -> None:
        """Say who keeps the others waiting: it may be stuck, or busy with something long; only a person can tell."""
        plan = self.session.plan
        assert plan is not None
        logger.warning(
            "epoch %d: %s did not come for %.0f s, and all others wait: see where the main thread of its worker is",
            plan.epoch,
            ", ".join(members),
            seconds,
        )
        if plan.store_host == self.channel.member:  # one word for all
            self.channel.event("members_awaited", epoch=plan.epoch, members=list(members), seconds=seconds)

    def _agent_gone(self) -> None:
        # Without its agent a worker has no lease: others take its roles over. It must not go on.
        sys.stderr.write(f"bamboo_ds: the agent of member {self.channel.member} is gone; the worker stops\n")
        sys.stderr.flush()
        os._exit(EXIT_EVICTED)

    # -- the end ----------------------------------------------------------------------------------------

    def _watch_exit(self) -> None:
        """Learn whether the script ends well: only then its peers may be waited for."""
        previous_exit = sys.exit

        def leave(status: Any = None) -> Any:
            self._exit_code = 0 if status is None else status if isinstance(status, int) else 1
            previous_exit(status)

        self._hook_before, sys.excepthook = sys.excepthook, self._note_exception
        sys.exit = leave
        # What `exit(1)` calls, which the interpreter has for its prompt and scripts use all the same.
        for name in ("exit", "quit"):
            if hasattr(builtins, name):
                setattr(builtins, name, leave)
        atexit.register(self._finish)

    def ends_by(self, error: BaseException) -> None:
        """Note what has come out of the script."""
        if os.getpid() != self._process:
            return
        if not isinstance(error, SystemExit):
            self._exit_code = 1  # the script may have replaced the hook that says the rest
            return
        self._exit_code = status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if status:
            failed = not self._left and _exit_code_of(error) is None
            self.channel.exit_notice(f"exit code {status}", failed=failed, code=status & 0xFF)

    def _note_exception(self, kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        """Handle an exception that ends the script."""
        if os.getpid() != self._process:
            # A process of a DataLoader, say: it does not speak for the worker, nor has it failed when that ends.
            if not _is_ending(self._process):
                self._hook_before(kind, value, trace)
            return
        self._exit_code = 1
        code = _exit_code_of(value)
        if self._left:
            # Whatever the script made of the exception: nothing has failed.
            code = EXIT_LEFT
            sys.stderr.write(f"bamboo_ds: {value}\n")
        else:
            self._hook_before(kind, value, trace)
        self.channel.exit_notice(f"{kind.__name__}: {value}", failed=code is None)
        if code is not None:
            self.channel.close()
            sys.stdout.flush()
            sys.stderr.flush()
            # Python has no other way to give an uncaught exception an exit code.
            os._exit(code)

    def _finish(self) -> None:
        if os.getpid() != self._process:
            return
        try:
            if not self._exit_code and not self._left and self.at_finish is not None:
                self.at_finish()
        except BaseException as error:  # which Python would print, and exit with 0
            sys.excepthook(type(error), error, error.__traceback__)
            self.channel.close()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
        finally:
            if self.at_end is not None:
                self.at_end()
            # Nobody takes over from a worker that is ending.
            if self._exit_code:
                self.session.close(_FAILED_CLOSE_S)
            else:
                self.session.close()
                if not self._left:
                    self.channel.exit_notice("the script has ended", done=True)
            self.channel.close()


def _is_ending(pid: int) -> bool:
    """Whether the kernel is ending the process, or has ended it; it closes connections before the parent changes."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            flags = file.read().rpartition(")")[2].split()[6]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return bool(int(flags) & _PF_EXITING)


def _exit_code_of(error: BaseException | None) -> int | None:
    """The exit code of a worker that ``error`` ends, if it comes from the loss of a member or of its own place."""
    while error is not None:
        if isinstance(error, (Evicted, Isolated, AbortFailed)):
            return EXIT_EVICTED
        # A loss that has hit what cannot be repeated, too: building the engine, loading, the script's sends.
        if isinstance(error, (FatalLoss, EpochChanged)):
            return EXIT_FATAL_LOSS
        error = error.__cause__ or error.__context__
    return None


def script_ends_by(error: BaseException) -> None:
    """Tell this process's job, if there is one, what has come out of the script."""
    if _job is not None:
        _job.ends_by(error)


def current_job() -> Job:
    """This process's job.

    Raises:
        ConfigError: the process groups are not bamboo's.
    """
    if _job is None:
        raise ConfigError(
            f'the configuration has a "{BLOCK}" block, but the process groups are not bamboo\'s: {_HOW_TO_START}'
        )
    return _job


require_job = current_job


def is_replaying() -> bool:
    """See :func:`bamboo_ds.is_replaying`."""
    return _job is not None and _job.replaying


def job_of_main_thread() -> Job | None:
    """This process's job; ``None``: there is none, or another thread than the main one asks."""
    return _job if threading.current_thread() is threading.main_thread() else None


def speaks_for(rank: int) -> bool:
    """See :func:`bamboo_ds.speaks_for`."""
    if _job is not None:
        return _job.speaks_for(rank)
    own, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if not -size <= rank < size:
        raise ValueError(f"there is no rank {rank} in a job of {size} ranks")
    return rank % size == own


def before_init_distributed(timeout: timedelta | None = None, config: Any = None) -> None:
    """Create the process groups of a bamboo job; does nothing in any other job.

    Called before ``deepspeed.init_distributed`` does its work. The block is looked for in ``config`` and on the
    command line (``--deepspeed_config``). A process of ``bamboo run`` or ``bamboo launch`` whose configuration is not
    known yet is taken for one of a bamboo job. A process that another launcher has started becomes the keeper of its
    slot (:mod:`.launched`).

    A configuration that cannot be read is an error in ``config`` and in processes of ``bamboo run`` and ``bamboo
    launch``. Elsewhere it has no block: DeepSpeed says what is wrong with it, if the script uses it.

    Raises:
        ConfigError: the block is wrong, or the process has neither agent nor launcher.
        LaunchError: the job's etcd cannot be had.
    """
    global _job
    if _job is not None:
        return
    source = config if config is not None else config_path_from_argv()
    settings = None
    if source is not None:
        try:
            loaded = load_config(source)
        except ConfigError:
            if config is None and not _is_ours():
                return
            raise
        settings = bamboo_config(loaded)
        if settings is None:
            return
        from .supported import check_config

        check_config(loaded)
    if _CHANNEL_VARIABLE not in os.environ:
        _become_keeper(settings, timeout or _DEFAULT_TIMEOUT)
        return
    import torch.distributed

    if torch.distributed.is_initialized():
        if settings is not None:
            raise ConfigError(f"torch.distributed was initialised by someone else already: {_HOW_TO_START}")
        return
    _disable_shared_memory_collectives()
    from .control.channel import WorkerChannel

    channel = WorkerChannel.from_environment()
    assert channel is not None
    job = Job(channel, settings, timeout or _DEFAULT_TIMEOUT)
    job.start()
    _job = job


def _is_ours() -> bool:
    """Whether ``bamboo run`` or ``bamboo launch`` has started this process."""
    from . import launched

    return _CHANNEL_VARIABLE in os.environ or launched.ENV_LAUNCH in os.environ


def _become_keeper(settings: BambooConfig | None, timeout: timedelta) -> None:
    """Leave the script to a worker, if another launcher has started this process and the job is a bamboo job."""
    from . import launched

    if settings is None:
        if launched.ENV_LAUNCH not in os.environ or launched.ENV_MEMBER in os.environ:
            return
        path = os.environ.get(launched.ENV_CONFIG)
        settings = (bamboo_config(path) if path else None) or BambooConfig()
    launched.adopt_slurm(os.environ)
    place = launched.launched(os.environ)
    if place is None:
        raise ConfigError(f'the configuration has a "{BLOCK}" block, but this process has no agent: {_HOW_TO_START}')
    launched.become_keeper(place, settings, timeout)


def init_distributed(config: Any, **kwargs: Any) -> None:
    """See :func:`bamboo_ds.init_distributed`."""
    from .autoload import autoload

    autoload()
    before_init_distributed(kwargs.get("timeout"), config)
    import deepspeed

    deepspeed.init_distributed(**kwargs)


def _disable_shared_memory_collectives() -> None:
    """Switch DeepSpeed's CPU shared-memory collective off: it spins for ever on a dead peer.

    ``deepspeed.comm.torch`` as an attribute is torch itself; the module is only in ``sys.modules``.
    """
    import deepspeed.comm  # noqa: F401

    backend: Any = sys.modules["deepspeed.comm.torch"]
    backend.build_shm_op = lambda: None
