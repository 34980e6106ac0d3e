"""The c10d backend computes what stock gloo does, for torch and DDP, and for roles that share a member."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import distributed as dist

from bamboo_ds.comm.attachment import DRAW
from bamboo_ds.errors import UnsupportedError
from tests.support.comm_cases import CASES, VICTIM
from tests.support.comm_worker import DEADLINE, Cluster, Member, cluster

pytestmark = [
    pytest.mark.claim("guides/scripts.md", "reference/guarantees.md", "reference/limits.md"),
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


# -- results --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_call_equals_stock_gloo(world: int) -> None:
    with cluster(world, stock=True) as stock, cluster(world) as bamboo:
        for name in CASES:
            expected = stock.everybody("case", lambda index, name=name: (name, index, world))
            found = bamboo.everybody("case", lambda index, name=name: (name, index, world))
            assert found == expected, name


def profile_messages(member: Member) -> list[tuple[str, list[list[int]]]]:
    rank, world = dist.get_rank(), dist.get_world_size()
    with torch.autograd.profiler.profile(record_shapes=True) as profile:
        for source in ((rank - 1) % world, None):
            work = dist.isend(torch.zeros(2, rank + 1), (rank + 1) % world)
            dist.recv(torch.zeros(2, (rank - 1) % world + 1), source)
            work.wait()
    return [(e.name, e.input_shapes) for e in profile.function_events or () if e.name.startswith("bamboo:")]


def test_the_profiler_sees_sends_and_receives(trio: Cluster) -> None:
    for rank, events in enumerate(trio.everybody("call", lambda _: (profile_messages,))):
        sent, received = [[2, rank + 1]], [[2, (rank - 1) % 3 + 1]]
        assert events == [
            ("bamboo:send", sent), ("bamboo:recv", received), ("bamboo:send", sent), ("bamboo:recvAnySource", received),
        ]  # fmt: skip


def exchange(member: Member) -> list[float]:
    """Both send before they receive, more than the kernel takes; as if the tensors were on a GPU."""
    from bamboo_ds.comm import backend, inner

    before = backend.kind_for
    backend.kind_for = lambda device: inner.NCCL
    try:
        rank, world = dist.get_rank(), dist.get_world_size()
        mine, found = torch.full((1 << 22,), float(rank)), torch.empty(1 << 22)
        sends = dist.P2POp(dist.isend, mine, (rank + 1) % world)
        for work in dist.batch_isend_irecv([sends, dist.P2POp(dist.irecv, found, (rank - 1) % world)]):
            work.wait()
        return [float(found.min()), float(found.max())]
    finally:
        backend.kind_for = before


def communicate_far(member: Member) -> list[Any]:
    """With tensors on a device that torch has no group for, and no driver either."""
    from tests.support.far import far

    rank, gathered = dist.get_rank(), [far(0.0) for _ in range(3)]
    summed, given = far(1.0 + rank, 2.0), far(float(rank))
    dist.all_reduce(summed)
    dist.all_gather(gathered, given)
    dist.broadcast(given, 1)
    return [each.elements.tolist() for each in (summed, given, *gathered)]


def test_collectives_of_any_device(trio: Cluster) -> None:
    expected = [[6.0, 6.0], [1.0], [0.0], [1.0], [2.0]]
    assert trio.everybody("call", lambda _: (communicate_far,)) == [expected] * 3


def reduce_through_host(member: Member) -> tuple[list[float], list[str]]:
    """As if the tensor were on a GPU, where a communicator would have to be made."""
    from bamboo_ds.comm import groups, inner
    from bamboo_ds.comm.calls import collectives

    kinds: list[str] = []

    def create(kind: str, *given: Any) -> Any:
        kinds.append(kind)
        if kind == inner.NCCL:
            raise RuntimeError("a communicator is made")
        return create_before(kind, *given)

    kind_before, create_before = collectives.kind_for, groups.create_inner
    collectives.kind_for, groups.create_inner = lambda device: inner.NCCL, create
    try:
        tensor, group = torch.full((2,), float(dist.get_rank())), dist.new_group([0, 1, 2])
        with member.session.attachment.through_host():
            dist.all_reduce(tensor, group=group)
        with pytest.raises(RuntimeError, match="a communicator is made"):
            dist.all_reduce(tensor, group=group)
        return tensor.tolist(), kinds
    finally:
        collectives.kind_for, groups.create_inner = kind_before, create_before


def test_while_an_engine_is_built_no_communicator_is(trio: Cluster) -> None:
    """The epoch in which that happens ends at once."""
    assert trio.everybody("call", lambda _: (reduce_through_host,)) == [([3.0, 3.0], ["gloo", "nccl"])] * 3


def test_large_exchanges_of_devices_need_no_common_beginning(trio: Cluster) -> None:
    assert trio.everybody("call", lambda _: (exchange,)) == [[2.0, 2.0], [0.0, 0.0], [1.0, 1.0]]


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
        assert found == ["gloo", 3, index, [0, 1, 2], "bamboo", 3, *pair]


def reduce_in_a_pass(member: Member) -> Any:
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    member.session.attachment.passing = True
    try:
        dist.all_reduce(torch.ones(1), group=alone)
        dist.all_reduce(torch.ones(1))
    except UnsupportedError as error:
        return str(error)
    finally:
        member.session.attachment.passing = False
        dist.destroy_process_group(alone)


def test_passes_of_whole_layers_do_not_communicate(trio: Cluster) -> None:
    for found in trio.everybody("call", lambda _: (reduce_in_a_pass,)):
        assert re.search(r"calls a collective in a pass, allreduce over ranks \[0, 1, 2\]: .*SyncBatchNorm", found)


def communicate_in_a_draw(member: Member) -> Any:
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    calls = {
        "allreduce": lambda: dist.all_reduce(torch.ones(1)),
        "send": lambda: dist.send(torch.ones(1), (dist.get_rank() + 1) % 3),
        "recv": lambda: dist.recv(torch.ones(1), (dist.get_rank() + 1) % 3),
        "recv_anysource": lambda: dist.recv(torch.ones(1)),
        "monitoredBarrier": dist.monitored_barrier,
    }
    found = {}
    with member.session.attachment.among_nobody(DRAW):
        dist.all_reduce(torch.ones(1), group=alone)
        for name, call in calls.items():
            try:
                call()
            except UnsupportedError as error:
                found[name] = str(error)
    dist.destroy_process_group(alone)
    return found


def test_who_draws_batches_does_not_communicate(trio: Cluster) -> None:
    for found in trio.everybody("call", lambda _: (communicate_in_a_draw,)):
        assert set(found) == {"allreduce", "send", "recv", "recv_anysource", "monitoredBarrier"}
        for name, told in found.items():
            place = r"test_backend\.py:\d+ in \S+\. "
            assert re.search(
                rf"gives a batch: {name} over ranks \[0, 1, 2\], called at \S*{place}.*each by itself", told
            )


def total(group: Any) -> int | None:
    """The sum of the ranks of the group, computed by it; ``None``: this rank is not of it."""
    if group is None or group == dist.GroupMember.NON_GROUP_MEMBER:
        return None
    tensor = torch.tensor([dist.get_rank()])
    dist.all_reduce(tensor, group=group)
    return int(tensor)


#: Names that scripts give the backend of a group of their own, and what that group says of itself.
ASKED = {
    None: "gloo",
    "gloo": "gloo",
    "GLOO": "gloo",
    "nccl": "nccl",
    "bamboo": "gloo",
    "cpu:gloo": "gloo",
    "cpu:gloo,cuda:nccl": "gloo",
}


def groups_by_name(member: Member) -> Any:
    """Groups made by all that torch has for it: their sums, classes and names."""
    from torch.distributed import device_mesh

    made = {str(name): dist.new_group([0, 2], backend=name) for name in ASKED}
    made["as the default group"] = dist.new_group([0, 2], backend=dist.get_backend())
    made["c10d"] = dist.distributed_c10d.new_group([0, 2], timedelta(seconds=9), "gloo")
    made["imported before"] = device_mesh.new_group([0, 2], backend="gloo")
    made["options"] = dist.new_group([0, 2], backend="gloo", pg_options=dist.ProcessGroupGloo._Options())
    local = dist.get_rank() in (0, 2)
    made["local"] = dist.new_group([0, 2], backend="gloo", use_local_synchronization=True) if local else None
    made["subgroups"], _ = dist.new_subgroups(1, backend="gloo")
    made["enumeration"], _ = dist.new_subgroups_by_enumeration([[0, 2], [1]], backend="gloo")
    made["mesh"] = device_mesh.init_device_mesh("cpu", (3, 1), mesh_dim_names=("a", "b")).get_group("b")
    found = {name: (total(group), type(group).__name__) for name, group in made.items()}
    names = [dist.get_backend(made[str(name)]) for name in ASKED] if local else []
    if local:
        dist.monitored_barrier(made["gloo"], timedelta(seconds=30))
        assert made["c10d"].timeout == timedelta(seconds=9)
    for group in made.values():
        if group is not None and group != dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    return found, names


def test_groups_of_the_backends_that_carry_ours_are_ours(trio: Cluster) -> None:
    """A group of gloo, as scripts make it for their processors, survives what the default group does."""
    ours = "BambooProcessGroup"
    for index, (found, names) in enumerate(trio.everybody("call", lambda _: (groups_by_name,))):
        alone = {"subgroups": (index, ours), "mesh": (index, ours)}
        if index == 1:
            alone["enumeration"] = (1, ours)
            assert {name for name, (value, _) in found.items() if value is not None} == set(alone)
            assert {name: found[name] for name in alone} == alone
        else:
            assert found == {name: (2, ours) for name in found} | alone
            assert names == list(ASKED.values())


def other_backends(member: Member) -> Any:
    """Groups of backends that are not ours, and one afterwards."""
    from torch.testing._internal.distributed import fake_pg  # registers it

    assert fake_pg
    found = []
    for name in ("mpi", "UCC", "cpu:gloo,cuda:ucc"):
        try:
            dist.new_group([0, 2], backend=name)
        except ValueError as error:
            found.append(f"{type(error).__name__}: {error}")
    fake = dist.new_group(backend="fake")
    assert dist.get_backend(fake) == "fake"
    dist.destroy_process_group(fake)
    group = dist.new_group(backend="gloo")
    found.append(total(group))
    dist.destroy_process_group(group)
    return found


def test_groups_of_other_backends_are_refused(trio: Cluster) -> None:
    for *refused, value in trio.everybody("call", lambda _: (other_backends,)):
        assert [text.partition(" would")[0] for text in refused] == [
            'UnsupportedError: new_group(backend="mpi"): a group of mpi',
            'UnsupportedError: new_group(backend="ucc"): a group of ucc',
            'UnsupportedError: new_group(backend="cpu:gloo,cuda:ucc"): a group of ucc',
        ]
        assert value == 3


def stock_groups(member: Member) -> Any:
    """In a process that has our backend, but whose default group is torch's."""
    from bamboo_ds.comm import backend

    backend.register()
    group = dist.new_group(backend="gloo")
    return type(group) is dist.ProcessGroup, dist.get_backend(group), total(group)


