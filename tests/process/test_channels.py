"""Channels and agreement: bit-exact, in order, abortable, and nothing of it is left behind."""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch

from bamboo_ds.comm.handshake import Handshake, calling
from bamboo_ds.comm.places import Place
from bamboo_ds.devices.accelerators import HOST
from bamboo_ds.errors import ProtocolError
from bamboo_ds.secret import NONE
from tests.support.comm_worker import (
    SECRET,
    Cluster,
    Member,
    Remote,
    cluster,
    grown,
    lowest,
    portable,
    take_census,
)
from tests.support.etcd import wait_until
from tests.unit.comm.test_wire import flat, sample_payloads

pytestmark = pytest.mark.claim("concepts.md", "guides/security.md", "reference/limits.md")

LOST = ("EpochChanged", "PeerLost")


@pytest.fixture(scope="module")
def trio(fork_server: None) -> Iterator[Cluster]:
    """Three members that many tests share; each test leaves all three alive, without channels."""
    with cluster(3, world=False) as made:
        yield made


def ends_of(member: Member) -> dict[str, tuple[str, str]]:
    """A ring both ways, a mailbox each, and a second channel between the first two."""
    names = member.session.plan.members
    pairs = [(source, destination) for source in names for destination in names]
    return {**{f"{source}>{destination}": (source, destination) for source, destination in pairs}, "second": pairs[2]}


def open_channels(member: Member) -> None:
    epoch = member.session.current
    member.channels = {name: epoch.open(HOST, name, *ends) for name, ends in ends_of(member).items()}


def conclude(member: Member) -> None:
    member.conclude()


def inside(made: Cluster, function: Any, *arguments: Any) -> list[Any]:
    return made.everybody("call", lambda _: (function, *arguments))


# -- the epoch's store ----------------------------------------------------------------------------------------
def keys_and_values(member: Member, host: str) -> list[Any]:
    """The first member and the second one, at the same keys; what they find must be right whoever keeps these."""
    epoch, first = member.session.current, member.name == "m0"
    store, other = epoch.store(host, "p/"), epoch.store(host, "q/")
    every = bytes(range(256))
    if first:
        store.set("a", every)
        assert not store.check(["a", "late"])
        found: list[Any] = [store.get("from m1")]
        store.set("late", "x")
        found += [store.add("n", 2), store.compare_set("c", "", "first"), store.compare_set("c", "", "second")]
        found += [store.compare_set("c", "first", "second"), store.compare_set("missing", "other", "x")]
        found += [store.check(["missing"]), store.delete_key("c"), store.delete_key("c"), other.num_keys()]
        with pytest.raises(RuntimeError, match="Timed out"):
            store.wait(["never"], timedelta(milliseconds=20))
        store.set("never", "late")
        return [*found, store.get("a") == every]  # the late answer of a wait given up disturbs nobody
    store.set("from m1", "here")
    return [store.multi_get(["late", "a"]) == [b"x", every]]


@pytest.mark.parametrize("host", ["m0", "m1", "m2"])
def test_keys_and_values(trio: Cluster, host: str) -> None:
    trio.attach()
    for index in (0, 1):
        trio[index].start("call", keys_and_values, host)
    assert trio[0].finish() == [b"here", 2, *[b"first"] * 2, b"second", b"other", False, True, False, 4, True]
    assert trio[1].finish() == [True]


def wait_for_a_key(member: Member) -> None:
    member.session.current.store("m0", "").get("nobody sets it")


@pytest.mark.parametrize("end", ["abort", "kill"])
def test_a_wait_for_a_key_ends_with_the_epoch_and_with_who_keeps_it(trio: Cluster, end: str) -> None:
    trio.attach()
    for index in (1, 2):
        trio[index].start("call", wait_for_a_key)
        trio[index].wait_blocked()
    if end == "kill":
        trio[0].kill()
        trio.replace_member(0)
    kinds = set()
    for index in (1, 2):
        if end == "abort":
            trio[index].control("abort", "a test")
        outcome = trio[index].outcome()
        assert outcome is not None
        kinds.add(outcome.kind)
    assert kinds <= {*LOST} and ("PeerLost" in kinds) == (end == "kill"), "who has seen it tells the other"


