"""What a worker's script forks has no part in the job: it neither keeps connections alive nor ends them."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from torch import distributed as dist

from bamboo_ds.comm import wire
from bamboo_ds.comm.places import Place
from tests.support.comm_worker import Member, cluster
from tests.support.hubs import Hubs, Inbox
from tests.support.jobs import run_text

pytestmark = [pytest.mark.claim("guides/elastic.md"), pytest.mark.integration, pytest.mark.usefixtures("fork_server")]


def all_reduce(member: Member) -> float:
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    return float(tensor)


def fork_one_that_stays(member: Member) -> int:
    pid = os.fork()
    if pid == 0:
        while True:
            signal.pause()
    return pid


def fork_one_that_ends(member: Member) -> int:
    """It runs its exit handlers, as after ``sys.exit``."""
    pid = os.fork()
    if pid == 0:
        try:
            atexit._run_exitfuncs()
        finally:
            os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_loss_is_seen_while_a_child_lives() -> None:
    with cluster(2) as made:
        assert made.everybody("call", lambda _: (all_reduce,)) == [2.0, 2.0]
        child = psutil.Process(made[1].run("call", fork_one_that_stays))
        try:
            made[0].start("call", all_reduce)
            made[0].wait_blocked()
            made[1].kill()
            outcome = made[0].outcome()
            assert outcome is not None and outcome.kind == "PeerLost", outcome
            assert child.is_running() and child.status() != psutil.STATUS_ZOMBIE
        finally:
            child.kill()
        made.replace_member(1)


def test_a_child_ends_nothing() -> None:
    with cluster(2) as made:
        assert made.everybody("call", lambda _: (all_reduce,)) == [2.0, 2.0]
        assert made[1].run("call", fork_one_that_ends) == 7
        assert made.everybody("call", lambda _: (all_reduce,)) == [2.0, 2.0]


def test_what_is_closed_is_closed() -> None:
    """A child that was forked while it was open holds nothing of it: neither a connection nor the port."""
    hubs = Hubs("ab")
    inboxes = {name: Inbox(hub, 1) for name, hub in hubs.items()}
    ports = {Place.parse(place).port for place in hubs.places}
    hubs["a"].reach("b", hubs["b"].place).send(1, wire.encode(b"key", 1, None, 1))
    inboxes["b"].wait(lambda: bool(inboxes["b"].got))
    reading, writing = os.pipe()
    try:
        child = os.fork()
        if child == 0:
            os.write(writing, b"\0")
            signal.pause()
            os._exit(0)
    finally:
        hubs.pop("b").close()
    try:
        assert os.read(reading, 1) == b"\0"
        inboxes["a"].wait(lambda: bool(inboxes["a"].lost))
        assert inboxes["a"].lost[0][0] == "b"
        # Not by connecting: another process may have got the port by now.
        held = [each for each in psutil.Process(child).net_connections("tcp") if each.laddr.port in ports]
        assert not held
        hubs.close()
        assert not ports & {each.laddr.port for each in psutil.Process().net_connections("tcp") if not each.raddr}
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)


FORKS = """
import os
from small_job import begin
from bamboo_ds.forking import sure_fork

engine, data = begin(7)
engine.train_batch(data)
assert (os.fork is sure_fork) == (sys.version_info < (3, 12, 1))
pid = os.fork()
if pid == 0:
    sys.exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
for _ in range(2):
    engine.train_batch(data)
"""


@pytest.mark.exhaustive
def test_a_script_that_forks(tmp_path: Path) -> None:
    """What its child ends with concerns nobody."""
    result = run_text(tmp_path, FORKS)
    assert [event["step"] for event in result.events("step")] == [1, 2, 3]
    assert not result.events("member_lost")


STUCK = """
import multiprocessing, os, signal, sys
from bamboo_ds import forking

forks = []
os.register_at_fork(before=lambda: forks.append(1))
# As where another thread has held the interpreter's lock in the moment of the first fork.
os.register_at_fork(after_in_child=lambda: len(forks) == 1 and signal.pause())
forking.TIMEOUT_S = 0.5
os.fork = forking.sure_fork
child = multiprocessing.get_context("fork").Process(target=sys.exit, args=(5,))
child.start()
child.join()
open_files = os.listdir("/proc/self/fd")
os.waitpid(os.fork() or os._exit(0), 0)
assert len(os.listdir("/proc/self/fd")) == len(open_files)
print(len(forks), child.exitcode)
"""


def test_a_child_that_hangs_in_the_fork_is_replaced() -> None:
    done = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["3", "5"], done.stderr
    assert done.stderr.count("hangs since it was forked") == 1
