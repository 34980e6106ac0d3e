"""A launcher's possessions while its job runs: etcd, or the job's name in it, and its file, secret and events."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

import psutil

from ..control.registry.access import embedded_etcd
from ..control.registry.claims import claimed
from ..control.reporting import emit_or_log
from ..errors import ConfigError
from ..observe.events import Event, EventWriter, RunFinished
from ..secret import keep
from . import jobs
from .narration import Narration, banner
from .slots import Slots

EMBEDDED = "embedded"


def tell_finished(events: EventWriter, job: str, code: int, begin: float) -> None:
    """Emits the end of a job that began at ``begin`` (monotonic seconds)."""
    emit_or_log(events, RunFinished(job=job, epoch=0, exit_code=code, run_seconds=time.monotonic() - begin))


class JobOwner(Slots, ABC):
    """Owns a job from its start to its end: other commands find it, and no other one takes its name.

    Attributes:
        what: what takes part, for the terminal.
    """

    what: str

    def run(self, quiet: bool) -> int:
        """Runs to the end; returns the exit code. ``quiet``: the course of the job is not told.

        Raises:
            ConfigError, LaunchError: the job cannot be started.
            StoreError: etcd cannot be used.
        """
        options = self._options
        options.check_notices()
        with ExitStack() as stack:
            try:
                events = stack.enter_context(EventWriter(options.events))
            except OSError as error:
                raise ConfigError(f"cannot write events to {options.events}: {error}") from error
            narration = Narration(options, quiet)
            stack.callback(narration.end)
            stack.enter_context(self._prepared({child.pid for child in psutil.Process().children()}))
            state_file = self._own_job(stack)
            begin = time.monotonic()
            for event in self._beginning():
                emit_or_log(events, event)
            self._mailbox.handle_all()
            if self._interrupted is None:
                self._start(state_file, stack)
            store = self._options.store
            narration.begin(banner(options, self.what, store), store)
            self._follow()
            narration.leave()
            self._join_background()
            code = self._result()
            tell_finished(events, options.job, code, begin)
            return code

    def _own_job(self, stack: ExitStack) -> str:
        """Has an etcd, and the job's name in it; returns the path of the file that says where the job is."""
        options = self._options
        if options.store == EMBEDDED:
            etcd = stack.enter_context(embedded_etcd(options.address, options.job, options.secret))
            self._watch_etcd(etcd.supervisor_pid, stack)
            self._options = replace(options, store=etcd.url)
        else:
            stack.enter_context(claimed(options.store, options.job))
        state = jobs.this_process(options.job, self._options.store, events=options.events, logs=options.logs)
        state.write()
        stack.callback(state.remove)
        keep(options.job, options.secret)
        return str(state.path)

    def _beginning(self) -> Sequence[Event]:
        """The lines that are told when etcd is there."""
        return ()

    @abstractmethod
    def _start(self, state_file: str, stack: ExitStack) -> None:
        """Starts what the job consists of; ``stack`` ends what must not outlive it."""

    @abstractmethod
    def _follow(self) -> None:
        """Follows the job until its end."""

    @abstractmethod
    def _result(self) -> int:
        """Stays for members that go on; returns the job's exit code."""
