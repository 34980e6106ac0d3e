"""A connection carries frames of many epochs; what an ended one leaves in it never reaches the next."""

from __future__ import annotations

import errno
import itertools
import os
import re
import select
import signal
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bamboo_ds.comm import connection as module
from bamboo_ds.comm import hub as hub_module
from bamboo_ds.comm import wire
from bamboo_ds.comm.connection import Connection
from bamboo_ds.comm.lifetime import Lifetime
from bamboo_ds.comm.links import Links
from bamboo_ds.comm.places import Listener
from bamboo_ds.comm.wire import payloads
from bamboo_ds.errors import EpochChanged, PeerLost, ProtocolError
from tests.support.connections import Ends, Incoming, filled, same
from tests.support.hubs import Hubs, Inbox

pytestmark = pytest.mark.claim("design.md")


# -- two connections, driven by hand --------------------------------------------------------------------------
@pytest.fixture
def ends() -> Iterator[Ends]:
    one = Ends()
    yield one
    one.close()


@pytest.mark.parametrize("relative", [-1, 0, 1])
@pytest.mark.parametrize("segments", [1, 2, 3])
def test_frames_around_the_ends_of_segments(ends: Ends, segments: int, relative: int) -> None:
    data = filled(segments * wire.SEGMENT + relative)
    for sequence, payload in enumerate([data, (data[:1], data[1:]), (data, data[:0], data)]):
        ends.send(1, sequence, payload)
        ends.send(1, 10 + sequence, None)
        ends.pump()
        (_, _, _, found), (_, _, number, nothing) = ends.got[-2:]
        assert same(found, payload) and number == 10 + sequence and nothing is None


def test_frames_of_all_sizes(ends: Ends) -> None:
    """Thousands of small ones, many tensors, some MiB, keys that do not fit the block."""
    sent: list[tuple[bytes, payloads.Payload]] = [(b"small", filled(number % 40)) for number in range(3000)]
    sent += [(b"many", tuple(filled(number % 9) for number in range(2500)))]
    sent += [(b"k" * 300, filled(12)), (b"", None), (b"dims", torch.zeros([1] * 40)), (b"none", ())]
    sent += [(b"large", filled(size)) for size in (1 << 16, (1 << 18) + 1, 5 << 20)]
    sent += [(b"after", filled(3))]
    numbers = [ends.send(1, number, payload, key) for number, (key, payload) in enumerate(sent)]
    assert numbers == list(range(1, len(sent) + 1)), "tickets count frames"
    assert ends.sender.written < ends.sender.sent
    ends.pump()
    assert ends.sender.written == ends.sender.sent == len(sent)
    assert [(key, sequence) for _, key, sequence, _ in ends.got] == [(key, n) for n, (key, _) in enumerate(sent)]
    assert all(same(found[3], payload) for found, (_, payload) in zip(ends.got, sent, strict=True))


def test_what_has_been_taken_is_kept_no_longer(ends: Ends) -> None:
    """By the connection, which may have nothing more to read for as long as an optimizer steps."""
    arrived: list[weakref.ref[torch.Tensor]] = []

    def take(connection: Connection, head: wire.FrameHead, key: bytes, tensors: list[payloads.WireTensor]) -> None:
        arrived.extend(weakref.ref(each.data) for each in tensors)

    ends.receiver.traffic = Incoming(take)
    ends.send(1, 1, (filled(10), filled(3 * wire.SEGMENT)))
    ends.pump()
    assert [each() for each in arrived] == [None, None]


@pytest.mark.parametrize("at_most", [1, 1000, 5 * wire.HEAD, 20 * wire.HEAD])
def test_one_look_leaves_nothing_that_the_kernel_tells_nothing_of(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, at_most: int
) -> None:
    """However little is read in one turn: a frame waits in the kernel, or it has been taken."""
    monkeypatch.setattr(module, "_READ_AT_MOST", at_most)
    poll = select.poll()
    poll.register(ends._other, select.POLLIN)
    for sequence in range(20):
        ends.send(1, sequence, filled(1000) if sequence == 3 else None)
    looks = 0
    while poll.poll(0):
        ends.receiver.read()
        looks += 1
    assert [found[2] for found in ends.got] == list(range(20)) and looks < 20