def test_groups_of_a_job_of_torchs_stay_torchs() -> None:
    with cluster(2, stock=True) as stock:
        assert stock.everybody("call", lambda _: (stock_groups,)) == [(True, "gloo", 1)] * 2


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


def waiting_in_vain(member: Member) -> list[str]:
    """What the ranks are told that wait for rank 1: by timeouts of groups, and of monitored barriers."""
    known, fresh = dist.new_group([0, 1, 2]), dist.new_group([0, 1, 2], timeout=timedelta(seconds=0.5))
    dist.all_reduce(torch.zeros(1), group=known)
    dist.monitored_barrier(known, timedelta(seconds=DEADLINE))
    if dist.get_rank() == 1:
        return []
    known.set_timeout(timedelta(seconds=0.5))
    brief, found = timedelta(seconds=0.5), []
    for call in (
        lambda: dist.all_reduce(torch.zeros(1), group=known),
        lambda: dist.all_reduce(torch.zeros(1), group=fresh),
        lambda: dist.monitored_barrier(known, brief),
        lambda: dist.monitored_barrier(known, brief, wait_all_ranks=True),
        lambda: dist.monitored_barrier(known, timedelta(0)),
    ):
        try:
            call()
        except RuntimeError as error:
            found.append(str(error))
    return found


