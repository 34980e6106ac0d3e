"""An agent's settings: those of its job (:mod:`bamboo_ds.job_settings`), and its own circumstances.

A new setting is a field of the ``"bamboo"`` block (:mod:`bamboo_ds.config`), and is read where it is used: as
``settings.bamboo.<path>`` by agents, as ``job.settings.<path>`` by workers, from the job's record by all others.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timezone
from typing import Any

from pydantic import TypeAdapter

from ..config import BambooConfig
from ..errors import ConfigError
from ..job_settings import JobSettings
from ..secret import ENV_SECRET, ENV_SECRET_FILE, NONE, JobSecret
from .notices import build_sources
from .registry.access import ENV_AGENT
from .registry.records import JobRecord


@dataclass(frozen=True, kw_only=True)
class MemberOptions:
    """The options that the members that one process starts have in common.

    Attributes:
        job: name of the job.
        store: comma-separated URLs of etcd, or ``embedded`` as long as there is none.
        address: IP address that other members reach these ones at.
        command: what the worker executes.
        zone: failure zone, for the planner.
        host: the failure domain, if it is another one than the machine by its name.
        events: file to append events to.
        logs: folder of the job's logs on this host, or ``None``.
        tee: what workers write goes into files of that folder, too.
        grace_s: seconds between SIGTERM and SIGKILL for a worker.
        secret: the job's.
        settings: the job's.
    """

    job: str
    store: str = ""
    address: str = "127.0.0.1"
    command: tuple[str, ...]
    zone: str = ""
    host: str | None = None
    events: str | None = None
    logs: str | None = None
    tee: bool = True
    grace_s: float = 5.0
    secret: JobSecret = NONE
    settings: JobSettings = field(default_factory=JobSettings)

    @property
    def bamboo(self) -> BambooConfig:
        """The settings by part of the block."""
        return self.settings.values

    def check_notices(self) -> None:
        """Raises :class:`ConfigError` if the sources of notices cannot be asked. The agent asks, under its own name."""
        for source in build_sources(self.bamboo.notices, os.environ, {"slot": "0", "member": "m0"}):
            source.check()

    def record(self, world_size: int, pipelines: int | None = None, starters: int | None = None) -> JobRecord:
        """The record in etcd of a job that begins now; the arguments are its fields."""
        return JobRecord(
            job=self.job,
            world_size=world_size,
            starters=starters,
            pipelines=pipelines,
            command=self.command,
            settings=self.settings.public(),
            since=datetime.now(timezone.utc),
        )


@dataclass(frozen=True, kw_only=True)
class AgentSettings(MemberOptions):
    """The settings of one agent.

    Attributes:
        slot: number of the slot, unique in the job.
        script_rank: ``RANK`` of the worker; ``None``: the slot is there from the start, its number is the rank.
        feeder: the worker only draws batches. Another agent has started this one, which ends with it.
        device: which of the host's devices, in turn, are the slot's; ``None``: those of its rank.
        world_size: number of ranks.
        parent_pid: process id of the launcher.
        master_port: ``MASTER_PORT`` for jobs that do not use bamboo's groups.
        pipelines: number of pipelines that the user asked for, if any.
        result_fd: descriptor to write the worker's departure to, as a line of JSON.
        state_file: the launcher's state file, to be removed if the launcher cannot.
        guest: nobody watches this agent: it is no launcher's and no other agent's child.
        rejoins: how many times it has rejoined, lately.
        generation: the restart (0: the first start) that the worker is part of from the beginning; ``None`` with a
            ``script_rank``: it joins what is running. Of one that waits: the newest that it takes no part in.
        waiting: there is no worker yet: the job is about to be started again.
        after_epoch: plans up to this one are over.
        restart_from: folder of the checkpoint that the job goes on from.
        extra: slots of further workers to start, by rank.
        prefix: each line of the worker's output is shown with the slot in front.
        tells: it tells in the terminal what becomes of its member.
        launched: another launcher has placed the slot: what that says of the host (``MASTER_ADDR``, …) holds for the
            worker, and its ``LOCAL_RANK`` for the rank that it has started.
    """

    slot: int
    world_size: int
    parent_pid: int
    master_port: int = 29500
    pipelines: int | None = None
    result_fd: int | None = None
    state_file: str | None = None
    script_rank: int | None = None
    device: int | None = None
    feeder: bool = False
    guest: bool = False
    generation: int | None = None
    waiting: bool = False
    after_epoch: int = 0
    restart_from: str | None = None
    extra: Mapping[int, int] = field(default_factory=dict)
    rejoins: int = 0
    prefix: bool = False
    tells: bool = False
    launched: bool = False

    @property
    def rank(self) -> int:
        """``RANK`` of the worker."""
        return self.slot if self.script_rank is None else self.script_rank

    @property
    def joins(self) -> bool:
        """Whether the worker joins a running job."""
        return self.script_rank is not None and self.generation is None

    @property
    def agent_command(self) -> list[str]:
        """The command line of the agent; what it says is for those who read it in the process table."""
        return [sys.executable, "-m", "bamboo_ds.control.agent", f"--job={self.job}", f"--slot={self.slot}"]

    def environment(self, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
        """The environment of the agent, from that of the process that starts it. Command lines are read by all."""
        inherited = {name: value for name, value in environ.items() if name != ENV_SECRET_FILE}
        told = _SETTINGS.dump_json(self, exclude={"secret"}, exclude_defaults=True).decode()
        return {**inherited, ENV_AGENT: told, ENV_SECRET: self.secret.text}


_SETTINGS = TypeAdapter(AgentSettings)


def in_slot(options: MemberOptions, **circumstances: Any) -> AgentSettings:
    """The agent of one slot among members with ``options``; ``circumstances`` are fields of its own, by name."""
    return AgentSettings(**{each.name: getattr(options, each.name) for each in fields(MemberOptions)}, **circumstances)


def settings_told(environ: MutableMapping[str, str]) -> AgentSettings:
    """The settings that :meth:`AgentSettings.environment` has put into ``environ``, which does not keep them.

    Raises:
        ConfigError: there are none.
    """
    if ENV_AGENT not in environ:
        raise ConfigError("this is no command for users: `bamboo run`, `bamboo launch` and `bamboo join` start agents")
    return replace(_SETTINGS.validate_json(environ.pop(ENV_AGENT)), secret=JobSecret(environ.get(ENV_SECRET, "")))