#: Bytes of data between two marks, and that are made ready: small, so that every byte of a frame can be a cut.
SEGMENT, READY = 40, 30
#: More than two segments, of two tensors, the second of which begins in the middle of one.
CUT = (filled(SEGMENT + 17), filled(SEGMENT + 11))


# -- frames that yield ----------------------------------------------------------------------------------------
def test_what_a_pass_waits_for_waits_behind_no_sum(ends: Ends) -> None:
    """16 MB behind 1 GB, on a network that takes 1 MB at a time: what the kernel has, or gets next, goes first."""
    ends.narrow.takes = 10 << 20
    ends.sender.send(1, wire.encode(b"sum", 1, torch.zeros(1 << 30, dtype=torch.uint8), 1), yields=True)
    data = filled(16 << 20)
    ends.send(1, 2, data)
    before = ends.narrow.taken
    while not ends.got:
        ends.narrow.takes = 1 << 20
        ends.sender.flush()
        ends.receiver.read()
    assert before <= 10 << 20 and ends.narrow.taken - before <= data.numel() + 2 * module._READY
    assert [found[2] for found in ends.got] == [2] and same(ends.got[0][3], data)


def test_what_passes_a_large_frame_does_not_count_as_its_time(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the rate is decided how many sums are sent: a network that is busy with passes is none that is slow."""
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])

    def take(seconds: float) -> None:
        """The network takes some."""
        ends.narrow.takes = 1 << 20
        ends.sender.flush()
        ends.receiver.read()
        now[0] += seconds

    ends.narrow.takes = 0
    ends.sender.send(1, wire.encode(b"sum", 1, filled(8 << 20), 1), yields=True)
    take(1.0)
    ends.send(1, 2, filled(16 << 20))
    before = now[0]
    while not ends.got:
        take(10.0)
    busy = now[0] - before
    while ends.sender.rate is None:
        take(1.0)
    # But for what was ready for the kernel when it came, or is when it has passed.
    assert (8 << 20) / ends.sender.rate < now[0] - 0.7 * busy


def test_one_turn_writes_so_much_whichever_carrier_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the other end keeps up, others that want to send would wait for all of a large frame."""
    monkeypatch.setattr(module, "_WRITE_AT_MOST", 4 << 20)
    ends = Ends(shared=True)
    real = ends.narrow.sendmsg

    def taken_at_once(pieces: list[memoryview], *others: Any) -> int:
        count = real(pieces, *others)
        ends.receiver.read()
        return count

    monkeypatch.setattr(ends.narrow, "sendmsg", taken_at_once)
    data = filled(20 << 20)
    ends.send(1, 1, data)
    assert not ends.got and ends.sender.interest & select.EPOLLOUT
    for _ in range(10):
        ends.sender.flush()
    assert same(ends.got[0][3], data) and not ends.sender.interest & select.EPOLLOUT
    ends.close()


class Late:
    """A copy to host memory of which so many bytes are there, and all when told."""

    def __init__(self, there: int) -> None:
        self.over, self.there = False, there

    def reached(self, end: int) -> bool:
        return self.over or end <= self.there


@settings(deadline=None, max_examples=200)
@given(
    frames=st.lists(
        st.tuples(
            st.booleans(),
            st.sampled_from((None, 0, SEGMENT, 2 * SEGMENT)),
            st.integers(0, 3 * SEGMENT),
            st.integers(0, 400),
        ),
        min_size=2,
        max_size=9,
    ),
    ready=st.sampled_from((1, READY, 1 << 20)),
    left=st.one_of(st.none(), st.integers(0, 8)),
)
def test_who_lets_whom_pass(frames: list[tuple[bool, int | None, int, int]], ready: int, left: int | None) -> None:
    """Frames arrive whole. Those that do not yield keep their order, as do the others, which pass nobody.

    Each is a kind, how much of it a device has copied to the host, if it comes from one, a size, and how much the
    kernel takes then. An epoch ends before the frame of number ``left``.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "SEGMENT", SEGMENT)
        patch.setattr(module, "_READY", ready)
        ends, copies = Ends(), []
        for number, (yields, late, size, takes) in enumerate(frames):
            epoch = 1 if left is None or number < left else 2
            if number == left:
                ends.sender.give_up(1)
            copy: Any = None if late is None else Late(late)
            copies.append(copy)
            ends.narrow.takes = takes
            ends.sender.send(epoch, wire.encode(b"key", number, filled(size), epoch), copy, yields)
            ends.sender.flush()
        ends.narrow.takes = None
        ends.sender.flush()
        ends.receiver.read()
        there = [(frames[number][1], frames[number][2]) for _, _, number, _ in ends.got]
        assert all(late is None or size <= late for late, size in there), "these are not in host memory"
        for copy in filter(None, copies):
            copy.over = True
            ends.sender.flush()
            ends.receiver.read()
        ends.sender.flush()
        ends.pump()
        assert ends.sender.written == ends.sender.sent == len(frames)
        got = [number for _, _, number, _ in ends.got]
        assert all(same(payload, filled(frames[number][2])) for _, _, number, payload in ends.got)
        assert [epoch for epoch, *_ in ends.got] == sorted(epoch for epoch, *_ in ends.got)
        assert sorted(got) == sorted(set(got)) and set(range(left or 0, len(frames))) <= set(got)
        for kind in (False, True):
            own = [number for number in got if frames[number][0] is kind]
            assert own == sorted(own)
        for place, number in enumerate(got):
            assert not frames[number][0] or all(earlier in got[:place] for earlier in got if earlier < number)
        ends.close()


def test_what_a_device_never_copies_is_given_up(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the middle: the next epoch waits for no device."""
    monkeypatch.setattr(wire, "SEGMENT", SEGMENT)
    copy: Any = Late(SEGMENT)
    ends.sender.send(1, wire.encode(b"key", 1, filled(2 * SEGMENT), 1), copy)
    ends.send(1, 2, None)
    ends.receiver.read()
    assert ends.narrow.taken == wire.HEAD + 1 + SEGMENT and not ends.got
    ends.sender.give_up(1)
    ends.send(2, 3, None)
    ends.pump()
    assert [found[2] for found in ends.got] == [3]


def test_no_frame_comes_between_two_parts_of_one_that_does() -> None:
    ends = Ends()
    frame = wire.encode(b"key", 1, filled(10), 1)
    (head,), data = frame[0], frame[1]
    ends.narrow._real.sendmsg([head, wire.BETWEEN, head, wire.BETWEEN, head, wire.HERE, *data])
    with pytest.raises(ProtocolError, match="memory that is not shared"):
        ends.receiver.read()
    ends.close()


# -- epochs in it ---------------------------------------------------------------------------------------------
def frame_size() -> int:
    """With a mark before each segment."""
    head, *segments = wire.encode(b"key", 1, CUT, 1)
    return sum(piece.nbytes for piece in itertools.chain(head, *segments)) + len(segments)


@pytest.mark.parametrize("ready", [1, READY, 1 << 20])
def test_an_ended_epoch_leaves_nothing_to_the_next(monkeypatch: pytest.MonkeyPatch, ready: int) -> None:
    """Cut at every byte of a frame: after it comes what the next epoch sends, whole, and never the rest of the old."""
    monkeypatch.setattr(wire, "SEGMENT", SEGMENT)
    monkeypatch.setattr(module, "_READY", ready)
    size = frame_size()
    last = 1 + sum(piece.nbytes for piece in wire.encode(b"key", 1, CUT, 1)[-1])
    for cut in range(size + 1):
        ends = Ends()
        ends.narrow.takes = cut
        ends.send(1, 1, CUT)
        ends.send(1, 2, CUT)
        ends.send(2, 3, filled(100))  # of an epoch that this member has been told of meanwhile
        assert ends.narrow.taken == cut
        ends.sender.give_up(1)
        ends.sender.send(1, wire.control(wire.LEFT, 1, 1))
        ends.send(2, 4, (CUT[0], filled(0), CUT[1]))
        ends.narrow.takes = None
        ends.pump()
        assert ends.sender.written == ends.sender.sent == 5
        old = [found for found in ends.got if found[0] == 1 and found[1] == b"key"]
        assert all(same(found[3], CUT) for found in old)
        if ready < SEGMENT:
            # Only a frame whose last segment was ready goes out, and the other one never does.
            assert [found[2] for found in old] == ([1] if size - last - cut < ready else []), cut
            sent_since = 3 * wire.HEAD + (100 + 3) + (sum(map(len, CUT)) + 3)
            assert ends.narrow.taken <= cut + ready + wire.HEAD + SEGMENT + 1 + sent_since
        else:
            assert [found[2] for found in old] == [1, 2][: 1 + (cut == size)]
        new = [found for found in ends.got if found[0] == 2]
        assert [found[2] for found in new] == [3, 4]
        assert same(new[0][3], filled(100)) and same(new[1][3], (CUT[0], filled(0), CUT[1]))
        assert [found[0] for found in ends.got if found[1] == b""] == [1], "the word that the epoch is left"
        ends.close()


def test_an_ended_epoch_leaves_nothing_of_a_frame_that_yields(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which one of the same epoch, or of the next, has interrupted, at every byte of it."""
    monkeypatch.setattr(wire, "SEGMENT", SEGMENT)
    monkeypatch.setattr(module, "_READY", 1)
    for epoch, cut in itertools.product((1, 2), range(frame_size() + 1)):
        ends = Ends()
        ends.narrow.takes = wire.HEAD + 10
        ends.sender.send(1, wire.encode(b"key", 1, CUT, 1), yields=True)
        ends.narrow.takes = SEGMENT + cut
        ends.send(epoch, 2, CUT)
        ends.sender.flush()
        ends.sender.give_up(1)
        ends.narrow.takes = None
        ends.send(2, 3, CUT)
        ends.pump()
        assert [found[2] for found in ends.got][-1] == 3 and {found[2] for found in ends.got} <= {2, 3}
        assert all(same(found[3], CUT) for found in ends.got) and len(ends.got) >= epoch
        assert ends.sender.written == ends.sender.sent == 3
        ends.close()


def test_what_is_given_up_may_be_changed_at_once() -> None:
    """A frame that goes out all the same has the bytes that it was sent with: the other end may use it yet."""
    for cut in (0, 100, wire.HEAD, wire.HEAD + 100):
        ends = Ends()
        data, before = filled(500), filled(500)
        ends.narrow.takes = cut
        ends.send(1, 1, data)
        ends.sender.give_up(1)
        data.zero_()
        ends.send(2, 2, None)
        ends.narrow.takes = None
        ends.pump()
        assert [found[2] for found in ends.got] == [1, 2] and same(ends.got[0][3], before)
        ends.close()


def test_ten_epochs_in_a_row_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "SEGMENT", SEGMENT)
    monkeypatch.setattr(module, "_READY", READY)
    size = frame_size()
    for cut in range(0, 2 * size, 3):
        ends = Ends()
        for epoch in range(1, 11):
            ends.send(epoch, epoch, filled(epoch))
            ends.narrow.takes = cut
            ends.send(epoch, 100 + epoch, CUT)
            ends.sender.give_up(epoch)
        ends.narrow.takes = None
        ends.send(11, 11, CUT)
        ends.pump()
        assert ends.got[-1][0] == 11 and same(ends.got[-1][3], CUT)
        assert all(same(found[3], CUT if found[2] > 100 else filled(found[0])) for found in ends.got[:-1])
        assert [found[0] for found in ends.got] == sorted(found[0] for found in ends.got)
        assert ends.sender.written == ends.sender.sent
        ends.close()


def test_giving_up_an_older_epoch_concerns_no_newer_one(ends: Ends) -> None:
    ends.narrow.takes = 10
    ends.send(5, 1, filled(9000))
    ends.send(5, 2, filled(10))
    ends.sender.give_up(4)
    assert ends.sender.written == 0
    assert not ends.sender.flush(), "there is nothing to tell of"
    ends.narrow.takes = None
    assert ends.sender.flush()
    ends.pump()
    assert not ends.sender.flush()
    assert [found[2] for found in ends.got] == [1, 2] and same(ends.got[0][3], filled(9000))


def test_nothing_waits_until_both_ends_have_proven_themselves(ends: Ends) -> None:
    """What is given up before has not been sent; the rest goes out when there is a connection."""
    ends.sender.open = False
    ends.send(1, 1, filled(10))
    ends.send(2, 2, filled(20))
    ends.sender.flush()  # as when a copy to host memory is complete
    assert ends.narrow.taken == 0
    ends.sender.give_up(1)
    assert ends.sender.written == 1
    ends.sender.open = True
    ends.pump()
    assert [found[2] for found in ends.got] == [2] and ends.sender.written == 2


def test_the_loop_is_told_when_to_look(ends: Ends) -> None:
    both, reading = select.EPOLLIN | select.EPOLLOUT, select.EPOLLIN
    ends.send(1, 1, None)
    assert not ends.watched and ends.sender.interest == reading
    ends.narrow.takes = 10
    ends.send(1, 2, None)
    ends.send(1, 3, None)
    assert ends.watched == [both]
    ends.sender.driven = True
    assert ends.sender.interest == select.EPOLLOUT
    ends.sender.driven, ends.narrow.takes = False, None
    ends.sender.flush()
    assert ends.watched == [both, reading]


def test_nothing_is_sent_after_the_end(ends: Ends) -> None:
    ends.narrow.takes = 10
    ends.send(1, 1, filled(1000))
    ends.sender.end()
    ends.narrow.takes = None
    ends.send(1, 2, filled(10))
    ends.sender.flush()
    ends.sender.give_up(1)
    ends.sender.send(2, wire.control(wire.LEFT, epoch=1))
    assert ends.narrow.taken == 10
    with pytest.raises(ConnectionError, match="closed by the peer"):
        ends.receiver.read()
    assert not ends.got


def test_why_the_kernel_has_given_a_connection_up_is_told(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so once, to who writes; who reads sees no more than an end then."""

    def given_up(*arguments: object) -> int:
        raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))

    monkeypatch.setattr(ends.narrow, "sendmsg", given_up)
    ends.receiver.send(1, wire.control(wire.ACK, 1, 1))
    ends.sender.traffic = Incoming(lambda *frame: frames.append(frame))
    frames: list[object] = []
    ends.send(1, 1, None)
    ends._other.close()
    with pytest.raises(OSError, match="timed out"):
        ends.sender.read()
    assert len(frames) == 1, "what the other end has said at last counts"


