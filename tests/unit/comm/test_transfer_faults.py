"""Copies of state whose connections, owners and receivers fail: noticed, survived, and nothing is left behind."""

from __future__ import annotations

import socket

import pytest
import torch

from bamboo_ds.comm.bulk.offers import Offer, Offers
from bamboo_ds.comm.wire import payloads
from bamboo_ds.errors import TransferError
from tests.support.hubs import Hubs
from tests.support.transfer import HEAD, PROOF, Proxy, fetch, get, hubs, nothing_left, offers, same, state, wait_for

pytestmark = pytest.mark.claim("guides/elastic.md", "guides/security.md")

__all__ = ["hubs", "nothing_left", "offers"]  # fixtures

#: Where the bytes of the second piece begin: after two heads of frames and the head of the offer with its facts.
LEAD = PROOF + HEAD
MIDDLE = 2 * (1 << 20)


# -- faults --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [MIDDLE, MIDDLE + 300_000, MIDDLE + 900_000])
def test_corruption_is_noticed(hubs: Hubs, offers: Offers, at: int) -> None:
    """What is not what was sent is fetched again, once."""
    tensors = state()
    offers.offer("k", "landmark", tensors)
    with Proxy(hubs["b"].place, "flip", at) as proxy:
        text, got = get(hubs, place=proxy.place)
        assert (proxy.strikes, proxy.calls, text) == (1, 2, "landmark")
    assert same(got, tensors)


@pytest.mark.parametrize("where", ["the words", "a dtype"])
def test_corruption_of_the_head_is_noticed(hubs: Hubs, offers: Offers, where: str) -> None:
    offers.offer("k", "landmark", state())
    at = LEAD + {"the words": 300, "a dtype": 32}[where]
    with Proxy(hubs["b"].place, "flip", at, times=2) as proxy:
        with pytest.raises(TransferError, match="checksum of what was sent"):
            get(hubs, place=proxy.place)
        assert (proxy.strikes, proxy.calls) == (1, 1)


def test_corruption_for_good(hubs: Hubs, offers: Offers) -> None:
    offers.offer("k", "", [torch.zeros(1 << 16)])  # a head and one piece
    with Proxy(hubs["b"].place, "flip", at=LEAD + 2000, times=9) as proxy:
        with pytest.raises(TransferError, match="piece 1 does not have the checksum of what was sent"):
            get(hubs, place=proxy.place)
        assert (proxy.strikes, proxy.calls) == (2, 2)


def test_a_connection_that_breaks(hubs: Hubs, offers: Offers) -> None:
    """The copy goes on from the piece that was not there: little comes twice."""
    tensors = state(16)
    offers.offer("k", "t", tensors)
    with Proxy(hubs["b"].place, "cut", at=3 * MIDDLE, times=2) as proxy:
        text, got = get(hubs, place=proxy.place)
        assert (proxy.strikes, proxy.calls, text) == (2, 3, "t")
        assert proxy.passed < sum(t.nbytes for t in tensors) + 2 * (1 << 20) + 100_000
    assert same(got, tensors)


def test_a_connection_that_breaks_again_and_again(hubs: Hubs, offers: Offers) -> None:
    offers.offer("k", "t", state())
    with Proxy(hubs["b"].place, "cut", at=PROOF + 100, times=9) as proxy:
        with pytest.raises(TransferError, match="connection ended: closed by the peer"):
            get(hubs, place=proxy.place)
        assert proxy.strikes == proxy.calls == 1, "nothing came of it"


def test_a_silent_connection_is_given_up(hubs: Hubs, offers: Offers) -> None:
    offers.offer("k", "t", state())
    with Proxy(hubs["b"].place, "hold", at=MIDDLE) as proxy:
        one = fetch(hubs, timeout_s=1, place=proxy.place)
        wait_for(lambda: proxy.strikes == 1)
        wait_for(one.done)
        with pytest.raises(TransferError, match=r"no progress for 1 s after \d\d%"):
            one.result(0)


def test_another_version(hubs: Hubs, offers: Offers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(payloads.CODES, torch.float32, 99)
    offer = Offer(1, "", [torch.zeros(1)], paced=True)
    monkeypatch.undo()
    offers._offers["k"] = offer
    with pytest.raises(TransferError, match="dtype 99, unknown to this torch"):
        get(hubs)


# -- ending --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["in the middle", "before the offer", "in the handshake", "in a connect"])
def test_stopping(hubs: Hubs, offers: Offers, when: str) -> None:
    if when == "in the middle":
        offers.offer("k", "t", state())
    at = 10 if when == "in the handshake" else MIDDLE
    with Proxy(hubs["b"].place, "hold", at) as proxy, socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        first = socket.create_connection(full.getsockname())  # fills the queue: others are not answered
        place = f"127.0.0.1 {full.getsockname()[1]} token" if when == "in a connect" else proxy.place
        one = fetch(hubs, timeout_s=600, place=place)
        if when == "before the offer":
            wait_for(lambda: bool(offers._requests))
        elif when != "in a connect":
            wait_for(lambda: proxy.strikes == 1)
        assert not one.done()
        one.cancel()
        with pytest.raises(TransferError, match=r"stopped after \d+%"):
            one.result(0)
        wait_for(lambda: not any(hubs["a"]._connections.values()))  # and does not call again
        first.close()


def test_ending_with_everything_in_flight(hubs: Hubs, offers: Offers) -> None:
    offers.begin(10.0, {})
    offers.offer("k", "t", [torch.zeros(1 << 22)])
    served, waiting = fetch(hubs), fetch(hubs, "absent")
    wait_for(lambda: served.share > 0 and len(offers._requests) == 2)
    offers.close()
    offers.close()
    for one in (served, waiting, fetch(hubs, "k")):
        with pytest.raises(TransferError, match="withdrawn after"):
            one.result(20)
    offers.withdraw("k")
    with pytest.raises(TransferError, match="offers nothing any more"):
        offers.offer("k", "", ())


@pytest.mark.parametrize("ends", ["a", "b"])
def test_a_worker_that_ends(hubs: Hubs, offers: Offers, ends: str) -> None:
    offers.begin(10.0, {})
    offers.offer("k", "t", [torch.zeros(1 << 22)])
    one = fetch(hubs)
    wait_for(lambda: one.share > 0)
    hubs.pop(ends).close()
    with pytest.raises(TransferError, match=r"this worker ends|refused|reset|withdrawn"):
        one.result(20)
