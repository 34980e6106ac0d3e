"""Copies of state over real sockets: bits survive, keys come and go, the rate is kept."""

from __future__ import annotations

import contextlib
import time
import weakref

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bamboo_ds.comm import wire
from bamboo_ds.comm.bulk import offers as offering
from bamboo_ds.comm.bulk.offers import Offer, Offers, TokenBucket
from bamboo_ds.comm.wire import payloads
from bamboo_ds.errors import TransferError, UnsupportedError
from bamboo_ds.secret import NONE, JobSecret
from bamboo_ds.state import join, split
from tests.support.hubs import Hubs
from tests.support.transfer import PROOF, Proxy, fetch, get, hubs, nothing_left, offers, same, state, wait_for

pytestmark = pytest.mark.claim("guides/elastic.md", "guides/security.md", "reference/settings.md")

__all__ = ["hubs", "nothing_left", "offers"]  # fixtures


# -- bits survive --------------------------------------------------------------------------------------


def test_every_dtype_and_form(hubs: Hubs, offers: Offers) -> None:
    filled = [
        torch.randint(0, 2, (12 * d.itemsize,), dtype=torch.uint8).view(d).reshape(3, 4)
        for d in payloads.DTYPES.values()
    ]
    assert {torch.bfloat16, torch.bool, torch.float8_e4m3fn, torch.complex64} <= {t.dtype for t in filled}
    forms = [
        torch.tensor(7),
        torch.tensor(float("nan")),
        torch.empty(0),
        torch.empty(2, 0, 3, dtype=torch.int64),
        torch.randn(64, 48).t(),
        torch.randn(64, 48)[::2, 1::3],
        torch.randn(3).expand(5, 3),
        torch.randn(4, 5, dtype=torch.complex64).conj(),
        torch.randn(9, requires_grad=True),
        torch.nn.Parameter(torch.randn(300, 300)),
    ]
    text = '{"ä": "☃"}\n'
    offers.offer("k", text, filled + forms)
    got_text, got = get(hubs)
    assert got_text == text
    assert same(got, [t.detach().resolve_conj() for t in filled + forms])
    assert all(t.is_contiguous() and t.untyped_storage().nbytes() == t.nbytes for t in got)


def test_a_tree_and_a_text(hubs: Hubs, offers: Offers) -> None:
    tree = {"optimizer": {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(700_000)}}, "lr": 0.1}
    offers.offer("0,1/step 7?&=%2F+ü", *split(tree))
    again = join(*get(hubs, "0,1/step 7?&=%2F+ü"))
    assert torch.equal(again["optimizer"][0]["exp_avg"], tree["optimizer"][0]["exp_avg"])  # type: ignore[index]
    for text in ("{}", "", "x" * 3_000_000):
        offers.offer("status", text, ())
        assert get(hubs, "status") == (text, [])


def test_answers_are_made_when_asked_for(hubs: Hubs, offers: Offers) -> None:
    known, early = ["a"], fetch(hubs, "history/0")
    get_text = {"history/": lambda key: ",".join(known[int(key.removeprefix("history/")) :])}
    offers.offer("other", "", ())
    assert get(hubs, "other") == ("", []) and not early.done()
    offers.begin(1e-6, get_text)  # nothing else gets through
    assert early.result(20) == get(hubs, "history/0") == ("a", [])
    known.append("b")
    assert get(hubs, "history/0") == ("a,b", [])
    assert get(hubs, "history/1") == ("b", [])
    offers.begin(None, get_text)
    offers.offer("history/1", "an offer goes first", ())
    assert get(hubs, "history/1") == ("an offer goes first", [])


def test_contiguous_host_tensors_are_not_copied(hubs: Hubs, offers: Offers) -> None:
    tensor = torch.zeros(10)
    offers.offer("k", "", [tensor, tensor.view(2, 5).t()])
    tensor.fill_(1)
    shared, copied = get(hubs)[1]
    assert shared.tolist() == [1.0] * 10
    assert copied.tolist() == [[0.0] * 2] * 5