def test_nonsense_is_no_frame(ends: Ends) -> None:
    ends.narrow._real.send(b"\xff" * wire.HEAD)
    with pytest.raises(Exception, match="not a message header"):
        ends.receiver.read()


# -- hubs -----------------------------------------------------------------------------------------------------
@pytest.fixture
def hubs() -> Iterator[Hubs]:
    made = Hubs("ab")
    yield made
    made.close()


def say(hubs: Hubs, source: str, destination: str, epoch: int, sequence: int, payload: payloads.Payload = None) -> None:
    connection = hubs[source].reach(destination, hubs[destination].place)
    connection.send(epoch, wire.encode(b"key", sequence, payload, epoch))


def descriptors(hubs: Hubs) -> list[int]:
    return sorted(
        each.socket.fileno() for hub in hubs.values() for several in hub._connections.values() for each in several
    )


def test_older_frames_are_dropped_and_newer_ones_wait(hubs: Hubs) -> None:
    inbox = Inbox(hubs["a"], 5)
    for sequence, epoch in enumerate([4, 5, 7, 6, 7, 3, 6, 5]):
        say(hubs, "b", "a", epoch, sequence)
    inbox.wait(lambda: len(inbox.got) == 2)
    assert [number for _, _, number in inbox.got] == [1, 7]
    sixth = Inbox(hubs["a"], 6)
    assert [number for _, _, number in sixth.got] == [3, 6]
    say(hubs, "b", "a", 6, 8)
    sixth.wait(lambda: len(sixth.got) == 3)
    assert [number for _, _, number in Inbox(hubs["a"], 7).got] == [2, 4]
    assert not hubs["a"]._early
    later = Inbox(hubs["a"], 9)  # it has skipped one
    say(hubs, "b", "a", 8, 9)
    say(hubs, "b", "a", 9, 10)
    later.wait(lambda: bool(later.got))
    assert [number for _, _, number in later.got] == [10]
    assert len(inbox.got) == 2 and len(sixth.got) == 3, "an epoch that is over gets nothing"


