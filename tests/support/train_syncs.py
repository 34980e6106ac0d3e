"""The job of train_late_streams.py; tells where the script's thread would wait for a device.

A file ``syncs-RANK`` in the job's folder has a line for each place between the first forward pass of an iteration and
the measuring of its gradients, at which a number of a tensor is asked for, or a tensor copied to the host: the
innermost two frames of the package.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    import lean_torch  # before torch

    lean_torch.install()  # the engine makes an optimizer

from torch.overrides import TorchFunctionMode

from bamboo_ds.engine.iteration.passes import Passes
from bamboo_ds.engine.iteration.reduction import Reduction

_ASKS = {
    "item",
    "tolist",
    "cpu",
    "numpy",
    "nonzero",
    "equal",
    "allclose",
    "is_nonzero",
    "__bool__",
    "__float__",
    "__int__",
}


class _Watch(TorchFunctionMode):
    """Notes each place once."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file, self._known = file, set[str]()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in _ASKS or (name == "to" and "cpu" in map(str, args[1:])):
            frames = [
                f for f in traceback.extract_stack() if "/bamboo_ds/" in f.filename or "/deepspeed/" in f.filename
            ]
            where = " < ".join(f"{Path(f.filename).stem}.{f.name}" for f in reversed(frames[-2:]))
            if where not in self._known:
                self._known.add(where)
                with self._file.open("a") as file:
                    file.write(f"{name} {where}\n")
        return function(*args, **(kwargs or {}))


def main() -> None:
    out, rank = Path(sys.argv[sys.argv.index("--out") + 1]), os.environ["RANK"]
    watch = _Watch(out / f"syncs-{rank}")
    entered: list[bool] = []
    forward, reduce = Passes.forward, Reduction.reduce

    def first(self: Any, buffer_id: int) -> None:
        if not entered and buffer_id == 0 and self.binding.current.owned:
            entered.append(True)
            watch.__enter__()
        forward(self, buffer_id)

    def last(self: Any) -> None:
        if entered:
            entered.clear()
            watch.__exit__(None, None, None)
        reduce(self)

    Passes.forward, Reduction.reduce = first, last  # type: ignore[method-assign]
    runpy.run_path(str(Path(__file__).with_name("train_late_streams.py")), run_name="__main__")


if __name__ == "__main__":
    main()
