"""``bamboo chaos`` whose joiners are forked from a process that has made their imports: nodes with warm caches.

Executed in place of ``bamboo``, with its arguments.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for tests.support

from bamboo_ds.chaos import joiners
from bamboo_ds.cli.main import cli
from tests.support import processes
from tests.support.processes import Process, parent_pid, start

processes.SERVER = Path(__file__).with_name("warm_server.py")


def popen(arguments: list[str], *, env: dict[str, str], stdout: Any, **others: Any) -> Process:
    """What :class:`joiners.Join` starts, in the working directory of this process."""
    return start(arguments, env, stdout.fileno())


if __name__ == "__main__":
    parent_pid()  # imports take their time now, not at the first join
    joiners.subprocess = SimpleNamespace(  # type: ignore[assignment]
        Popen=popen, DEVNULL=subprocess.DEVNULL, STDOUT=subprocess.STDOUT, TimeoutExpired=subprocess.TimeoutExpired
    )
    cli()
