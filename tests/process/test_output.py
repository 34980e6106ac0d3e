"""What workers write: the way to the terminal, and how far members are."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import threading
from pathlib import Path

import pytest

from bamboo_ds.observe.logfiles import worker_log
from tests.unit.cli.test_output import DEADLINE_S

pytestmark = pytest.mark.claim("guides/logs.md")

# -- from the worker to its agent's output --------------------------------------------------------------------


class Relay:
    """A worker that executes ``script``, and an agent's part in its output, which this process reads or ``stdout``."""

    def __init__(
        self,
        folder: Path,
        script: str,
        prefix: bool = False,
        most: int = 64 << 20,
        stdout: int = subprocess.PIPE,
        hurried: bool = False,
    ) -> None:
        self.file = worker_log(folder, 1)
        worker = [sys.executable, "-c", f"import os, sys, time\n{script}"]
        options = ["1" * prefix, str(most), "1" * hurried]
        self.agent = subprocess.Popen(
            [sys.executable, "-m", "tests.support.relay", str(folder), *options, *worker],
            stdout=stdout,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
        )

    def shows(self, text: bytes, stream: str = "stdout") -> None:
        """``text`` is what comes next."""
        pipe, found = getattr(self.agent, stream), b""
        while len(found) < len(text):
            assert select.select([pipe], [], [], DEADLINE_S)[0], found
            data = os.read(pipe.fileno(), len(text) - len(found))
            assert data, found
            found += data
        assert found == text

    def rest(self) -> tuple[bytes, bytes]:
        out, err = self.agent.communicate(timeout=DEADLINE_S)
        assert self.agent.returncode == 0
        return out, err

    def lines(self) -> list[bytes]:
        """Of the file, without their times, and without the first one, which says whose it is."""
        begin, *lines = [line[24:] for line in self.file.read_bytes().split(b"\n")[:-1]]
        assert re.fullmatch(rb"\[bamboo\] worker of m1-a, process \d+", begin)
        return lines


#: A megabyte, which no pipe holds, in lines.
MUCH = "[os.write(1, b'%07d' % n + 992 * b'x' + b'\\n') for n in range(1000)]"


@pytest.mark.integration
def test_output_is_copied_as_it_is(tmp_path: Path) -> None:
    relay = Relay(
        tmp_path,
        "os.write(1, b'no end yet'); time.sleep(0.2); os.write(2, b'\\x00\\xff\\r\\nan error\\n')\n"
        f"while not os.path.exists('{tmp_path}/go'): time.sleep(0.01)\nos.write(1, b', now\\n')",
    )
    relay.shows(b"no end yet")  # at once
    relay.shows(b"of the agent\n\x00\xff\r\nan error\n", "stderr")
    (tmp_path / "go").touch()
    out, err = relay.rest()
    assert out == b", now\n" and err.endswith(b"bamboo_ds: the end\n")
    assert relay.lines() == [b"\x00\xff", b"an error", b"no end yet, now"], "without the agent's own lines"


@pytest.mark.integration
def test_a_terminal_stays_one(tmp_path: Path) -> None:
    outside, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 40, 132, 0, 0))
    relay = Relay(
        tmp_path,
        "print(os.isatty(1), os.isatty(2), *os.get_terminal_size(), flush=True); os.write(1, b'a\\tb\\n\\x1b[31mred')",
        stdout=terminal,
    )
    relay.rest()
    shown = b""
    while not shown.endswith(b"red"):
        shown += os.read(outside, 1000)
    assert shown == b"True False 132 40\r\na\tb\r\n\x1b[31mred", "the worker's terminal changes nothing"
    assert relay.lines() == [b"True False 132 40", b"a\tb", b"\x1b[31mred"]
    os.close(outside)
    os.close(terminal)


@pytest.mark.integration
def test_prefixes(tmp_path: Path) -> None:
    """Of whole lines, as a terminal shows them; scripts see a pipe."""
    relay = Relay(tmp_path, "os.write(1, b'\\r 10%\\r 20%\\nwords without an end')", prefix=True)
    assert relay.rest()[0] == b"[1]  20%\n[1] words without an end\n"
    assert relay.lines() == [b" 20%", b"words without an end"]


@pytest.mark.integration
def test_a_launcher_that_takes_nothing_stops_neither_worker_nor_agent(tmp_path: Path) -> None:
    """What waits is shown once it goes on; of what exceeds it the file has all, and it is said."""
    relay = Relay(tmp_path, f"{MUCH}; open('{tmp_path}/done', 'w')", most=400_000)
    assert relay.agent.wait(DEADLINE_S) == 0
    assert (tmp_path / "done").exists()
    out, err = relay.rest()
    assert out == b"".join(b"%07d" % n + 992 * b"x" + b"\n" for n in range(1000))[: len(out)] and out
    assert b"the end of this worker's output is not shown\n" in err and err.endswith(b"bamboo_ds: the end\n")
    assert [int(line[:7]) for line in relay.lines()] == list(range(1000))

    relay = Relay(tmp_path / "2", f"{MUCH}\nwhile not os.path.exists('{tmp_path}/go'): time.sleep(0.01)", most=400_000)
    waiting = threading.Event()
    while not relay.file.exists() or relay.file.stat().st_size < 1_000_000:
        waiting.wait(0.05)
    relay.shows(b"%07d" % 0)
    (tmp_path / "go").touch()
    out, _ = relay.rest()
    told = re.search(rb"\n\[bamboo\] (\d+) bytes were not shown\n", out)
    assert told and len(out) + 7 - len(told[0]) + int(told[1]) == 1_000_000


@pytest.mark.integration
def test_an_agent_that_is_waited_for_does_not_wait_for_a_slow_terminal(tmp_path: Path) -> None:
    relay, pause = Relay(tmp_path, MUCH, hurried=True), threading.Event()
    assert relay.agent.stdout is not None
    read = 0
    while relay.agent.poll() is None:
        read += len(os.read(relay.agent.stdout.fileno(), 4096))
        pause.wait(0.1)
    _, err = relay.rest()
    assert read < 900_000 and b"the end of this worker's output is not shown\n" in err
    assert len(relay.lines()) == 1000, "the file has all"


@pytest.mark.integration
def test_a_killed_launcher_does_not_stop_the_worker(tmp_path: Path) -> None:
    relay = Relay(tmp_path, f"time.sleep(0.1); {MUCH}; os.write(1, b'its last words')")
    assert relay.agent.stdout and relay.agent.stderr
    relay.agent.stdout.close()
    relay.agent.stderr.close()
    assert relay.agent.wait(DEADLINE_S) == 0
    assert len(relay.lines()) == 1001 and relay.lines()[-1] == b"its last words"
