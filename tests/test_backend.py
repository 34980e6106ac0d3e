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
from tests.support.comm_worker import DEADLINE, Cluster, Member, Raised, Remote, cluster, stop_fork_server

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
    dist.send(torch.zeros(1 << 24), VICTIM, tag=6)  # more than the kernel's buffers take


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
#: gloo and the store cannot know here that the victim is gone: only the control plane can tell.
UNNOTICED = {"wait_on_store", "get_from_store", "first_use_of_a_group"}
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


def first_to_raise(survivors: list[Remote], operation: str) -> dict[str, Raised | None]:
    """Wait until one survivor's operation has raised; the outcomes that are known by then, by member."""
    outcomes: dict[str, Raised | None] = {}
    end = time.monotonic() + DEADLINE
    while not any(outcomes.values()):
        for survivor in survivors:
            if survivor.name not in outcomes and survivor.answered():
                outcomes[survivor.name] = survivor.outcome()
        assert len(outcomes) < len(survivors) or any(outcomes.values()), f"{operation} went through without its peer"
        assert time.monotonic() < end, f"nobody noticed: {operation}"
    return outcomes


def test_killed_peer_under_every_operation() -> None:
    """One process per operation dies; its successor joins in the next epoch."""
    killed = 0
    with cluster(3) as made:
        made.everybody("case", lambda index: ("all_gather", index, 3))  # builds the group
        for operation in OPERATIONS:
            survivors = [made[0], made[2]]
            made[VICTIM].stop()  # so that it dies in the middle of what it gets, and not after
            for rank in (0, 2):
                start_operation(made[rank], operation, rank)
            for survivor in survivors:
                survivor.wait_blocked()
            start = time.monotonic()
            made[VICTIM].kill()
            killed += 1
            outcomes = {} if operation in UNNOTICED else first_to_raise(survivors, operation)
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
            failures = [pair for survivor in survivors for pair in survivor.control("failures")]
            if operation not in UNNOTICED:
                assert "m1" in {member for member, _ in failures}, f"{operation}: {failures}"
            made.replace_member(VICTIM)
            made.attach()
            made[VICTIM].run("init", VICTIM, 3)
            results = made.everybody("case", lambda index: ("all_gather", index, 3))
            assert results[0] == results[1] == results[2]
    assert killed == len(OPERATIONS)


def large_all_reduce(member: Member) -> None:
    data = torch.zeros(1 << 24)
    while True:
        dist.all_reduce(data)


def large_transfers(member: Member) -> None:
    data, room = torch.ones(1 << 22), [torch.ones(1 << 22) for _ in range(3)]
    others = [rank for rank in range(3) if rank != dist.get_rank()]
    while True:
        works = [dist.isend(data, rank) for rank in others] + [dist.irecv(room[rank], rank) for rank in others]
        for work in works:
            assert work is not None
            work.wait()


@pytest.mark.parametrize("fault", ["stopped", "killed"])
@pytest.mark.parametrize("operation", [large_all_reduce, large_transfers])
def test_peer_lost_in_the_middle_of_its_data(operation: Any, fault: str) -> None:
    """gloo never wakes an operation that has a part of its data; the others go on and end cleanly all the same."""
    with cluster(3) as made:
        check_alive(made)
        for index in range(3):
            made[index].start("call", operation)
        for index in range(3):
            made[index].wait_blocked()
        made[VICTIM].stop()
        start = time.monotonic()
        if fault == "killed":
            made[VICTIM].kill()
        for index in (0, 2):
            if fault == "stopped":
                made[index].control("abort", "a test stopped m1")
        outcomes = [made[index].outcome() for index in (0, 2)]
        for outcome in outcomes:
            assert outcome is not None and outcome.kind in LOST, outcome
            WAKE[fault].append(outcome.when - start)
        if fault == "killed":
            made.replace_member(VICTIM)
            made.attach()
            made[VICTIM].run("init", VICTIM, 3)
        else:
            made[VICTIM].resume()
            assert made[VICTIM].outcome() is not None
        check_alive(made)


