"""The rank supervisor: what a process becomes that another launcher (deepspeed, torchrun, srun) has started.

It runs the agent of its slot. The launcher sees a process that lives as long as the job has use for the slot: when the
worker is lost the supervisor stays until the job is over, so that the launcher does not end the others. Its exit code
says how the *job* ended, as far as it can tell.

Under ``bamboo launch`` on the same host two processes share this: the one that the launcher has started only waits, and
the supervisor is a child of ``bamboo launch``, which neither the launcher's signals nor the death of that process
concern.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace

import psutil

from ..control.registry.claims import release
from ..control.registry.mirror import Mirror
from ..control.reporting import emit_or_log
from ..control.settings import AgentSettings, settings_told
from ..errors import EXIT_FATAL_LOSS, BambooError, StoreUnavailable
from ..observe import logs
from ..observe.events import EventWriter, RunStarted
from ..processes import started
from . import jobs, joined
from .owning import tell_finished
from .slots import OTHERS_S, Slots

logger = logging.getLogger("bamboo_ds.launchers")

_STORE_TIMEOUT_S = 2.0
_POLL_S = 0.2
#: Seconds after which an embedded etcd that does not answer is taken for gone, and the job with it.
_GONE_S = 10.0
#: Seconds that etcd's supervisor gets to end.
_SUPERVISOR_S = 10.0


@dataclass(frozen=True)
class SupervisorTask:
    """The task of a rank supervisor, besides its agent's settings.

    Attributes:
        owner: it speaks for the job, as a launcher would: there is no ``bamboo launch``.
        supervisor: process id of the supervisor of the job's embedded etcd, a child of this process.
        embedded: the job's etcd belongs to the job.
        wrapper: process id of ``bamboo launch`` on this host, and wrapper_started: when it began, in clock ticks.
    """

    owner: bool = False
    supervisor: int | None = None
    embedded: bool = False
    wrapper: int | None = None
    wrapper_started: int | None = None


def supervisor_command(task: SupervisorTask) -> list[str]:
    """The command that runs a rank supervisor, in the environment of its agent."""
    return [sys.executable, "-m", "bamboo_ds.launchers.supervisor", json.dumps(asdict(task))]


class RankSupervisor(Slots):
    """Runs one slot to its end. Use it once, in the main thread."""

    def __init__(self, task: SupervisorTask, agent: AgentSettings) -> None:
        super().__init__(agent, (agent.slot,))
        self._task, self._agent = task, agent

    def run(self) -> int:
        """Runs to the end; returns the exit code.

        Raises:
            BambooError: the agent could not be started, or another job of this name runs here.
        """
        task, agent = self._task, self._agent
        with ExitStack() as stack:
            events = stack.enter_context(EventWriter(agent.events))
            if task.supervisor is not None:
                stack.callback(_end_etcd, task.supervisor)
            stack.enter_context(self._prepared(() if task.supervisor is None else (task.supervisor,)))
            if task.supervisor is not None:
                self._watch_etcd(task.supervisor, stack)
            if task.wrapper is not None:
                self._watch_wrapper(task.wrapper, stack)
            state_file = self._own_job(stack) if task.owner else None
            begin = time.monotonic()
            if agent.slot == 0:
                started_ = RunStarted(job=agent.job, epoch=0, members=agent.world_size, command=list(agent.command))
                emit_or_log(events, started_)
            self._spawn(replace(agent, parent_pid=os.getpid(), state_file=state_file))
            self._serve()
            code = self._result()
            self._join_background()
            if task.owner:
                tell_finished(events, agent.job, code, begin)
                if not task.embedded:
                    release(agent.store, agent.job)
            return code

    def _own_job(self, stack: ExitStack) -> str:
        """Lets other commands find the job; returns the path of the file that says where."""
        agent = self._agent
        events = agent.events and os.path.abspath(agent.events)
        state = jobs.this_process(agent.job, agent.store, foreign=True, events=events, logs=agent.logs)
        state.write()
        stack.callback(state.remove)
        return str(state.path)

    def _watch_wrapper(self, pid: int, stack: ExitStack) -> None:
        def ended() -> None:
            logger.error("bamboo launch is gone: the worker of slot %d ends", self._agent.slot)
            if self._interrupted is None:
                self._interrupt(signal.SIGTERM, time.monotonic())

        try:
            self._watch_process(pid, ended, stack)
        except ProcessLookupError:
            ended()
            return
        if started(pid) != self._task.wrapper_started:  # another process has its number
            ended()

    # -- what it comes to ---------------------------------------------------------------------------

    def _result(self) -> int:
        """The exit code, once the agent has ended and, where others go on, the job has."""
        code, keeps_etcd = self._worst(), self._task.supervisor is not None
        if code is None and self._interrupted is None:
            done = self._outcomes & {"finished", "left"}
            code = 0 if done and not keeps_etcd else self._await_job()
        elif keeps_etcd:
            self._await_job()
        if self._interrupted is not None:
            return 128 + self._interrupted
        return EXIT_FATAL_LOSS if code is None else code

    def _await_job(self) -> int:
        """Stays until no member of the job is left; returns what the job has come to."""
        if self._outcomes & {"lost", "evicted"} or not self._departures:
            logger.warning("slot %d has lost its worker; this process stays until the job ends", self._agent.slot)
        ending = not self._outcomes.isdisjoint(("failed", "stopped", "fatal"))
        if (self._stopping or ending) and self._leave_at is None:
            self._leave_at = time.monotonic() + self._agent.grace_s + OTHERS_S
        others = joined.JoinedMembers(self._agent, self._slots)
        silent_since: float | None = None
        with joined.launchers_store(self._agent, _STORE_TIMEOUT_S) as store:
            while True:
                now = time.monotonic()
                try:
                    mirror = Mirror(store.get_prefix(""))
                    silent_since = None
                except StoreUnavailable as error:
                    silent_since = now if silent_since is None else silent_since
                    if self._task.embedded and now - silent_since > _GONE_S:
                        logger.info("the job's etcd is gone: %s", error)
                        return 0  # whoever owned it has judged the job
                else:
                    if mirror.plan is None and not mirror.members:
                        return EXIT_FATAL_LOSS if self._task.owner else 0  # its owner has removed its keys
                    if not others.look(mirror, now):
                        return joined.exit_code(mirror)
                self._attend(_POLL_S)
                late = self._leave_at is not None and time.monotonic() >= self._leave_at
                if late or self._hurried or (self._etcd_ended and self._task.owner):
                    return EXIT_FATAL_LOSS
                if self._interrupted is not None and not self._task.owner:
                    return EXIT_FATAL_LOSS


def _end_etcd(pid: int) -> None:
    try:
        process = psutil.Process(pid)
        process.terminate()
        process.wait(_SUPERVISOR_S)
    except psutil.NoSuchProcess:
        return  # it has ended by itself
    except psutil.TimeoutExpired:
        process.kill()  # the kernel ends etcd with it


def _detach() -> int:
    """Goes on as another process, which is nobody's child but the wrapper's; the caller must not have threads.

    The process that was waits for the result and ends with it. Without one it ends with 0, since the job may go on.

    Returns:
        The descriptor that takes the result, in the new process.
    """
    reading, writing = os.pipe()
    between = os.fork()
    if between == 0:
        os.setsid()
        if os.fork() == 0:
            os.close(reading)
            return writing
        os._exit(0)
    os.close(writing)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # the agent hears it, and may leave the job in an orderly way
    os.waitpid(between, 0)
    with os.fdopen(reading, "rb") as pipe:
        result = pipe.read()
    os._exit(int(result) if result else 0)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a rank supervisor; returns its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    task, agent = SupervisorTask(**json.loads(argv[0])), settings_told(os.environ)
    result_to = None if task.wrapper is None else _detach()
    logs.configure()
    try:
        code = RankSupervisor(task, agent).run()
    except (BambooError, OSError) as error:
        logger.error("%s", error)
        code = 1
    if result_to is not None:
        try:
            os.write(result_to, str(code).encode())
        except BrokenPipeError:
            logger.info("the process that the launcher had started is gone")
    return code


if __name__ == "__main__":
    exit_code = main()
    logging.shutdown()
    # A thread may still be waiting for an etcd that is gone; nothing that it could do matters any more.
    os._exit(exit_code)
