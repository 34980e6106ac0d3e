"""Tensors of a device go and come by streams of their own: nobody uses a copy before it is there, nor lets go of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from bamboo_ds.comm import connection
from bamboo_ds.comm.wire import payloads
from bamboo_ds.devices import staging
from bamboo_ds.devices.accelerators import HOST
from tests.support.comm_worker import Cluster, Member, cluster
from tests.support.nccl.streams import LateMark, install
from tests.unit.comm.test_staging import made

pytestmark = pytest.mark.claim("reference/limits.md")

#: Messages of a conversation.
COUNT = 60
LOST = ("EpochChanged", "PeerLost")


#: Ends of channels by their names.
ENDS = {"out": ("m0", "m1"), "back": ("m1", "m0"), "own": ("m0", "m0"), "again": ("m0", "m1")}


def same(found: Any, number: int) -> bool:
    return all(map(torch.equal, found, made(number))) and len(found) == len(made(number))


def begin(member: Member, seed: int, without: str = "") -> None:
    """Use late streams, half of the time with small chunks; one of the waits for them is left out."""
    streams = install(seed)
    staging._CHUNK = 1 << 16 if seed % 2 else 1 << 21
    member.kept = [streams]
    if without == "writer":
        connection._Outgoing.complete = lambda self: True  # type: ignore[method-assign]
    elif without == "source":
        begun = staging.Staging.out
        staging._keep = lambda copy, under_way: None
        staging.Staging.out = lambda self, sources: _forgetting(*begun(self, sources))  # type: ignore[method-assign]
    elif without == "order":
        streams.order = lambda mark: None  # type: ignore[method-assign]
    elif without == "payload":
        payloads.Staged.payload = lambda self: payloads.assemble(self.structure, self.tensors)  # type: ignore[method-assign]
    epoch = member.session.current
    member.channels = {name: epoch.open(HOST, name, *ends) for name, ends in ENDS.items()}


def _forgetting(targets: list[torch.Tensor], copy: staging.Copy) -> tuple[list[torch.Tensor], staging.Copy]:
    return targets, staging.Copy([(0, mark) for mark in copy.marks], targets)


def talk(member: Member) -> int:
    """Send what nobody else keeps, to the other one and to itself; some of it again. Returns how much was wrong."""
    wrong, kept = 0, []
    for number in range(COUNT):
        kept.append(member.channels["out"].send(number, made(number)))
        if number % 5 == 0:
            member.channels["own"].send(number, kept[-1])
            wrong += not same(member.channels["own"].recv(number), number)
    for number in range(0, COUNT, 7):
        member.channels["again"].send(number, kept[number])
    member.session.current.drain()
    return wrong + member.kept[0].counts["lost"]


def listen(member: Member) -> int:
    """Returns how much was wrong."""
    wrong = sum(not same(member.channels["out"].recv(number), number) for number in range(COUNT))
    return wrong + sum(not same(member.channels["again"].recv(number), number) for number in range(0, COUNT, 7))


def conversation(members: Cluster, seed: int, without: str = "") -> int:
    """How much of a conversation was wrong."""
    members.everybody("call", lambda _: (begin, seed, without))
    members[0].start("call", talk)
    members[1].start("call", listen)
    return sum(int(members[index].finish(60)) for index in (0, 1))


@pytest.fixture
def pair(fork_server: None) -> Iterator[Cluster]:
    with cluster(2, world=False) as found:
        yield found


@pytest.mark.parametrize("seed", [1, 2, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(3, 8))])
def test_what_is_late_comes_whole_and_in_order(pair: Cluster, seed: int) -> None:
    assert conversation(pair, seed) == 0
    counts = pair[0].run("call", counted)
    assert counts["lost"] == 0 and (counts["out"] > 2 * COUNT if seed % 2 else counts["out"] == COUNT)
    assert pair[1].run("call", counted)["in"] == COUNT + len(range(0, COUNT, 7))


def counted(member: Member) -> dict[str, int]:
    return dict(member.kept[0].counts, lost=member.kept[0].counts["lost"])


@pytest.mark.parametrize("without", ["writer", "source", "order", "payload"])
def test_each_wait_is_needed(pair: Cluster, without: str) -> None:
    """Leaving one out is found: the streams are as harsh as the test needs them to be."""
    assert conversation(pair, 1, without) > 0


def leave(member: Member) -> list[int]:
    """How many messages of a channel that yields have not left: before they can, when they can, at the end."""
    streams, found = member.kept[0], []
    channel = member.session.current.open(HOST, "sums", "m0", "m1", yields=True)
    streams.hold()
    for number in range(3):
        channel.send(number, made(5))
    found.append(channel.leaving())
    streams.release()
    member.session.current.drain()
    channel.send(3, made(5))
    found.append(len(channel._leaving))
    member.session.current.drain()
    return [*found, channel.leaving()]


def test_what_has_not_left_is_counted(pair: Cluster) -> None:
    """By channel, so that nobody adds to sums that the network has not taken. What has left is forgotten."""
    pair.everybody("call", lambda _: (begin, 3, ""))
    assert pair[0].run("call", leave) == [3, 1, 0]


def hang(member: Member) -> None:
    """A device that is not through with anything any more, as one that waits for a lost member."""
    member.kept[0].hold()
    member.channels["out"].send(0, made(5))
    member.session.current.drain()


def test_an_abort_does_not_wait_for_a_device(pair: Cluster) -> None:
    """Nor does the next epoch, once the device goes on; nothing of the old one comes then."""
    pair.everybody("call", lambda _: (begin, 3, ""))
    pair[0].start("call", hang)
    pair[0].wait_blocked()
    for index in (0, 1):
        pair[index].control("abort", "a test")
    outcome = pair[0].outcome()
    assert outcome is not None and outcome.kind in LOST
    pair.attach()
    pair[0].run("call", go_on)
    assert conversation(pair, 4) == 0


def go_on(member: Member) -> None:
    member.kept[0].release()


def await_either(member: Member) -> list[str]:
    """What ends a wait for a message or a mark, in turn: a mark, then a message."""
    streams, found = member.kept[0], []
    for mark in (streams.mark(), LateMark(lambda: None)):
        member.channels["out"].await_message(mark)
        found.append("message" if member.channels["out"].ready() else "mark" if mark.query() else "nothing")
        member.channels["back"].send(len(found), None)
    return found


def answer_one(member: Member) -> None:
    member.channels["back"].recv(1)
    member.channels["out"].send(0, made(1))


def test_a_bubble_is_waited_for_until_the_device_is_through_or_a_message_comes(pair: Cluster) -> None:
    pair.everybody("call", lambda _: (begin, 1, ""))
    pair[1].start("call", await_either)
    pair[0].start("call", answer_one)
    assert pair[1].finish() == ["mark", "message"]
    pair[0].finish()
