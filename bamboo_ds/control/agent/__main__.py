"""The process of an agent, whose settings are in its environment (:mod:`bamboo_ds.control.settings`)."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path

from ...errors import EXIT_EVICTED, EXIT_LEFT, ConfigError, LaunchError
from ...observe import logs
from ...observe.outlet import Outlet, Sink
from ...processes import adopt_orphans, die_with_parent
from ...secret import forget
from ..registry.records import LeftRecord
from ..settings import AgentSettings, settings_told
from .agent import Agent
from .output import log_to_file
from .reexec import reexecute

logger = logging.getLogger("bamboo_ds.control.agent")

_WRONG_USAGE = 2
#: Exit codes of guests whose job goes on without them. Who keeps them running must tell that from a job that is over.
_GONE = {"left": EXIT_LEFT, "evicted": EXIT_EVICTED}


def _serve(settings: AgentSettings) -> LeftRecord:
    """Runs one worker, or waits for the job's restart; re-executes this process where the slot goes on."""
    if settings.waiting:
        from .waiting import WaitingAgent

        logs.show_by(Outlet(Sink(2)))
        agent: Agent | WaitingAgent = WaitingAgent(settings)
    else:
        agent = Agent(settings)
    departure = agent.run()
    if agent.next is not None:
        reexecute(agent.next)
    assert departure is not None
    return departure


def main() -> int:
    """Runs an agent; returns the exit code of its worker, 128 + n for signal n; see also :data:`_GONE`."""
    logs.configure()
    try:
        settings = settings_told(os.environ)
    except ConfigError as error:
        logger.error("%s", error)
        return _WRONG_USAGE
    log_to_file(settings)
    if not settings.guest:
        die_with_parent(signal.SIGTERM, settings.parent_pid)
    adopt_orphans()
    try:
        departure = _serve(settings)
    except (ConfigError, LaunchError) as error:
        logger.error("%s", error)
        return 1
    if settings.result_fd is not None:
        try:
            os.write(settings.result_fd, departure.to_json().encode() + b"\n")
        except BrokenPipeError:
            logger.info("the launcher is gone and hears no results any more")
    if settings.state_file is not None and os.getppid() != settings.parent_pid:
        forget(settings.job, Path(settings.state_file), settings.parent_pid)  # the launcher cannot do it any more
    if settings.guest and departure.outcome in _GONE:
        return _GONE[departure.outcome]
    return departure.code


if __name__ == "__main__":
    exit_code = main()
    logs.end()
    # A thread may still be waiting for an etcd that is gone; nothing that it could do matters any more.
    os._exit(exit_code)
