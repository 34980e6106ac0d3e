"""tests/support/train.py, whose workers wait for the file ``built`` while they build their engines the first time."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import lean_torch  # noqa: F401  before torch
import torch
import train

OUT = Path(sys.argv[sys.argv.index("--out") + 1])
build = torch.optim.Adam.__init__


def build_slowly(*arguments: Any, **keywords: Any) -> None:
    """Called by DeepSpeed's engine."""
    (OUT / f"building-{os.environ['RANK']}").touch()
    while not (OUT / "built").exists():
        time.sleep(0.01)
    build(*arguments, **keywords)


if __name__ == "__main__":
    if not os.environ.get("BAMBOO_RESTART_COUNT"):
        torch.optim.Adam.__init__ = build_slowly  # type: ignore[method-assign]
    train.main()
