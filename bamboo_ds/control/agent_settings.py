"""What an agent is told by its launcher, and what it tells its worker."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields

from .access import ENV_STORE, without_access
from .channel import ENV_ADDRESS, ENV_HEARTBEAT_TIMEOUT, ENV_JOB, ENV_JOINER, ENV_MEMBER


@dataclass(frozen=True)
class AgentSettings:
    """The settings of one agent.

    Attributes:
        slot: number of the slot, unique in the job.
        home: ``RANK`` of the worker of a slot that joins a running job; ``None``: the slot is there from the start,
            its number is the rank.
        feeder: the worker only draws batches. Another agent has started this one, which ends with it.
        world_size: number of slots at the start.
        store: comma-separated URLs of etcd.
        job: name of the job.
        address: IP address that other members reach this one at.
        zone: failure zone, for the planner.
        events: file to append events to.
        parent_pid: process id of the launcher.
        lease_ttl_s: seconds of silence after which a member is lost.
        heartbeat_timeout_s: seconds without a heartbeat after which a worker is killed.
        settle_s: seconds that the leader waits for companions of a loss.
        grace_s: seconds between SIGTERM and SIGKILL for a worker.
        master_port: ``MASTER_PORT`` for jobs that do not use bamboo's groups.
        pipelines: number of pipelines that the user asked for, if any.
        result_fd: descriptor to write the worker's departure to, as a line of JSON.
        state_file: the launcher's state file, to be removed if the launcher cannot.
        command: what the worker executes.
        host: the failure domain, if it is another one than the machine by its name.
    """

    slot: int
    world_size: int
    store: str
    job: str
    address: str
    zone: str
    events: str | None
    parent_pid: int
    lease_ttl_s: float
    heartbeat_timeout_s: float
    settle_s: float
    grace_s: float
    master_port: int
    pipelines: int | None
    result_fd: int | None
    state_file: str | None
    command: tuple[str, ...]
    home: int | None = None
    feeder: bool = False
    host: str | None = None

    @property
    def rank(self) -> int:
        """``RANK`` of the worker."""
        return self.slot if self.home is None else self.home

    def to_arguments(self) -> list[str]:
        """The command line that :func:`parse_arguments` turns into these settings (without the store)."""
        arguments = []
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            if value is True:
                arguments.append(f"--{name.replace('_', '-')}")
            elif value is not None and value is not False and name not in ("store", "command"):
                arguments.append(f"--{name.replace('_', '-')}={value}")
        return [*arguments, "--", *self.command]


def parse_arguments(argv: Sequence[str]) -> AgentSettings:
    """Parse an agent's command line; exits with a message if it is wrong."""
    parser = argparse.ArgumentParser(prog="python -m bamboo_ds.control.agent", allow_abbrev=False)
    parser.add_argument("--slot", type=int, required=True)
    parser.add_argument("--home", type=int)
    parser.add_argument("--feeder", action="store_true")
    parser.add_argument("--host")
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--store", default=os.environ.get(ENV_STORE), help=f"default: ${ENV_STORE}")
    parser.add_argument("--job", required=True)
    parser.add_argument("--address", default="127.0.0.1")
    parser.add_argument("--zone", default="")
    parser.add_argument("--events")
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--lease-ttl-s", type=float, default=5.0)
    parser.add_argument("--heartbeat-timeout-s", type=float)
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
    return AgentSettings(**parsed)


def script_command(script: str, arguments: Sequence[str], module: bool) -> tuple[str, ...]:
    """The command that runs a user's Python script, or module, with unbuffered output."""
    return (sys.executable, "-u", *(("-m",) if module else ()), script, *arguments)


def worker_environment(settings: AgentSettings, member: str) -> dict[str, str]:
    """The environment of the worker of ``member``, without the channel's descriptor."""
    env = dict(os.environ)
    without_access(env)
    env.setdefault("OMP_NUM_THREADS", "1")
    env.update(
        {
            ENV_MEMBER: member,
            ENV_JOB: settings.job,
            ENV_ADDRESS: settings.address,
            ENV_HEARTBEAT_TIMEOUT: str(settings.heartbeat_timeout_s),
            "RANK": str(settings.rank),
            "WORLD_SIZE": str(settings.world_size),
            "LOCAL_RANK": str(settings.rank),
            "LOCAL_WORLD_SIZE": str(settings.world_size),
            # DeepSpeed on CPU asks for this one.
            "LOCAL_SIZE": str(settings.world_size),
            "CROSS_RANK": "0",
            "CROSS_SIZE": "1",
            "MASTER_ADDR": settings.address,
            "MASTER_PORT": str(settings.master_port),
        }
    )
    env.pop(ENV_JOINER, None)
    if settings.home is not None:
        env[ENV_JOINER] = "1"
    if settings.pipelines is not None:
        env["BAMBOO_PIPELINES"] = str(settings.pipelines)
    return env
