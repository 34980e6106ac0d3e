"""Nodes that live and die by the market, and the processes of stock DeepSpeed on them."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import WORKERS, JobFailed, environment

from bamboo_ds.chaos.faults import Fault, FaultKind
from bamboo_ds.launchers.network import free_port
from tests.support import processes
from tests.support.processes import Process, start

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # caches are warm: what is imported is compiled once
#: All processes are forked from one that has made their imports, agents' and workers' too.
processes.SERVER = Path(__file__).with_name("warm_server.py")

#: Seconds between two looks at processes and files.
LOOK_S = 0.01
#: Seconds for a job to come to its first steps, or for killed processes to be gone.
PATIENCE_S = 120.0


def lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a journal; none if it is not there yet."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


@dataclass
class Gang:
    """Processes that are started together as the ranks of one process group, on nodes.

    Attributes:
        folder: for their files.
        nodes: by rank.
        processes: by node.
        began: when they were started, in seconds since 1970.
    """

    folder: Path
    nodes: tuple[str, ...]
    processes: dict[str, Process] = field(default_factory=dict)
    began: float = 0.0

    def start(self, script: str, arguments: Sequence[str], variables: Mapping[str, str] | None = None) -> None:
        """Start all of them.

        Args:
            script: in the folder of workers.
            arguments: of each.
            variables: more of their environment.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self.began = time.time()
        port = str(free_port("127.0.0.1"))
        for rank, node in enumerate(self.nodes):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": len(self.nodes), "LOCAL_SIZE": len(self.nodes)}
            env = environment() | {name: str(value) for name, value in place.items()}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **(variables or {})}
            with open(self.folder / f"log-{rank}.txt", "wb") as log:
                command = [sys.executable, str(WORKERS / script), *arguments]
                self.processes[node] = start(command, env, log.fileno(), stock=True)

    def ended(self) -> list[str]:
        """Nodes whose process has ended."""
        return [node for node, process in self.processes.items() if process.poll() is not None]

    def kill(self, nodes: Sequence[str] | None = None) -> None:
        """SIGKILL to some or all of them, without waiting."""
        for node in self.nodes if nodes is None else nodes:
            self.processes[node].kill()

    def end(self) -> None:
        """Kill all of them and wait until they are gone."""
        self.kill()
        for process in self.processes.values():
            process.wait(PATIENCE_S)

    def log(self) -> str:
        """The ends of their outputs."""
        files = sorted(self.folder.glob("log-*.txt"))
        return "\n".join(f"{file}:\n{file.read_text(errors='replace')[-1500:]}" for file in files)


class Clock:
    """Does what a market does at its times.

    Args:
        faults: in order of time.
        told: the accounts of what was done are added to it.
    """

    def __init__(self, faults: Sequence[Fault], told: list[dict[str, Any]]) -> None:
        self._left = list(faults)
        self._told = told
        self.begin: float | None = None

    def start(self) -> None:
        """The window begins now."""
        self.begin = time.time()

    @property
    def now(self) -> float:
        """Seconds since the window's begin."""
        assert self.begin is not None
        return time.time() - self.begin

    def due(self, until_s: float) -> list[tuple[str, str]]:
        """What is to happen now: (``join`` or ``lose``, node). Nothing from the end of the window on."""
        found = []
        while self._left and self._left[0].at_s <= min(self.now, until_s):
            fault = self._left.pop(0)
            assert fault.target is not None
            what = "join" if fault.kind is FaultKind.JOIN else "lose"
            self._told.append(
                {
                    "planned_s": fault.at_s,
                    "done_s": self.now,
                    "kind": what,
                    "node": fault.target.name,
                    "outcome": "done",
                }
            )
            found.append((what, fault.target.name))
        return found


def wait_for(what: str, found: Callable[[], bool], gang: Gang, start_s: float) -> None:
    """Wait until ``found`` says yes.

    Args:
        start_s: emulated seconds of the start of a process.

    Raises:
        JobFailed: it does not within :data:`PATIENCE_S` after that, or a process ends.
    """
    deadline = time.monotonic() + PATIENCE_S + start_s
    while not found():
        ended = gang.ended()
        if ended or time.monotonic() > deadline:
            raise JobFailed(f"{what} did not come; ended: {ended}\n{gang.log()}")
        time.sleep(LOOK_S)
