"""The job of train.py, whose copies of state come in small pieces; tells what of them has come.

In the job's folder: ``copying-STAGE`` once a part of a copy of that stage's state has come anywhere; ``fetched-RANK``
with a line for each piece, its key, number and bytes; ``begun-RANK`` with a line for each replica under
construction whenever the worker has entered a plan: the epoch, the key, and which part of the copy has come;
``verified-RANK-STAGE`` once that rank's replica of that stage has been compared with its owner's state.
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

from bamboo_ds.comm.bulk import offers
from bamboo_ds.comm.bulk.copying import Fetch
from bamboo_ds.engine.iteration.replication import Replication
from bamboo_ds.engine.recovery.copies import Copies

#: Most bytes of a piece; the state of a stage has some thousands.
_PIECE = 256
#: The part of a copy that has come when it counts as under way.
_UNDER_WAY = 0.2


def main() -> None:
    out, rank = Path(sys.argv[sys.argv.index("--out") + 1]), os.environ["RANK"]
    offers.PIECE = _PIECE
    take, begin, compare = Fetch._take, Copies.begin, Replication._compare

    def taking(self: Fetch, piece: memoryview) -> None:
        take(self, piece)
        with open(out / f"fetched-{rank}", "a") as file:
            file.write(f"{self._key} {self._next} {len(piece)}\n")
        if self.share > _UNDER_WAY:
            (out / f"copying-{self._key.rpartition('/')[2]}").touch()

    def beginning(self: Copies, plan: Any, *arguments: Any) -> None:
        begin(self, plan, *arguments)
        with open(out / f"begun-{rank}", "a") as file:
            for each in self.constructions.values():
                file.write(f"{plan.epoch} {each.source[1]} {each.fetch.share}\n")

    def comparing(self: Replication, replica: Any, *arguments: Any) -> None:
        compare(self, replica, *arguments)
        (out / f"verified-{rank}-{replica.role.stage}").touch()

    Fetch._take, Copies.begin = taking, beginning  # type: ignore[method-assign]
    Replication._compare = comparing  # type: ignore[method-assign]
    runpy.run_path(str(Path(__file__).with_name("train.py")), run_name="__main__")


if __name__ == "__main__":
    main()
