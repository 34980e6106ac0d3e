"""Members more: ``bamboo join`` with the job's own command."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..control.registry.records import MemberRecord
from .faults import Fault
from .injections import Impossible, Injection
from .situation import JobSituation

#: Seconds from the start of a joiner to its admission.
JOIN_S = 180.0
_LOG_TAIL = 1500


@dataclass(frozen=True)
class JoinCommand:
    """The command that starts a joiner.

    Attributes:
        store: URLs of etcd.
        job: name of the job.
        member: one of the job on this host; joiners have its address, and write events where it does.
        command: what the workers execute, from the job's ``spec``.
        env: environment to start in.
        folder: working directory to start in.
        logs: folder for the output.
    """

    store: str
    job: str
    member: MemberRecord | None
    command: tuple[str, ...]
    env: Mapping[str, str]
    folder: str
    logs: Path

    def arguments(self) -> list[str]:
        """The command line; raises :class:`Impossible` if the job's command is unknown."""
        rest = list(self.command)
        if rest[:1] and rest[1:2] == ["-u"]:
            rest = rest[2:]
        if not rest:
            raise Impossible("the job does not say what its workers execute: nothing can join it")
        words = [sys.executable, "-m", "bamboo_ds.cli.main", "join", "--store", self.store, "--job", self.job]
        if self.member is not None:
            words += ["--address", self.member.address]
        if self.member is not None and self.member.events is not None:
            words += ["--events", self.member.events]
        if rest[0] == "-m":
            return [*words, "-m", *rest[1:]]
        return [*words, *rest]


class Join(Injection):
    """A joiner from its start to its admission. Its process becomes the agent, so their numbers are the same."""

    def __init__(self, fault: Fault, command: JoinCommand, number: int) -> None:
        super().__init__(fault)
        self._command = command
        self._log = command.logs / f"join-{number}.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.member: str | None = None

    def begin(self) -> None:
        arguments = self._command.arguments()
        self.began = time.monotonic()
        self.due = self.began + JOIN_S
        with open(self._log, "wb") as log:
            self.process = subprocess.Popen(
                arguments,
                env=dict(self._command.env),
                cwd=self._command.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for us, who end it in order
            )
        self.pids = [self.process.pid]

    def record(self, situation: JobSituation) -> MemberRecord | None:
        """The member that it has become, while it is registered."""
        pid = self.process.pid if self.process else None
        return next((record for record in situation.members.values() if record.agent_pid == pid), None)

    def done(self, situation: JobSituation) -> bool:
        assert self.process is not None
        record = self.record(situation)
        if record is not None and self.member is None:
            self.member = record.id
            self.members, self.slots = [record.id], [record.slot]
        if situation.plan is not None and self.member in situation.plan.members:
            self.confirmed = True
            self.seconds = time.monotonic() - self.began
            return True
        code = self.process.poll()
        if code is not None:
            self.detail = f"it ended with exit code {code} before it was admitted: {self._tail()}"
            return True
        if time.monotonic() >= (self.due or 0.0):
            self.detail = f"it was not admitted within {JOIN_S:.0f} s: {self._tail()}"
            return True
        return False

    @property
    def alive(self) -> bool:
        """Whether its process lives."""
        return self.process is not None and self.process.poll() is None

    def ended(self, timeout_s: float) -> bool:
        """Whether its process has ended (or never begun), after at most ``timeout_s`` seconds."""
        if self.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(max(0.0, timeout_s))
        return not self.alive

    def end(self, grace_s: float) -> None:
        """Ends the joiner: SIGTERM, after ``grace_s`` seconds SIGKILL. Idempotent."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(grace_s)
        if self.process.poll() is None:
            self.process.kill()  # the kernel ends its worker with it
            self.process.wait()

    def _tail(self) -> str:
        with open(self._log, "rb") as file:
            file.seek(max(0, os.path.getsize(self._log) - _LOG_TAIL))
            return file.read().decode(errors="replace").strip()
