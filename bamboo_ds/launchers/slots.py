"""Agents of some slots of a job on this host: started, watched, ended, judged by how their workers have ended."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from multiprocessing.connection import wait
from types import FrameType
from typing import BinaryIO

from ..control import standard_input
from ..control.agent.mailbox import Mailbox
from ..control.agent.neighbours import report_dead_agent
from ..control.registry.keys import Keys
from ..control.registry.mirror import Mirror
from ..control.registry.records import LeftRecord
from ..control.settings import AgentSettings, MemberOptions
from ..errors import LaunchError, StoreError
from ..processes import adopt_orphans, end_descendants, reap_adopted
from . import joined

logger = logging.getLogger("bamboo_ds.launchers")

#: Seconds beyond the workers' grace until agents are killed that do not end.
AGENT_GRACE_S = 3.0
#: Seconds that members get to stop by themselves after a fatal loss; their agents end them before.
_FATAL_GRACE_S = 90.0
#: Seconds within which signals come of one event: a terminal that closes, a launcher that repeats what Ctrl-C said.
_SAME_EVENT_S = 0.5
_STORE_TIMEOUT_S = 10.0
#: Seconds that etcd has to hear that the job ends, before members here end and etcd with them.
_TELL_S = 2.0
#: Seconds beyond the workers' grace that members of other slots get when the job is ended.
OTHERS_S = 5.0


class _Agent:
    """An agent process and what it tells."""

    def __init__(self, settings: AgentSettings) -> None:
        read_end, write_end = os.pipe()
        # Until the agent handles it, a request to leave would kill it.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        try:
            self.process = subprocess.Popen(
                settings.agent_command,
                env=dataclasses.replace(settings, result_fd=write_end).environment(),
                stdin=standard_input.inherited(),
                pass_fds=[write_end],
                start_new_session=True,  # Ctrl-C is for the launcher, which ends the others in order
            )
        except OSError as error:
            os.close(read_end)
            raise LaunchError(f"cannot start the agent of slot {settings.slot}: {error}") from error
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
            os.close(write_end)
        self.slot = settings.slot
        self.pidfd = os.pidfd_open(self.process.pid)
        self._result: BinaryIO = os.fdopen(read_end, "rb")
        self.departure: LeftRecord | None = None

    def reap(self) -> None:
        """Collects the dead agent and its result."""
        self.process.wait()
        line = self._result.readline()
        self._result.close()
        os.close(self.pidfd)
        if line.endswith(b"\n"):
            self.departure = LeftRecord.from_json(line)


class Slots:
    """Agents of some slots on this host, and the main loop of the process that is their parent.

    Use it once, in the main thread. Subclasses say which slots there are, and what their ends come to.

    Args:
        options: of every member; with URLs of etcd at the latest before the first of them is started.
        own: numbers of the slots.
    """

    def __init__(self, options: MemberOptions, own: Collection[int]) -> None:
        self._options = options
        self._slots = own
        self._mailbox = Mailbox()
        self._watched: dict[int, Callable[[], None]] = {}  # by pidfd: what follows from the end of the process
        self._background: list[threading.Thread] = []
        self._agents: dict[int, _Agent] = {}  # by slot; the running ones
        self._departures: list[LeftRecord] = []
        self._interrupted: int | None = None
        self._interrupted_at = 0.0
        self._stopping = False
        self._kill_at: float | None = None
        self._leave_at: float | None = None
        self._stop_at: float | None = None
        self._etcd_ended = self._hurried = False
        self._own: set[int] = set()  # children besides agents
        self._child_died = False

    @contextlib.contextmanager
    def _prepared(self, spare: Collection[int]) -> Iterator[None]:
        """Is the parent of orphans, and handles signals; at the end no child is left but those in ``spare``."""
        adopt_orphans()
        with ExitStack() as stack:
            stack.callback(end_descendants, spare)
            stack.callback(self._mailbox.close)
            stack.callback(self._mailbox.take_signals(self._interrupt))
            before = signal.signal(signal.SIGCHLD, self._note_child)
            stack.callback(signal.signal, signal.SIGCHLD, before)
            yield

    def _note_child(self, signum: int, frame: FrameType | None) -> None:
        self._child_died = True
        self._mailbox.post(lambda: None)

    def _reap(self) -> None:
        """Collects dead children that nobody waits for, such as the worker of an agent that was killed."""
        reap_adopted({*self._own, *(agent.process.pid for agent in self._agents.values())})

    def _watch_process(self, pid: int, on_end: Callable[[], None], stack: ExitStack) -> None:
        """Has ``on_end`` called once when the process ``pid``, which need not be a child, is dead.

        Raises:
            ProcessLookupError: it is already.
        """
        pidfd = os.pidfd_open(pid)
        stack.callback(os.close, pidfd)
        self._watched[pidfd] = on_end

    def _in_background(self, action: Callable[[], None]) -> None:
        """Runs ``action`` in a thread."""
        self._background.append(threading.Thread(target=action, daemon=True))
        self._background[-1].start()

    def _join_background(self) -> None:
        """Waits for the threads, but not for long."""
        for thread in self._background:
            thread.join(AGENT_GRACE_S)

    def _stop_soon(self) -> None:
        """Stops now instead of at the time that is set. Callable from any thread."""
        self._stop_at = time.monotonic()
        self._mailbox.post(lambda: None)

    # -- etcd and the others ------------------------------------------------------------------------

    def _watch_etcd(self, supervisor: int, stack: ExitStack) -> None:
        """Notices the end of the embedded etcd with the supervisor of that process id, a child of ours.

        That starts etcd again many times before it ends.
        """
        self._own.add(supervisor)

        def ended() -> None:
            self._etcd_ended = True
            logger.error("the embedded etcd has ended for good: %s", self._without_etcd())

        self._watch_process(supervisor, ended, stack)

    def _without_etcd(self) -> str:
        """The outcome of a job without etcd."""
        fence_s = self._options.bamboo.fence_s
        if fence_s is None:
            return "training goes on, but survives no loss any more"
        return (
            f"training goes on for bamboo.membership.fence_s = {fence_s:g} s and survives no loss; then "
            "it pauses, and the workers end. Start the job again from its newest checkpoint"
        )

    def _end_others(self, signum: int) -> None:
        """Has members of other slots end as well, since this process was told to by a signal.

        Those here end after :meth:`_stop_soon`: else others would take their ends for losses.
        """
        self._stop_soon()

    def _tell_others(self, signum: int, told: str) -> None:
        """The same through etcd, since ``told`` has got the signal: in the background, because etcd may not answer."""

        def tell() -> None:
            joined.tell_to_stop(self._options, signum, told)
            self._stop_soon()

        self._in_background(tell)

    def _await_joined(self, quiet: bool, departed: bool = False) -> int | None:
        """Stays for members that have joined, as long as they go on; see :func:`.joined.await_end`."""

        def pause(seconds: float) -> bool:
            self._attend(seconds)
            late = self._leave_at is not None and time.monotonic() >= self._leave_at
            return not (late or self._etcd_ended or self._hurried)

        return joined.await_end(self._options, self._slots, pause, quiet, departed)

    # -- agents -------------------------------------------------------------------------------------

    def _spawn(self, settings: AgentSettings) -> None:
        """Starts the agent of one slot."""
        agent = _Agent(settings)
        self._agents[agent.slot] = agent

        def ended() -> None:
            agent.reap()
            del self._agents[agent.slot]
            self._judge(agent)

        self._watched[agent.pidfd] = ended

    def _serve(self) -> None:
        """Serves until all agents are gone."""
        while self._agents:
            if self._attend_until_kill():
                if self._stopping:
                    self._signal_agents(signal.SIGKILL)  # the kernel ends their workers with them
                else:
                    self._stop()

    def _attend_until_kill(self) -> bool:
        """Handles the next event; returns whether it is time to kill the processes that were told to end, once."""
        self._attend(None if self._kill_at is None else max(0.0, self._kill_at - time.monotonic()))
        if self._kill_at is None or time.monotonic() < self._kill_at:
            return False
        self._kill_at = None
        return True

    def _attend(self, timeout_s: float | None) -> None:
        """Handles what happens within ``timeout_s`` seconds, if anything."""
        if self._stop_at is not None:
            left = max(0.0, self._stop_at - time.monotonic())
            timeout_s = left if timeout_s is None else min(timeout_s, left)
        self._mailbox.handle_next(timeout_s, list(self._watched))
        self._mailbox.handle_all()
        if self._child_died:
            self._child_died = False
            self._reap()
        for pidfd in wait(list(self._watched), 0.0):
            assert isinstance(pidfd, int)
            self._watched.pop(pidfd)()
        if self._stop_at is not None and time.monotonic() >= self._stop_at:
            self._stop_at = None
            self._stop()

    def _judge(self, agent: _Agent) -> None:
        """The consequence of an agent's end for the others."""
        departure = agent.departure
        if departure is None:
            logger.error("the agent of slot %d has died (%s)", agent.slot, agent.process.returncode)
            if not self._stopping:
                self._in_background(lambda: self._report_dead_agent(agent))
            return
        self._departures.append(departure)
        if departure.outcome == "failed" and not self._stopping:
            what = f"{departure.reason} {departure.detail}"
            logger.error("the worker of slot %d has failed (%s): ending the job", agent.slot, what)
        if departure.error is not None and not self._stopping:
            logger.error("the worker of slot %d has failed (%s): it counts as lost", agent.slot, departure.error)
        if departure.outcome in ("failed", "stopped"):
            self._stop()
        elif departure.outcome == "fatal" and not self._stopping and self._kill_at is None:
            self._kill_at = time.monotonic() + _FATAL_GRACE_S

    def _report_dead_agent(self, agent: _Agent) -> None:
        """Tells the leader of a member whose agent cannot: its lease would take a while to run out.

        Runs in a thread of its own; without etcd the lease has to do.
        """
        died = time.monotonic()
        try:
            with joined.launchers_store(self._options, _STORE_TIMEOUT_S) as store:
                for member in Mirror(store.get_prefix(Keys.KNOWN, Keys.MEMBERS)).known.values():
                    # Not by its slot: an agent that has come back has got another one.
                    if member.address == self._options.address and member.agent_pid == agent.process.pid:
                        status = agent.process.returncode
                        report_dead_agent(store, member, died, f"agent died with exit status {status}")
        except StoreError as error:
            logger.error("cannot report the death of slot %d, its lease will run out: %s", agent.slot, error)

    def _interrupt(self, signum: int, at: float) -> None:
        if signum == signal.SIGUSR1:
            self._signal_agents(signum)  # this host is to be left
        elif self._interrupted is None:
            self._interrupted, self._interrupted_at = signum, at
            self._leave_at = time.monotonic() + self._options.grace_s + AGENT_GRACE_S + OTHERS_S
            self._stop_at = time.monotonic() + _TELL_S
            self._end_others(signum)
        elif at - self._interrupted_at >= _SAME_EVENT_S:
            self._hurried = True  # asked twice
            self._signal_agents(signal.SIGKILL)

    def _stop(self) -> None:
        if not self._stopping:
            self._stopping = True
            self._kill_at = time.monotonic() + self._options.grace_s + AGENT_GRACE_S
            self._terminate()

    def _terminate(self) -> None:
        self._signal_agents(signal.SIGTERM)

    def _signal_agents(self, signum: int) -> None:
        for agent in self._agents.values():
            agent.process.send_signal(signum)
            if signum == signal.SIGTERM:
                agent.process.send_signal(signal.SIGCONT)

    @property
    def _outcomes(self) -> set[str]:
        return {departure.outcome for departure in self._departures}

    def _worst(self) -> int | None:
        """The exit code of a departure that ends the job, if there was one."""
        for outcome in ("failed", "stopped", "fatal"):
            for departure in self._by_time:
                if departure.outcome == outcome:
                    return departure.code
        return None

    @property
    def _by_time(self) -> list[LeftRecord]:
        """The departures in the order in which the workers have ended; agents may take longer or shorter."""
        return sorted(self._departures, key=lambda departure: departure.since)
