"""The c10d backend: results equal stock gloo's; every failure raises, nothing hangs, nothing is left behind."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import distributed as dist

from tests.support.comm_cases import CASES, VICTIM
from tests.support.comm_worker import DEADLINE, Cluster, Member, Raised, Remote, cluster, portable, stop_fork_server

#: What a survivor may see.
LOST = ("EpochChanged", "PeerLost")
#: seconds from abort (or death) to the survivors' main threads having raised; printed at the end
WAKE: dict[str, list[float]] = {"stopped": [], "killed": []}


@pytest.fixture(scope="module", autouse=True)
def fork_server() -> Iterator[None]:
    yield
    stop_fork_server()
    for fault, seconds in WAKE.items():
        if seconds:
            ordered = sorted(seconds)
            print(
                f"\nwoken after a peer was {fault}: median {1e3 * ordered[len(ordered) // 2]:.1f} ms, "
                f"worst {1e3 * ordered[-1]:.1f} ms, {len(ordered)} survivors"
            )


@pytest.fixture(scope="module")
def trio() -> Iterator[Cluster]:
    """Three members that many tests share; each test leaves all three alive and in a live epoch."""
    with cluster(3) as made:
        yield made


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# -- results --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_call_equals_stock_gloo(world: int) -> None:
    stock = Cluster(world)
    try:
        port = free_port()
        stock.everybody("init_stock", lambda index: (index, world, port))
        with cluster(world) as bamboo:
            for name in CASES:
                expected = stock.everybody("case", lambda index, name=name: (name, index, world))
                found = bamboo.everybody("case", lambda index, name=name: (name, index, world))
                assert found == expected, name
        stock.close()
    finally:
        stock.destroy()


def names_of_torch(member: Member) -> Any:
    group = dist.group.WORLD
    assert group is not None
    pair = dist.new_group([0, 2])
    inside = dist.get_rank() in (0, 2)
    found = [
        dist.get_backend(),
        dist.get_world_size(),
        dist.get_rank(),
        dist.get_process_group_ranks(group),
        group.name(),
        group.size(),
        dist.get_rank(pair) if inside else -1,
        dist.get_world_size(pair) if inside else -1,
        dist.get_process_group_ranks(pair) if inside else [],
    ]
    if inside:
        dist.destroy_process_group(pair)
    return found


def test_torch_knows_the_groups(trio: Cluster) -> None:
    for index, found in enumerate(trio.everybody("call", lambda _: (names_of_torch,))):
        pair = [[0, 2].index(index), 2, [0, 2]] if index != 1 else [-1, -1, []]
        assert found == ["bamboo", 3, index, [0, 1, 2], "bamboo", 3, *pair]


def misuse(member: Member) -> list[str]:
    found = []
    for call in (
        lambda: dist.all_gather([torch.zeros(2)] * 3, torch.zeros(2, dtype=torch.int32)),
        lambda: dist.all_gather([torch.zeros(2)], torch.zeros(2)),
        lambda: dist.broadcast(torch.zeros(1), src=99),
        lambda: dist.send(torch.zeros(1), dist.get_rank()),
        lambda: dist.all_reduce(torch.zeros(2).to_sparse()[0:0].to_dense().to_sparse(), dist.ReduceOp.MAX),
        lambda: dist.isend(torch.zeros(1), (dist.get_rank() + 1) % 3, tag=-1),
    ):
        try:
            call()
            found.append("nothing")
        except Exception as error:
            found.append(type(error).__name__)
    return found


def test_misuse_is_not_taken_for_a_lost_peer(trio: Cluster) -> None:
    for found in trio.everybody("call", lambda _: (misuse,)):
        assert not set(found) & {*LOST, "nothing"}, found
    for name in trio.names:
        assert trio.members[name].control("failures") == []


def times_out(member: Member) -> list[tuple[str, str]]:
    """By handle, and by the group's own timeout for a collective."""
    work = dist.irecv(torch.zeros(1), 1, tag=77)
    group = dist.group.WORLD
    assert work is not None and group is not None
    found = []
    for wait in (
        lambda: work.wait(timedelta(milliseconds=50)),
        lambda: dist.all_reduce(torch.zeros(1), async_op=True).wait(timedelta(milliseconds=50)),
    ):
        try:
            wait()
        except Exception as error:
            found.append((type(error).__name__, str(error)))
    return found


def test_a_timeout_of_the_caller_stays_a_timeout() -> None:
    with cluster(3) as made:
        made.everybody("case", lambda index: ("barrier", index, 3))
        (p2p, collective) = made[0].run("call", times_out)
        assert p2p[0] == "RuntimeError" and "Timed out" in p2p[1]
        assert collective[0] == "RuntimeError" and "imed out" in collective[1], collective
        assert made[0].control("failures") == []


# -- failures -------------------------------------------------------------------------------------------------
def recv_from_victim(member: Member) -> None:
    dist.recv(torch.zeros(4), VICTIM, tag=5)


def send_to_victim(member: Member) -> None:
    dist.send(torch.zeros(1 << 20), VICTIM, tag=6)


