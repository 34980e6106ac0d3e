"""Whatever carries the data of messages: they arrive in order and whole, and no fault leaves anything behind."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from bamboo_ds.comm import connection as connections
from bamboo_ds.comm import wire
from bamboo_ds.comm.carriers import slabs
from bamboo_ds.devices.accelerators import HOST
from tests.support.comm_worker import Cluster, Member, cluster
from tests.support.connections import Ends, filled, same
from tests.support.etcd import wait_until
from tests.unit.comm.test_carriers import (
    CARRIERS,
    FEW,
    SEGMENT,
    SMALLEST,
    end,
    give_up,
    left,
    mappings,
    sample_payloads,
    segments,
)

pytestmark = pytest.mark.claim("design.md")
LOST = {"EpochChanged", "PeerLost"}


# -- by hand --------------------------------------------------------------------------------------------------
@pytest.fixture(params=CARRIERS)
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    one = Ends(request.param == "memory")
    yield one
    one.close()
    assert not mappings()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "SEGMENT", SEGMENT)
    monkeypatch.setattr(slabs, "SMALLEST", SMALLEST)
    monkeypatch.setattr(slabs, "SLABS", FEW)
    monkeypatch.setattr(connections, "_READY", 30)


# -- processes ------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module", params=CARRIERS)
def pair(request: pytest.FixtureRequest, fork_server: None) -> Iterator[tuple[Cluster, bool]]:
    """Two members that many tests share, and whether they share memory."""
    with cluster(2, world=False, apart=request.param == "stream") as made:
        yield made, request.param == "memory"


def open_channels(member: Member) -> None:
    epoch = member.session.current
    out, back = (epoch.open(HOST, names[0], *names) for names in (("m0", "m1"), ("m1", "m0")))
    member.channels = {"out": out, "in": back} if member.name == "m0" else {"out": back, "in": out}


def begin(made: Cluster) -> None:
    made.attach()
    made.everybody("call", lambda _: (open_channels,))
    assert made.everybody("call", lambda _: (exchange, 100)) == [True, True]


def exchange(member: Member, size: int) -> bool:
    """Both send and receive; whether all is as it was sent."""
    sent = (filled(size), filled(3))
    member.channels["out"].send(0, sent)
    found = member.channels["in"].recv(0)
    member.session.current.drain()
    return same(found, sent)


def send_all(member: Member) -> bool:
    """Every size, and many small ones between; whether all comes back as it was sent."""
    sent = [filled(number % 300) for number in range(500)]
    sent[::40] = sample_payloads()[: len(sent[::40])]  # type: ignore[assignment]
    for number, payload in enumerate(sent):
        member.channels["out"].send(1 + number, payload)
    whole = [same(member.channels["in"].recv(1 + number), payload) for number, payload in enumerate(sent)]
    member.session.current.drain()
    assert not member.channels["in"].ready()
    return all(whole)


def test_every_size_between_processes(pair: tuple[Cluster, bool]) -> None:
    made, shared = pair
    begin(made)
    before = made.everybody("call", lambda _: (segments,))
    assert made.everybody("call", lambda _: (send_all,)) == [True, True]
    after = made.everybody("call", lambda _: (segments,))
    assert [now - then > 10 for now, then in zip(after, before, strict=True)] == [shared, shared]
    end(made)


def large(member: Member, size: int) -> int:
    """From the first to the second; how many bytes are right."""
    if member.name == "m0":
        member.channels["out"].send(1, torch.arange(size // 8))
        member.session.current.drain()
        return size
    found, some = member.channels["in"].recv(1), 1 << 20
    right = [torch.equal(part, torch.arange(some) + at * some) for at, part in enumerate(found.split(some))]
    return int(found.nbytes) if all(right) else -1


@pytest.mark.parametrize(
    "size", [pytest.param(256 << 20, id="256 MiB"), pytest.param(1 << 30, id="1 GiB", marks=pytest.mark.exhaustive)]
)
def test_large_messages(pair: tuple[Cluster, bool], size: int) -> None:
    made, shared = pair
    begin(made)
    for index in range(2):
        made[index].start("call", large, size)
    assert [made[index].finish(60.0) for index in range(2)] == [size, size]
    assert (made[1].run("call", segments) > 16) == shared
    end(made)


# -- faults ---------------------------------------------------------------------------------------------------
def written(member: Member) -> int:
    """Frames that are out."""
    return sum(each.written for each in itertools.chain(*member.session._hub._connections.values()))


def send_for_ever(member: Member) -> None:
    for number in itertools.count(1):
        member.channels["out"].send(number, filled(3 << 20))
        member.session.current.drain()


def send_much(member: Member) -> None:
    """Far more than slabs and the kernel take, at once."""
    for number in range(1, 21):
        member.channels["out"].send(number, filled(3 << 20))


def drain(member: Member) -> None:
    send_much(member)
    member.session.current.drain()


def receive_for_ever(member: Member) -> None:
    for number in itertools.count(1):
        assert same(member.channels["in"].recv(number), filled(3 << 20))


def ask_for_ever(member: Member) -> None:
    """Whether there is something to be received; takes what there is, until the epoch ends."""
    number = 1
    while True:
        if member.channels["in"].ready():
            assert same(member.channels["in"].recv(number), filled(3 << 20))
            number += 1
        member.session.wait("a test", lambda: member.channels["in"].ready(), 0.05)


def abort(member: Member) -> float:
    """In the middle of what is on its way; the seconds that it takes."""
    send_much(member)
    begin = time.monotonic()
    member.session.abort("a test")
    return time.monotonic() - begin


#: What the survivor does, and the other member meanwhile.
VERBS: dict[str, tuple[Callable[[Member], Any], Callable[[Member], None]]] = {
    "send": (send_for_ever, receive_for_ever),
    "receive": (receive_for_ever, send_for_ever),
    "ready": (ask_for_ever, send_for_ever),
    "drain": (drain, receive_for_ever),
    "abort": (abort, receive_for_ever),
}


@pytest.mark.parametrize("fault", ["stopped", "killed"])
@pytest.mark.parametrize("verb", VERBS)
def test_a_peer_lost_under_every_verb(pair: tuple[Cluster, bool], verb: str, fault: str) -> None:
    """Its end is noticed, a stop needs an abort; in the next epoch messages arrive whole, and nothing has been left."""
    made, shared = pair
    survivor, victim = made[0], made[1]
    begin(made)
    before, carried_before = survivor.run("call", left), survivor.run("call", segments)
    assert (before["mappings"] > 0) == shared
    own, other = VERBS[verb]
    quiet = verb in ("drain", "abort")  # the victim is stopped first: what it does not read fills slabs and stream
    victim.start("call", other)
    victim.wait_blocked()
    if quiet:
        victim.stop()
    survivor.start("call", own)
    if quiet:
        survivor.wait_blocked()
    else:
        begun = sum(member.control("ask", written) for member in (survivor, victim))
        wait_until(
            lambda: sum(member.control("ask", written) for member in (survivor, victim)) > begun + 10, "messages move"
        )
        victim.stop()
    assert (survivor.control("ask", segments) > carried_before) == shared
    if fault == "killed":
        victim.kill()
        made.replace_member(1)
    elif verb != "abort":
        assert not survivor.answered(), "a stop is no end"
        survivor.control("abort", "a test has stopped m1")
    if verb == "abort":
        assert survivor.finish() < 1.0
    else:
        outcome = survivor.outcome()
        assert outcome is not None and outcome.kind in LOST, outcome
        assert fault == "stopped" or outcome.kind == "PeerLost"
    if fault == "stopped":
        victim.resume()
        lost = victim.outcome()
        assert lost is not None and lost.kind in LOST
        victim.run("call", give_up)
    survivor.run("call", give_up)
    begin(made)
    assert made.everybody("call", lambda _: (exchange, 9 << 20)) == [True, True]
    assert (survivor.run("call", segments) > 0) == shared
    wait_until(lambda: survivor.run("call", left) == before, "nothing is left")
    end(made)
