"""The job of train.py, whose workers tell that their iterations take minutes."""

from __future__ import annotations

import runpy
from pathlib import Path

if __name__ == "__main__":
    import lean_torch  # before torch

    lean_torch.install()  # the engine makes an optimizer

from bamboo_ds.engine.iteration.block_times import BlockTimes

#: Seconds.
_TOLD_S = 240.0


def tell_long_iterations() -> None:
    """This worker tells from its second iteration on that they take minutes: plans interrupt them."""
    told = property(lambda self: _TOLD_S if self._iterations else 0.0)
    BlockTimes.iteration_s = told  # type: ignore[method-assign, assignment]


def main() -> None:
    tell_long_iterations()
    runpy.run_path(str(Path(__file__).with_name("train.py")), run_name="__main__")


if __name__ == "__main__":
    main()