def test_wait_for_a_peer_that_never_comes(trio: Cluster) -> None:
    """Stopped before attaching, so the others wait for its address; the next epoch works."""
    trio[VICTIM].stop()
    try:
        plan = trio.next_plan()
        port = trio[0].run("host", plan)
        survivors = [trio[0], trio[2]]
        for survivor in survivors:
            survivor.start("attach", plan, (trio.address, port))
        for survivor in survivors:
            survivor.wait_blocked()
        for survivor in survivors:
            survivor.control("abort", "m1 never came", plan.epoch)
        for survivor in survivors:
            outcome = survivor.outcome()
            assert outcome is not None and outcome.kind == "EpochChanged", outcome
    finally:
        trio[VICTIM].resume()
    check_alive(trio)


def stop_while_connecting(member: Member) -> None:
    """Be stopped with the address published and no connection made: gloo waits for us, perhaps without a socket."""
    import os
    import signal

    from bamboo_ds.comm import epoch as module

    real = module.create_inner

    def stopping(*arguments: Any) -> Any:
        class Stopping(dist.Store):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.real = arguments[1]

            def set(self, key: str, value: Any) -> None:
                self.real.set(key, value)
                os.kill(os.getpid(), signal.SIGSTOP)

            def get(self, key: str) -> Any:
                return self.real.get(key)

            def wait(self, keys: list[str], timeout: Any = None) -> None:
                self.real.wait(keys)

        return real(arguments[0], Stopping(), *arguments[2:])

    module.create_inner = stopping
    try:
        dist.barrier()
    finally:
        module.create_inner = real


def test_peer_stopped_in_the_middle_of_connecting(trio: Cluster) -> None:
    """Whichever side connects: with port numbers at random some of the tries wait without any socket."""
    for _ in range(4):
        trio.attach()
        trio[VICTIM].start("call", stop_while_connecting)
        for index in (0, 2):
            trio[index].start("case", "barrier", index, 3)
        trio[VICTIM].wait_stopped()
        when = {}
        for index in (0, 2):
            trio[index].wait_blocked()
            when[index] = trio[index].control("abort", "m1 stopped while connecting")
        for index in (0, 2):
            outcome = trio[index].outcome()
            assert outcome is not None and outcome.kind in LOST, outcome
            WAKE["stopped"].append(max(0.0, outcome.when - when[index]))
            trio[index].start("case", "barrier", index, 3)
            after = trio[index].outcome()
            assert after is not None and after.kind == "EpochChanged"
        trio[VICTIM].resume()
        trio[VICTIM].control("abort", "it was stopped for too long")
        assert trio[VICTIM].outcome() is not None
    check_alive(trio)


def test_store_host_stopped(trio: Cluster) -> None:
    """Attaching to a store whose host answers no more is abortable; another host serves the next epoch."""
    plan = trio.next_plan(store_host="m1")
    port = trio[VICTIM].run("host", plan)
    trio[VICTIM].stop()
    try:
        for index in (0, 2):
            trio[index].start("attach", plan, (trio.address, port))
        for index in (0, 2):
            trio[index].wait_blocked()
            when = trio[index].control("abort", "m1 is stopped")
            outcome = trio[index].outcome()
            assert outcome is not None and outcome.kind == "EpochChanged", outcome
            WAKE["stopped"].append(outcome.when - when)
    finally:
        trio[VICTIM].resume()
    trio.plan = trio.next_plan(store_host="m0")
    check_alive(trio)


def test_store_host_gone(trio: Cluster) -> None:
    """Nobody listens at the store's address: its host is accused at once."""
    before = len(trio[0].control("failures"))
    plan = trio.next_plan(store_host="m2")
    trio[0].start("attach", plan, (trio.address, free_port()))
    outcome = trio[0].outcome()
    assert outcome is not None and outcome.kind == "PeerLost", outcome
    assert [member for member, _ in trio[0].control("failures")[before:]] == ["m2"]
    trio.plan = trio.next_plan(store_host="m0")
    check_alive(trio)


