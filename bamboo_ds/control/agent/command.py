"""The command that an agent executes as its worker, and its environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...secret import ENV_SECRET
from ...variables import (
    ENV_ADDRESS,
    ENV_CHECK_EXACT,
    ENV_HOST,
    ENV_JOB,
    ENV_JOINER,
    ENV_MEMBER,
    ENV_RESTART_FROM,
    ENV_RESTARTS,
    ENV_SETTINGS,
    LOCAL_RANK_OPTIONS,
)
from ..registry.access import without_access
from ..settings import AgentSettings

_GPUS = Path("/proc/driver/nvidia/gpus")
_STUB = "bamboo_ds.control.script"
#: How many of a launcher's ranks are on a host: torchrun, deepspeed, Open MPI, Intel MPI.
_HERE = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
#: Options of the interpreter that are followed by a value.
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
#: Options that may stand together behind one dash.
_FLAGS = frozenset("bBdEiIOPqRsSuvx")


def script_command(script: str, arguments: Sequence[str], module: bool) -> tuple[str, ...]:
    """The command that runs a user's Python script, or module, with unbuffered output."""
    return (sys.executable, "-u", *(("-m",) if module else ()), script, *arguments)


def observed(command: Sequence[str]) -> tuple[str, ...]:
    """The command that runs ``command`` in :mod:`bamboo_ds.control.script`; itself if it is no script or module."""
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


def ranks_here(environ: Mapping[str, str]) -> str | None:
    """The number of ranks that the launcher has on this host, or ``None`` where it does not say so."""
    return next((environ[name] for name in _HERE if name in environ), None)


def local_rank(settings: AgentSettings, environ: Mapping[str, str], gpus: Path = _GPUS) -> int:
    """``LOCAL_RANK`` of a worker: on a host with GPUs they go round, by :attr:`~AgentSettings.device` or by rank.

    By rank a member that joins as a lost rank gets the GPU of that one, and what scripts expect, Megatron among them.
    Where another launcher has placed the slot this holds for a worker that runs as another rank than it has been
    started for: the launcher gives ranks to hosts in blocks.

    Args:
        environ: may have ``CUDA_VISIBLE_DEVICES`` and the launcher's variables.
        gpus: the folder in which the driver has an entry for every GPU.
    """
    if settings.launched:
        if settings.rank == settings.slot and environ.get("LOCAL_RANK", "").isdecimal():
            return int(environ["LOCAL_RANK"])
        here = ranks_here(environ) or ""
        if here.isdecimal() and int(here):
            return settings.rank % int(here)
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        count = len([device for device in visible.split(",") if device.strip() not in ("", "-1")])
    else:
        count = len(list(gpus.iterdir())) if gpus.is_dir() else 0
    number = settings.rank if settings.device is None else settings.device
    return number % count if count else number


def device_of(settings: AgentSettings, environ: Mapping[str, str]) -> str:
    """The worker's GPU by its ``LOCAL_RANK``: the index, or the name in ``CUDA_VISIBLE_DEVICES``."""
    number = local_rank(settings, environ)
    visible = [each.strip() for each in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each.strip()]
    return visible[number % len(visible)] if visible else str(number)


def as_local_rank(command: Sequence[str], rank: int | str) -> tuple[str, ...]:
    """``command`` with ``rank`` in its option for local ranks, if it has one: DeepSpeed refuses another one than
    ``LOCAL_RANK``.
    """
    arguments = list(command)
    for at, argument in enumerate(arguments):
        name, equals, _ = argument.partition("=")
        if name in LOCAL_RANK_OPTIONS and equals:
            arguments[at] = f"{name}={rank}"
        elif name in LOCAL_RANK_OPTIONS and at + 1 < len(arguments):
            arguments[at + 1] = str(rank)
    return tuple(arguments)


def place_variables(rank: int, size: int | str, address: str, port: int) -> dict[str, str]:
    """Variables of a worker that is ``rank`` of ``size`` on its host, and of the place where all ranks meet."""
    return {
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "LOCAL_SIZE": str(size),  # DeepSpeed on CPU asks for this one
        "CROSS_RANK": "0",
        "CROSS_SIZE": "1",
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }


def worker_environment(settings: AgentSettings, member: str) -> dict[str, str]:
    """The environment of the worker of ``member``, without the channel's descriptor."""
    env = dict(os.environ)
    without_access(env)
    env.update(
        {
            ENV_MEMBER: member,
            ENV_JOB: settings.job,
            ENV_ADDRESS: settings.address,
            ENV_SETTINGS: settings.settings.public().model_dump_json(exclude_defaults=True),
            ENV_SECRET: settings.secret.text,
            "RANK": str(settings.rank),
            "WORLD_SIZE": str(settings.world_size),
        }
    )
    size = (ranks_here(env) or "1") if settings.launched else str(settings.world_size)
    placed = place_variables(local_rank(settings, env), size, settings.address, settings.master_port)
    if settings.launched:
        env.update({name: value for name, value in placed.items() if name not in env or name == "LOCAL_RANK"})
        if "OMPI_COMM_WORLD_LOCAL_RANK" in env:  # DeepSpeed compares
            env["OMPI_COMM_WORLD_LOCAL_RANK"] = env["LOCAL_RANK"]
    else:
        env.setdefault("OMP_NUM_THREADS", "1")
        env.update(placed)
    for name in (ENV_JOINER, ENV_RESTARTS, ENV_RESTART_FROM, ENV_CHECK_EXACT, ENV_HOST):
        env.pop(name, None)
    if settings.host is not None:
        env[ENV_HOST] = settings.host
    if settings.joins:
        env[ENV_JOINER] = "1"
    if settings.generation:
        env[ENV_RESTARTS] = str(settings.generation)
    if settings.restart_from is not None:
        env[ENV_RESTART_FROM] = settings.restart_from
    if settings.pipelines is not None:
        env["BAMBOO_PIPELINES"] = str(settings.pipelines)
    return env
