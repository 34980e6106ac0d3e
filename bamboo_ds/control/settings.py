"""What an agent is told: about the job, about its slot, and the settings of the ``"bamboo"`` block.

A new setting is a field of its block (:mod:`bamboo_ds.config`), and is read where it is used: as
``settings.bamboo.<path>`` by agents and leaders, which get the settings whole, as ``job.settings.<path>`` by workers.
What else an agent is told is a field here; its command line is made from the fields and parsed by them.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from datetime import datetime, timezone
from functools import cached_property
from typing import Any, get_args, get_origin, get_type_hints

from ..config import BambooConfig, NoticesConfig, paths_by_name
from ..secret import ENV_SECRET, ENV_SECRET_FILE, NONE, JobSecret, handed
from ..variables import ENV_STORE
from .notices import build_sources
from .registry.access import ENV_NOTICES
from .registry.records import JobRecord

#: What is not on a command line, which everybody can read; so are ``block.notices``, which may have a password.
_IN_THE_ENVIRONMENT = ("store", "secret")


@dataclass(frozen=True, kw_only=True)
class MemberOptions:
    """What a member goes by: its agent, and those who start agents.

    Attributes:
        job: name of the job.
        address: IP address that other members reach this one at.
        command: what the worker executes.
        zone: failure zone, for the planner.
        host: the failure domain, if it is another one than the machine by its name.
        events: file to append events to.
        logs: folder of the job's logs; ``None``: there is none on this host.
        tee: what workers write goes into files of that folder, too.
        grace_s: seconds between SIGTERM and SIGKILL for a worker.
        secret: the job's.
        block: the ``"bamboo"`` block of the configuration that the command line names.
        overrides: settings that the command line gives in place of the block's, by path. They hold for the worker, too,
            whose script may have another block.
    """

    job: str
    address: str = "127.0.0.1"
    command: tuple[str, ...]
    zone: str = ""
    host: str | None = None
    events: str | None = None
    logs: str | None = None
    tee: bool = True
    grace_s: float = 5.0
    secret: JobSecret = NONE
    block: BambooConfig = field(default_factory=BambooConfig)
    overrides: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def bamboo(self) -> BambooConfig:
        """The settings: the block with what overrides it."""
        return self.block.overridden(self.overrides)

    @classmethod
    def from_block(cls, block: BambooConfig, **others: Any) -> MemberOptions:
        """The options of ``block`` and ``others``, by name: fields, or settings that override the block's.

        Of ``others`` ``None`` leaves a setting to the block, and a field to its default.

        Raises:
            ConfigError: two settings contradict each other.
        """
        given = {name: value for name, value in others.items() if value is not None}
        paths = paths_by_name()
        overrides = {paths[name]: given.pop(name) for name in list(given) if name in paths}
        options = MemberOptions(block=block, overrides=overrides, **given)
        options.bamboo.check()
        return options

    def member_options(self) -> dict[str, Any]:
        """These options alone, by name, without what a subclass adds."""
        return {each.name: getattr(self, each.name) for each in fields(MemberOptions)}

    def check_notices(self) -> None:
        """Raise :class:`ConfigError` if the sources of notices cannot be asked. The agent asks, under its own name."""
        build_sources(self.bamboo.notices, os.environ, {"slot": "0", "member": "m0"})


def job_record(options: MemberOptions, world_size: int, pipelines: int | None = None) -> JobRecord:
    """What etcd keeps of a job that begins now."""
    return JobRecord(
        job=options.job,
        world_size=world_size,
        pipelines=pipelines,
        command=options.command,
        min_gain=options.bamboo.topology.min_gain,
        standby_replicas=options.bamboo.standby.replicas,
        zones_apart=options.bamboo.topology.zones_apart,
        since=datetime.now(timezone.utc),
    )


@dataclass(frozen=True, kw_only=True)
class AgentSettings(MemberOptions):
    """The settings of one agent.

    Attributes:
        slot: number of the slot, unique in the job.
        home: ``RANK`` of the worker of a slot that joins a running job; ``None``: the slot is there from the start,
            its number is the rank.
        feeder: the worker only draws batches. Another agent has started this one, which ends with it.
        world_size: number of slots at the start.
        store: comma-separated URLs of etcd.
        parent_pid: process id of the launcher.
        master_port: ``MASTER_PORT`` for jobs that do not use bamboo's groups.
        pipelines: number of pipelines that the user asked for, if any.
        result_fd: descriptor to write the worker's departure to, as a line of JSON.
        state_file: the launcher's state file, to be removed if the launcher cannot.
        guest: nobody watches this agent: it is no launcher's and no other agent's child.
        rejoins: how many times it has rejoined, lately.
        generation: the restart (0: the first start) that the worker is part of from the beginning; ``None`` with a
            ``home``: it joins what is running. Of one that waits: the newest that it takes no part in.
        waiting: there is no worker yet: the job is about to be started again.
        after_epoch: plans up to this one are over.
        restart_from: folder of the checkpoint that the job goes on from.
        extra: further workers to start, as ``rank:slot`` separated by commas.
        screen: what the launcher, which shows the output of agents, shows it on; see
            :class:`~bamboo_ds.control.agent.output.Screens`. ``None``: the agent's own output is shown as it is.
        tells: it tells in the terminal what becomes of its member.
        launched: another launcher has placed the slot: what that says of the host (``LOCAL_RANK``, ``MASTER_ADDR``, …)
            holds for the worker.
    """

    slot: int
    world_size: int
    store: str
    parent_pid: int
    master_port: int = 29500
    pipelines: int | None = None
    result_fd: int | None = None
    state_file: str | None = None
    home: int | None = None
    feeder: bool = False
    guest: bool = False
    generation: int | None = None
    waiting: bool = False
    after_epoch: int = 0
    restart_from: str | None = None
    extra: str | None = None
    rejoins: int = 0
    screen: str | None = None
    tells: bool = False
    launched: bool = False

    @property
    def rank(self) -> int:
        """``RANK`` of the worker."""
        return self.slot if self.home is None else self.home

    @property
    def joins(self) -> bool:
        """Whether the worker joins a running job."""
        return self.home is not None and self.generation is None

    @property
    def extra_ranks(self) -> dict[int, int]:
        """Slots of further workers by rank."""
        pairs = (item.split(":") for item in (self.extra or "").split(",") if item)
        return {int(rank): int(slot) for rank, slot in pairs}

    def to_arguments(self) -> list[str]:
        """The command line that :func:`parse_arguments` turns into these settings, with :meth:`environment`."""
        arguments = []
        for each in _on_the_command_line():
            value = getattr(self, each.name)
            if isinstance(value, BambooConfig):
                value = value.model_dump(mode="json", exclude_defaults=True, exclude={"notices"})
            if isinstance(value, Mapping):
                value = json.dumps(dict(value), separators=(",", ":")) if value else None
            option = f"--{each.name.replace('_', '-')}"
            if value is True:
                arguments.append(option)
            elif value is not None and value is not False:
                arguments.append(f"{option}={value}")
        return [*arguments, "--", *self.command]

    def environment(self, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
        """The environment of an agent with these settings, from that of the process that starts it."""
        told = {
            ENV_STORE: self.store,
            ENV_NOTICES: self.block.notices.model_dump_json(exclude_defaults=True),
            ENV_SECRET: self.secret.text,
        }
        return {**{name: value for name, value in environ.items() if name != ENV_SECRET_FILE}, **told}


def _on_the_command_line() -> list[Any]:
    return [each for each in fields(AgentSettings) if each.name not in (*_IN_THE_ENVIRONMENT, "command")]


def parse_arguments(argv: Sequence[str]) -> AgentSettings:
    """Parse an agent's command line; exits with a message if it is wrong."""
    parser = argparse.ArgumentParser(prog="python -m bamboo_ds.control.agent", allow_abbrev=False)
    types = get_type_hints(AgentSettings)
    for each in _on_the_command_line():
        option, needed = f"--{each.name.replace('_', '-')}", each.default is each.default_factory is MISSING
        if types[each.name] is bool:
            parser.add_argument(option, action="store_true")
        else:
            unset = argparse.SUPPRESS  # then the field has its default
            parser.add_argument(option, type=_reader(types[each.name]), required=needed, default=unset)
    parser.add_argument("--store", default=os.environ.get(ENV_STORE), help=f"default: ${ENV_STORE}")
    parser.add_argument("command", nargs="+", help="what the worker executes")
    parsed = vars(parser.parse_args(argv))
    if not parsed["store"]:
        parser.error(f"etcd's URL is missing: give --store or set {ENV_STORE}")
    notices = NoticesConfig.model_validate_json(os.environ.get(ENV_NOTICES) or "{}")
    parsed["block"] = parsed.get("block", BambooConfig()).model_copy(update={"notices": notices})
    parsed["command"] = tuple(parsed["command"])
    return AgentSettings(**parsed, secret=handed(os.environ))


def _reader(kind: Any) -> Callable[[str], Any]:
    """What turns an argument into a field's value of type ``kind``."""
    if kind is BambooConfig:
        return BambooConfig.model_validate_json
    if get_origin(kind) is Mapping:
        return json.loads
    return next(each for each in (int, float, str) if each in (kind, *get_args(kind)))
