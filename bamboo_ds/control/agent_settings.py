"""What an agent is told by its launcher, and what it tells its worker."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..config import BambooConfig, NoticesConfig
from ..errors import ConfigError
from ..secret import ENV_SECRET, ENV_SECRET_FILE, NONE, JobSecret, handed
from ..variables import ENV_CHECK_EXACT
from .access import ENV_NOTICES, ENV_STORE, without_access
from .channel import (
    ENV_ADDRESS,
    ENV_HEARTBEAT_TIMEOUT,
    ENV_JOB,
    ENV_JOINER,
    ENV_MEMBER,
    ENV_RESTART_FROM,
    ENV_RESTARTS,
)
from .notices import build_sources

#: Cold file systems take that long to load libraries, at least.
_START_TIMEOUT_S = 60.0
_GPUS = Path("/proc/driver/nvidia/gpus")
#: Settings that are not on a command line, which everybody can read, and the command.
_IN_THE_ENVIRONMENT = ("store", "notices", "secret", "command")
_STUB = "bamboo_ds.control.script"
#: Options of the interpreter that are followed by a value.
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
#: Options that may stand together behind one dash.
_FLAGS = frozenset("bBdEiIOPqRsSuvx")


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
        lease_ttl_s: seconds of silence after which a member is lost.
        heartbeat_timeout_s: seconds without a heartbeat after which a worker is killed.
        start_timeout_s: the same before its first step, if that is longer.
        first_timeout_s: seconds from its start to its first heartbeat after which a worker is killed; ``None``: never.
        hang_timeout_s: seconds without progress after which a worker is killed; ``None``: as it suggests itself.
        settle_s: seconds that the leader waits for companions of a loss.
        grace_s: seconds between SIGTERM and SIGKILL for a worker.
        min_gain, standby_replicas: see :class:`~bamboo_ds.topology.Policy`.
        notices: ``bamboo.notices`` as JSON.
        max_restarts, min_members: see :class:`~bamboo_ds.control.restart.RestartPolicy`.
        on_exception: ``bamboo.recovery.on_exception``.
        fence_s: ``bamboo.membership.fence_s``; ``None``, too, where no restart can follow a fatal loss.
        rejoin_s: seconds for which it tries to come back when its worker was evicted.
        secret: the job's.
        check_exact: steps that are checked; ``None``: as the block of the worker's script says.
    """

    job: str
    address: str
    command: tuple[str, ...]
    zone: str
    events: str | None
    lease_ttl_s: float
    heartbeat_timeout_s: float
    settle_s: float
    grace_s: float
    host: str | None = None
    start_timeout_s: float = 0.0
    first_timeout_s: float | None = None
    hang_timeout_s: float | None = None
    min_gain: float = 0.05
    standby_replicas: bool = False
    notices: str | None = None
    max_restarts: int = 0
    min_members: int = 1
    on_exception: str = "stop"
    rejoin_s: float = 600.0
    secret: JobSecret = NONE
    check_exact: int | None = None
    fence_s: float | None = None

    @classmethod
    def from_block(cls, block: BambooConfig, **others: Any) -> MemberOptions:
        """The options that ``block`` stands for; ``others`` by name, where ``None`` leaves it to the block.

        Raises:
            ConfigError: two of them contradict each other.
        """
        membership, recovery = block.membership, block.recovery
        block.redundancy.steps_to_check(others.get("check_exact"))
        ttl = others.get("lease_ttl_s") or float(membership.lease_ttl_s)
        patience = others.get("heartbeat_timeout_s") or membership.heartbeat_timeout_s
        restarts = recovery.max_restarts if others.get("max_restarts") is None else others["max_restarts"]
        fence_s = membership.fence_s if restarts else None
        if fence_s is not None and fence_s < 2 * ttl:
            raise ConfigError(
                f"bamboo.membership.fence_s = {fence_s:g} is less than twice lease_ttl_s = {ttl:g}: workers would "
                "pause before their members count as lost; set it to at least twice lease_ttl_s"
            )
        values: dict[str, Any] = {
            "zone": "",
            "grace_s": 5.0,
            "lease_ttl_s": ttl,
            "heartbeat_timeout_s": membership.heartbeat_timeout_s or ttl,
            "start_timeout_s": membership.start_timeout_s or (0.0 if patience else _START_TIMEOUT_S),
            "first_timeout_s": membership.start_timeout_s,
            "hang_timeout_s": membership.hang_timeout_s,
            "settle_s": membership.settle_ms / 1000,
            "min_gain": block.topology.min_gain,
            "standby_replicas": block.standby.replicas,
            "notices": block.notices.model_dump_json(),
            "max_restarts": recovery.max_restarts,
            "min_members": recovery.min_members,
            "on_exception": recovery.on_exception,
            "rejoin_s": membership.rejoin_s,
            "fence_s": fence_s,
            "events": None,
        }
        return MemberOptions(**values | {name: value for name, value in others.items() if value is not None})

    def member_options(self) -> dict[str, Any]:
        """These options alone, by name, without what a subclass adds."""
        return {field.name: getattr(self, field.name) for field in fields(MemberOptions)}

    def check_notices(self) -> None:
        """Raise :class:`ConfigError` if the sources of notices cannot be asked. The agent asks, under its own name."""
        if self.notices is not None:
            build_sources(NoticesConfig.model_validate_json(self.notices), os.environ, {"slot": "0", "member": "m0"})


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
        comebacks: how many times it has come back, lately.
        generation: the restart (0: the first start) that the worker is part of from the beginning; ``None`` with a
            ``home``: it joins what is running.
        waiting: there is no worker yet: the job is about to be started again.
        after_epoch: plans up to this one are over.
        restart_from: folder of the checkpoint that the job goes on from.
        extra: further workers to start, as ``rank:slot`` separated by commas.
        launched: another launcher has placed the slot: what that says of the host (``LOCAL_RANK``, ``MASTER_ADDR``, …)
            holds for the worker.
    """

    slot: int
    world_size: int
    store: str
    parent_pid: int
    master_port: int
    pipelines: int | None
    result_fd: int | None
    state_file: str | None
    home: int | None = None
    feeder: bool = False
    guest: bool = False
    generation: int | None = None
    waiting: bool = False
    after_epoch: int = 0
    restart_from: str | None = None
    extra: str | None = None
    comebacks: int = 0
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
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            if value is True:
                arguments.append(f"--{name.replace('_', '-')}")
            elif value is not None and value is not False and name not in _IN_THE_ENVIRONMENT:
                arguments.append(f"--{name.replace('_', '-')}={value}")
        return [*arguments, "--", *self.command]

    def environment(self) -> dict[str, str]:
        """The environment of an agent with these settings."""
        told = {ENV_STORE: self.store, ENV_NOTICES: self.notices or "", ENV_SECRET: self.secret.text}
        return {**{name: value for name, value in os.environ.items() if name != ENV_SECRET_FILE}, **told}


def parse_arguments(argv: Sequence[str]) -> AgentSettings:
    """Parse an agent's command line; exits with a message if it is wrong."""
    parser = argparse.ArgumentParser(prog="python -m bamboo_ds.control.agent", allow_abbrev=False)
    parser.add_argument("--slot", type=int, required=True)
    parser.add_argument("--home", type=int)
    parser.add_argument("--feeder", action="store_true")
    parser.add_argument("--host")
    parser.add_argument("--hang-timeout-s", type=float)
    parser.add_argument("--min-gain", type=float, default=0.05)
    parser.add_argument("--standby-replicas", action="store_true")
    parser.add_argument("--notices", default=os.environ.get(ENV_NOTICES) or None, help=f"default: ${ENV_NOTICES}")
    parser.add_argument("--guest", action="store_true")
    parser.add_argument("--max-restarts", type=int, default=0)
    parser.add_argument("--min-members", type=int, default=1)
    parser.add_argument("--generation", type=int)
    parser.add_argument("--waiting", action="store_true")
    parser.add_argument("--after-epoch", type=int, default=0)
    parser.add_argument("--restart-from")
    parser.add_argument("--extra")
    parser.add_argument("--rejoin-s", type=float, default=600.0)
    parser.add_argument("--check-exact", type=int)
    parser.add_argument("--fence-s", type=float)
    parser.add_argument("--comebacks", type=int, default=0)
    parser.add_argument("--launched", action="store_true")
    parser.add_argument("--on-exception", choices=["stop", "takeover"], default="stop")
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--store", default=os.environ.get(ENV_STORE), help=f"default: ${ENV_STORE}")
    parser.add_argument("--job", required=True)
    parser.add_argument("--address", default="127.0.0.1")
    parser.add_argument("--zone", default="")
    parser.add_argument("--events")
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--lease-ttl-s", type=float, default=5.0)
    parser.add_argument("--heartbeat-timeout-s", type=float)
    parser.add_argument("--start-timeout-s", type=float, default=0.0)
    parser.add_argument("--first-timeout-s", type=float)
    parser.add_argument("--settle-s", type=float, default=0.02)
    parser.add_argument("--grace-s", type=float, default=5.0)
    parser.add_argument("--master-port", type=int, default=29500)
    parser.add_argument("--pipelines", type=int)
    parser.add_argument("--result-fd", type=int)
    parser.add_argument("--state-file")
    parser.add_argument("command", nargs="+", help="what the worker executes")
    parsed = vars(parser.parse_args(argv))
    if not parsed["store"]:
        parser.error(f"etcd's URL is missing: give --store or set {ENV_STORE}")
    if parsed["heartbeat_timeout_s"] is None:
        parsed["heartbeat_timeout_s"] = parsed["lease_ttl_s"]
    parsed["command"] = tuple(parsed["command"])
    parsed["secret"] = handed(os.environ)
    return AgentSettings(**parsed)


