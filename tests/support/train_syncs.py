"""The job of train.py; tells how often the host waits for the device.

A file ``syncs-RANK`` in the job's folder has a line for each iteration: how often between its first forward pass and
the measuring of its gradients, and how often from there to the next iteration's first pass; each as two numbers, for
what the device computes, and for copies to it.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    import lean_torch  # before torch

    lean_torch.install()  # the engine makes an optimizer

import far_device

from bamboo_ds.engine.iteration.passes import Passes
from bamboo_ds.engine.iteration.reduction import Reduction


def main() -> None:
    out, rank = Path(sys.argv[sys.argv.index("--out") + 1]), os.environ["RANK"]
    told, counted = out / f"syncs-{rank}", [0, 0]
    forward, reduce = Passes.forward, Reduction.reduce

    def tell(end: str) -> None:
        before, now = tuple(counted), far_device.counts()
        counted[:] = now["waits"], now["loads"]
        with told.open("a") as file:
            file.write(f"{counted[0] - before[0]} {counted[1] - before[1]}{end}")

    def first(self: Any, buffer_id: int) -> None:
        if buffer_id == 0 and self.binding.current.owned:
            tell("\n")
        forward(self, buffer_id)

    def last(self: Any) -> None:
        tell(" ")
        reduce(self)

    Passes.forward, Reduction.reduce = first, last  # type: ignore[method-assign]
    runpy.run_path(str(Path(__file__).with_name("train.py")), run_name="__main__")


if __name__ == "__main__":
    main()
