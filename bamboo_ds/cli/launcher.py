"""``bamboo run``: etcd if need be, one agent per slot, and the end of all of them."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace

import psutil

from ..control.access import embedded_etcd
from ..control.agent_settings import AgentSettings, MemberOptions
from ..control.claims import claimed
from ..control.reporting import emit_or_log
from ..errors import EXIT_FATAL_LOSS, ConfigError
from ..observe.events import EventWriter, RunFinished, RunStarted
from ..secret import JobSecret, given, keep
from . import guests, jobs
from .slots import OTHERS_S, Slots, free_port

EMBEDDED = "embedded"


@dataclass(frozen=True, kw_only=True)
class RunOptions(MemberOptions):
    """What ``bamboo run`` was asked for.

    Attributes:
        workers: number of slots.
        store: URLs of etcd, or ``embedded``.
        pipelines: their number, if the user has said it.
        prefix_output: whether each line of output begins with its slot.
        emulate_hosts: number of hosts that the slots are said to be on; ``None``: the one that they are on.
    """

    workers: int
    store: str
    pipelines: int | None
    prefix_output: bool
    emulate_hosts: int | None


class Launcher(Slots):
    """Runs one job. Use it once, in the main thread."""

    def __init__(self, options: RunOptions) -> None:
        options = replace(options, secret=given(os.environ) or JobSecret.new())
        super().__init__(options, range(options.workers), options.prefix_output)
        self._options = options

    def run(self) -> int:
        """Run to the end; returns the exit code.

        Raises :class:`LaunchError` or :class:`ConfigError` if the job cannot be started, ``StoreError``
        if etcd cannot be used.
        """
        options = self._options
        options.check_notices()
        with ExitStack() as stack:
            try:
                events = stack.enter_context(EventWriter(options.events))
            except OSError as error:
                raise ConfigError(f"cannot write events to {options.events}: {error}") from error
            stack.enter_context(self._prepared({child.pid for child in psutil.Process().children()}))
            if options.store == EMBEDDED:
                etcd = stack.enter_context(embedded_etcd(options.address, options.job, options.secret))
                urls = etcd.url
                self._watch_etcd(etcd.supervisor_pid, stack)
            else:
                urls = options.store
                stack.enter_context(claimed(urls, options.job))
            self._urls = urls
            state = jobs.this_process(options.job, urls)
            state.write()
            stack.callback(state.remove)
            keep(options.job, options.secret)
            begin = time.monotonic()
            command = list(options.command)
            emit_or_log(events, RunStarted(job=options.job, epoch=0, members=options.workers, command=command))
            self._handle_signals()
            if self._interrupted is None:
                self._start_all(urls, str(state.path))
            self._serve()
            self._join_reporters()
            code = self._exit_code(self._await_guests())
            seconds = time.monotonic() - begin
            emit_or_log(events, RunFinished(job=options.job, epoch=0, exit_code=code, run_seconds=seconds))
            return code

    def _start_all(self, urls: str, state_file: str) -> None:
        options = self._options
        port = free_port(options.address)
        for slot in range(options.workers):
            member = options.member_options()
            if options.emulate_hosts is not None:
                member["host"] = f"emulated-{slot * options.emulate_hosts // options.workers}"
            settings = AgentSettings(
                **member,
                slot=slot,
                world_size=options.workers,
                store=urls,
                parent_pid=os.getpid(),
                master_port=port,
                pipelines=options.pipelines,
                state_file=state_file,
                generation=0,
            )
            self._spawn(settings)

    def _await_guests(self) -> int | None:
        """Stay for members that have joined, as long as they go on; the job's exit code if there were any."""
        options = self._options
        if options.store != EMBEDDED and self._outcomes & {"left", "finished"}:
            return None  # the job needs nothing that is here
        ending = not self._outcomes.isdisjoint(("failed", "stopped", "fatal"))
        if (self._stopping or ending) and self._leave_at is None:
            self._leave_at = time.monotonic() + options.grace_s + OTHERS_S

        def pause(seconds: float) -> bool:
            self._attend(seconds)
            late = self._leave_at is not None and time.monotonic() >= self._leave_at
            return not (late or self._etcd_ended or self._hurried)

        return_s = 2 * options.bamboo.membership.lease_ttl_s
        quiet = self._stopping or ending
        return guests.await_end(self._urls, options.job, self._slots, pause, return_s, quiet, secret=options.secret)

    def _end_others(self, signum: int) -> None:
        """In the background, because etcd may not answer."""

        def tell() -> None:
            guests.tell_to_stop(self._urls, self._options.job, signum, "the launcher", self._secret)
            self._stop_soon()

        self._in_background(tell)

    def _exit_code(self, of_guests: int | None) -> int:
        """See ``bamboo run --help``. ``of_guests``: what the job has come to, if members that had joined ended it."""
        if self._interrupted is not None:
            return 128 + self._interrupted
        worst = self._worst()
        if worst is not None:
            return worst
        if of_guests is not None:
            return of_guests
        all_left = len(self._departures) == self._options.workers and self._outcomes == {"left"}
        if "finished" in self._outcomes or all_left:
            return 0
        return next((d.code for d in self._by_time if d.error is not None), EXIT_FATAL_LOSS)
