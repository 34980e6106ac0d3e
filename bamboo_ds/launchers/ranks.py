"""The ranks that another launcher has started: deepspeed, torchrun, srun, mpirun. One process each."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from ..control.agent.command import ranks_here
from ..errors import ConfigError
from ..variables import ENV_MEMBER
from . import slurm

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Launched:
    """The launcher's variables: the process's rank, the number of ranks, and where they meet.

    Attributes:
        local: all ranks are on this host.
    """

    rank: int
    world_size: int
    master_address: str
    master_port: int
    local: bool = False


def adopt_slurm(environ: MutableMapping[str, str]) -> None:
    """In a task of ``srun``, set the variables that DeepSpeed asks for; nothing that is set is changed.

    Raises:
        ConfigError: Slurm's variables cannot be read.
    """
    if slurm.is_task(environ) and ENV_MEMBER not in environ and "RANK" not in environ:
        environ.update(slurm.variables(environ))


def launched(environ: Mapping[str, str]) -> Launched | None:
    """The variables of another launcher; ``None`` without one, or if this process is a worker already.

    Raises:
        ConfigError: a variable is no number.
    """
    if ENV_MEMBER in environ or any(name not in environ for name in _NEEDED):
        return None
    try:
        rank, size, port = (int(environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    except ValueError as error:
        raise ConfigError(f"RANK, WORLD_SIZE and MASTER_PORT must be numbers: {error}") from error
    return Launched(rank, size, environ["MASTER_ADDR"], port, local=ranks_here(environ) == str(size))