def talk_nonsense(member: Member) -> None:
    """What a member of another version might send."""
    member.session.current.links.send("m1", b"store/ask", 1, torch.tensor([91] * 200_000, dtype=torch.uint8))


@pytest.mark.usefixtures("fork_server")
def test_nonsense_ends_the_connection_and_not_the_worker() -> None:
    with cluster(3, world=False) as made:
        made[1].start("call", wait_for_m0)
        made[1].wait_blocked()
        made[0].run("call", talk_nonsense)
        outcome = made[1].outcome()
        assert outcome is not None and outcome.kind == "PeerLost" and "m0" in outcome.text, outcome
        wait_until(lambda: made[0].control("failures"), "the other end knows")
        made.attach()


@pytest.mark.usefixtures("fork_server")
def test_strangers_at_the_door_delay_no_epoch() -> None:
    """Silent ones, and some that say they are a member. Each of the silent ones would have cost five seconds."""
    with cluster(3, world=False, attached=False) as made, contextlib.ExitStack() as stack:
        plan = made.next_plan()
        place = Place.parse(plan.places[0])
        door = place.host, place.port
        strangers = [stack.enter_context(socket.create_connection(door)) for _ in range(3)]
        false = []
        for secret, token in ((NONE, place.token), (SECRET, "another token")):
            connection = stack.enter_context(socket.create_connection(door))
            connection.settimeout(10)
            false.append(Handshake(connection, calling(secret, "wire", token, "m1", "m0")))
        for words in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 200, b"[" * 200_000):
            stranger = stack.enter_context(socket.create_connection(door))
            stranger.settimeout(10)
            stranger.sendall(words)
            with contextlib.suppress(ConnectionError):
                assert stranger.recv(1) == b""
        for name in plan.members:
            made.members[name].start("attach", plan)
        seconds = [made.members[name].finish() for name in plan.members]
        assert max(seconds) < 4.0, seconds
        for handshake in false:
            with pytest.raises(ConnectionError):
                handshake.advance()
        for stranger in strangers:
            stranger.settimeout(0.0)
        assert not any(map(_ended, strangers)), "they have time"