def test_frames_of_an_epoch_that_is_skipped_are_forgotten(hubs: Hubs) -> None:
    inbox = Inbox(hubs["a"], 1)
    say(hubs, "b", "a", 2, 1)
    say(hubs, "b", "a", 1, 2)
    inbox.wait(lambda: bool(inbox.got))
    assert list(hubs["a"]._early) == [2]
    assert not Inbox(hubs["a"], 3).got and not hubs["a"]._early


def test_connections_outlive_ten_epochs(hubs: Hubs) -> None:
    """The same two descriptors, though each epoch is cut in the middle of a message of some MiB."""
    large = filled(8 << 20)
    opened: set[tuple[int, ...]] = set()
    first = Inbox(hubs["b"], 1)
    say(hubs, "a", "b", 1, 0)
    first.wait(lambda: bool(first.got))
    for epoch in range(2, 12):
        inboxes = {name: Inbox(hub, epoch) for name, hub in hubs.items()}
        for source, destination in (("a", "b"), ("b", "a")):
            say(hubs, source, destination, epoch, epoch, filled(epoch))
            say(hubs, source, destination, epoch, 100, large)
        for name, inbox in inboxes.items():
            inbox.wait(lambda inbox=inbox: bool(inbox.got))  # type: ignore[misc]
            assert inbox.got[0][2] == epoch and same(inbox.payloads[0], filled(epoch)), name
        for hub in hubs.values():
            hub.leave(epoch, False)
        opened.add(tuple(descriptors(hubs)))
        assert not any(inbox.lost for inbox in inboxes.values())
    (only,) = opened
    assert len(only) == 2, "both ends of one connection"


