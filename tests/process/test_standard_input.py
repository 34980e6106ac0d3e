"""Who reads the standard input of a launcher."""

from __future__ import annotations

import fcntl
import os
import pty
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from bamboo_ds.control import standard_input
from bamboo_ds.control.settings import AgentSettings
from bamboo_ds.job_settings import JobSettings
from tests.support.control import Job, Start

pytestmark = [pytest.mark.claim("guides/launchers.md", "reference/cli.md"), pytest.mark.integration]


def read(job: Job, rank: int, count: int) -> str:
    """What the worker of ``rank`` reads when it asks for ``count`` bytes."""
    before = len(job.find("read"))
    job.tell(rank, f"read {count}")
    job.wait(lambda: len(job.find("read")) > before, f"rank {rank} has read")
    return str(job.find("read")[-1]["text"])


def test_workers_share_the_launcher_s(start: Start) -> None:
    reading, writing = os.pipe()
    job = start(3, stdin=reading).run()
    os.close(reading)
    os.write(writing, b"onetwo")
    assert read(job, 0, 3) == "one"
    job.tell(1, "read 3")
    job.wait(lambda: job.find("read", 1), "rank 1 has read")
    assert job.find("read", 1)[0]["text"] == "two", "of one pipe"
    job.kill(job.worker(0))
    job.wait_epoch(3, 0)
    os.write(writing, b"three")
    assert read(job, 2, 5) == "three", "it outlives a worker that has read"
    os.close(writing)
    assert read(job, 1, 1) == read(job, 2, 1) == "", "its end is everybody's"
    job.finish(0)


def test_none_that_is_closed(start: Start) -> None:
    job = start(2).run()
    assert read(job, 0, 1) == read(job, 1, 1) == ""
    job.finish()


LOOK = """
import os, subprocess, sys
from bamboo_ds.control import standard_input
def look():
    print({None: "shared", subprocess.DEVNULL: "nothing"}[standard_input.inherited()], flush=True)
look()
for begin in (lambda: os.setpgid(0, 0), os.setsid):
    pid = os.fork()
    if pid == 0:
        begin()
        look()
        os._exit(0)
    os.waitpid(pid, 0)
os.close(0)
look()
os.open(sys.argv[0], os.O_RDONLY)  # as number 0
look()
"""


def test_a_process_in_the_background_of_its_terminal_gives_none_to_others(tmp_path: Path) -> None:
    outside, terminal = pty.openpty()

    def own() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    script = tmp_path / "look.py"
    script.write_text(LOOK)
    done = subprocess.run(
        [sys.executable, str(script)],
        stdin=terminal,
        stdout=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=own,
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    os.close(outside)
    os.close(terminal)
    words = ["shared", "nothing", "shared", "nothing", "nothing"]
    assert done.stdout.decode().split() == words, "foreground, background, another session, closed, another file"


@pytest.mark.parametrize(
    ("circumstances", "again"),
    [
        ({"generation": 0}, False),
        ({"generation": 1}, True),
        ({"script_rank": 0}, True),
        ({"generation": 0, "launched": True}, True),
    ],
)
def test_a_worker_that_comes_later_reads_a_file_again(
    circumstances: dict[str, int], again: bool, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_text("words")
    kept, given = os.dup(0), os.open(file, os.O_RDONLY)
    settings = AgentSettings(
        job="j", store="s", address="a", command=("c",), settings=JobSettings(), slot=0, world_size=1, parent_pid=1,
        **circumstances,
    )  # fmt: skip
    try:
        os.dup2(given, 0)
        assert os.read(0, 3) == b"wor"
        with standard_input.of_worker(settings) as stdin:
            done = subprocess.run(["cat"], stdin=stdin, capture_output=True, check=True)
    finally:
        os.dup2(kept, 0)
        os.close(kept)
        os.close(given)
    assert done.stdout == (b"words" if again else b"ds")