def test_abort_that_comes_before_its_epoch_or_after(trio: Cluster) -> None:
    plan = trio.next_plan()
    port = trio[0].run("host", plan)
    for index in range(3):
        trio[index].control("abort", "a newer plan is known", plan.epoch)
    for index in range(3):
        trio[index].start("attach", plan, (trio.address, port))
        outcome = trio[index].outcome()
        assert outcome is not None and outcome.kind == "EpochChanged", outcome
    trio.attach()
    for index in range(3):
        trio[index].control("abort", "late", plan.epoch)  # of the epoch before
    results = trio.everybody("case", lambda index: ("all_reduce", index, 3))
    assert results[0] == results[1] == results[2]


def test_many_epochs_leave_nothing_behind() -> None:
    """Survivors alone, then all again, over and over: threads and descriptors stay as many."""
    with cluster(3) as made:
        made.everybody("case", lambda index: ("all_reduce", index, 3))
        census = []
        for _ in range(5):
            made.attach(members=("m0", "m2"), owners=("m0", "m0", "m2"))
            made.everybody("case", lambda index: ("all_gather", index and 2, 3))
            for index in (0, 2):
                made[index].start("call", recv_from_victim_of_survivors)
            for index in (0, 2):
                made[index].wait_blocked()
                made[index].control("abort", "next")
                assert made[index].outcome() is not None
            made.attach(members=made.names, owners=made.names)
            results = made.everybody("case", lambda index: ("all_reduce", index, 3))
            assert results[0] == results[1] == results[2]
            census.append(made.everybody("census"))
        assert census[1] == census[2] == census[3] == census[4], census


def recv_from_victim_of_survivors(member: Member) -> None:
    dist.barrier()
    dist.recv(torch.zeros(1), 2 if dist.get_rank() == 0 else 0, tag=4)


# -- roles that share a member --------------------------------------------------------------------------------
def shared(member: Member) -> dict[str, Any]:
    """Three members, four roles: m1 owns roles 1 and 2. Every member calls once."""
    me = {"m0": 0, "m1": 1, "m2": 3}[member.name]
    group = member.session.logical_group("all", [0, 1, 2, 3], me)
    found: dict[str, Any] = {}
    value = torch.tensor([float(10 ** member.session.plan.members.index(member.name))])  # 1, 10, 100

    def keep(name: str, *tensors: torch.Tensor) -> None:
        found[name] = [tensor.tolist() for tensor in tensors]

    tensor = value.clone()
    dist.all_reduce(tensor, group=group)
    keep("sum", tensor)
    tensor = value.clone()
    dist.all_reduce(tensor, dist.ReduceOp.AVG, group=group)
    keep("average", tensor)
    for root in range(4):
        tensor = value.clone()
        dist.broadcast(tensor, src=root, group=group)
        keep(f"from {root}", tensor)
    tensor = value.clone()
    dist.reduce(tensor, dst=2, group=group)
    keep("reduce", tensor if me == 1 else torch.zeros(1))
    outputs = [torch.zeros(1) for _ in range(4)]
    dist.all_gather(outputs, value, group=group)
    keep("all_gather", *outputs)
    output = torch.zeros(4)
    dist.all_gather_into_tensor(output, value, group=group)
    keep("all_gather_into_tensor", output)
    outputs = [torch.zeros(1) for _ in range(4)] if me == 1 else []
    dist.gather(value, outputs or None, dst=1, group=group)
    keep("gather", *outputs)
    output = torch.zeros(1)
    parts = [torch.tensor([float(part)]) for part in range(4)] if me == 1 else None
    dist.scatter(output, parts, src=1, group=group)
    keep("scatter", output)
    output = torch.zeros(1)
    dist.reduce_scatter(output, [value * (part + 1) for part in range(4)], group=group)
    keep("reduce_scatter", output)
    dist.reduce_scatter_tensor(output, torch.cat([value * (part + 1) for part in range(4)]), group=group)
    keep("reduce_scatter_tensor", output)
    outputs = [torch.zeros(1) for _ in range(4)]
    dist.all_to_all(outputs, [value * (part + 1) for part in range(4)], group=group)
    keep("all_to_all", *outputs)
    output = torch.zeros(4, 1)
    dist.all_to_all_single(output, torch.stack([value * (part + 1) for part in range(4)]), group=group)
    keep("all_to_all_single", output)
    dist.barrier(group=group)
    names: list[Any] = [None] * 4
    dist.all_gather_object(names, member.name, group=group)
    found["objects"] = names
    if me == 1:  # both ends, and each of its roles towards others
        dist.send(torch.tensor([7.0]), 2, group=group, tag=1)
        other = member.session.logical_group("all", [0, 1, 2, 3], 2)
        within, outside = torch.zeros(1), torch.zeros(1)
        dist.recv(within, 1, group=other, tag=1)
        dist.recv(outside, 0, group=other, tag=1)
        tensor = torch.zeros(1)
        dist.recv(tensor, 0, group=group, tag=1)
        keep("p2p", within, outside, tensor)
    if me == 0:
        sent = [torch.tensor([1.0]), torch.tensor([2.0])]
        works = [dist.isend(tensor, 1 + index, group=group, tag=1) for index, tensor in enumerate(sent)]
        for work in works:
            assert work is not None
            work.wait()
    return found


