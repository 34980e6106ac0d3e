"""Whatever carries the data of messages: they arrive in order and whole, and no fault leaves anything behind."""

from __future__ import annotations

import itertools
import json
import os
import random
import socket
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bamboo_ds.comm import connection as connections
from bamboo_ds.comm import wire
from bamboo_ds.comm.carriers import sharing, slabs
from bamboo_ds.comm.connection import Connection
from bamboo_ds.comm.wire import payloads
from bamboo_ds.errors import ProtocolError
from tests.support.comm_worker import Cluster, Member
from tests.support.connections import Ends, filled, same
from tests.support.hubs import Hubs, Inbox

pytestmark = pytest.mark.claim("design.md")

CARRIERS = ["stream", "memory"]


def mappings() -> int:
    """How often this process has memory of ours mapped."""
    return Path("/proc/self/maps").read_text().count(" /memfd:bamboo-slabs")


def carried(payload: payloads.Payload) -> int:
    """Segments that go by shared memory where a slab is free."""
    _, *segments = wire.encode(b"", 0, payload)
    return sum(sum(map(len, segment)) >= slabs.SMALLEST for segment in segments)


def sample_payloads() -> list[payloads.Payload]:
    """Around the ends of segments, odd, without order in memory, of many parts."""
    base = torch.randn(700, 900, generator=torch.Generator().manual_seed(5))
    sizes = [0, 1, slabs.SMALLEST - 1, slabs.SMALLEST, wire.SEGMENT - 1, wire.SEGMENT, wire.SEGMENT + 1, (5 << 20) + 77]
    return [
        *map(filled, sizes),
        None,
        (),
        base[:, ::3],
        base.t(),
        (base[:1], filled(3), base.t(), filled(0), filled(wire.SEGMENT)),
        tuple(filled(number % 90) for number in range(3000)),
        base.half(),
    ]


# -- by hand --------------------------------------------------------------------------------------------------
@pytest.fixture(params=CARRIERS)
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    one = Ends(request.param == "memory")
    yield one
    one.close()
    assert not mappings()


def test_every_size_arrives_whole_and_in_order(ends: Ends) -> None:
    sent = sample_payloads()
    for number, payload in enumerate(sent):
        ends.send(1, number, payload)
        ends.pump()
    assert [sequence for _, _, sequence, _ in ends.got] == list(range(len(sent)))
    assert all(same(found[3], payload) for found, payload in zip(ends.got, sent, strict=True))
    memory = ends.receiver.sharing.memory
    if memory is not None:
        expected = sum(map(carried, sent))
        assert ends.sender.sharing.memory is not None
        assert ends.sender.sharing.memory.sent == memory.received == expected > 10
        assert not any(memory._in[0])


def test_what_finds_no_slab_goes_in_the_stream(ends: Ends) -> None:
    """A receiver that does not read gets as much as the slabs and the kernel take, and then all the rest."""
    data = [filled(wire.SEGMENT + number) for number in range(slabs.SLABS + 9)]
    for number, payload in enumerate(data):
        ends.send(1, number, payload)
    memory = ends.sender.sharing.memory
    if memory is not None:
        assert memory.sent == slabs.SLABS and not memory.ready(wire.SEGMENT)
    assert ends.sender.written < len(data)
    ends.pump()
    assert [sequence for _, _, sequence, _ in ends.got] == list(range(len(data)))
    assert all(same(found[3], payload) for found, payload in zip(ends.got, data, strict=True))
    if memory is not None:
        assert memory.ready(wire.SEGMENT) and memory.sent > slabs.SLABS, "slabs are used again"


def test_the_lowest_slab_is_used_again() -> None:
    ends = Ends(shared=True)
    with closing(ends):
        for number in range(40):
            ends.send(1, number, filled(wire.SEGMENT))
            ends.pump()
        memory = ends.sender.sharing.memory
        assert memory is not None and memory.sent == 40
        assert [bool(slab.any()) for slab in memory._out[1]] == [True] + [False] * (slabs.SLABS - 1)


#: Small, so that every byte of a frame can be a cut, with two slabs; a segment that is too small for them.
SEGMENT, SMALLEST, FEW = 40, 30, 2
CUT = (filled(SEGMENT + 17), filled(2 * SEGMENT + 3))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "SEGMENT", SEGMENT)
    monkeypatch.setattr(slabs, "SMALLEST", SMALLEST)
    monkeypatch.setattr(slabs, "SLABS", FEW)
    monkeypatch.setattr(connections, "_READY", 30)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("read", [False, True])
