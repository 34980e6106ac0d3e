"""Options that ``bamboo run`` and ``bamboo join`` have in common."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import click

from ..config import BambooConfig, bamboo_config, config_path_from_argv
from ..control.agent_settings import MemberOptions, script_command
from . import jobs


@dataclass(frozen=True)
class MemberArguments:
    """What the command line says of members; ``None`` where the ``"bamboo"`` block decides. See the options' help."""

    address: str
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

    def options(self, job: str, zone: str = "", host: str | None = None) -> dict[str, Any]:
        """Values of :class:`~bamboo_ds.control.agent_settings.MemberOptions`, by name.

        Raises:
            ConfigError: the block is wrong, or the job's name.
        """
        return MemberOptions.from_block(
            block_of(self.config, self.arguments),
            job=jobs.check_name(job),
            address=self.address,
            command=script_command(self.script, self.arguments, self.module),
            zone=zone,
            host=host,
            events=None if self.events is None else os.path.abspath(self.events),
            lease_ttl_s=self.lease_ttl_s,
            heartbeat_timeout_s=self.heartbeat_timeout_s,
            settle_s=None if self.settle_ms is None else self.settle_ms / 1000,
            grace_s=self.grace_s,
            max_restarts=self.max_restarts,
            rejoin_s=self.rejoin_s,
        ).member_options()


_SHARED = (
    click.option("--address", default="127.0.0.1", show_default=True, help="IP address to bind to."),
    click.option("--events", type=click.Path(dir_okay=False), help="File to append events to, as JSON lines."),
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
    block = bamboo_config(path) if path else None
    return block or BambooConfig()