def test_the_timeout_of_a_group() -> None:
    """It holds for its collectives, from the first one on. A monitored barrier says who has not come, as gloo does."""
    with cluster(3) as made:
        first, nothing, third = made.everybody("call", lambda _: (waiting_in_vain,))
        assert nothing == []
        for found in (first, third):
            assert len(found) == 5 and all("imed out" in text for text in found[:2]), found
        late = r"Ranks? 1 failed to pass monitoredBarrier in 500 ms"
        assert all(re.search(late, text) for text in first[2:4]), first
        assert "Rank 0 timed out in monitoredBarrier after 0 ms" in first[4], first
        assert all("Rank 2 successfully reached monitoredBarrier, but received errors" in t for t in third[2:]), third


# -- roles that share a member --------------------------------------------------------------------------------
def shared(member: Member) -> dict[str, Any]:
    """Three members, four roles: m1 owns roles 1 and 2. Every member calls once.

    Other forms of these are in :mod:`tests.unit.comm.test_user_collectives`, where a member stands for a lost rank as
    well.
    """
    me = {"m0": 0, "m1": 1, "m2": 3}[member.name]
    group = member.session.logical_group("all", [0, 1, 2, 3], me)
    found: dict[str, Any] = {}
    value = torch.tensor([float(10 ** member.session.plan.members.index(member.name))])  # 1, 10, 100

    def keep(name: str, *tensors: torch.Tensor) -> None:
        found[name] = [tensor.tolist() for tensor in tensors]

    tensor = value.clone()
    dist.all_reduce(tensor, group=group)
    keep("sum", tensor)
    for root in range(4):
        tensor = value.clone()
        dist.broadcast(tensor, src=root, group=group)
        keep(f"from {root}", tensor)
    output = torch.zeros(4)
    dist.all_gather_into_tensor(output, value, group=group)
    keep("all_gather_into_tensor", output)
    output = torch.zeros(1)
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
    with cluster(3, world=False, attached=False) as made:
        made.attach(owners=("m0", "m1", "m1", "m2"))
        ranks = {"m0": 0, "m1": 1, "m2": 3}
        made.everybody("init", lambda index: (ranks[made.names[index]], 4))
        results = dict(zip(made.names, made.everybody("call", lambda _: (shared,)), strict=True))
        everyone = [[1.0], [10.0], [10.0], [100.0]]
        for name, rank in ranks.items():
            found = results[name]
            assert found["sum"] == [[111.0]]
            assert [found[f"from {root}"] for root in range(4)] == [[value] for value in everyone]
            assert found["all_gather_into_tensor"] == [[1.0, 10.0, 10.0, 100.0]]
            assert found["reduce_scatter_tensor"] == [[111.0 * (rank + 1)]]
            assert found["all_to_all"] == [[value[0] * (rank + 1)] for value in everyone]
            assert found["all_to_all_single"] == [[[value[0] * (rank + 1)] for value in everyone]]
            assert found["objects"] == ["m0", "m1", "m1", "m2"]
        assert results["m1"]["p2p"] == [[7.0], [2.0], [1.0]]


