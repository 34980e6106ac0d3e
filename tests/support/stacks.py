"""Where the processes of a job that hangs are."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path


def stacks(pids: Iterable[int]) -> str:
    """The Python stacks of all threads of these processes, as py-spy reads them; where it cannot, what it says."""
    command = Path(sys.executable).with_name("py-spy")
    told = []
    for pid in pids:
        call = [str(command), "dump", "--pid", str(pid)]
        try:
            done = subprocess.run(call, capture_output=True, text=True, timeout=30, check=False)
            told.append(done.stdout or f"process {pid}: {done.stderr}")
        except (subprocess.TimeoutExpired, FileNotFoundError) as error:
            told.append(f"process {pid}: {error}")
    return "\n".join(told)
