"""``bamboo run``: etcd if need be, one agent per slot, and the end of all of them."""

from __future__ import annotations

import dataclasses
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import BinaryIO

import psutil
from tenacity import Retrying, retry_if_result, stop_after_delay, wait_fixed

from ..control.access import ENV_STORE, open_store
from ..control.agent_settings import AgentSettings
from ..control.membership import Keys, LeaderRecord, LeftRecord, MemberRecord, boot_id
from ..control.reporting import emit_or_log
from ..control.worker_process import adopt_orphans, end_descendants
from ..errors import EXIT_FATAL_LOSS, ConfigError, LaunchError, StoreError
from ..observe.events import EventWriter, RunFinished, RunStarted
from ..store.embedded import EmbeddedEtcd
from . import jobs

logger = logging.getLogger("bamboo_ds.cli.launcher")

EMBEDDED = "embedded"
#: Seconds beyond the workers' grace until agents are killed that do not end.
_AGENT_GRACE_S = 3.0
#: Seconds that members get to stop by themselves after a fatal loss, each with its own message.
_FATAL_GRACE_S = 30.0
_STORE_TIMEOUT_S = 10.0
#: Seconds that members which have joined get at the end of the job, and between two looks whether they are gone.
_GUESTS_S = 10.0
_GUESTS_POLL_S = 0.05


@dataclass(frozen=True)
class RunOptions:
    """What ``bamboo run`` was asked for.

    Attributes:
        workers: number of slots.
        store: URLs of etcd, or ``embedded``.
        prefix_output: whether each line of output begins with its slot.
        emulate_hosts: number of hosts that the slots are said to be on; ``None``: the one that they are on.
        The others are as in :class:`~bamboo_ds.control.agent_settings.AgentSettings`.
    """

    workers: int
    store: str
    job: str
    address: str
    events: str | None
    pipelines: int | None
    lease_ttl_s: float
    heartbeat_timeout_s: float
    settle_s: float
    grace_s: float
    prefix_output: bool
    emulate_hosts: int | None
    command: tuple[str, ...]


class _Agent:
    """An agent process and what it tells."""

    def __init__(self, settings: AgentSettings, env: dict[str, str], prefix_output: bool) -> None:
        read_end, write_end = os.pipe()
        output = subprocess.PIPE if prefix_output else None
        try:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "bamboo_ds.control.agent"),
                    *dataclasses.replace(settings, result_fd=write_end).to_arguments(),
                ],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[write_end],
                start_new_session=True,  # Ctrl-C is for the launcher, which ends the others in order
            )
        except OSError as error:
            os.close(read_end)
            raise LaunchError(f"cannot start the agent of slot {settings.slot}: {error}") from error
        finally:
            os.close(write_end)
        self.slot = settings.slot
        self.pidfd = os.pidfd_open(self.process.pid)
        self._result: BinaryIO = os.fdopen(read_end, "rb")
        self.departure: LeftRecord | None = None

    def reap(self) -> None:
        """Collect the dead agent and its result."""
        self.process.wait()
        line = self._result.readline()
        self._result.close()
        os.close(self.pidfd)
        if line.endswith(b"\n"):
            self.departure = LeftRecord.from_json(line)


class _Output:
    """Copies one stream of an agent line by line, each with the slot in front."""

    def __init__(self, slot: int, source: BinaryIO, target: BinaryIO) -> None:
        self.source = source
        self._prefix = f"[{slot}] ".encode()
        self._target = target
        self._rest = b""
        os.set_blocking(source.fileno(), False)

    def copy(self) -> bool:
        """Copy what has arrived; false at the end."""
        try:
            data = os.read(self.source.fileno(), 1 << 16)
        except BlockingIOError:
            return True
        *lines, self._rest = (self._rest + data).split(b"\n")
        if not data and self._rest:
            lines, self._rest = [self._rest], b""
        self._target.write(b"".join(self._prefix + line + b"\n" for line in lines))
        self._target.flush()
        return bool(data)


