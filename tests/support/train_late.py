"""The job of train.py with :mod:`late_groups`, two stages and two pipelines, that loses rank 3 while it reduces.

The first stage's reduction of the third iteration is held on its members, ranks 0 and 1. When both are in it rank 3, of
the other stage, is killed: nothing but the end of the epoch ends that reduction, on both alike.
"""

from __future__ import annotations

import os
import runpy
import sys
import threading
from pathlib import Path

if __name__ == "__main__":
    import lean_torch  # noqa: F401  before torch

import late_groups
from faults import mark, strike

FAULT = {"rank": 3, "step": 2, "at": "late", "micro_batch": None}
_HELD = ("0", "1")
#: Elements of a reduction of gradients at least.
_MANY = 64


def main() -> None:
    out = Path(sys.argv[sys.argv.index("--out") + 1])
    rank = os.environ["RANK"]
    reductions = 0

    def hold(group: late_groups.LateGroup, operation: str, size: int) -> None:
        nonlocal reductions
        if rank in _HELD and operation == "allreduce" and size >= _MANY:
            reductions += 1
            if reductions == FAULT["step"] + 1:
                (out / f"held-{rank}").touch()
                group.aborted.wait(60)

    def die() -> None:
        while not all((out / f"held-{each}").exists() for each in _HELD):
            pause.wait(0.002)
        strike(FAULT, out)

    pause = threading.Event()
    if rank == str(FAULT["rank"]) and not (out / mark(FAULT)).exists():
        threading.Thread(target=die, daemon=True).start()
    late_groups.install(out / "late", hold)
    runpy.run_path(str(Path(__file__).with_name("train.py")), run_name="__main__")


if __name__ == "__main__":
    main()
