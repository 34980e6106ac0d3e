"""A forked process is what an executed one would be, and so are the agents and workers that it starts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import bamboo_command, environment
from tests.support.processes import Process, servers, start

pytestmark = pytest.mark.integration

#: Tells all that a program can see of how it was started.
PROBE = """
import __main__, gc, json, logging, os, signal, sys, tempfile, threading
shown = lambda name: open(f"/proc/self/{name}").read().split("\\0")[:-1]
kind = lambda fd: os.readlink(f"/proc/self/fd/{fd}").partition(":")[0].partition("-")[0]
seen = {
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "main": __main__.__file__, "name": __name__,
    "environ": dict(os.environ), "cmdline": shown("cmdline"), "shown": sorted(shown("environ")),
    "comm": open("/proc/self/comm").read(),
    "signals": {int(n): str(signal.getsignal(n)).partition(" at ")[0] for n in signal.valid_signals()},
    "mask": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))),
    "fds": {fd: kind(fd) for fd in range(1000) if os.path.lexists(f"/proc/self/fd/{fd}")},
    "session": os.getsid(0) == os.getpid(), "group": os.getpgid(0) == os.getpid(),
    "cwd": os.getcwd(), "tmp": tempfile.gettempdir(), "threads": threading.active_count(),
    "hooks": [sys.excepthook is sys.__excepthook__, sys.exit.__module__], "gc": gc.isenabled(),
    "log": [len(logging.getLogger("bamboo_ds").handlers), len(logging.getLogger().handlers)],
    "fork": os.fork.__module__, "unbuffered": sys.stdout.write_through,
}
for name in ("PARENT", "INVOCATION"):
    seen["environ"].pop(name, None)
with open(os.environ["SEEN_IN"], "w") as file:
    json.dump(seen, file)
"""


def run(folder: Path, name: str, command: list[str], fork: bool, **options: Any) -> tuple[Process, str]:
    """A process that has ended, and what it has printed."""
    log = folder / f"{name}-{fork}.txt"
    env = environment() | {"TMPDIR": str(folder), "SEEN_IN": str(folder / "seen.json")}
    with open(log, "wb") as file:
        process = start(command, env, file.fileno(), fork=fork, **options)
    process.wait(60)
    return process, log.read_text()


def seen(folder: Path) -> dict[str, Any]:
    """What the probe has told; a line of that length may be cut by what others print."""
    file = folder / "seen.json"
    found: dict[str, Any] = json.loads(file.read_text())
    file.unlink()  # the next process tells anew
    return found


def test_a_worker_sees_what_it_would(tmp_path: Path) -> None:
    """Launcher, agent and worker are forked from each other."""
    script = tmp_path / "probe.py"
    script.write_text(PROBE)
    found = []
    for fork in (True, False):
        command = [sys.executable, bamboo_command(), "run", "-n", "1", "--job", "probe", str(script), "x"]
        process, printed = run(tmp_path, "worker", command, fork)
        assert process.returncode == 0, printed
        one = seen(tmp_path)
        varying = (
            "BAMBOO_MEMBER",
            "BAMBOO_JOB_SECRET",
            "MASTER_PORT",
            "BAMBOO_CHANNEL_FD",
            "BAMBOO_LISTENER",
            "BAMBOO_TETHER_FD",
            "BAMBOO_TIMELINE_FD",
        )
        for name in varying:
            assert one["environ"].pop(name)
        one["shown"] = [pair for pair in one["shown"] if not pair.startswith(varying)]
        one["fds"] = sorted(one["fds"].values())
        found.append(one)
    assert found[0] == found[1]
    assert servers()[0], "nothing was forked"


@pytest.mark.parametrize(
    ("ending", "code", "told"),
    [
        ("pass", 0, "at exit"),
        ("sys.exit(3)", 3, "at exit"),
        ("sys.exit('why')", 1, "why"),
        ("raise ValueError('wrong')", 1, "ValueError: wrong"),
        ("os._exit(5)", 5, ""),
        ("os.kill(os.getpid(), 9)", -9, ""),
        ("threading.Thread(target=lambda: print('a thread')).start()", 0, "a thread\nat exit"),
    ],
)
def test_a_program_ends_as_it_would(tmp_path: Path, ending: str, code: int, told: str) -> None:
    script = tmp_path / "ends.py"
    script.write_text(f"import atexit, os, sys, threading\natexit.register(print, 'at exit')\n{ending}\n")
    for fork in (True, False):
        process, printed = run(tmp_path, "ends", [sys.executable, str(script)], fork)
        assert process.returncode == code
        assert told in printed
        assert ("at exit" in printed) == (code in (0, 1, 3))


def test_processes_have_seeds_of_their_own(tmp_path: Path) -> None:
    script = tmp_path / "seeds.py"
    script.write_text(
        "import numpy, random, torch\nprint(numpy.random.rand(), random.random(), torch.initial_seed())\n"
    )
    _, one = run(tmp_path, "one", [sys.executable, str(script)], True)
    _, other = run(tmp_path, "other", [sys.executable, str(script)], True)
    assert not set(one.split()) & set(other.split())