def test_tensors_that_cannot_be_sent(offers: Offers) -> None:
    for tensor in (torch.eye(3).to_sparse(), torch.empty(3, device="meta")):
        with pytest.raises(UnsupportedError, match="tensor 1 of a snapshot"):
            offers.offer("k", "", [torch.zeros(1), tensor])


def test_several_receivers_at_once(hubs: Hubs, offers: Offers) -> None:
    """One that takes nothing holds nobody up, nor what members say to each other."""
    tensors = state(16)
    offers.offer("k", "t", tensors)
    with Proxy(hubs["b"].place, "hold", at=1 << 20) as proxy:
        slow = fetch(hubs, place=proxy.place)
        wait_for(lambda: proxy.strikes == 1)
        fetches = [fetch(hubs) for _ in range(4)]
        assert all(same(one.result(20)[1], tensors) for one in fetches)
        assert all(one.done() and one.share == 1.0 for one in fetches)
        assert not slow.done() and slow.share < 1
        said = hubs["a"].reach("b", hubs["b"].place)
        said.send(1, wire.control(wire.FLUSH, 7, 1))
        wait_for(lambda: said.confirmed == 7)
        proxy.release.set()
        assert same(slow.result(20)[1], tensors)


@given(st.lists(st.integers(0, 20), max_size=12), st.integers(1, 9), st.integers(0, 5))
def test_pieces_are_all_bytes_in_order(sizes: list[int], piece_bytes: int, text: int) -> None:
    tensors = [torch.arange(size, dtype=torch.uint8) + place for place, size in enumerate(sizes)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offering, "PIECE", piece_bytes)
        offer = Offer(1, "x" * text, tensors, paced=True)
        head, *pieces = [offer.piece(number) for number in range(offer.count)]
        assert [len(piece) for piece in pieces] == [offer.size(number) for number in range(1, offer.count)]
    assert torch.cat([torch.full((text,), ord("x"), dtype=torch.uint8), *tensors]).tolist() == [
        byte for piece in pieces for byte in piece.tolist()
    ]
    assert all(0 < len(piece) <= piece_bytes for piece in pieces)
    assert [each.shape for each in wire.described(payloads.view(head))] == [(text,), *((size,) for size in sizes)]


# -- who asks early, late, or without right ------------------------------------------------------------


def test_asking_before_the_offer(hubs: Hubs, offers: Offers) -> None:
    one = fetch(hubs)
    wait_for(lambda: len(offers._requests) == 1)
    offers.offer("other", "", ())
    assert not one.done()
    with pytest.raises(TimeoutError):
        one.result(0)
    offers.offer("k", "late", [])
    assert one.result(20) == ("late", [])


def test_a_key_that_nobody_offers(hubs: Hubs, offers: Offers) -> None:
    with pytest.raises(TransferError, match=r"'nope' from b has failed: no progress for 0\.3 s after 0%"):
        get(hubs, "nope", timeout_s=0.3)
    wait_for(lambda: not offers._requests)


def test_withdrawn(hubs: Hubs, offers: Offers) -> None:
    offers.offer("k", "", [torch.zeros(1)])
    offers.withdraw("k")
    offers.withdraw("never offered")
    with pytest.raises(TransferError, match="no progress"):
        get(hubs, timeout_s=0.3)
    offers.offer("k", "again", [])
    assert get(hubs) == ("again", [])


@pytest.mark.parametrize("replaced", [False, True])
def test_withdrawn_on_its_way(hubs: Hubs, offers: Offers, replaced: bool) -> None:
    """The owner may change the tensors at once, and nothing of them is kept; what was sent before is what it was."""
    offers.begin(20.0, {})
    memory = numpy.zeros(1 << 24, dtype=numpy.float32)
    alive = weakref.ref(memory)
    tensors = [torch.from_numpy(memory)]
    offers.offer("k", "", tensors)
    one = fetch(hubs)
    wait_for(lambda: one.share > 0)
    if replaced:
        offers.offer("k", "second", state(1))
    else:
        offers.withdraw("k")
    tensors[0].fill_(1)
    del tensors, memory
    assert alive() is None
    with pytest.raises(TransferError, match=r"withdrawn after \d+%"):
        one.result(20)
    assert 0 < one.share < 1
    if replaced:
        assert same(get(hubs)[1], state(1))


