"""``torchft``: the pipelines of :mod:`.pipelines` as replica groups, with its Lighthouse, its Manager and Gloo.

It is installed in an environment of its own, since its versions of torch need not be ours. A start without others goes
on from states that the first group saves at the interval of the other systems.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import JobFailed, environment

from bamboo_ds.chaos.faults import Fault
from bamboo_ds.launchers.network import free_port
from tests.support import processes

from .crew import Gang
from .market import Work
from .outcome import Outcome
from .pipelines import Pipelines

#: The Lighthouse forms a quorum of those that it hears of, and takes for gone what is silent for so long.
_LIGHTHOUSE = (
    "--min_replicas",
    "1",
    "--join_timeout_ms",
    "500",
    "--quorum_tick_ms",
    "20",
    "--heartbeat_timeout_ms",
    "500",
)


class Missing(JobFailed):
    """There is no torchft to be measured."""


@contextmanager
def interpreter(python: Path) -> Iterator[None]:
    """In the body another interpreter starts the processes."""
    before = sys.executable, processes._server
    sys.executable, processes._server = str(python), None
    try:
        yield
    finally:
        if processes._server is not None:
            processes._server.close()
        sys.executable, processes._server = before


@contextmanager
def lighthouse(folder: Path, python: Path) -> Iterator[str]:
    """A Lighthouse; gives its address."""
    port = free_port("127.0.0.1")
    command = [str(python.parent / "torchft_lighthouse"), "--bind", f"127.0.0.1:{port}", *_LIGHTHOUSE]
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lighthouse.txt", "wb") as log:
        process = subprocess.Popen(command, env=environment(), stdout=log, stderr=subprocess.STDOUT)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def check(environment_folder: Path) -> Path:
    """The interpreter of the environment.

    Raises:
        Missing: it has no torchft that can be imported.
    """
    python = environment_folder / "bin" / "python"
    cure = (
        f"python -m venv {environment_folder} && {python} -m pip install torch==2.13.0 torchft==0.2.0 deepspeed==0.19.8"
    )
    if not python.exists():
        raise Missing(f"there is no environment {environment_folder} with torchft: {cure}")
    command = [str(python), "-c", "import torchft, deepspeed"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise Missing(f"torchft cannot be imported in {environment_folder}: {done.stderr[-1500:]}\n{cure}")
    return python


def torchft(work: Work, folder: Path, founders: Sequence[str], faults: Sequence[Fault], every: int, outcome: Outcome,
            seconds: float | None, steps: int | None, environment_folder: Path) -> tuple[list[str], int]:  # fmt: skip
    """Run it; returns problems with the weights, and how often they were compared."""
    python = check(environment_folder)
    states = folder.with_name(folder.name + "-states")
    for file in states.glob("*"):
        file.unlink()
    states.mkdir(parents=True, exist_ok=True)
    groups = work.shape.pipelines
    begun: set[int] = set()
    with interpreter(python), lighthouse(states, python) as address:

        def start(gang: Gang, slot: int, arguments: list[str]) -> None:
            more = ["--lighthouse", address, "--checkpoint", str(states), "--save-every", str(max(1, every))]
            more += ["--meet", str(1 if slot in begun else groups)]
            begun.add(slot)
            gang.start("whole.py", [*arguments, *more])

        pipelines = Pipelines(work, folder, founders, faults, start, lambda slot: None, every)
        pipelines.run(outcome, seconds, steps)
    return _compare([line for start in pipelines.starts for line in start.journal if line["what"] == "step"])


def _compare(told: Sequence[dict[str, Any]]) -> tuple[list[str], int]:
    """Weights of the first stage after the same step of several groups that did it together."""
    problems, checks = [], 0
    newest: dict[int, dict[int, dict[str, Any]]] = {}
    for line in sorted(told, key=lambda line: float(line["at"])):
        newest.setdefault(line["step"], {})[line["slot"]] = line
    for step, lines in newest.items():
        if len(lines) > 1 and len(lines) == next(iter(lines.values()))["pipelines"]:
            checks += 1
            if len({line["digest"] for line in lines.values()}) > 1:
                problems.append(f"weights of the first stage differ after step {step}")
    return problems, checks
