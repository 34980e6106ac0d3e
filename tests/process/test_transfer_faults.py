"""Copies of state whose connections, owners and receivers fail: noticed, survived, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import warnings

import pytest
import torch

from bamboo_ds.comm.bulk.offers import Offers
from bamboo_ds.errors import TransferError
from tests.support.hubs import Hubs
from tests.support.transfer import fetch, get, hubs, nothing_left, offers, wait_for

pytestmark = pytest.mark.claim("guides/elastic.md", "guides/security.md")

__all__ = ["hubs", "nothing_left", "offers"]  # fixtures


OTHER_PROCESS = """
import sys, torch
from bamboo_ds.comm.hub import Hub
from bamboo_ds.comm.places import Listener
from bamboo_ds.secret import NONE
hub = Hub("b", Listener.open("127.0.0.1"), NONE, 10.0)
hub.offers.begin(4.0, {})
hub.offers.offer("k", "theirs", [torch.arange(1 << 21)])
print(hub.place, flush=True)
sys.stdin.read()
"""


@pytest.mark.integration
def test_the_owner_is_killed(hubs: Hubs, offers: Offers) -> None:
    command = [sys.executable, "-c", OTHER_PROCESS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        one = fetch(hubs, place=owner.stdout.readline().strip())
        wait_for(lambda: one.share > 0)
        owner.kill()
        assert owner.wait(20) == -signal.SIGKILL
        with pytest.raises(TransferError, match=r"refused|reset"):
            one.result(20)
        assert one.share < 1, "it died in the middle"
    offers.offer("k", "ours", [torch.arange(1 << 21)])
    text, (got,) = get(hubs)
    assert text == "ours"
    assert torch.equal(got, torch.arange(1 << 21))


@pytest.mark.integration
def test_a_forked_child_keeps_nothing_open(hubs: Hubs, offers: Offers) -> None:
    """A DataLoader's worker inherits all sockets; the owner's receivers must still see its end."""
    offers.begin(10.0, {})
    offers.offer("k", "", [torch.zeros(1 << 22)])
    one = fetch(hubs)
    wait_for(lambda: one.share > 0)
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    try:
        hubs.pop("b").close()
        with pytest.raises(TransferError, match=r"refused|reset|withdrawn"):
            one.result(20)
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "it lived all the time"
    finally:
        os.close(writing)
        os.close(reading)
        os.waitpid(child, 0)