def test_withdrawn_while_the_connection_is_broken(hubs: Hubs, offers: Offers) -> None:
    """Pieces of two offers are not put together."""
    offers.begin(20.0, {})
    offers.offer("k", "first", state(8))
    with Proxy(hubs["b"].place, "hold", at=PROOF + 3 * (1 << 20)) as proxy:
        one = fetch(hubs, place=proxy.place)
        wait_for(lambda: proxy.strikes == 1)
        (connection,) = offers._requests
        connection.hang_up()
        wait_for(lambda: not offers._requests)
        offers.offer("k", "second", state(8))
        proxy.release.set()
        with pytest.raises(TransferError, match="withdrawn after"):
            one.result(20)
        assert proxy.calls == 2


def test_who_does_not_know_the_secret_gets_nothing_and_gives_nothing() -> None:
    """Places and their tokens are in etcd. What they open without the job's secret is nothing."""
    ours, others = JobSecret.new(), JobSecret.new()
    with contextlib.ExitStack() as stack:
        job, *false = [stack.enter_context(contextlib.closing(Hubs("ab", secret))) for secret in (ours, NONE, others)]
        for each in (job, *false):
            each["b"].offers.offer("k", "weights", [torch.ones(3)])
        assert get(job)[0] == "weights"
        for each in false:
            with pytest.raises(TransferError, match="closed by the other end"):
                get(each, place=job["b"].place)
            with pytest.raises(TransferError, match="closed by the other end"):
                get(job, place=each["b"].place)
        host, port, token = job["b"].place.split(" ")
        for wrong in ("wrong", token + "x"):
            with pytest.raises(TransferError, match="closed by the other end") as caught:
                get(job, place=f"{host} {port} {wrong}")
            assert wrong not in str(caught.value)
        assert not job["b"].offers._requests


@pytest.mark.parametrize("place", ["nowhere", "127.0.0.1 1 token"])
def test_where_nobody_is(hubs: Hubs, place: str) -> None:
    with pytest.raises(TransferError, match=r"cannot be reached|refused"):
        get(hubs, place=place)


# -- rate ----------------------------------------------------------------------------------------------


class Clock:
    now = 5.0

    def __call__(self) -> float:
        return self.now


@given(
    st.floats(1, 1e9),
    st.integers(1, 10_000),
    st.lists(st.tuples(st.integers(0, 30_000), st.floats(0, 5)), min_size=1, max_size=30),
)
def test_rate(rate: float, burst: int, requests: list[tuple[int, float]]) -> None:
    """Never more than burst + rate * t; and what has to wait goes at exactly that rate."""
    clock = Clock()
    bucket = TokenBucket(rate, burst, clock)
    sent = []
    for size, pause_s in requests:
        wait_s = bucket.reserve(size)
        assert wait_s >= 0
        sent.append((clock.now + wait_s, size, wait_s))
        clock.now += pause_s
    for first in range(len(sent)):
        start = sent[first][0]
        total = 0
        for at, size, _ in sent[first:]:
            total += size
            # The first of a window may have gathered its tokens before it.
            assert total <= sent[first][1] + burst + rate * (at - start) + 1e-6 * (1 + total + rate * at)
    greedy = TokenBucket(rate, burst, clock)
    waits = [greedy.reserve(burst) for _ in range(10)]
    assert waits == pytest.approx([n * burst / rate for n in range(10)])


def test_a_rate_that_is_none(offers: Offers) -> None:
    for rate in (0, -1.0):
        with pytest.raises(ValueError, match="positive"):
            offers.begin(rate, {})


def test_one_rate_for_all_copies(hubs: Hubs, offers: Offers) -> None:
    offers.begin(20.0, {})
    tensors = state(4)
    size, begin = sum(t.nbytes for t in tensors), time.monotonic()
    offers.offer("k", "t", tensors)
    fetches = [fetch(hubs) for _ in range(3)]
    assert all(same(one.result(20)[1], tensors) for one in fetches)
    assert time.monotonic() - begin >= (3 * size - offering.PIECE) / 20e6
