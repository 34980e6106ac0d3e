"""``bamboo launch``: another launcher, whose processes it does not let end each other."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import psutil

from ..control import standard_input
from ..control.settings import MemberOptions
from ..errors import LaunchError
from ..processes import die_with_parent, process_space, started
from ..secret import ENV_SECRET_FILE, NONE, given
from ..variables import ENV_CHECK_EXACT, ENV_CONFIG, ENV_EVENTS, ENV_JOB, ENV_LAUNCH, ENV_LOGS, ENV_STORE, ENV_TEE
from .owning import JobOwner

logger = logging.getLogger("bamboo_ds.launchers")

#: Names that DeepSpeed's file of variables for other hosts goes by.
_DEEPSPEED_FILE = "DS_ENV_FILE"
_DEEPSPEED_DEFAULT = ".deepspeed_env"


class Wrapper(JobOwner):
    """Runs another launcher, and stays until the job is over. Use it once, in the main thread.

    Args:
        options: what is known of the members; their ``command`` is that of the other launcher.
        config: DeepSpeed's configuration, for scripts that do not name it on their command line.
    """

    def __init__(self, options: MemberOptions, config: str | None) -> None:
        # Without one that the user gives, rank 0 makes one if all ranks are on its host.
        super().__init__(replace(options, secret=given(os.environ) or NONE), ())
        self._config = config
        self.what = f"started by {options.command[0]}"
        self._status: int | None = None
        self._members_code: int | None = None
        self._launcher: subprocess.Popen[bytes] | None = None

    def _start(self, state_file: str, stack: ExitStack) -> None:
        command, me = self._options.command, os.getpid()
        try:
            self._launcher = subprocess.Popen(
                command,
                env=self._environment(stack),
                stdin=standard_input.inherited(),
                start_new_session=True,  # Ctrl-C is for this process, which ends the members in order
                preexec_fn=lambda: die_with_parent(signal.SIGTERM, me),
            )
        except OSError as error:
            raise LaunchError(f"cannot start {command[0]}: {error}") from error
        self._own.add(self._launcher.pid)
        self._watch_process(self._launcher.pid, lambda: None, stack)

    def _environment(self, stack: ExitStack) -> dict[str, str]:
        """The environment of the launcher's processes."""
        options = self._options
        told = {
            ENV_STORE: options.store,
            ENV_JOB: options.job,
            ENV_LAUNCH: f"{os.getpid()} {started(os.getpid())} {process_space()}",
        }
        if options.events is not None:
            told[ENV_EVENTS] = options.events
        if options.logs is not None:
            told[ENV_LOGS] = os.path.dirname(options.logs)
            told[ENV_TEE] = str(int(options.tee))
        if "redundancy.check_exact" in options.settings.given:
            told[ENV_CHECK_EXACT] = str(options.bamboo.redundancy.check_exact)
        if self._config is not None:
            told[ENV_CONFIG] = os.path.abspath(self._config)
        if os.environ.get(ENV_SECRET_FILE):
            told[ENV_SECRET_FILE] = os.path.abspath(os.environ[ENV_SECRET_FILE])
        # To other hosts DeepSpeed passes what this file lists.
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="bamboo-launch-"))
        told[_DEEPSPEED_FILE] = str(Path(folder, "deepspeed_env"))
        Path(told[_DEEPSPEED_FILE]).write_text(deepspeed_variables(told, os.environ.get(_DEEPSPEED_FILE)))
        return {**os.environ, **told}

    def _follow(self) -> None:
        """Follows the launcher to its end, and then the members."""
        command = self._options.command[0]
        while self._launcher is not None and (status := self._launcher.poll()) is None:
            if self._attend_until_kill():
                self._signal_launcher(signal.SIGKILL)
        self._status = None if self._launcher is None else status
        if self._status and not self._stopping:
            logger.warning("%s has ended with %d; members of the job may go on", command, self._status)
        self._members_code = self._await_joined(quiet=True, departed=True)

    def _result(self) -> int:
        """The members' exit code; the launcher's own if there never were members."""
        status, code = self._status, self._members_code
        if self._interrupted is not None:
            return 128 + self._interrupted
        if code is not None:
            if status:
                command = self._options.command[0]
                logger.warning("%s has ended with %d; the job's exit code is %d", command, status, code)
            return code
        return 0 if status is None else status if status >= 0 else 128 - status

    # -- the end ------------------------------------------------------------------------------------

    def _terminate(self) -> None:
        self._signal_launcher(signal.SIGTERM)

    def _signal_launcher(self, signum: int) -> None:
        """Signal the launcher and what it has started in its session, which rank supervisors here are not in."""
        if self._launcher is not None and self._launcher.poll() is None:
            os.killpg(self._launcher.pid, signum)

    def _signal_agents(self, signum: int) -> None:
        if signum == signal.SIGKILL:
            self._signal_launcher(signum)
            return
        for child in psutil.Process().children():
            if child.pid not in self._own:  # a rank supervisor: its parent is gone
                child.send_signal(signum)

    def _end_others(self, signum: int) -> None:
        self._tell_others(signum, "bamboo launch")


def deepspeed_variables(told: dict[str, str], file: str | None) -> str:
    """The text of DeepSpeed's file of variables: what the user's own files list, and ``told``."""
    name = file or _DEEPSPEED_DEFAULT
    lines: list[str] = []
    for folder in (os.path.expanduser("~"), "."):
        path = Path(folder, name)
        if path.is_file():
            lines += [line for line in path.read_text().splitlines() if line.strip()]
    lines += [f"{name}={value}" for name, value in told.items() if name != _DEEPSPEED_FILE]
    return "".join(f"{line}\n" for line in lines)