def test_one_connection_where_one_side_calls(hubs: Hubs) -> None:
    inboxes = {name: Inbox(hub, 1) for name, hub in hubs.items()}
    say(hubs, "a", "b", 1, 1)
    inboxes["b"].wait(lambda: bool(inboxes["b"].got))
    for sequence in range(3):
        say(hubs, "b", "a", 1, sequence)
    inboxes["a"].wait(lambda: len(inboxes["a"].got) == 3)
    assert len(descriptors(hubs)) == 2


def test_both_may_call_at_once() -> None:
    """Nothing is lost nor comes out of order, whoever's connection is used."""
    for _ in range(20):
        hubs = Hubs("ab")
        inboxes = {name: Inbox(hub, 1) for name, hub in hubs.items()}
        for sequence in range(20):
            say(hubs, "a", "b", 1, sequence)
            say(hubs, "b", "a", 1, sequence)
        for inbox in inboxes.values():
            inbox.wait(lambda inbox=inbox: len(inbox.got) == 20)  # type: ignore[misc]
            assert [number for _, _, number in inbox.got] == list(range(20))
        assert len(descriptors(hubs)) in (2, 4)
        hubs.close()


def test_a_member_that_dies_between_epochs_is_found_by_the_next(hubs: Hubs) -> None:
    first = {name: Inbox(hub, 1) for name, hub in hubs.items()}
    say(hubs, "a", "b", 1, 1)
    first["b"].wait(lambda: bool(first["b"].got))
    place = hubs["b"].place
    hubs["a"].leave(1, False)
    hubs.pop("b").close()
    first["a"].wait(lambda: bool(first["a"].lost))
    second = Inbox(hubs["a"], 2)
    assert not second.lost, "it was no matter of this epoch"
    hubs["a"].reach("b", place).send(2, wire.encode(b"key", 1, None, 2))
    second.wait(lambda: bool(second.lost))
    assert second.lost[0][0] == "b" and "connecting failed" in second.lost[0][1]
    assert hubs["a"].known("b") is None


