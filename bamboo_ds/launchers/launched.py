"""A process that another launcher has started: it becomes the supervisor of its rank, whose worker runs the script.

``deepspeed``, ``torchrun``, ``srun`` and others start one process per rank and know nothing of agents. When such a
process comes to ``deepspeed.init_distributed`` and the job has the block, all of them agree on an etcd, and each
replaces itself (``exec``) by a rank supervisor, :mod:`.supervisor`. That runs the agent, and the agent runs the
command line of the process again, as its worker. The launcher goes on seeing the process that it has started.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NoReturn

from ..config import BambooConfig
from ..control.settings import AgentSettings
from ..errors import ConfigError
from ..job_settings import JobSettings
from ..observe import logs
from ..processes import process_space, started
from ..secret import JobSecret, given
from ..variables import ENV_EVENTS, ENV_LAUNCH, ENV_LOGS, ENV_TEE, checked_steps
from . import jobs
from .folders import EVENTS, folder_of
from .meeting import Meeting, StartDecision, address
from .ranks import Launched
from .supervisor import SupervisorTask, supervisor_command


def become_supervisor(me: Launched, block: BambooConfig | None, timeout: timedelta) -> NoReturn:
    """Agrees with the processes of the other ranks, then replaces this process. Does not return.

    Args:
        block: that of the configuration; ``None``: that is not known yet.

    Raises:
        ConfigError: the process cannot be started again by its command line, the job's secret cannot be had, or the
            block is wrong or not that of rank 0.
        LaunchError: the etcd of the job cannot be had, or another process than rank 0 has answered in its place.
    """
    command = own_command()
    own = given(os.environ)
    settings = JobSettings.resolve(block, {"check_exact": checked_steps(os.environ)})
    meeting, decision = Meeting(me, timeout), StartDecision(me, own, settings)
    try:
        shared, secret = meeting.agree(own, decision)
    except BaseException:  # goes on up; only what was begun must not stay
        if decision.etcd is not None:
            decision.etcd.stop()
        raise
    etcd = None if decision.etcd is None else decision.etcd.supervisor_pid
    arguments, environment = _supervisor(me, settings, command, shared, secret, etcd)
    logs.end()
    os.execve(sys.executable, arguments, environment)


def own_command() -> tuple[str, ...]:
    """The command line that starts this process again.

    Raises:
        ConfigError: there is none.
    """
    arguments = sys.orig_argv[1:]
    if multiprocessing.parent_process() is not None or "--multiprocessing-fork" in arguments:
        raise ConfigError(
            "this rank was started by multiprocessing, so that no command line starts it again: start the script by "
            "`bamboo run`, `bamboo launch`, deepspeed, torchrun or srun"
        )
    main: Any = sys.modules.get("__main__")
    if not arguments or arguments[0] == "-" or not (hasattr(main, "__file__") or "-c" in arguments):
        raise ConfigError("this rank reads its script from standard input: give it a file, it is started twice")
    return (sys.executable, *arguments)


def _supervisor(
    me: Launched,
    own: JobSettings,
    command: tuple[str, ...],
    shared: Mapping[str, Any],
    secret: JobSecret,
    etcd: int | None,
) -> tuple[list[str], dict[str, str]]:
    """The command of the rank supervisor, and its environment; ``own``: what this rank would go by."""
    job, settings = jobs.check_name(shared["job"]), JobSettings.model_validate(shared["settings"])
    logs = folder_of(job, os.environ.get(ENV_LOGS))
    agent = AgentSettings(
        job=job,
        store=shared["store"],
        address=address(me),
        command=command,
        events=os.environ.get(ENV_EVENTS) or (os.path.join(logs, EVENTS) if logs else None),
        logs=logs,
        tee=os.environ.get(ENV_TEE, "1") != "0",
        secret=secret,
        settings=settings.of_member(own),
        slot=me.rank,
        world_size=me.world_size,
        parent_pid=os.getpid(),
        master_port=me.master_port,
        generation=0,
        launched=True,
    )
    agent.check_notices()
    wrapper = _wrapper_here()
    task = SupervisorTask(
        owner=me.rank == 0 and not shared["wrapped"],
        supervisor=etcd,
        embedded=shared["embedded"],
        wrapper=None if wrapper is None else wrapper[0],
        wrapper_started=None if wrapper is None else wrapper[1],
    )
    return supervisor_command(task), agent.environment()


def _wrapper_here() -> tuple[int, int] | None:
    """Process id and start of ``bamboo launch``, if it runs on this host."""
    text = os.environ.get(ENV_LAUNCH)
    if text is None:
        return None
    pid, begin, space = text.split(" ", 2)
    here = space == process_space() and started(int(pid)) == int(begin)
    return (int(pid), int(begin)) if here else None
