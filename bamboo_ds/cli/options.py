"""Options that commands have in common, and what can be told of a script before anything is started."""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import os
import re
import warnings
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import click
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from ..config import BLOCK, BambooConfig, bamboo_config, config_path_from_argv, load_config
from ..control.agent.command import script_command
from ..control.registry.access import open_store
from ..control.registry.mirror import Mirror
from ..control.settings import MemberOptions
from ..errors import ConfigError
from ..job_settings import JobSettings, paths_by_name
from ..launchers import jobs
from ..launchers.network import LOOPBACK
from ..launchers.owning import EMBEDDED
from ..secret import NONE, JobSecret
from ..store.records import Snapshot
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


class _Setting(click.ParamType):
    """A value of one of the block's settings."""

    name = "value"

    def __init__(self, field: FieldInfo) -> None:
        kind: Any = field.annotation
        for constraint in field.metadata:
            kind = Annotated[kind, constraint]
        self._values: TypeAdapter[Any] = TypeAdapter(kind)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._values.validate_strings(value)
        except ValidationError as error:
            self.fail(f"{value!r}: {error.errors()[0]['msg']}", param, ctx)


def setting_option(name: str) -> Callable[[Command], Command]:
    """The option of a setting, made from its field of the block."""
    path = paths_by_name()[name]
    part: Any = BambooConfig.model_fields[path.partition(".")[0]].annotation
    field: FieldInfo = part.model_fields[name]
    words = re.sub(r"\[([^]]*)\]\([^)]*\)|`", r"\1", field.description or "")
    told: dict[str, Any] = {
        "type": _Setting(field),
        "help": f"{words[0].upper()}{words[1:]}. In place of {BLOCK}.{path}.",
    }
    option = f"--{name.replace('_', '-')}"
    return variable_option(option, **told) if option in _VARIABLES else click.option(option, **told)


def ranks_option(members: str) -> Callable[[Command], Command]:
    """The option ``--ranks`` of a command; ``members`` is its option for the number of members that start the job."""
    return click.option(
        "--ranks",
        type=click.IntRange(min=1),
        metavar="R",
        help="Ranks (stages times pipelines), if there are more than members that start the job; so many can share the "
        f"work.  [default: {members}]",
    )


def check_ranks(ranks: int | None, option: str, members: int | None) -> None:
    """Raises :class:`ConfigError` if that many ``members``, which ``option`` gives, cannot start so many ``ranks``."""
    if ranks is None:
        return
    if members is None:
        raise ConfigError(f"--ranks needs {option}: the job that runs already has its number of ranks")
    if ranks < members:
        raise ConfigError(
            f"--ranks {ranks} is less than {option} {members}: a member has at least one; take {option} {ranks}, and "
            "let the others join"
        )


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
    setting_option("check_exact"),
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


def snapshot_of(location: jobs.JobLocation, secret: JobSecret = NONE) -> Snapshot:
    """The state of a job in etcd; raises :class:`ConfigError` if etcd has no key of it."""
    with open_store(location.store, location.job, _TIMEOUT_S, secret) as store:
        snapshot = store.get_prefix("")
    if not snapshot.entries:
        raise ConfigError(f"no job {location.job!r} is known at {location.store}")
    return snapshot


def read_job(location: jobs.JobLocation) -> Mirror:
    """The keys of a job; raises :class:`ConfigError` if there is none."""
    return Mirror(snapshot_of(location))


_member = together(
    variable_option(
        "--address",
        help=f"IP address that others reach this host at.  [default: {LOOPBACK}; of bamboo join: the one towards etcd]",
    ),
    started,
    *map(setting_option, ("lease_ttl_s", "heartbeat_timeout_s", "settle_ms", "max_restarts", "rejoin_s")),
    click.option("-m", "--module", is_flag=True, help="SCRIPT is the name of a module."),
    click.argument("script"),
    click.argument("arguments", nargs=-1, type=click.UNPROCESSED),
)


def member_options(command: Command) -> Command:
    """Gives a command the options of members.

    It gets what the command line says of members as its first argument, :class:`MemberOptions`; empty are in these the
    name of the job and the address where the user has named none. ``--logs`` and ``--config`` it gets as well.
    """

    @functools.wraps(command)
    def call(script: str, arguments: tuple[str, ...], module: bool, tee: bool, grace_s: float, **values: Any) -> None:
        settings = {name: values.pop(name) for name in paths_by_name() if name in values}
        events, config = values.pop("events"), values["config"]
        options = MemberOptions(
            job=check_name(values.pop("job")),
            address=values.pop("address") or "",
            command=script_command(script, arguments, module),
            events=None if events is None else os.path.abspath(events),
            tee=tee,
            grace_s=grace_s,
            settings=JobSettings.resolve(block_of(config, arguments), settings),
        )
        check_script(script, module)
        command(options, **values)

    return _member(call)


def check_name(job: str | None) -> str:
    """``job``, as :func:`.jobs.check_name` has it; empty without one."""
    return "" if job is None else jobs.check_name(job)


def block_of(config: str | None, arguments: Sequence[str]) -> BambooConfig | None:
    """The ``"bamboo"`` block of ``--config``, or of the script's own configuration, or ``None``."""
    path = config or config_path_from_argv(arguments)
    loaded = load_config(path) if path else {}
    if path and BLOCK not in loaded:
        what = f'the configuration has no "{BLOCK}" block'
        click.echo(f"bamboo: {what}: unless the script adds one, the loss of a worker ends the job", err=True)
    elif not path:
        what = "the command line names no configuration (--deepspeed_config FILE)"
        click.echo(f"bamboo: {what}: what it starts must give one to deepspeed.initialize", err=True)
    return bamboo_config(loaded)


def check_script(script: str, module: bool) -> None:
    """Finds what would end every worker at once; raises :class:`ConfigError`."""
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
