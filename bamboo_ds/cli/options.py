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
from ..control.agent_settings import MemberOptions, script_command
from ..errors import ConfigError
from ..launched import ENV_ADDRESS, ENV_CHECK_EXACT, ENV_EVENTS, ENV_JOB, ENV_LAUNCH, ENV_MEMBER, ENV_STORE
from . import jobs

#: Where members of ``bamboo run`` meet unless it is told.
LOOPBACK = "127.0.0.1"
NAME_THE_JOB = f"--store ({ENV_STORE}) needs --job ({ENV_JOB}): an etcd may serve several jobs"


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
    "--check-exact": ENV_CHECK_EXACT,
}


def variable_option(name: str, **attributes: Any) -> Callable[..., Any]:
    """An option of the same name as a variable, ``BAMBOO_…``, which its default may come from."""
    variable = _VARIABLES[name]
    return click.option(name, cls=_OfTheUser, envvar=variable, show_envvar=True, **attributes)


events_option = variable_option(
    "--events", type=click.Path(dir_okay=False), help="File to append events to, as JSON lines."
)

check_option = variable_option(
    "--check-exact",
    type=click.IntRange(min=0),
    metavar="N",
    help="In the first N steps rehearse the takeover of every stage and compare everything, bit for bit. Overrides "
    "bamboo.redundancy.check_exact.",
)


@dataclass(frozen=True)
class MemberArguments:
    """What the command line says of members; ``None`` where the ``"bamboo"`` block decides. See the options' help."""

    address: str | None
    events: str | None
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
        """Values of :class:`~bamboo_ds.control.agent_settings.MemberOptions`, by name.

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


_SHARED = (
    variable_option(
        "--address",
        help=f"IP address that others reach this host at.  [default: {LOOPBACK}; of bamboo join: the one towards etcd]",
    ),
    events_option,
    click.option("--config", type=click.Path(exists=True, dir_okay=False), help="DeepSpeed configuration to read."),
    click.option("--lease-ttl-s", type=click.FloatRange(min=1), help="Overrides bamboo.membership.lease_ttl_s."),
    click.option("--heartbeat-timeout-s", type=click.FloatRange(min=0.5), help="Overrides the block's setting."),
    click.option("--settle-ms", type=click.FloatRange(min=0), help="Overrides the block's setting."),
    click.option("--max-restarts", type=click.IntRange(min=0), help="Overrides bamboo.recovery.max_restarts."),
    click.option("--rejoin-s", type=click.FloatRange(min=0), help="Overrides bamboo.membership.rejoin_s."),
    click.option(
        "--grace-s", type=click.FloatRange(min=0), default=5.0, show_default=True, help="From SIGTERM to SIGKILL."
    ),
    click.option("-m", "--module", is_flag=True, help="SCRIPT is the name of a module."),
    click.argument("script"),
    click.argument("arguments", nargs=-1, type=click.UNPROCESSED),
)


def member_arguments(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the shared options; it gets them as its first argument, a :class:`MemberArguments`."""
    names = [field.name for field in fields(MemberArguments)]

    @functools.wraps(command)
    def call(**values: Any) -> None:
        command(MemberArguments(**{name: values.pop(name) for name in names}), **values)

    decorated: Callable[..., None] = call
    for decorator in reversed(_SHARED):
        decorated = decorator(decorated)
    return decorated


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
