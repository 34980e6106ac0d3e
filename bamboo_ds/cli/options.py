"""Options that commands have in common, and what can be told of a script before anything is started."""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import os
import warnings
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import click

from ..config import BLOCK, BambooConfig, bamboo_config, config_path_from_argv, load_config
from ..control.agent.command import script_command
from ..control.registry.access import open_store
from ..control.registry.mirror import Mirror
from ..control.settings import MemberOptions
from ..errors import ConfigError
from ..launchers import jobs
from ..launchers.network import LOOPBACK
from ..launchers.owning import EMBEDDED
from ..variables import (
    ENV_ADDRESS,
    ENV_CHECK_EXACT,
    ENV_EVENTS,
    ENV_JOB,
    ENV_LAUNCH,
    ENV_LOGS,
    ENV_MEMBER,
    ENV_STORE,
    ENV_TEE,
)

_TIMEOUT_S = 5.0

#: Settings of a job that ``bamboo profile`` measures: all instructions and all bytes are told, and nothing moves. The
#: first steps are as all others.
MEASURED = {
    "observe.timeline": "all",
    "topology.memory_limit_mb": 2.0**40,
    "topology.min_gain": 0.99,
    "redundancy.check_exact": 0,
}

Command = Callable[..., None]


class _OfTheUser(click.Option):
    """An option with a variable, which does not count where the variable is of another job that this process is in."""

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        inherited = ENV_MEMBER in os.environ or ENV_LAUNCH in os.environ
        return None if inherited else super().resolve_envvar_value(ctx)


_VARIABLES = {
    "--store": ENV_STORE,
    "--job": ENV_JOB,
    "--address": ENV_ADDRESS,
    "--events": ENV_EVENTS,
    "--logs": ENV_LOGS,
    "--tee/--no-tee": ENV_TEE,
    "--check-exact": ENV_CHECK_EXACT,
}


def variable_option(name: str, **attributes: Any) -> Callable[[Command], Command]:
    """An option of the same name as a variable, ``BAMBOO_…``, which its default may come from."""
    return click.option(name, cls=_OfTheUser, envvar=_VARIABLES[name], show_envvar=True, **attributes)


