"""Runs a script as stock DeepSpeed would, without its JIT-compiled CPU collective.

stock.py SCRIPT ARGS        as this process, with the environment of a rank
stock.py -n WORLD --logs FOLDER SCRIPT ARGS     as WORLD processes, forked when torch and DeepSpeed are imported
"""

from __future__ import annotations

import argparse
import os
import runpy
import signal
import sys
import threading
from pathlib import Path

import deepspeed.comm  # noqa: F401
import torch

from bamboo_ds.processes import die_with_parent


def run(command: list[str]) -> None:
    """Execute the script in this process."""
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    sys.argv = command
    sys.path.insert(0, command[0].rpartition("/")[0])
    runpy.run_path(command[0], run_name="__main__")
    # Left to the interpreter's end, gloo's threads abort the process now and then ("terminate called without ...").
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def become_rank(rank: int, world: int, log: Path) -> None:
    """Give this process the environment and the output of one rank."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_SIZE=str(world))
    with open(log, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def main() -> int:
    """All ranks; when one fails, the others are ended. Returns the first exit code that is not 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("-n", type=int, dest="world")
    parser.add_argument("--logs", type=Path)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    if arguments.world is None:
        run(arguments.command)
        return 0
    # A thread would be missing in a fork; some builds of torch start one.
    alone = threading.active_count() == len(os.listdir("/proc/self/task")) == 1
    me, ranks, failed = os.getpid(), set[int](), 0
    for rank in range(arguments.world):
        if not (pid := os.fork()):
            die_with_parent(signal.SIGKILL, me)
            become_rank(rank, arguments.world, arguments.logs / f"log-{rank}.txt")
            if not alone:
                os.execv(sys.executable, [sys.executable, __file__, *arguments.command])
            run(arguments.command)
            return 0
        ranks.add(pid)
    while ranks:
        pid, status = os.wait()
        ranks.discard(pid)
        if status and not failed:
            failed = os.waitstatus_to_exitcode(status)
            for pid in ranks:
                os.kill(pid, signal.SIGKILL)
    return failed


if __name__ == "__main__":
    sys.exit(main())