def test_roles_that_share_a_member() -> None:
    made = Cluster(3)
    try:
        made.attach(owners=("m0", "m1", "m1", "m2"))
        ranks = {"m0": 0, "m1": 1, "m2": 3}
        made.everybody("init", lambda index: (ranks[made.names[index]], 4))
        results = dict(zip(made.names, made.everybody("call", lambda _: (shared,)), strict=True))
        everyone = [[1.0], [10.0], [10.0], [100.0]]
        for name, rank in ranks.items():
            found = results[name]
            assert found["sum"] == [[111.0]]
            assert found["average"] == [[27.75]]
            assert [found[f"from {root}"] for root in range(4)] == [[value] for value in everyone]
            assert found["reduce"] == [[111.0]] if rank == 1 else [[0.0]]
            assert found["all_gather"] == everyone
            assert found["all_gather_into_tensor"] == [[1.0, 10.0, 10.0, 100.0]]
            assert found["gather"] == (everyone if rank == 1 else [])
            assert found["scatter"] == [[float(rank)]]
            assert found["reduce_scatter"] == found["reduce_scatter_tensor"] == [[111.0 * (rank + 1)]]
            assert found["all_to_all"] == [[value[0] * (rank + 1)] for value in everyone]
            assert found["all_to_all_single"] == [[[value[0] * (rank + 1)] for value in everyone]]
            assert found["objects"] == ["m0", "m1", "m1", "m2"]
        assert results["m1"]["p2p"] == [[7.0], [2.0], [1.0]]
        made.close()
    finally:
        made.destroy()


def adopted_group(member: Member) -> Any:
    """m1 took role 2 over: it meets role 0's owner in a group that m0 made by ``new_group`` long ago."""
    if member.name == "m0":
        group, name = member.kept
        assert name == group.group_name
    else:
        group = member.session.logical_group(member.kept[0], [0, 2], 2)
        assert group.rank() == 1 and dist.get_process_group_ranks(group) == [0, 2]
        assert dist.get_world_size(group) == 2 and dist.get_backend(group) == "bamboo"
    tensor = torch.tensor([1.0 if member.name == "m0" else 20.0])
    dist.all_reduce(tensor, group=group)
    return tensor.tolist()


