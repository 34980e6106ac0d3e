"""Variables of Slurm's ``srun`` in the names that DeepSpeed and torch ask for. Pure, standard library."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping

from ..errors import ConfigError

#: A task of a step has these; a batch script or a shell of ``salloc`` lacks the step's.
_NEEDED = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS")
#: Ports that ``MASTER_PORT`` is taken from, below those that the system gives out itself.
_PORTS = range(20000, 32000)
_RANGE = re.compile(r"(?P<first>\d+)(-(?P<last>\d+))?")
_COUNT = re.compile(r"(?P<tasks>\d+)(\(x(?P<nodes>\d+)\))?")


def is_task(environ: Mapping[str, str]) -> bool:
    """Whether the process is a task of ``srun``."""
    return all(name in environ for name in _NEEDED)


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR``, … of a task of ``srun``, without those that are set.

    ``MASTER_ADDR`` is the first node of the step, where the task with rank 0 runs; ``MASTER_PORT`` is a number that
    job and step determine.

    Raises:
        ConfigError: a variable is not as Slurm sets it.
    """
    try:
        node = next(hosts(environ["SLURM_STEP_NODELIST"]))
        size = tasks_of_nodes(environ.get("SLURM_STEP_TASKS_PER_NODE", environ["SLURM_STEP_NUM_TASKS"]))[
            int(environ.get("SLURM_NODEID", "0"))
        ]
        job, step = int(environ.get("SLURM_JOB_ID", "0")), int(environ.get("SLURM_STEP_ID", "0"))
    except (ValueError, IndexError, StopIteration) as error:
        raise ConfigError(
            f"srun's variables SLURM_* cannot be read ({error}); set RANK, WORLD_SIZE, … instead"
        ) from error
    found = {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": environ["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environ["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(size),
        "LOCAL_SIZE": str(size),
        "MASTER_ADDR": node,
        "MASTER_PORT": str(_PORTS[(job * 101 + step) % len(_PORTS)]),
    }
    return {name: value for name, value in found.items() if name not in environ}


def tasks_of_nodes(text: str) -> list[int]:
    """The numbers that ``SLURM_STEP_TASKS_PER_NODE`` stands for: ``2(x3),1`` is 2, 2, 2, 1."""
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part)
        if match is None:
            raise ValueError(f"{part!r} is no number of tasks")
        counts += [int(match["tasks"])] * int(match["nodes"] or 1)
    return counts


def hosts(text: str) -> Iterator[str]:
    """The names that a list of nodes stands for: ``a[1-2,07],b`` is a1, a2, a07, b."""
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        pieces: list[str] = re.findall(r"\[[^\]]*\]|[^\[]+", part)
        choices = [_numbers(piece[1:-1]) if piece[0] == "[" else [piece] for piece in pieces]
        yield from map("".join, itertools.product(*choices))


def _numbers(text: str) -> list[str]:
    found: list[str] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ValueError(f"{part!r} is no range of nodes")
        first, last = match["first"], match["last"] or match["first"]
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return found