def adopted_group(member: Member) -> Any:
    """m1 took role 2 over: it meets role 0's owner in a group that m0 made by ``new_group`` long ago."""
    if member.name == "m0":
        group, name = member.kept
        assert name == group.group_name
    else:
        group = member.session.logical_group(member.kept[0], [0, 2], 2)
        assert group.rank() == 1 and dist.get_process_group_ranks(group) == [0, 2]
        assert dist.get_world_size(group) == 2 and dist.get_backend(group) == "gloo"
    tensor = torch.tensor([1.0 if member.name == "m0" else 20.0])
    dist.all_reduce(tensor, group=group)
    dist.destroy_process_group(group)
    return tensor.tolist()


def make_group(member: Member, backend: str | None) -> None:
    group = dist.new_group([0, 2], backend=backend)
    # A member outside the group knows its name too: torch counts groups equally everywhere.
    name = str(dist.distributed_c10d._world.group_count - 1)
    member.kept = [group, name] if dist.get_rank() in (0, 2) else [name]


@pytest.mark.parametrize("backend", [None, "gloo"])
def test_adopting_a_role_of_a_group_made_by_torch(backend: str | None) -> None:
    with cluster(3) as made:
        made.everybody("call", lambda _: (make_group, backend))
        made[2].kill()
        made.attach(members=("m0", "m1"), owners=("m0", "m1", "m1"))
        assert made.everybody("call", lambda _: (adopted_group,)) == [[21.0], [21.0]]
        del made.members["m2"]


# -- detached -------------------------------------------------------------------------------------------------
def alone(member: Member) -> list[Any]:
    """Rank 1 of 4, without anybody."""
    from tests.support.comm_worker import portable

    names = sorted(set(CASES) - {"send_recv", "recv_from_anybody", "subgroup"})
    return [portable(CASES[name](VICTIM, 4)) for name in names] + [portable(dist.get_world_size())]


def test_detached_collectives_succeed_without_peers() -> None:
    with cluster(1, world=False, attached=False) as made:
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


@pytest.mark.exhaustive
def test_ddp() -> None:
    """It calls from C++, and computes on this backend what it computes on stock gloo."""
    with cluster(2, stock=True) as stock, cluster(2) as bamboo:
        for made in (stock, bamboo):
            for index in range(2):
                made[index].start("call", train_with_ddp)
        expected = [stock[index].finish(90) for index in range(2)]
        assert [bamboo[index].finish(90) for index in range(2)] == expected