def _ended(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False


class NoBuffers:
    """A socket for whose next writes the kernel has no memory."""

    def __init__(self, real: socket.socket) -> None:
        self._real = real

    def sendmsg(self, *arguments: Any) -> int:
        raise OSError(errno.ENOBUFS, "no buffer space")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def wait_for_m0(member: Member) -> None:
    links = member.session.current.links
    with links.changed:
        links.wait("a test", lambda: False, ["m0"])


def write_without_buffers(member: Member) -> None:
    links = member.session.current.links
    connection = links.send("m1", b"first", 0, None).connection
    connection.socket = NoBuffers(connection.socket)  # type: ignore[assignment]
    links.send("m1", b"lost", 0, None)


@pytest.mark.usefixtures("fork_server")
def test_a_frame_that_cannot_be_written_ends_the_connection() -> None:
    """The peer must not wait for ever for what was dropped."""
    with cluster(2, world=False) as made:
        made[1].start("call", wait_for_m0)
        made[1].wait_blocked()
        made[0].run("call", write_without_buffers)
        outcome = made[1].outcome()
        assert outcome is not None and outcome.kind == "PeerLost", outcome


# -- channels, agreement --------------------------------------------------------------------------------------
def everything_to_everybody(member: Member) -> list[Any]:
    names, me = member.session.plan.members, member.name
    sent = sample_payloads()
    for number, payload in enumerate(sent):
        for other in names:
            member.channels[f"{me}>{other}"].send(10 + number, payload)
    member.session.current.drain()
    received = []
    for other in names:
        channel = member.channels[f"{other}>{me}"]
        received.append([flat(channel.recv(10 + number)) for number in range(len(sent))])
        assert not channel.ready() and channel.arrival() is None
    expected = [flat(payload) for payload in sent]
    return [found == expected for found in received]


def collectives(member: Member) -> Any:
    rank = member.session.plan.members.index(member.name)
    total = member.session.current.agreement.all_reduce(torch.tensor([1.0, 10.0**rank, 0.1], dtype=torch.float64))
    member.session.current.agreement.barrier()
    names = member.session.current.agreement.exchange("ü" * 3000 * rank + member.name)
    return portable(total), {name: (len(text), text[-2:]) for name, text in names.items()}


def test_every_payload_on_every_channel(trio: Cluster) -> None:
    trio.attach()
    inside(trio, open_channels)
    assert inside(trio, everything_to_everybody) == [[True] * 3] * 3
    results = inside(trio, collectives)
    assert results[0] == results[1] == results[2]
    assert results[0][1] == {"m0": (2, "m0"), "m1": (3002, "m1"), "m2": (6002, "m2")}
    inside(trio, conclude)


def wrong_order(member: Member) -> list[Any]:
    names, me = member.session.plan.members, member.name
    successor, predecessor = names[(names.index(me) + 1) % 3], names[names.index(me) - 1]
    channel = member.channels[f"{predecessor}>{me}"]
    for sequence in (3, 5):
        member.channels[f"{me}>{successor}"].send(sequence, torch.ones(2))
    member.session.current.drain()
    member.session.current.agreement.barrier()
    channel.discard(5)  # what was sent before
    found: list[Any] = []
    for sequence in (4, 6, 5):
        try:
            found.append(channel.recv(sequence).tolist())
        except ProtocolError as error:
            found.append(str(error).startswith(f"channel {channel.name}: expected message {sequence}, got 5"))
            found.append(channel.ready() and time.monotonic() - 60 < channel.arrival() <= time.monotonic())
    try:
        channel.recv(6, timedelta(milliseconds=20))
    except TimeoutError:
        found.append("timeout")
    for wrong in (lambda: member.channels[f"{me}>{successor}"].recv(0), lambda: channel.send(0, None)):
        try:
            wrong()
        except ValueError:
            found.append("value")
    return found


def test_a_message_out_of_order_is_refused_and_kept(trio: Cluster) -> None:
    trio.attach()
    inside(trio, open_channels)
    expected = [True, True, True, True, [1.0, 1.0], "timeout", "value", "value"]
    assert inside(trio, wrong_order) == [expected] * 3
    inside(trio, conclude)


def memory_of_many_sends(member: Member) -> int:
    """Bytes that are still held after many large messages, of which the receiver takes each."""
    import gc
    import weakref

    me = member.name
    if me == "m0":
        held = []
        for number in range(50):
            tensor = torch.full((100_000,), float(number))
            held.append(weakref.ref(tensor))
            member.channels["m0>m1"].send(number, tensor)
            del tensor
        member.session.current.drain()
        gc.collect()
        return sum(ref() is not None for ref in held)
    if me == "m1":
        for number in range(50):
            received = member.channels["m0>m1"].recv(number)
            assert float(received[0]) == number == float(received[-1])
    return 0


def test_finished_sends_are_released(trio: Cluster) -> None:
    trio.attach()
    inside(trio, open_channels)
    assert inside(trio, memory_of_many_sends) == [0, 0, 0]
    inside(trio, conclude)


def mailbox_is_a_copy(member: Member) -> bool:
    channel = member.channels[f"{member.name}>{member.name}"]
    tensor = torch.ones(3)
    channel.send(0, tensor)
    tensor.zero_()
    return bool(channel.recv(0).eq(1).all())


def test_a_mailbox_delivers_what_was_sent(trio: Cluster) -> None:
    trio.attach()
    inside(trio, open_channels)
    assert inside(trio, mailbox_is_a_copy) == [True] * 3
    inside(trio, conclude)


def sum_behind_a_large_message(member: Member, number: int) -> tuple[Any, float]:
    """The sum, and when it was there; on m2 when the message that it waited behind was."""
    rank, channel = member.session.plan.members.index(member.name), member.channels["m0>m2"]
    if rank == 0:
        channel.send(number, torch.zeros(1 << 26))
    total = member.session.current.agreement.all_reduce(torch.tensor([10.0**rank], dtype=torch.float64))
    when = time.monotonic()
    if rank == 2:
        when = channel.arrival()
        channel.recv(number)
    return portable(total), when


def test_a_sum_is_equal_on_all_although_some_get_it_late(trio: Cluster) -> None:
    """One member has the sum while its own contribution is still on its way to another one."""
    trio.attach()
    inside(trio, open_channels)
    for number in range(8):  # the first one may write all of it itself, where the other one keeps up
        (first, done), (second, _), (third, arrived) = inside(trio, sum_behind_a_large_message, number)
        assert first == second == third == portable(torch.tensor([111.0], dtype=torch.float64))
        if done < arrived:
            break
    else:
        pytest.fail("nobody got the sum late")
    inside(trio, conclude)


# -- failures -------------------------------------------------------------------------------------------------
def blocked_recv(member: Member) -> None:
    member.channels[f"m1>{member.name}"].recv(0)


def blocked_recv_with_timeout(member: Member) -> None:
    member.channels[f"m1>{member.name}"].recv(0, timedelta(seconds=50))


def blocked_drain(member: Member) -> None:
    # More than the kernel's socket buffers take.
    for number in range(20):
        member.channels[f"{member.name}>m1"].send(number, torch.zeros(1_000_000))
    member.session.current.drain()


def blocked_all_reduce(member: Member) -> None:
    member.session.current.agreement.all_reduce(torch.zeros(3, dtype=torch.float64))


def blocked_barrier(member: Member) -> None:
    member.session.current.agreement.barrier()


def blocked_exchange(member: Member) -> None:
    member.session.current.agreement.exchange("x")


def blocked_close(member: Member) -> None:
    member.session.conclude()


def send_half_a_message(member: Member) -> None:
    """More than the kernel's buffers take, so the receiver has a part of it when we are stopped."""
    for other in ("m0", "m2"):
        member.channels[f"m1>{other}"].send(0, torch.zeros(1 << 26))


def failures(survivor: Remote) -> list[tuple[str, str]]:
    """Members whose connection it has seen end."""
    return survivor.control("failures")  # type: ignore[no-any-return]


@pytest.mark.parametrize("fault", ["stopped", "killed"])
def test_peer_lost_in_the_middle_of_a_message(trio: Cluster, fault: str) -> None:
    """256 MB are on their way to both survivors when the sender is stopped, or killed."""
    trio.attach()
    inside(trio, open_channels)
    survivors = [trio[0], trio[2]]
    before = [len(failures(survivor)) for survivor in survivors]
    for survivor in survivors:
        survivor.start("call", blocked_recv)
        survivor.wait_blocked()
    trio[1].run("call", send_half_a_message)
    trio[1].stop()
    if fault == "killed":
        trio[1].kill()
    else:
        for survivor in survivors:
            survivor.control("abort", "a test stopped m1")
    outcomes = [survivor.outcome() for survivor in survivors]
    # Under load, one of the two may have got all of it before the signal.
    raised = [outcome for outcome in outcomes if outcome is not None]
    assert raised, "the message went through before the signal"
    assert {outcome.kind for outcome in raised} <= {*LOST} - ({"PeerLost"} if fault == "stopped" else set())
    if fault == "killed":
        seen = [name for survivor, n in zip(survivors, before, strict=True) for name, _ in failures(survivor)[n:]]
        assert "m1" in seen, "who has seen it, maybe one that had got all, tells the other"
    if fault == "killed":
        trio.replace_member(1)
        for survivor in survivors:
            survivor.run("call", close_after_failure)
    else:
        trio[1].resume()
        inside(trio, close_after_failure)


def recv_of_a_survivor(member: Member) -> None:
    """From a living member that sends nothing."""
    member.channels["m0>m2" if member.name == "m2" else "m2>m0"].recv(0)


OPERATIONS = [
    blocked_recv,
    blocked_recv_with_timeout,
    blocked_drain,
    blocked_all_reduce,
    blocked_barrier,
    blocked_exchange,
    blocked_close,
    recv_of_a_survivor,
]


def close_after_failure(member: Member) -> None:
    """As the engine's recovery does: close, whatever happened."""
    member.session.abort("recovery")
    member.conclude()


@pytest.mark.parametrize("fault", ["stopped", "killed"])
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda function: function.__name__)
def test_a_peer_lost_under_every_operation(trio: Cluster, operation: Any, fault: str) -> None:
    """An abort wakes the others. A death they notice by themselves, unless they wait for somebody who lives."""
    trio.attach()
    inside(trio, open_channels)
    survivors = {index: trio[index] for index in (0, 2)}
    before = {index: len(survivor.control("failures")) for index, survivor in survivors.items()}
    trio[1].stop()  # so that it dies in the middle of what it gets, and not after
    for survivor in survivors.values():
        survivor.start("call", operation)
    for survivor in survivors.values():
        survivor.wait_blocked()
    if fault == "killed":
        trio[1].kill()
    told = fault == "stopped" or operation is recv_of_a_survivor
    for survivor in survivors.values():
        if told:
            survivor.control("abort", "a test took m1 away")
    for index, survivor in survivors.items():
        outcome = survivor.outcome()
        assert outcome is not None and outcome.kind in LOST, outcome
        if outcome.kind == "PeerLost" and fault == "killed":
            assert "m1" in [member for member, _ in survivor.control("failures")[before[index] :]], operation
        if not told:
            trio[2].control("abort", "a test killed m1")  # it may wait for the other survivor
    if fault == "killed":
        trio.replace_member(1)
    else:
        trio[1].resume()
        for survivor in survivors.values():
            survivor.start("call", mailbox_is_a_copy)
            after = survivor.outcome()
            assert after is not None and after.kind == "EpochChanged"
    for member in trio.members.values() if fault == "stopped" else survivors.values():
        member.run("call", close_after_failure)


