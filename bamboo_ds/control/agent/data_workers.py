"""Workers that an agent starts only to draw batches, for a pipeline at whose ends no other script runs."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import wait

from ...processes import reap_adopted
from .. import standard_input
from ..settings import AgentSettings
from .mailbox import Mailbox

logger = logging.getLogger("bamboo_ds.control.agent.data_workers")

#: Seconds between two looks at all processes of the host.
_LOOK_S = 1.0


class DataWorkers:
    """The data workers of one agent, each with an agent of its own. They end with this one."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._killed = False  # some agent of theirs was, so that its worker is ours when that has ended
        self._next_look = 0.0

    def start(self, own: AgentSettings, slot: int, rank: int) -> None:
        """Starts a worker in a slot of its own that joins as ``rank``; ``own``: of the agent that starts it."""
        logger.warning("starting a worker for rank %d: nobody else can draw its batches", rank)
        self._start(dataclasses.replace(own, slot=slot, script_rank=rank, generation=None))

    def start_extra(self, own: AgentSettings) -> None:
        """Starts the workers that a restart wants besides the agent's own; they give their roles to others soon."""
        for rank, slot in own.extra.items():
            logger.warning("starting a worker for rank %d as well: there are too few members", rank)
            self._start(dataclasses.replace(own, slot=slot, script_rank=rank))

    def _start(self, settings: AgentSettings) -> None:
        settings = dataclasses.replace(
            settings,
            feeder=True,
            guest=False,
            tells=False,
            parent_pid=os.getpid(),
            result_fd=None,
            state_file=None,
            extra={},
        )
        # It ends with us, at the latest by `end_descendants`.
        process = subprocess.Popen(
            settings.agent_command,
            env=settings.environment(),
            stdin=standard_input.inherited(),
            start_new_session=True,
        )
        self._processes.append(process)

    def reap(self, worker: int) -> None:
        """Forgets those that have ended, whom the kernel keeps until then, and what those have left that were killed.

        Args:
            worker: process id of the agent's own worker, which is not looked for.
        """
        ended = [process for process in self._processes if process.poll() is not None]
        self._processes = [process for process in self._processes if process not in ended]
        self._killed |= any(process.returncode < 0 for process in ended)
        now = time.monotonic()
        if self._killed and now >= self._next_look:
            self._next_look = now + _LOOK_S
            reap_adopted({worker, *(process.pid for process in self._processes)})

    def tell_to_leave(self) -> None:
        """The agent leaves, and they have to leave with it."""
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGUSR1)

    def terminate(self) -> None:
        """Ends all. Each says so in etcd, where others would wait for its lease, and gives up to lead if it does."""
        for process in self._processes:
            if process.poll() is None:
                process.terminate()

    def wait(self, mailbox: Mailbox, left_s: Callable[[], float | None]) -> None:
        """Waits for the end of all.

        Args:
            mailbox: what is posted there is done meanwhile.
            left_s: for how many seconds to wait on at most, ``None``: as long as it takes.
        """
        with ExitStack() as stack:
            living = [os.pidfd_open(process.pid) for process in self._processes if process.poll() is None]
            for pidfd in living:
                stack.callback(os.close, pidfd)
            while living and ((left := left_s()) is None or left > 0):
                mailbox.handle_next(left, living)
                ended = wait(living, 0.0)
                living = [pidfd for pidfd in living if pidfd not in ended]