def test_a_frame_that_is_given_up_anywhere(carrier: str, read: bool) -> None:
    """Cut at every byte of the stream: what the next epoch sends arrives, and of the old one only whole frames.

    Args:
        read: the other end has read what there is when the epoch ends.
    """
    used, most = 0, sum(map(len, CUT)) + wire.HEAD + 20
    for cut in range(most):
        ends = Ends(carrier == "memory")
        ends.narrow.takes = cut
        old = tuple(tensor.clone() for tensor in CUT)
        for number in (1, 2, 3):
            ends.send(1, number, old)
        assert ends.narrow.taken <= cut and ends.sender.written < 3
        if read:
            ends.receiver.read()
        ends.sender.give_up(1)
        for tensor in old:
            tensor.zero_()
        ends.send(2, 4, CUT)
        ends.narrow.takes = None
        ends.pump()
        assert ends.sender.written == ends.sender.sent == 4
        assert [found[0] for found in ends.got] == [1] * (len(ends.got) - 1) + [2]
        assert all(same(found[3], CUT) for found in ends.got)
        memory = ends.sender.sharing.memory
        if memory is not None:
            used += memory.sent
            other = ends.receiver.sharing.memory
            assert other is not None and other.received == memory.sent and not any(memory._out[0])
        ends.close()
    assert (used > most) == (carrier == "memory")