def test_epochs_leave_nothing_behind(trio: Cluster) -> None:
    """An abort in the middle of traffic, five epochs in a row: threads and descriptors stay as many."""
    census = []
    for _ in range(5):
        trio.attach()
        inside(trio, open_channels)
        assert inside(trio, everything_to_everybody) == [[True] * 3] * 3
        for index in range(3):
            trio[index].start("call", traffic)
        for index in range(3):
            trio[index].wait_blocked()
            trio[index].control("abort", "next")
        for index in range(3):
            outcome = trio[index].outcome()
            assert outcome is not None and outcome.kind in LOST, outcome
        inside(trio, close_after_failure)
        trio.attach()
        inside(trio, open_channels)
        inside(trio, conclude)
        take_census(trio, census)
    assert not grown(census[-1], lowest(census[:-1])), census


def traffic(member: Member) -> None:
    """Until somebody ends it."""
    names, me = member.session.plan.members, member.name
    number = 100
    while True:
        for other in names:
            member.channels[f"{me}>{other}"].send(number, torch.zeros(20_000))
        for other in names:
            member.channels[f"{other}>{me}"].recv(number)
        member.session.current.drain()
        number += 1


def test_ends_are_checked(trio: Cluster) -> None:
    trio.attach()
    found = inside(trio, bad_channels)
    assert found == [["ValueError"] * 2] * 3


def bad_channels(member: Member) -> list[str]:
    found = []
    member.session.current.open(HOST, "a", "m0", "m1")
    for channel in (("a", "m1", "m0"), ("b", "m0", "nobody")):
        try:
            member.session.current.open(HOST, *channel)
        except Exception as error:
            found.append(type(error).__name__)
    return found
