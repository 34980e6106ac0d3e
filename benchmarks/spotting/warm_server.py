"""The fork server of the tests, which also makes the imports that DeepSpeed makes when it builds a sharded engine."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[2])
#: Without it every start of a worker would import torch's compiler, for seconds.
MODULES = ("deepspeed.runtime.zero.muon.muon_optimizer",)

if __name__ == "__main__":
    sys.path.append(ROOT)
    from tests.support import fork_server

    sys.path.remove(ROOT)
    fork_server.STOCK_MODULES += MODULES
    fork_server.main()