@given(st.integers(0, 2**32), st.sampled_from([16, 1000, 1 << 18]), st.booleans())
def test_frames_in_pieces_of_any_size(seed: int, segment: int, shared: bool) -> None:
    """The kernel takes random numbers of bytes, the other end reads now and then, epochs end at any moment."""
    chance = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "SEGMENT", segment)
        patch.setattr(slabs, "SMALLEST", chance.choice([1, segment // 2, segment]))
        patch.setattr(slabs, "SLABS", chance.choice([1, 3, 16]))
        patch.setattr(connections, "_READY", chance.choice([1, 3000, 1 << 20]))
        patch.setattr(connections, "_PIECES", chance.choice([1, 3, 512]))
        patch.setattr(connections, "_BUFFER", chance.choice([300, 1 << 16]))
        ends = Ends(shared)
        with closing(ends):
            sent: dict[int, payloads.Payload] = {}
            for epoch in range(1, 5):
                last = chance.randrange(1, 6)  # of an epoch, all of which arrive if nothing ends it
                for _ in range(last):
                    size = chance.choice([0, 1, chance.randrange(50), chance.randrange(9000), segment % 9000])
                    sent[len(sent)] = chance.choice([filled(size), (filled(size), filled(size // 2)), None])
                    ends.narrow.takes = chance.choice([0, chance.randrange(20_000)])
                    ends.send(epoch, len(sent) - 1, sent[len(sent) - 1])
                    ends.sender.flush()
                    if chance.random() < 0.5:
                        ends.receiver.read()
                if epoch < 4:
                    ends.sender.give_up(epoch)
            ends.narrow.takes = None
            ends.pump()
            numbers = [sequence for _, _, sequence, _ in ends.got]
            assert numbers == sorted(set(numbers)) and numbers[-last:] == list(range(len(sent)))[-last:]
            assert ends.sender.written == len(sent)
            assert all(same(payload, sent[sequence]) for _, _, sequence, payload in ends.got)


def test_memory_that_nobody_has_filled(ends: Ends) -> None:
    """A mark of a slab that is empty, or of one that does not exist, ends the connection."""
    head = bytes(wire.encode(b"key", 1, filled(wire.SEGMENT))[0][0])
    ends.narrow._real.send(head + bytes([2 + (slabs.SLABS if ends.receiver.sharing.memory is None else 3)]))
    with pytest.raises(ProtocolError, match=r"not shared|nothing in slab 3"):
        ends.receiver.read()


# -- memory for what arrives ----------------------------------------------------------------------------------
def test_memory_is_used_again_when_its_message_is_dropped() -> None:
    buffers = payloads.Buffers(smallest=1000, most=10_000)
    first, other = buffers.take(4000), buffers.take(4000)
    where = {first.data_ptr(), other.data_ptr()}
    assert len(where) == 2 and not any(place % 64 for place in where)
    part = first.view(torch.float32)[3:7]  # of a message
    del first
    assert buffers.take(4000).data_ptr() not in where, "a part of it is in use"
    part.zero_()
    del part, other
    again = [buffers.take(4000) for _ in range(3)]
    assert where < {each.data_ptr() for each in again}
    view = payloads.view(again.pop())
    place = torch.frombuffer(view, dtype=torch.uint8).data_ptr()
    assert buffers.take(4000).data_ptr() != place, "its memory is looked at"


def test_not_more_memory_is_kept_than_it_may() -> None:
    buffers = payloads.Buffers(smallest=1000, most=10_000)
    many = [buffers.take(4000) for _ in range(5)] + [buffers.take(20_000), buffers.take(999)]
    assert not buffers._free
    del many
    assert 0 < sum(each.nbytes for each in buffers._free.values()) <= 10_000
    assert buffers.take(5000).numel() == 5000, "another size"


# -- the agreement --------------------------------------------------------------------------------------------
def tcp() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]


def descriptors() -> set[str]:
    return {os.readlink(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd")[:-1] if _is_open(each)}


def _is_open(descriptor: str) -> bool:
    with suppress(OSError):
        return bool(os.readlink(f"/proc/self/fd/{descriptor}"))
    return False


def memfd(size: int, seals: int = slabs._SEALS, token: bytes = b"t" * slabs.TOKEN) -> int:
    descriptor = os.memfd_create("bamboo-slabs", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    os.pwrite(descriptor, token, 0)
    if seals:
        slabs.fcntl.fcntl(descriptor, slabs.fcntl.F_ADD_SEALS, seals)
    return descriptor


def bad_offers(folder: Path) -> Iterator[tuple[str, Any, int | None]]:
    """What is wrong, what is said, and a descriptor that this process has for it."""
    right, me = slabs.size_of(wire.SEGMENT), os.getpid()
    token = (b"t" * slabs.TOKEN).hex()
    no_process = int(Path("/proc/sys/kernel/pid_max").read_text()) + 1

    def say(descriptor: int, pid: int = me, host: str = "h", token: str = token) -> list[Any]:
        return [host, pid, descriptor, token]

    good = memfd(right)
    yield "another host", say(good, host="other"), None
    yield "no such process", say(good, pid=no_process), None
    yield "another token", say(good, token="00" * slabs.TOKEN), None
    yield "half a token", say(good, token=token[:6]), None
    yield "no token", say(good, token="zz"), good
    yield "no such descriptor", say(999_999), None
    short = memfd(right - 4096)
    yield "a short one", say(short), short
    shrinking = memfd(right, slabs.fcntl.F_SEAL_GROW | slabs.fcntl.F_SEAL_SEAL)
    yield "one that may shrink", say(shrinking), shrinking
    reading, writing = os.pipe()
    os.close(writing)
    yield "a pipe", say(reading), reading
    os.mkfifo(folder / "fifo")
    fifo = os.open(folder / "fifo", os.O_RDWR)
    yield "a named pipe", say(fifo), fifo
    file = os.open(folder / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(file, right)
    os.pwrite(file, b"t" * slabs.TOKEN, 0)
    yield "a file", say(file), file
    for nonsense in ("text", None, [], ["h"], ["h", "x", {}, token], {"h": 1}, ["h", me, file, 7]):
        yield f"nonsense: {nonsense}", nonsense, None


def test_bad_offers_are_refused_and_harm_nothing(tmp_path: Path) -> None:
    one, other = tcp()
    with one, other:
        before = descriptors()
        for what, said, descriptor in bad_offers(tmp_path):
            host = sharing.Sharing("a", other, "h")
            answer = host.hear(sharing._OFFERED, json.dumps(said).encode())
            assert answer is not None
            head = wire.decode_head(answer[0][0])
            assert (head.kind, head.sequence) == (wire.SHARE, sharing._REFUSED), what
            assert host.memory is None and host._descriptor < 0, what
            if descriptor is not None:
                os.close(descriptor)
        assert descriptors() <= before and not mappings()
        for broken in (b"", b"\xff\xfe", b"[" * 40_000):
            answer = sharing.Sharing("a", other, "h").hear(sharing._OFFERED, broken)
            assert answer is not None and wire.decode_head(answer[0][0]).sequence == sharing._REFUSED


def test_an_agreement(caplog: pytest.LogCaptureFixture) -> None:
    one, other = tcp()
    with one, other:
        before = descriptors()
        caller, host = (sharing.Sharing(name, end, "h") for name, end in (("b", one), ("a", other)))
        offer = caller.offer()
        assert offer is not None and caller.sender(1 << 20) is caller._stream, "not before the answer"
        head = wire.decode_head(offer[0][0])
        answer = host.hear(head.sequence, wire.decode_meta(head, head.meta)[0])
        assert answer is not None and host.sender(1 << 20) is host.memory
        assert wire.decode_head(answer[0][0]).sequence == sharing._ACCEPTED
        assert caller.hear(sharing._ACCEPTED, b"") is None
        assert caller.sender(1 << 20) is caller.memory and caller.sender(100) is caller._stream
        assert mappings() == 2 and descriptors() == before, "the memory has no descriptor any more"
        for again in (sharing._OFFERED, sharing._ACCEPTED, sharing._REFUSED, 9):
            with pytest.raises(ProtocolError, match="once more"):
                caller.hear(again, b"")
        caller.end()
        host.end()
        assert not mappings()


def test_where_there_is_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel has none, the caller is refused, or it ends without an answer."""
    one, other = tcp()
    with one, other:
        before = descriptors()
        for end in ("refused", "ended"):
            caller = sharing.Sharing("b", one, "h")
            assert caller.offer() is not None and mappings() == 1
            if end == "refused":
                caller.hear(sharing._REFUSED, b"no")
            else:
                caller.end()
            assert caller.memory is None and not mappings() and descriptors() == before

        def none(*arguments: object) -> int:
            raise OSError("no memory")

        assert sharing.Sharing("b", one, None).offer() is None
        monkeypatch.setattr(os, "memfd_create", none)
        assert sharing.Sharing("b", one, "h").offer() is None
        one.close()
        assert sharing.Sharing("b", one, "h").offer() is None
        assert not mappings()


@pytest.mark.parametrize("hosts", [("h", "h"), ("h", "other"), (None, "h"), ("h", None)], ids=str)
def test_members_agree_by_themselves(hosts: tuple[str | None, str | None]) -> None:
    """Those of one host share memory, all others do not; either way messages arrive, and at the end nothing is left."""
    before = descriptors()
    hubs = Hubs("ab", hosts=hosts)
    inboxes = {name: Inbox(hub, 1) for name, hub in hubs.items()}
    shared = hosts == ("h", "h")

    def say(source: str, destination: str, number: int, size: int) -> None:
        connection = hubs[source].reach(destination, hubs[destination].place)
        connection.send(1, wire.encode(b"key", number, filled(size), 1))
        inbox = inboxes[destination]
        inbox.wait(lambda: bool(inbox.got) and inbox.got[-1][2] == number)
        assert same(inbox.payloads[-1], filled(size))

    for number in range(3):  # the answer is there when the second one is
        say("a", "b", number, 3 << 20)
        say("b", "a", number, 3 << 20)
    memories = [only(hub).sharing.memory for hub in hubs.values()]
    if shared:
        assert mappings() == 2 and all(each is not None and each.sent >= 3 for each in memories)
    else:
        assert memories == [None, None] and not mappings()
    assert not any("memfd" in each for each in descriptors())
    hubs.close()
    assert not mappings() and descriptors() <= before


def only(hub: Any) -> Connection:
    ((connection,),) = hub._connections.values()
    return connection  # type: ignore[no-any-return]


def segments(member: Member) -> int:
    """Those that have gone by shared memory, in either direction."""
    every = itertools.chain(*member.session._hub._connections.values())
    memories = [each.sharing.memory for each in every]
    return sum(memory.sent + memory.received for memory in memories if memory is not None)


def left(member: Member) -> dict[str, int]:
    """What this process has."""
    threads, files = member.census()
    return {"threads": threads, "descriptors": files, "mappings": mappings()}


def end(made: Cluster) -> None:
    for name in made.plan.members:
        made.members[name].run("call", give_up)


def give_up(member: Member) -> None:
    """As the engine's recovery does: close, whatever happened."""
    member.session.abort("recovery")
    member.conclude()