def together(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Several options as one decorator, in this order."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


#: What commands have that start a job.
new_job = together(
    variable_option("--store", default=EMBEDDED, show_default=True, help="URLs of etcd, separated by commas."),
    variable_option("--job", help="Name of the job.  [default: random]"),
    variable_option(
        "--check-exact",
        type=click.IntRange(min=0),
        metavar="N",
        help="In the first N steps rehearse the takeover of every stage and compare everything, bit for bit; 0: in "
        "none. Overrides bamboo.redundancy.check_exact.",
    ),
)
#: What commands have that are about a job that runs; see :func:`~bamboo_ds.launchers.jobs.locate`.
running_job = together(
    variable_option("--job", help="Name of the job.  [default: the only one that runs here]"),
    variable_option("--store", help="URLs of its etcd.  [default: found through the launcher on this host]"),
)
#: What commands have that start processes of a job.
started = together(
    variable_option(
        "--events",
        type=click.Path(dir_okay=False),
        help="File to append events to, as JSON lines.  [default: JOB/events.jsonl in the folder of --logs]",
    ),
    variable_option(
        "--logs",
        type=click.Path(file_okay=False),
        help="Folder for logs; each job has a folder of its name there, with its events, and a file for each worker "
        "and agent.  [default: bamboo-logs; of bamboo join: that of the job, if its launcher is on this host]",
    ),
    variable_option(
        "--tee/--no-tee",
        default=True,
        help="Copy what workers write into files of that folder.  [default: tee]",
    ),
    click.option("--quiet", is_flag=True, help="Say nothing about the course of the job."),
    click.option("--config", type=click.Path(exists=True, dir_okay=False), help="DeepSpeed configuration to read."),
    click.option(
        "--grace-s", type=click.FloatRange(min=0), default=5.0, show_default=True, help="From SIGTERM to SIGKILL."
    ),
)


def read_job(location: jobs.JobLocation) -> Mirror:
    """The keys of a job; raises :class:`ConfigError` if there is none."""
    with open_store(location.store, location.job, _TIMEOUT_S) as store:
        snapshot = store.get_prefix("")
    if not snapshot.entries:
        raise ConfigError(f"no job {location.job!r} is known at {location.store}")
    return Mirror(snapshot)


@dataclass(frozen=True)
class MemberArguments:
    """What the command line says of members; ``None`` where the ``"bamboo"`` block decides. See the options' help."""

    address: str | None
    events: str | None
    logs: str | None
    tee: bool
    config: str | None
    lease_ttl_s: float | None
    heartbeat_timeout_s: float | None
    settle_ms: float | None
    max_restarts: int | None
    rejoin_s: float | None
    grace_s: float
    module: bool
    script: str
    arguments: tuple[str, ...]

    def options(
        self, job: str, address: str, zone: str = "", host: str | None = None, check_exact: int | None = None
    ) -> dict[str, Any]:
        """Values of :class:`~bamboo_ds.control.settings.MemberOptions`, by name.

        Args:
            address: unless ``--address`` names another one.

        Raises:
            ConfigError: the block is wrong, or the job's name, or the script cannot be run.
        """
        options = MemberOptions.from_block(
            block_of(self.config, self.arguments),
            job=jobs.check_name(job),
            address=self.address or address,
            command=script_command(self.script, self.arguments, self.module),
            zone=zone,
            host=host,
            events=None if self.events is None else os.path.abspath(self.events),
            tee=self.tee,
            lease_ttl_s=self.lease_ttl_s,
            heartbeat_timeout_s=self.heartbeat_timeout_s,
            settle_ms=self.settle_ms,
            grace_s=self.grace_s,
            max_restarts=self.max_restarts,
            rejoin_s=self.rejoin_s,
            check_exact=check_exact,
        ).member_options()
        check_script(self.script, self.module)
        return options


_member = together(
    variable_option(
        "--address",
        help=f"IP address that others reach this host at.  [default: {LOOPBACK}; of bamboo join: the one towards etcd]",
    ),
    started,
    click.option("--lease-ttl-s", type=click.FloatRange(min=1), help="Overrides bamboo.membership.lease_ttl_s."),
    click.option("--heartbeat-timeout-s", type=click.FloatRange(min=0.5), help="Overrides the block's setting."),
    click.option("--settle-ms", type=click.FloatRange(min=0), help="Overrides the block's setting."),
    click.option("--max-restarts", type=click.IntRange(min=0), help="Overrides bamboo.recovery.max_restarts."),
    click.option("--rejoin-s", type=click.FloatRange(min=0), help="Overrides bamboo.membership.rejoin_s."),
    click.option("-m", "--module", is_flag=True, help="SCRIPT is the name of a module."),
    click.argument("script"),
    click.argument("arguments", nargs=-1, type=click.UNPROCESSED),
)


def member_arguments(command: Command) -> Command:
    """Give a command the shared options; it gets them as its first argument, a :class:`MemberArguments`."""
    names = [field.name for field in fields(MemberArguments)]

    @functools.wraps(command)
    def call(**values: Any) -> None:
        command(MemberArguments(**{name: values.pop(name) for name in names}), **values)

    return _member(call)


def block_of(config: str | None, arguments: Sequence[str]) -> BambooConfig:
    """The ``"bamboo"`` block that agents go by, from ``--config`` or from the script's own configuration."""
    path = config or config_path_from_argv(arguments)
    loaded = load_config(path) if path else {}
    if path and BLOCK not in loaded:
        what = f'the configuration has no "{BLOCK}" block'
        click.echo(f"bamboo: {what}: unless the script adds one, the loss of a worker ends the job", err=True)
    return bamboo_config(loaded) or BambooConfig()


def check_script(script: str, module: bool) -> None:
    """Find what would end every worker at once; raises :class:`ConfigError`."""
    if module:
        name = script.partition(".")[0]  # looking for what is inside a package would execute it
        if not importlib.machinery.PathFinder.find_spec(name, [os.getcwd()]) and not importlib.util.find_spec(name):
            raise ConfigError(f"there is no module {name!r} to run; it is looked for from the working directory on")
        return
    path = Path(script)
    if not path.exists():
        raise ConfigError(f"there is no script {script!r}")
    if path.is_dir() or path.suffix == ".pyc" or zipfile.is_zipfile(path):
        return  # Python runs these, too
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they are for those who run it
            compile(path.read_bytes(), script, "exec", dont_inherit=True)
    except SyntaxError as error:
        raise ConfigError(f"the script {script} is not valid Python: {error.msg} (line {error.lineno})") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"the script {script} cannot be read: {error}") from error