class Launcher:
    """Runs one job. Use it once, in the main thread."""

    def __init__(self, options: RunOptions) -> None:
        self._options = options
        self._selector = selectors.DefaultSelector()
        self._agents: dict[int, _Agent] = {}  # by slot; the running ones
        self._departures: list[LeftRecord] = []
        self._signals: list[int] = []
        self._interrupted: int | None = None
        self._stopping = False
        self._kill_at: float | None = None
        self._urls = ""
        self._reporters: list[threading.Thread] = []

    def run(self) -> int:
        """Run to the end; returns the exit code.

        Raises :class:`LaunchError` or :class:`ConfigError` if the job cannot be started, ``StoreError``
        if etcd cannot be used.
        """
        options = self._options
        adopt_orphans()
        with ExitStack() as stack:
            try:
                events = stack.enter_context(EventWriter(options.events))
            except OSError as error:
                raise ConfigError(f"cannot write events to {options.events}: {error}") from error
            stack.callback(end_descendants, {child.pid for child in psutil.Process().children()})
            stack.enter_context(self._selector)
            stack.enter_context(self._handling_signals())
            if options.store == EMBEDDED:
                etcd = stack.enter_context(EmbeddedEtcd(options.address))
                urls = etcd.url
                self._watch_etcd(etcd, stack)
            else:
                urls = options.store
                stack.enter_context(self._claimed(urls))
            self._urls = urls
            state = jobs.this_process(options.job, urls)
            state.write()
            stack.callback(state.remove)
            begin = time.monotonic()
            command = list(options.command)
            emit_or_log(events, RunStarted(job=options.job, epoch=0, members=options.workers, command=command))
            self._handle_signals()
            if not self._stopping:
                self._spawn(urls, str(state.path))
            self._serve()
            if options.store == EMBEDDED and self._interrupted is None:
                self._await_guests(urls)
            for reporter in self._reporters:
                reporter.join(_AGENT_GRACE_S)
            code = self._exit_code()
            seconds = time.monotonic() - begin
            emit_or_log(events, RunFinished(job=options.job, epoch=0, exit_code=code, run_seconds=seconds))
            return code

    def _await_guests(self, urls: str) -> None:
        """Let members that have joined say good-bye to our etcd before it ends."""
        with open_store(urls, self._options.job, _STORE_TIMEOUT_S) as store:
            gone = Retrying(
                retry=retry_if_result(lambda members: bool(members)),
                stop=stop_after_delay(_GUESTS_S),
                wait=wait_fixed(_GUESTS_POLL_S),
                retry_error_callback=lambda state: logger.warning("members that have joined are still there"),
            )
            try:
                gone(lambda: store.get_prefix(Keys.MEMBERS).entries)
            except StoreError as error:
                logger.warning("cannot see whether members that have joined are gone: %s", error)

    @contextmanager
    def _handling_signals(self) -> Iterator[None]:
        reading, writing = socket.socketpair()
        reading.setblocking(False)
        writing.setblocking(False)
        handled = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {signum: signal.signal(signum, self._on_signal) for signum in handled}
        wakeup_before = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        self._selector.register(reading, selectors.EVENT_READ, lambda: self._drain(reading))
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakeup_before)
            for signum, handler in before.items():
                signal.signal(signum, handler)
            reading.close()
            writing.close()

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self._signals.append(signum)

    def _drain(self, reading: socket.socket) -> None:
        try:
            reading.recv(4096)
        except BlockingIOError:
            return

    @contextmanager
    def _claimed(self, urls: str) -> Iterator[None]:
        """Own the job's keys in a shared etcd; what a dead job of this name left there is removed."""
        options = self._options
        with open_store(urls, options.job, _STORE_TIMEOUT_S) as store:
            alive = store.get_prefix(Keys.MEMBERS).entries
            if alive:
                raise LaunchError(
                    f"a job named {options.job!r} runs already at {urls}: it has {len(alive)} members; "
                    "take another name"
                )
            store.delete_prefix("")
            yield
            store.delete_prefix("")

    def _watch_etcd(self, etcd: EmbeddedEtcd, stack: ExitStack) -> None:
        pidfd = os.pidfd_open(etcd.supervisor_pid)
        stack.callback(os.close, pidfd)

        def ended() -> None:
            self._selector.unregister(pidfd)
            logger.error("the embedded etcd has ended: training goes on, but survives no loss any more")

        self._selector.register(pidfd, selectors.EVENT_READ, ended)

    # -- agents -------------------------------------------------------------------------------------

    def _spawn(self, urls: str, state_file: str) -> None:
        options = self._options
        env = {**os.environ, ENV_STORE: urls}
        port = _free_port(options.address)
        for slot in range(options.workers):
            host = None
            if options.emulate_hosts is not None:
                host = f"emulated-{slot * options.emulate_hosts // options.workers}"
            settings = AgentSettings(
                slot=slot,
                world_size=options.workers,
                store=urls,
                job=options.job,
                address=options.address,
                zone="",
                events=options.events,
                parent_pid=os.getpid(),
                lease_ttl_s=options.lease_ttl_s,
                heartbeat_timeout_s=options.heartbeat_timeout_s,
                settle_s=options.settle_s,
                grace_s=options.grace_s,
                master_port=port,
                pipelines=options.pipelines,
                result_fd=None,
                state_file=state_file,
                command=options.command,
                host=host,
            )
            agent = _Agent(settings, env, options.prefix_output)
            self._agents[slot] = agent
            self._register(agent)

    def _register(self, agent: _Agent) -> None:
        def ended() -> None:
            self._selector.unregister(agent.pidfd)
            agent.reap()
            del self._agents[agent.slot]
            self._judge(agent)

        self._selector.register(agent.pidfd, selectors.EVENT_READ, ended)
        for source, target in (
            (agent.process.stdout, sys.stdout.buffer),
            (agent.process.stderr, sys.stderr.buffer),
        ):
            if source is not None:
                self._copy_output(_Output(agent.slot, source, target))  # type: ignore[arg-type]

    def _copy_output(self, output: _Output) -> None:
        def copy() -> None:
            if not output.copy():
                self._selector.unregister(output.source)
                output.source.close()

        self._selector.register(output.source, selectors.EVENT_READ, copy)

    def _serve(self) -> None:
        """Until all agents are gone."""
        while self._agents:
            timeout = None if self._kill_at is None else max(0.0, self._kill_at - time.monotonic())
            ready: Sequence[Callable[[], None]] = [key.data for key, _ in self._selector.select(timeout)]
            for action in ready:
                action()
            self._handle_signals()
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                self._kill_at = None
                if self._stopping:
                    self._signal_agents(signal.SIGKILL)  # the kernel ends their workers with them
                else:
                    self._stop()

    def _judge(self, agent: _Agent) -> None:
        """What the end of an agent means for the others."""
        departure = agent.departure
        if departure is None:
            logger.error("the agent of slot %d has died (%s)", agent.slot, agent.process.returncode)
            if not self._stopping:
                reporter = threading.Thread(target=self._report_dead_agent, args=(agent,), daemon=True)
                reporter.start()
                self._reporters.append(reporter)
            return
        self._departures.append(departure)
        if departure.outcome == "failed" and not self._stopping:
            what = f"{departure.reason} {departure.detail}"
            logger.error("the worker of slot %d has failed (%s): ending the job", agent.slot, what)
        if departure.outcome in ("failed", "stopped"):
            self._stop()
        elif departure.outcome == "fatal" and not self._stopping and self._kill_at is None:
            self._kill_at = time.monotonic() + _FATAL_GRACE_S

    def _report_dead_agent(self, agent: _Agent) -> None:
        """Tell the leader of a member whose agent cannot: its lease would take a while to run out.

        Runs in a thread of its own; without etcd the lease has to do.
        """
        died = time.monotonic()
        try:
            with open_store(self._urls, self._options.job, _STORE_TIMEOUT_S) as store:
                for entry in store.get_prefix(Keys.MEMBERS).entries.values():
                    member = MemberRecord.from_json(entry.value)
                    if member.slot == agent.slot and member.agent_pid == agent.process.pid:
                        departure = LeftRecord(
                            id=member.id,
                            slot=member.slot,
                            outcome="lost",
                            reason="signal",
                            detail=f"agent died with exit status {agent.process.returncode}",
                            code=EXIT_FATAL_LOSS,
                            since=died,
                            boot=boot_id(),
                        )
                        store.put(Keys.left(member.id), departure.to_json())
                        store.delete(entry.key)
                        leader = store.get(Keys.LEADER)
                        if leader and LeaderRecord.from_json(leader.value).id == member.id:
                            store.compare_and_delete(Keys.LEADER, leader.mod_revision)
        except StoreError as error:
            logger.error("cannot report the death of slot %d, its lease will run out: %s", agent.slot, error)

    def _handle_signals(self) -> None:
        while self._signals:
            self._interrupt(self._signals.pop(0))

    def _interrupt(self, signum: int) -> None:
        if self._interrupted is None:
            self._interrupted = signum
            self._stop()
        else:
            self._signal_agents(signal.SIGKILL)  # asked twice

    def _stop(self) -> None:
        if not self._stopping:
            self._stopping = True
            self._kill_at = time.monotonic() + self._options.grace_s + _AGENT_GRACE_S
            self._signal_agents(signal.SIGTERM)

    def _signal_agents(self, signum: int) -> None:
        for agent in self._agents.values():
            agent.process.send_signal(signum)
            if signum == signal.SIGTERM:
                agent.process.send_signal(signal.SIGCONT)

    def _exit_code(self) -> int:
        """See ``bamboo run --help``."""
        if self._interrupted is not None:
            return 128 + self._interrupted
        for outcome in ("failed", "stopped", "fatal"):
            for departure in self._departures:
                if departure.outcome == outcome:
                    return departure.code
        finished = any(departure.outcome == "finished" for departure in self._departures)
        return 0 if finished else EXIT_FATAL_LOSS


def _free_port(address: str) -> int:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as server:
        port: int = server.getsockname()[1]
        return port