def wait_on_store(member: Member) -> None:
    dist.distributed_c10d._get_default_store().wait(["never set"])


def get_from_store(member: Member) -> None:
    dist.distributed_c10d._get_default_store().get("never set either")


def first_use_of_a_group(member: Member) -> None:
    group = dist.new_group([0, 1, 2])
    dist.all_reduce(torch.zeros(1), group=group)


def async_handles(member: Member) -> None:
    works = [dist.all_reduce(torch.zeros(1000), async_op=True) for _ in range(3)]
    for work in works:
        assert work is not None
        work.wait()


def unfinished_handles_are_left_behind(member: Member) -> None:
    member.kept = [dist.irecv(torch.zeros(4), VICTIM, tag=12), dist.all_reduce(torch.zeros(9), async_op=True)]
    dist.barrier()


BLOCKING = {
    function.__name__: function
    for function in (
        recv_from_victim,
        send_to_victim,
        wait_on_store,
        get_from_store,
        first_use_of_a_group,
        async_handles,
        unfinished_handles_are_left_behind,
    )
}
ON_STORE = {"wait_on_store", "get_from_store"}
#: Cases with several steps block at the first that needs the victim. The others are covered by name.
OPERATIONS = sorted(set(CASES) - {"subgroup"}) + sorted(BLOCKING)


def start_operation(member: Remote, operation: str, rank: int) -> None:
    if operation in CASES:
        member.start("case", operation, rank, 3)
    else:
        member.start("call", BLOCKING[operation])


def check_alive(made: Cluster) -> None:
    """All members work together, in a new epoch."""
    made.attach()
    name = "all_reduce"
    results = made.everybody("case", lambda index: (name, index, 3))
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_survivors_of_a_stopped_peer_are_woken_by_abort(trio: Cluster, operation: str) -> None:
    victim, survivors = trio[VICTIM], [trio[0], trio[2]]
    victim.stop()
    try:
        for rank, survivor in ((0, trio[0]), (2, trio[2])):
            start_operation(survivor, operation, rank)
        for survivor in survivors:
            survivor.wait_blocked()
        times = [survivor.control("abort", "a test stopped m1") for survivor in survivors]
        outcomes = [survivor.outcome() for survivor in survivors]
    finally:
        victim.resume()
    raised = [(outcome, when) for outcome, when in zip(outcomes, times, strict=True) if outcome is not None]
    assert raised, f"{operation} went through without its peer"
    for outcome, when in raised:
        # The other survivor's abort may have reached this one first.
        assert outcome.kind in LOST, outcome
        WAKE["stopped"].append(max(0.0, outcome.when - when))
    for survivor in survivors:
        survivor.start("case", "barrier", 0, 3)
        after = survivor.outcome()
        assert after is not None and after.kind == "EpochChanged", "an aborted epoch must stay aborted"
    check_alive(trio)


def first_to_raise(survivors: list[Remote]) -> dict[str, Raised | None]:
    """Wait until one survivor's operation has raised; the outcomes that are known by then, by member."""
    outcomes: dict[str, Raised | None] = {}
    end = time.monotonic() + DEADLINE
    while not any(outcomes.values()):
        for survivor in survivors:
            if survivor.name not in outcomes and survivor.answered():
                outcomes[survivor.name] = survivor.outcome()
        assert len(outcomes) < len(survivors) or any(outcomes.values()), "went through without its peer"
        assert time.monotonic() < end, "nobody noticed"
    return outcomes


def test_killed_peer_under_every_operation() -> None:
    """One process per operation dies; its successor joins in the next epoch."""
    killed = 0
    with cluster(3) as made:
        for operation in OPERATIONS:
            survivors = [made[0], made[2]]
            for rank in (0, 2):
                start_operation(made[rank], operation, rank)
            for survivor in survivors:
                survivor.wait_blocked()
            start = time.monotonic()
            made[VICTIM].kill()
            killed += 1
            # The store is alive: only the control plane can tell those who wait for a key.
            outcomes = {} if operation in ON_STORE else first_to_raise(survivors)
            for survivor in survivors:  # the same for one that waits for the other survivor
                survivor.control("abort", "a test killed m1")
            for survivor in survivors:
                if survivor.name not in outcomes:
                    outcomes[survivor.name] = survivor.outcome()
            raised = [outcome for outcome in outcomes.values() if outcome is not None]
            assert raised, operation
            for outcome in raised:
                assert outcome.kind in LOST, f"{operation}: {outcome}"
                WAKE["killed"].append(outcome.when - start)
            accused = {member for survivor in survivors for member, _ in survivor.control("failures")}
            if operation not in ON_STORE:
                assert "m1" in accused, f"{operation}: accused {accused}"
            made.replace_member(VICTIM)
            made.attach()
            made[VICTIM].run("init", VICTIM, 3)
            results = made.everybody("case", lambda index: ("all_gather", index, 3))
            assert results[0] == results[1] == results[2]
    assert killed == len(OPERATIONS)