def make_group(member: Member) -> None:
    group = dist.new_group([0, 2])
    # A member outside the group knows its name too: torch counts groups equally everywhere.
    name = str(dist.distributed_c10d._world.group_count - 1)
    member.kept = [group, name] if dist.get_rank() in (0, 2) else [name]


def test_adopting_a_role_of_a_group_made_by_torch() -> None:
    with cluster(3) as made:
        made.everybody("call", lambda _: (make_group,))
        made[2].kill()
        made.attach(members=("m0", "m1"), owners=("m0", "m1", "m1"), store_host="m1")
        assert made.everybody("call", lambda _: (adopted_group,)) == [[21.0], [21.0]]
        del made.members["m2"]


# -- detached -------------------------------------------------------------------------------------------------
def alone(member: Member) -> list[Any]:
    """Rank 1 of 4, without anybody."""
    from tests.support.comm_worker import portable

    names = sorted(set(CASES) - {"send_recv", "recv_from_anybody", "subgroup"})
    return [portable(CASES[name](VICTIM, 4)) for name in names] + [portable(dist.get_world_size())]


def test_detached_collectives_succeed_without_peers() -> None:
    with cluster(1, world=False) as made:
        made[0].run("detach")
        made[0].run("init", 1, 4)
        assert made[0].run("call", alone)[-1] == 4


# -- other users of torch.distributed -------------------------------------------------------------------------
def train_with_ddp(member: Member) -> Any:
    from tests.support.comm_worker import portable

    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        data = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        optimizer.zero_grad()
        wrapped(data).square().sum().backward()
        optimizer.step()
    return [portable(parameter) for parameter in model.parameters()]


def use_deepspeed(member: Member) -> list[Any]:
    """DeepSpeed's own wrappers, sub-groups and all."""
    import sys

    import deepspeed
    from deepspeed import comm

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # compiles; spins forever on a dead peer
    deepspeed.init_distributed(dist_backend="bamboo", auto_mpi_discovery=False, verbose=False)
    rank, world = comm.get_rank(), comm.get_world_size()
    found: list[Any] = [rank, world]

    def values(tensor: torch.Tensor) -> list[float]:
        return tensor.tolist()

    tensor = torch.ones(2) * rank
    comm.all_reduce(tensor)
    found.append(values(tensor))
    group = comm.new_group([0, 1])
    if rank < 2:
        comm.broadcast(tensor.fill_(rank), src=1, group=group)
        found.append(values(tensor))
    output = torch.zeros(world * 2)
    comm.all_gather_into_tensor(output, torch.full((2,), float(rank)))
    found.append(values(output))
    reduced = torch.zeros(2)
    comm.reduce_scatter_tensor(reduced, torch.arange(world * 2, dtype=torch.float32))
    found.append(values(reduced))
    comm.all_reduce_coalesced([tensor, reduced])
    found.append(values(reduced))
    outputs = [torch.zeros(1) for _ in range(world)]
    comm.all_gather(outputs, torch.full((1,), float(rank)))
    found.append([values(each) for each in outputs])
    names: list[Any] = [None] * world
    comm.all_gather_object(names, f"r{rank}")
    found.append(names)
    if rank == 0:
        comm.send(torch.full((3,), 4.0), 1)
    elif rank == 1:
        comm.recv(tensor := torch.zeros(3), 0)
        found.append(values(tensor))
    comm.barrier()
    return found


@pytest.mark.parametrize("user", [train_with_ddp, use_deepspeed])
def test_other_users_of_torch_distributed(user: Any) -> None:
    """DDP (from C++) and DeepSpeed compute on this backend what they compute on stock gloo."""
    stock = Cluster(2)
    try:
        port = free_port()
        stock.everybody("init_stock", lambda index: (index, 2, port))
        with cluster(2) as bamboo:
            for made in (stock, bamboo):
                for index in range(2):
                    made[index].start("call", user)
            expected = [stock[index].finish(90) for index in range(2)]
            assert [bamboo[index].finish(90) for index in range(2)] == expected
        stock.close()
    finally:
        stock.destroy()
