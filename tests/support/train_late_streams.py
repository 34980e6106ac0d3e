"""The job of train.py with :mod:`late_streams`: ``--late SEED``, and what train.py takes.

A worker that ends leaves a file ``late-RANK`` in the job's folder: how many messages it has sent and received by the
streams, and how many copies have lost what they were to copy.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    import lean_torch  # before torch

    lean_torch.install()  # the engine makes an optimizer

import late_streams


def main() -> None:
    place = sys.argv.index("--late")
    _, seed = sys.argv[place : place + 2]
    del sys.argv[place : place + 2]
    out, rank = Path(sys.argv[sys.argv.index("--out") + 1]), os.environ["RANK"]
    streams = late_streams.install(int(seed))

    @atexit.register
    def tell() -> None:
        counts = {what: streams.counts[what] for what in ("out", "in", "lost")}
        (out / f"late-{rank}").write_text(json.dumps(counts))

    runpy.run_path(str(Path(__file__).with_name("train.py")), run_name="__main__")


if __name__ == "__main__":
    main()