def script_command(script: str, arguments: Sequence[str], module: bool) -> tuple[str, ...]:
    """The command that runs a user's Python script, or module, with unbuffered output."""
    return (sys.executable, "-u", *(("-m",) if module else ()), script, *arguments)


def observed(command: Sequence[str]) -> tuple[str, ...]:
    """The command that runs ``command`` in :mod:`.script`; itself if it is not Python with a script or a module."""
    at = 1
    while at < len(command) and command[at].startswith("-") and command[at] != "-m":
        if command[at] in _WITH_VALUE:
            at += 1
        elif not (_FLAGS.issuperset(command[at][1:]) and command[at] != "-") and command[at][:2] not in _WITH_VALUE:
            return tuple(command)
        at += 1
    if at >= len(command) or not os.path.basename(command[0]).startswith("python"):
        return tuple(command)
    return (*command[:at], "-m", _STUB, *command[at:])


def local_rank(settings: AgentSettings, environ: Mapping[str, str], gpus: Path = _GPUS) -> int:
    """``LOCAL_RANK`` of a worker: on a host with GPUs they go round by rank.

    So a member that joins as a lost rank gets the GPU of that one, and what scripts expect, Megatron among them.

    Args:
        environ: where ``CUDA_VISIBLE_DEVICES`` may be.
        gpus: the folder in which the driver has an entry for every GPU.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        count = len([device for device in visible.split(",") if device.strip() not in ("", "-1")])
    else:
        count = len(list(gpus.iterdir())) if gpus.is_dir() else 0
    return settings.rank % count if count else settings.rank


def worker_environment(settings: AgentSettings, member: str) -> dict[str, str]:
    """The environment of the worker of ``member``, without the channel's descriptor."""
    env = dict(os.environ)
    without_access(env)
    env.update(
        {
            ENV_MEMBER: member,
            ENV_JOB: settings.job,
            ENV_ADDRESS: settings.address,
            ENV_HEARTBEAT_TIMEOUT: str(settings.heartbeat_timeout_s),
            ENV_SECRET: settings.secret.text,
            "RANK": str(settings.rank),
            "WORLD_SIZE": str(settings.world_size),
        }
    )
    size = env.get("LOCAL_WORLD_SIZE", "1") if settings.launched else str(settings.world_size)
    placed = {
        "LOCAL_RANK": str(local_rank(settings, env)),
        "LOCAL_WORLD_SIZE": size,
        # DeepSpeed on CPU asks for this one.
        "LOCAL_SIZE": size,
        "CROSS_RANK": "0",
        "CROSS_SIZE": "1",
        "MASTER_ADDR": settings.address,
        "MASTER_PORT": str(settings.master_port),
    }
    if settings.launched:
        env.update({name: value for name, value in placed.items() if name not in env})
    else:
        env.setdefault("OMP_NUM_THREADS", "1")
        env.update(placed)
    for name in (ENV_JOINER, ENV_RESTARTS, ENV_RESTART_FROM, ENV_CHECK_EXACT):
        env.pop(name, None)
    if settings.check_exact is not None:
        env[ENV_CHECK_EXACT] = str(settings.check_exact)
    if settings.joins:
        env[ENV_JOINER] = "1"
    if settings.generation:
        env[ENV_RESTARTS] = str(settings.generation)
    if settings.restart_from is not None:
        env[ENV_RESTART_FROM] = settings.restart_from
    if settings.pipelines is not None:
        env["BAMBOO_PIPELINES"] = str(settings.pipelines)
    return env
