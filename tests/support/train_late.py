"""A job of four ranks with :mod:`nccl.groups` that loses rank 3 while the two others of the first stage communicate.

train_late.py ...: that of train.py, two stages and two pipelines: in the reduction of the third iteration.
train_late.py ... --slices 2: the same with two stages of two slices: in a pass of the third iteration.

The collective is held on ranks 0 and 1. When both are in it rank 3, of the other stage, is killed: nothing but the end
of the epoch ends that collective, on both alike.

With ``BAMBOO_TEST_LATE`` = ``undisturbed`` in the environment nothing is held, and nobody killed. With ``hang`` the
abort of the collective blocks on both of them until the process of the other has ended.
"""

from __future__ import annotations

import os
import runpy
import sys
import threading
from pathlib import Path

if __name__ == "__main__":
    import lean_torch  # noqa: F401  before torch

from faults import mark, strike
from nccl import groups as late_groups

from bamboo_ds.comm import groups

FAULT = {"rank": 3, "step": 2, "at": "late", "micro_batch": None}
_HELD = ("0", "1")
#: Elements of a reduction of gradients, or of a tensor between layers, at least.
_MANY = 64
#: Which of the first stage's reductions is held. It has one in an iteration, or 16 in its passes, two in each: the last
#: one of the first backward pass, after which that counts as done.
_NUMBER, _NUMBER_SLICED = 3, 38


def main() -> None:
    out = Path(sys.argv[sys.argv.index("--out") + 1])
    rank = os.environ["RANK"]
    slices, how = "--slices" in sys.argv, os.environ.get("BAMBOO_TEST_LATE")
    reductions = 0

    def hold(group: late_groups.LateGroup, operation: str, size: int) -> None:
        nonlocal reductions
        if rank in _HELD and operation in ("allreduce", "alltoall") and size >= _MANY and how != "undisturbed":
            reductions += 1
            if reductions == (_NUMBER_SLICED if slices else _NUMBER):
                (out / f"held-{rank}").write_text(str(os.getpid()))
                group.aborted.wait(60)

    def hang(group: late_groups.LateGroup) -> None:
        """An abort, as of NCCL within a host: it waits for all processes of the group."""
        if rank in _HELD and (out / mark(FAULT)).exists() and not (out / f"hung-{rank}").exists():
            (out / f"hung-{rank}").touch()
            other = Path("/proc") / (out / f"held-{_HELD[1 - int(rank)]}").read_text()
            while other.exists():
                pause.wait(0.002)
        abort(group)

    def die() -> None:
        while not all((out / f"held-{each}").exists() for each in _HELD):
            pause.wait(0.002)
        strike(FAULT, out)

    pause, abort = threading.Event(), late_groups.LateGroup.abort
    if how == "hang":
        late_groups.LateGroup.abort, groups._ABORT_TIMEOUT_S = hang, 0.5
    if how != "undisturbed" and rank == str(FAULT["rank"]) and not (out / mark(FAULT)).exists():
        threading.Thread(target=die, daemon=True).start()
    late_groups.install(out / "late", hold, in_order=slices)
    runpy.run_path(str(Path(__file__).with_name("train.py")), run_name="__main__")


if __name__ == "__main__":
    main()
