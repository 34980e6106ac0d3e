"""The worker's end of the channel, with the test as its agent."""

from __future__ import annotations

import os
import socket

import pytest

from bamboo_ds.comm.places import Listener
from bamboo_ds.worker import channel as module
from bamboo_ds.worker.channel import WorkerChannel


@pytest.mark.integration
def test_from_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_inherited", None)
    monkeypatch.delenv("BAMBOO_CHANNEL_FD", raising=False)
    assert WorkerChannel.from_environment() is None
    ours, theirs = socket.socketpair()
    fd = theirs.detach()
    os.set_inheritable(fd, True)
    door = Listener.open("127.0.0.1")
    reached = door.place
    listening = door.socket.detach()
    os.set_inheritable(listening, True)
    settings = {
        "BAMBOO_CHANNEL_FD": str(fd),
        "BAMBOO_LISTENER": f"{listening} {door.token}",
        "BAMBOO_MEMBER": "m3-ab",
        "BAMBOO_JOB": "j",
        "BAMBOO_ADDRESS": "127.0.0.2",
        "BAMBOO_HOST": "emulated-1",
        "RANK": "3",
        "WORLD_SIZE": "4",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    channel = WorkerChannel.from_environment()
    assert channel is not None
    assert WorkerChannel.from_environment() is channel
    assert (channel.member, channel.job, channel.rank, channel.world_size, channel.address) == (
        "m3-ab",
        "j",
        3,
        4,
        "127.0.0.2",
    )
    assert channel.listener is not None and channel.listener.place == reached and channel.host == "emulated-1"
    assert "BAMBOO_CHANNEL_FD" not in os.environ and "BAMBOO_LISTENER" not in os.environ
    assert not os.get_inheritable(fd) and not os.get_inheritable(listening)
    pid = os.fork()
    if pid == 0:  # a forked child, such as a DataLoader's, is no worker
        os._exit(0 if WorkerChannel.from_environment() is None else 1)
    assert os.waitpid(pid, 0)[1] == 0
    channel.close()
    channel.listener.socket.close()
    ours.close()
