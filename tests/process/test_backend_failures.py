"""The c10d backend when a peer is stopped or killed: every call raises, nothing hangs, nothing is left behind."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import distributed as dist

from tests.support.comm_cases import CASES, VICTIM
from tests.support.comm_worker import (
    DEADLINE,
    TELL_AFTER_S,
    Cluster,
    Member,
    Raised,
    Remote,
    cluster,
    grown,
    lowest,
    take_census,
)
from tests.support.ports import free_port

pytestmark = [
    pytest.mark.claim("concepts.md", "guides/elastic.md", "guides/scripts.md"),
    pytest.mark.integration,
    pytest.mark.usefixtures("fork_server"),
]

#: What a survivor may see.
LOST = ("EpochChanged", "PeerLost")


@pytest.fixture(scope="module")
def trio(fork_server: None) -> Iterator[Cluster]:
    """Three members that many tests share; each test leaves all three alive and in a live epoch."""
    with cluster(3) as made:
        yield made


def test_who_does_not_come_is_named_and_not_accused(trio: Cluster) -> None:
    """Its main thread is somewhere in its script; the others say more and more rarely that they wait for it."""
    plan, before = trio.next_plan(), trio[0].control("failures")
    for index in (0, 1):
        trio[index].start("attach", plan)
    told: list[tuple[list[str], float]] = []
    deadline = time.monotonic() + DEADLINE
    while len(told) < 2 and time.monotonic() < deadline:
        told = [(members, s) for members, s in trio[0].control("awaited") if members == [trio[2].name]]
    trio[2].start("attach", plan)
    for index in range(3):
        trio[index].finish()
    (_, first), (_, second), *_ = told
    assert first >= TELL_AFTER_S and second - first >= 2 * TELL_AFTER_S
    assert trio[0].control("failures") == before


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
    results = made.everybody("case", lambda index: ("all_reduce", index, 3))
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
        for survivor in survivors:
            survivor.control("abort", "a test stopped m1")
        raised = [outcome for survivor in survivors if (outcome := survivor.outcome()) is not None]
    finally:
        victim.resume()
    assert raised, f"{operation} went through without its peer"
    # The other survivor's abort may have reached one first.
    assert all(outcome.kind in LOST for outcome in raised), raised
    for survivor in survivors:
        survivor.start("case", "barrier", 0, 3)
        after = survivor.outcome()
        assert after is not None and after.kind == "EpochChanged", "an aborted epoch must stay aborted"
    check_alive(trio)


def of_one_rank(member: Member) -> list[Any]:
    """What the collectives of a group of one rank give; the epoch of the process may have ended."""
    (group,) = member.kept
    rank, ones = dist.get_rank(), torch.ones(2)
    found = [torch.full((2,), rank + 1.0) for _ in range(4)]
    dist.all_reduce(found[0], group=group)
    dist.broadcast(found[1], rank, group=group)
    dist.all_gather_into_tensor(found[2], ones, group=group)
    dist.reduce_scatter_tensor(found[3], ones, group=group)
    dist.barrier(group=group)
    dist.monitored_barrier(group)
    objects: list[Any] = [None]
    dist.all_gather_object(objects, rank, group=group)
    work = dist.all_reduce(ones, group=group, async_op=True)
    return [[float(each[0]) for each in found], objects, work.wait() and work.is_completed()]


def make_a_group_of_one(member: Member) -> None:
    member.kept = [dist.new_group([dist.get_rank()], use_local_synchronization=True)]


def forget_the_group(member: Member) -> None:
    dist.destroy_process_group(member.kept.pop())


def test_a_group_of_one_rank_needs_no_epoch(trio: Cluster) -> None:
    """Scripts call it where they cannot be interrupted: in the middle of an iterator, of a pass, of a step."""
    trio.everybody("call", lambda _: (make_a_group_of_one,))
    expected = [[[r + 1.0, r + 1.0, 1.0, 1.0], [r], True] for r in range(3)]
    assert trio.everybody("call", lambda _: (of_one_rank,)) == expected
    for member in trio:
        member.control("abort", "a test ends the epoch")
    assert trio.everybody("call", lambda _: (of_one_rank,)) == expected
    trio[0].start("case", "barrier", 0, 3)
    outcome = trio[0].outcome()
    assert outcome is not None and outcome.kind == "EpochChanged", "the epoch had ended"
    trio.everybody("call", lambda _: (forget_the_group,))
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


@pytest.mark.exhaustive
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
        if fault == "killed":
            made[VICTIM].kill()
        for index in (0, 2):
            if fault == "stopped":
                made[index].control("abort", "a test stopped m1")
        for outcome in [made[index].outcome() for index in (0, 2)]:
            assert outcome is not None and outcome.kind in LOST, outcome
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
        survivors = [trio[0], trio[2]]
        for survivor in survivors:
            survivor.start("attach", plan)
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


class Interrupted(RuntimeError):
    """What a signal handler of the script raises."""


def reduce_and_be_interrupted(member: Member, interrupted: bool) -> str:
    """An all-reduce; a signal handler raises just when it is complete."""
    import torch
    import torch.distributed as dist

    class Interrupting:
        def __init__(self, inner: Any) -> None:
            self._inner, self._signals = inner, ["enough"]

        def wait(self, *timeout: Any) -> bool:
            done = bool(self._inner.wait())
            if self._signals:
                raise Interrupted(self._signals.pop())
            return done

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

    work: Any = dist.all_reduce(torch.ones(4), async_op=True)
    if interrupted:
        work._inner = Interrupting(work._inner)
    try:
        work.wait()
    except Interrupted as error:
        return str(error)
    return "done"


def test_an_error_of_the_script_stays_its_own(trio: Cluster) -> None:
    """Also one that is raised while an operation waits, and is a RuntimeError like those of the transport."""
    said = trio.everybody("call", lambda index: (reduce_and_be_interrupted, index == 0))
    assert said == ["enough", "done", "done"]
    check_alive(trio)


def stop_while_connecting(member: Member) -> None:
    """Be stopped with the address published and no connection made: gloo waits for us, perhaps without a socket."""
    import os
    import signal

    from bamboo_ds.comm import groups as module

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
        for index in (0, 2):
            trio[index].wait_blocked()
            trio[index].control("abort", "m1 stopped while connecting")
        for index in (0, 2):
            outcome = trio[index].outcome()
            assert outcome is not None and outcome.kind in LOST, outcome
            trio[index].start("case", "barrier", index, 3)
            after = trio[index].outcome()
            assert after is not None and after.kind == "EpochChanged"
        trio[VICTIM].resume()
        trio[VICTIM].control("abort", "it was stopped for too long")
        assert trio[VICTIM].outcome() is not None
    check_alive(trio)


def test_a_member_that_does_not_come_is_stopped(trio: Cluster) -> None:
    """Waiting for it is abortable; it takes part in the next epoch."""
    plan = trio.next_plan()
    trio[VICTIM].stop()
    try:
        for index in (0, 2):
            trio[index].start("attach", plan)
        for index in (0, 2):
            trio[index].wait_blocked()
            trio[index].control("abort", "m1 is stopped")
            outcome = trio[index].outcome()
            assert outcome is not None and outcome.kind == "EpochChanged", outcome
    finally:
        trio[VICTIM].resume()
    check_alive(trio)


def test_nobody_listens_where_a_member_should_be() -> None:
    """Who has something to say to it accuses it at once."""
    with cluster(3, world=False, attached=False) as made:
        plan = made.next_plan()
        made[2].start("attach", replace(plan, places=(f"{made.address} {free_port()} token", *plan.places[1:])))
        outcome = made[2].outcome()
        assert outcome is not None and outcome.kind == "PeerLost", outcome
        assert [member for member, _ in made[2].control("failures")] == ["m0"]
        made.attach()


def test_abort_that_comes_before_its_epoch_or_after(trio: Cluster) -> None:
    plan = trio.next_plan()
    for index in range(3):
        trio[index].control("abort", "a newer plan is known", plan.epoch)
    for index in range(3):
        trio[index].start("attach", plan)
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
                made[index].start("call", recv_from_survivor)
            for index in (0, 2):
                made[index].wait_blocked()
                made[index].control("abort", "next")
                assert made[index].outcome() is not None
            made.attach(members=made.names, owners=made.names)
            results = made.everybody("case", lambda index: ("all_reduce", index, 3))
            assert results[0] == results[1] == results[2]
            take_census(made, census)
        assert not grown(census[-1], lowest(census[:-1])), census


def recv_from_survivor(member: Member) -> None:
    dist.recv(torch.zeros(1), 2 if dist.get_rank() == 0 else 0, tag=4)