@pytest.mark.parametrize("where", ["parsing", "receiving"])
@pytest.mark.parametrize("raised", [TimeoutError, ConnectionResetError, KeyboardInterrupt])
def test_what_a_signal_handler_raises_while_this_member_reads_is_the_script_s(
    hubs: Hubs, monkeypatch: pytest.MonkeyPatch, raised: type[BaseException], where: str
) -> None:
    """Nobody knows which bytes come next: the connection ends at both ends, and no tensor is made of others' bytes."""
    inboxes = {name: Inbox(hub, 1) for name, hub in hubs.items()}
    say(hubs, "a", "b", 1, 1)
    inboxes["b"].wait(lambda: bool(inboxes["b"].got))
    struck = []
    take = Connection._take_from_buffer

    def strike(connection: Connection) -> None:
        if threading.current_thread() is threading.main_thread() and not struck:
            struck.append(connection)
            signal.raise_signal(signal.SIGUSR2)

    def interrupted(connection: Connection) -> None:
        strike(connection)
        take(connection)

    class Receiving:
        """A socket in whose call the signal comes."""

        def __init__(self, connection: Connection) -> None:
            self._connection, self._socket = connection, connection.socket

        def __getattr__(self, name: str) -> Any:
            return getattr(self._socket, name)

        def recv_into(self, *arguments: Any) -> int:
            count = self._socket.recv_into(*arguments)
            strike(self._connection)
            return count

    def handler(signum: int, frame: object) -> None:
        raise raised("of the script")

    def over() -> bool:
        if not asked:  # the main thread reads from now on
            asked.append(say(hubs, "b", "a", 1, 1))
        return bool(got)

    if where == "parsing":
        monkeypatch.setattr(Connection, "_take_from_buffer", interrupted)
    else:
        (connection,) = hubs["a"]._connections["wire", "b"]
        connection.socket = cast(Any, Receiving(connection))
    before, got, asked = signal.signal(signal.SIGUSR2, handler), inboxes["a"].got, list[None]()
    try:
        with hubs["a"].changed, pytest.raises(raised, match="of the script"):
            hubs["a"].wait_for(over, ["b"], 20.0)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert struck and not got
    for name, other in (("a", "b"), ("b", "a")):
        inboxes[name].wait(lambda name=name: bool(inboxes[name].lost))  # type: ignore[misc]
        assert inboxes[name].lost[0][0] == other
    assert raised.__name__ in inboxes["a"].lost[0][1]


