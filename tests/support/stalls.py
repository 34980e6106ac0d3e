"""Tests whose processes are stopped for moments: ``python -m tests.support.stalls SEED -- COMMAND``.

Any process that the command's tests start, workers, agents, launchers and etcd, is stopped now and then for 50 to 500
milliseconds, as on a host whose processors others use. The tests themselves are not. A failure is a race of the product
or of the test.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from contextlib import suppress
from random import Random

import psutil

#: Seconds between two stops, and of one: at least, and at most.
BETWEEN_S = 0.05, 0.4
STOP_S = 0.05, 0.5
#: What runs tests, by an argument: pytest, a process of pytest-xdist, the server that forks processes of jobs.
_RUNNERS = ("pytest", "import sys;exec(eval(sys.stdin.readline()))")
_FORK_SERVER = "fork_server.py"


class Stalls(threading.Thread):
    """Stops processes below this one, one at a time.

    Attributes:
        count: how many stops there were.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(daemon=True)
        self.count = 0
        self._random = Random(seed)
        self._end = threading.Event()

    def run(self) -> None:
        while not self._end.wait(self._random.uniform(*BETWEEN_S)):
            found = [process for process in psutil.Process().children(recursive=True) if _may_stop(process)]
            if found:
                self._hold(self._random.choice(found))

    def _hold(self, process: psutil.Process) -> None:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGSTOP)
            self.count += 1
            self._end.wait(self._random.uniform(*STOP_S))
            process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        """Stop nothing any more."""
        self._end.set()
        self.join()


def _may_stop(process: psutil.Process) -> bool:
    """Whether it belongs to a job: not one that runs tests, nor one that a test has stopped."""
    try:
        line = process.cmdline()
        # Jobs' own arguments name folders of pytest's.
        runs_tests = any(each in _RUNNERS or each.endswith(_FORK_SERVER) for each in line)
        return bool(line) and not runs_tests and process.status() != psutil.STATUS_STOPPED
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return False


def main() -> None:
    """Run the command and stop its tests' processes; end as it does."""
    seed, command = int(sys.argv[1]), sys.argv[sys.argv.index("--") + 1 :]
    stalls = Stalls(seed)
    with subprocess.Popen(command) as tests:
        stalls.start()
        code = tests.wait()
        stalls.end()
    print(f"{stalls.count} processes were stopped for a moment (seed {seed})")
    sys.exit(code)


if __name__ == "__main__":
    main()
