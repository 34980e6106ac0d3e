"""Two ranks of plain torch on one GPU: what its NCCL group does that the package relies on. See ``--help``.

Does an all-reduce that its caller waits for give a work? How long does a communicator take, with and without blocking?
What becomes of a collective in flight when the group is aborted? On a CPU gloo stands in, which shows no more than that
this program works.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from typing import Any

from bench import Experiment, experiment, table
from common import WORKERS, ending, environment
from rich.markup import escape

RANKS = 2


def ask(run: Experiment, blocking: bool) -> dict[str, Any]:
    """What both ranks have seen, by rank, with communicators that block or not; ``problem``: why not all has come."""
    limit, name = run.timeout_s("two plain ranks"), "blocking" if blocking else "nonblocking"
    folder = run.folder(name)
    env = {**environment(), "DS_ACCELERATOR": run.kind, "TORCH_NCCL_USE_COMM_NONBLOCKING": str(int(not blocking))}
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        processes = []
        for rank in range(RANKS):
            log = stack.enter_context(open(folder / f"log-{rank}.txt", "wb"))
            command = [sys.executable, str(WORKERS / "plain_ranks.py"), str(rank), str(RANKS), str(folder)]
            process = subprocess.Popen(
                command, env=env | {"NCCL_HOSTID": f"host-{rank}"}, stdout=log, stderr=subprocess.STDOUT
            )
            stack.enter_context(ending(process))
            processes.append(process)
        for rank, process in enumerate(processes):
            try:
                code: int | None = process.wait(min(limit, 60.0))
            except subprocess.TimeoutExpired:
                code = None
            file = folder / f"result-{rank}.json"
            found[str(rank)] = json.loads(file.read_text()) if file.exists() else {}
            if code != 0:
                found["problem"] = f"{name}: rank {rank} ended with {code}; see {folder}/log-{rank}.txt"
    return found


@experiment("plain", minutes=2.0)
def main(run: Experiment) -> None:
    """Ask torch's NCCL group what it does."""
    rows: dict[str, Any] = {}
    view = table("two plain ranks", "communicators", " seen by rank 0", " problem")
    for blocking in (False, True):
        name = "blocking" if blocking else "not blocking"
        rows[name] = found = ask(run, blocking)
        if "problem" in found:
            run.problems.append(found["problem"])
        view.add_row(name, escape(json.dumps(found.get("0"))), escape(found.get("problem", "")))
        run.save(rows=rows)
    run.end(view, rows=rows)


if __name__ == "__main__":
    main()