@pytest.mark.parametrize(
    ("place", "why"), [("255.255.255.255 80 token", "unreachable|denied"), ("127.0.0.1 1 token", "refused")]
)
def test_why_there_is_no_way_to_a_member_is_told(hubs: Hubs, place: str, why: str) -> None:
    """Also where the kernel knows at once."""
    inbox = Inbox(hubs["a"], 1)
    hubs["a"].reach("b", place)
    inbox.wait(lambda: bool(inbox.lost))
    assert re.search(f"connecting failed: .*{why}", inbox.lost[0][1]), inbox.lost


def test_a_member_that_cannot_be_called_is_lost(hubs: Hubs, monkeypatch: pytest.MonkeyPatch) -> None:
    """For this member at least: a script knows nothing of descriptors, and the others can go on."""
    accused: list[tuple[str | None, str]] = []
    life = Lifetime(1, lambda member, reason: accused.append((member, reason)))
    links = Links(life, hubs["a"], ("a", "b"), "a", hubs.places)
    links.enter()

    def none_left(*arguments: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(hub_module, "only_here", none_left)
        for _ in range(2):
            with pytest.raises(PeerLost, match=r"towards b: connecting failed: .*Too many open files"):
                links.send("b", b"key", 1, None)
    assert [member for member, _ in accused] == ["b"]
    assert isinstance(life.ended("x"), PeerLost) and "towards b" in str(life.aborted)


@pytest.mark.parametrize("told", [0, 1, 2])
def test_an_epoch_that_ends_just_as_its_messages_are_asked_about_leaves_no_wait_behind(hubs: Hubs, told: int) -> None:
    """The question has not gone out: in the next epoch it is put anew, however little there is to ask about."""
    inboxes = [Inbox(hubs["b"], 1)]

    def links_of(epoch: int) -> Links:
        made = Links(Lifetime(epoch, lambda member, reason: None), hubs["a"], ("a", "b"), "a", hubs.places)
        made.enter()
        return made

    first = links_of(1)
    first.send("b", b"key", 0, None)
    inboxes[0].wait(lambda: bool(inboxes[0].got))

    def end(member: str) -> None:
        first.life.abort("a test")

    first._check = end  # type: ignore[method-assign]
    with pytest.raises(EpochChanged, match="a test"):
        first.flush()
    inbox, second = Inbox(hubs["b"], 2), links_of(2)
    for sequence in range(told):
        second.send("b", b"key", sequence, None)
    with ThreadPoolExecutor(1) as pool:
        flushed = pool.submit(second.flush)
        try:
            flushed.result(10)
        finally:
            second.life.abort("the test is over")
    inbox.wait(lambda: len(inbox.got) == told)


def test_a_member_without_part_in_the_job_is_dropped(hubs: Hubs) -> None:
    """Without a failure of the epoch on this side; the other end sees the connection end."""
    inboxes = {name: Inbox(hub, 1) for name, hub in hubs.items()}
    say(hubs, "a", "b", 1, 1)
    inboxes["b"].wait(lambda: bool(inboxes["b"].got))
    hubs["a"].drop(["b", "unknown"])
    assert hubs["a"].known("b") is None and not inboxes["a"].lost
    inboxes["b"].wait(lambda: bool(inboxes["b"].lost))
    assert inboxes["b"].lost[0][0] == "a" and not descriptors(hubs)


def test_who_has_left_a_newer_epoch_has_left_the_older_ones(hubs: Hubs) -> None:
    """It says so to whoever waits for it, now or later; only of the very epoch it may say that it is over."""
    hubs["b"].reach("a", hubs["a"].place)
    inbox = Inbox(hubs["a"], 3)
    hubs["b"].leave(2, True)
    say(hubs, "b", "a", 3, 1)
    inbox.wait(lambda: bool(inbox.got))
    assert not inbox.gone, "an older epoch is no matter of this one"
    hubs["b"].leave(4, True)
    inbox.wait(lambda: bool(inbox.gone))
    assert inbox.gone == [("b", False)]
    assert Inbox(hubs["a"], 4).gone == [("b", False)]
    fifth = Inbox(hubs["a"], 5)
    assert not fifth.gone
    hubs["b"].leave(5, True)
    fifth.wait(lambda: bool(fifth.gone))
    assert fifth.gone == [("b", True)]


def test_a_new_connection_begins_with_what_was_left(hubs: Hubs) -> None:
    hubs["b"].leave(7, True)
    inbox = Inbox(hubs["a"], 6)
    say(hubs, "a", "b", 6, 1)
    inbox.wait(lambda: bool(inbox.gone))
    assert inbox.gone == [("b", False)]


def test_a_listener_is_handed_on() -> None:
    made = Listener.open("127.0.0.1")
    place = made.place
    made.socket.set_inheritable(True)
    text = made.handed_on()
    made.socket.detach()
    again = Listener.inherited(text)
    with again.socket:
        assert again.place == place and not again.socket.get_inheritable()
    assert place.token not in repr(place) + repr(again)
