"""Sums on groups that run behind the host have one order, whatever the group does and whoever holds the ranks.

The groups here move shares by gloo, in the place of NCCL's; what they would sum up themselves fails the test. Members
are threads, each in an epoch of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed as dist

from bamboo_ds.comm import groups as groups_module
from bamboo_ds.comm.c10d import registry
from bamboo_ds.comm.calls import collectives, order
from bamboo_ds.comm.calls.collectives import start
from bamboo_ds.comm.calls.order import by_rank, matters, ring
from bamboo_ds.comm.calls.participants import Participants, owning, surviving
from bamboo_ds.comm.calls.table import COLLECTIVES
from bamboo_ds.comm.epoch import Epoch
from bamboo_ds.comm.inner import NCCL
from bamboo_ds.engine.stage import shares as shares_module
from bamboo_ds.engine.stage.shares import all_reduce, shares_of
from bamboo_ds.errors import EpochChanged
from bamboo_ds.topology import Layout, Plan
from tests.support.hubs import Hubs

pytestmark = pytest.mark.claim("reference/guarantees.md", "reference/limits.md")

LONG = timedelta(seconds=60)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SUM = dist.ReduceOp.SUM
PLAIN = (SUM, dist.ReduceOp.PRODUCT)
NAMES = "abcde"


class LateWork(dist.Work):  # type: ignore[misc]
    """A work whose result is there when it is waited for, and noise before."""

    def __init__(self, work: Any, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        self._work, self._pairs = work, list(pairs)
        for tensor, _ in self._pairs:
            tensor.fill_(77)

    def wait(self, timeout: timedelta = LONG) -> bool:
        self._work.wait()
        for tensor, found in self._pairs:
            tensor.copy_(found)
        self._pairs.clear()
        return True

    def is_completed(self) -> bool:
        return not self._pairs

    def exception(self) -> None:
        return None


class Moving:
    """A group that moves tensors. It adds whole numbers, and two of others: of more it has no order."""

    def __init__(self, inner: Any, size: int) -> None:
        self._inner, self._size = inner, size
        self.exchanges: list[int] = []

    def alltoall_base(self, output: torch.Tensor, given: torch.Tensor, outputs: Any, inputs: Any, *options: Any) -> Any:
        self.exchanges.append(given.numel())
        found = torch.empty_like(output)
        return LateWork(self._inner.alltoall_base(found, given.clone(), outputs, inputs), [(output, found)])

    def _allgather_base(self, output: torch.Tensor, given: torch.Tensor, *options: Any) -> Any:
        found = torch.empty_like(output)
        return LateWork(self._inner._allgather_base(found, given.clone()), [(output, found)])

    def allgather(self, outputs: list[list[torch.Tensor]], given: list[torch.Tensor], options: Any) -> Any:
        found = [[torch.empty_like(each) for each in row] for row in outputs]
        pairs = [pair for out, row in zip(outputs, found, strict=True) for pair in zip(out, row, strict=True)]
        return LateWork(self._inner.allgather(found, [each.clone() for each in given], options), pairs)

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        options = options or registry.AllreduceOptions()
        dtype = tensors[0].dtype
        exact = not dtype.is_floating_point or (self._size == 2 and any(options.reduceOp == each for each in PLAIN))
        assert exact or self._connecting(tensors), (
            f"{options.reduceOp} of {dtype} over {self._size} in an order of its own"
        )
        found = [each.clone() for each in tensors]
        return LateWork(self._inner.allreduce(found, options), zip(tensors, found, strict=True))  # type: ignore[arg-type]

    def _connecting(self, tensors: list[torch.Tensor]) -> bool:
        return not self.exchanges and torch.equal(tensors[0], torch.ones(self._size))

    def abort(self) -> None:
        """Nothing is under way."""


def moving(kind: str, store: Any, rank: int, size: int, timeout: timedelta, gloo_device: Any) -> Moving:
    assert kind == NCCL
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timeout
    return Moving(dist.ProcessGroupGloo(store, rank, size, options), size)


@pytest.fixture(autouse=True)
def behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the processor are as those of a GPU; those of a few KB go piece by piece."""
    for module in (collectives, order):
        monkeypatch.setattr(module, "kind_for", lambda device: NCCL)
    monkeypatch.setattr(groups_module, "create_inner", moving)
    monkeypatch.setattr(order, "_AT_ONCE", 8192)


Call = Callable[[str, str, Any, Any], Any]


class Members:
    """The members of a plan in which ``owners`` have the ranks; ``script_ranks`` are the ranks that they run as."""

    def __init__(self, owners: str, script_ranks: Sequence[int] | None = None) -> None:
        self.owners, self.names = owners, tuple(dict.fromkeys(owners))
        script_ranks = script_ranks if script_ranks is not None else [owners.index(name) for name in self.names]
        self._hubs = Hubs(self.names)
        self.plan = Plan(
            epoch=1, owners=tuple(owners), members=self.names, places=self._hubs.places,
            script_ranks=tuple(script_ranks), layout=Layout(len(owners), 1),
        )  # fmt: skip
        usual = LONG, lambda member, reason: None, lambda members, seconds: None, 60.0, lambda: None
        self.epochs = {name: Epoch(self.plan, hub, name, "127.0.0.1", *usual) for name, hub in self._hubs.items()}
        for epoch in self.epochs.values():
            epoch.links.enter()

    def own(self, name: str) -> list[int]:
        return [rank for rank, owner in enumerate(self.owners) if owner == name]

    def each(self, body: Callable[[str], Any]) -> dict[str, Any]:
        """What ``body`` returns for each member, called in a thread of its own."""
        with ThreadPoolExecutor(len(self.names)) as pool:
            return dict(zip(self.names, pool.map(body, self.names), strict=True))

    def call(self, name: str, among: Participants, rank: int, what: str, *arguments: Any) -> None:
        """A collective of ``name``, which is there when this returns."""
        epoch = self.epochs[name]
        work = start(epoch, "g", among, COLLECTIVES[what], arguments, rank, LONG)
        assert work.wait()
        epoch.groups.confirm("reducing")

    def exchanges(self, name: str) -> list[int]:
        return [size for group in self.epochs[name].groups._groups.values() for size in group.exchanges]

    def close(self) -> None:
        for epoch in self.epochs.values():
            epoch.destroy()
        self._hubs.close()


@pytest.fixture
def members() -> Iterator[Callable[..., Members]]:
    made: list[Members] = []

    def make(*arguments: Any) -> Members:
        made.append(Members(*arguments))
        return made[-1]

    yield make
    for each in made:
        each.close()


def options(what: str, operator: Any = SUM, root: int = 0) -> Any:
    made = getattr(registry, COLLECTIVES[what].options)()
    made.reduceOp = dist.ReduceOp(operator)
    if what == "reduce":
        made.rootRank = root
    return made


def values(dtype: torch.dtype, elements: int, rank: int) -> torch.Tensor:
    """Of many magnitudes and both signs, so that each order of additions has a sum of its own."""
    generator = torch.Generator().manual_seed(1000 * elements + rank)
    spread = 10.0 ** (torch.randint(-3, 4, (elements,), generator=generator).double())
    found = (torch.randn(elements, generator=generator, dtype=torch.float64) * spread).to(dtype)
    if elements > 3:
        found[:4] = torch.tensor([-0.0, float("inf") if rank == 1 else 1.0, float("nan") if rank == 2 else 2.0, 0.0])
        found[3] = -0.0 if rank % 2 else 0.0
    return found


def in_order(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rank 0 and rank 1 first, rounded each time."""
    total = rows[0].clone()
    for row in rows[1:]:
        total = total + row
    return total


def bits(tensor: torch.Tensor) -> list[int]:
    known = torch.where(tensor.isnan(), torch.full_like(tensor, float("nan")), tensor)
    return known.reshape(-1).contiguous().view(torch.uint8).tolist()


@pytest.mark.parametrize(
    "owners", ["abc", "aab", "aba", "abb", "aaa", "abcd", "abcc", "abab", "abcde", "abcba", "aabcb"]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bits_of_gradients_are_those_of_a_member_for_each_pipeline(
    members: Callable[..., Members], owners: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    some, count = members(owners), len(owners)
    among = owning(some.plan, range(count))

    def sum_up(tensor: torch.Tensor, group: str) -> None:
        what = "allreduce"
        some.call(group, among, some.own(group)[0], what, [tensor], options(what))

    monkeypatch.setattr(shares_module, "dist", SimpleNamespace(all_reduce=sum_up))
    for elements in (0, 1, 17, 3 * count, 5003):
        rows = [values(dtype, elements, rank) for rank in range(count)]

        def reduce(name: str, rows: list[torch.Tensor] = rows) -> torch.Tensor:
            own = some.own(name)
            shares = shares_of(list(owners), own)
            if shares is not None:
                return all_reduce([rows[rank] for rank in own], shares, name)
            total = rows[own[0]].clone()
            sum_up(total, name)
            return total

        expected = in_order(rows)
        if elements > 1000:
            another = in_order(rows[::-1])
            assert bits(expected) != bits(another), "the order makes no difference here"
        for name, found in some.each(reduce).items():
            assert found.dtype == dtype and bits(found) == bits(expected), (name, elements)


def test_a_sum_in_half_precision_is_rounded_after_each_addition() -> None:
    rows = [torch.tensor([x], dtype=torch.bfloat16) for x in (256.0, 1.0, 1.0)]
    assert order.combined(rows, range(3), SUM).item() == 256.0, "once in higher precision it were 258"
    assert order.combined(rows[::-1], range(3), SUM).item() == 258.0
    rows = [torch.tensor([x], dtype=torch.float16) for x in (60000.0, 60000.0, -60000.0)]
    assert order.combined(rows, range(3), SUM).isinf().item()


REDUCTIONS = {
    "AVG": lambda rows: in_order(rows) / len(rows),
    "PRODUCT": lambda rows: order.combined(rows, range(len(rows)), dist.ReduceOp.PRODUCT),
    "MAX": lambda rows: order.combined(rows, range(len(rows)), dist.ReduceOp.MAX),
    "MIN": lambda rows: order.combined(rows, range(len(rows)), dist.ReduceOp.MIN),
}


@pytest.mark.parametrize("operator", REDUCTIONS)
@pytest.mark.parametrize("count", [2, 3, 4])
def test_every_operator_gives_a_script_before_a_loss_what_it_gives_after_it(
    members: Callable[..., Members], operator: str, count: int
) -> None:
    """The last rank is lost, and the first member contributes for it what it passes itself."""
    whole, left = members(NAMES[:count]), members(NAMES[: count - 1] + "a", range(count - 1))
    for dtype in DTYPES:
        own = [values(dtype, 1001, rank) for rank in range(count - 1)]
        rows = [*own, own[0]]
        expected = REDUCTIONS[operator](rows)
        for some in (whole, left):
            among = surviving(some.plan, range(count))
            assert among.complete == (some is whole)

            def reduce(
                name: str, some: Members = some, among: Participants = among, rows: list[torch.Tensor] = rows
            ) -> torch.Tensor:
                rank = NAMES.index(name)
                tensor = rows[rank].clone()
                some.call(name, among, rank, "allreduce", [tensor], options("allreduce", operator_of(operator)))
                return tensor

            for name, found in some.each(reduce).items():
                assert bits(found) == bits(expected), (name, dtype)


def operator_of(name: str) -> Any:
    return getattr(dist.ReduceOp, name)


def test_one_pass_serves_several_tensors_and_reaches_a_root(members: Callable[..., Members]) -> None:
    some = members("abc")
    among = owning(some.plan, range(3))
    rows = [[values(torch.float32, size, rank) for size in (5, 0, 700)] for rank in range(3)]
    expected = [in_order([row[place] for row in rows]) for place in range(3)]

    def coalesced(name: str) -> list[torch.Tensor]:
        rank = NAMES.index(name)
        tensors = [tensor.clone() for tensor in rows[rank]]
        some.call(name, among, rank, "allreduce_coalesced", tensors, options("allreduce_coalesced"))
        return tensors

    for found in some.each(coalesced).values():
        assert [bits(tensor) for tensor in found] == [bits(tensor) for tensor in expected]

    def to_root(name: str) -> torch.Tensor:
        rank = NAMES.index(name)
        tensor = rows[rank][2].clone().reshape(7, 100).t()
        some.call(name, among, rank, "reduce", [tensor], options("reduce", root=1))
        return tensor

    for rank, found in enumerate(some.each(to_root).values()):
        wanted = expected[2] if rank == 1 else rows[rank][2]
        assert bits(found) == bits(wanted.reshape(7, 100).t().contiguous()), "only the root gets it"


@pytest.mark.parametrize("sizes", [(4, 4, 4), (1, 0, 300)])
def test_scattered_sums_have_the_bits_of_the_whole(members: Callable[..., Members], sizes: tuple[int, ...]) -> None:
    some = members("abc")
    among = owning(some.plan, range(3))
    rows = [values(torch.float32, sum(sizes), rank) for rank in range(3)]
    expected = in_order(rows).split(list(sizes))

    def scatter(name: str) -> list[torch.Tensor]:
        rank = NAMES.index(name)
        output = torch.zeros(sizes[rank])
        what = "reduce_scatter"
        some.call(name, among, rank, what, [output], [list(rows[rank].split(list(sizes)))], options(what))
        found = [output]
        if len(set(sizes)) == 1:
            for what in ("_reduce_scatter_base", "reduce_scatter_tensor_coalesced"):
                output, given = torch.zeros(sizes[rank]), rows[rank].clone()
                both = ([output], [given]) if "coalesced" in what else (output, given)
                some.call(name, among, rank, what, *both, options(what))
                found.append(output)
        return found

    for rank, found in enumerate(some.each(scatter).values()):
        assert [bits(each) for each in found] == [bits(expected[rank])] * len(found)


def test_what_has_no_order_is_left_to_the_group(members: Callable[..., Members]) -> None:
    """Whole numbers, and sums of two: they take no second way, and no exchange of all with all but the first."""
    three, two = members("abc"), members("ab")
    for some, tensor in ((three, torch.arange(6)), (two, values(torch.float32, 6, 0))):
        before = some.each(some.exchanges)
        among = owning(some.plan, range(len(some.names)))

        def reduce(
            name: str, some: Members = some, among: Participants = among, tensor: torch.Tensor = tensor
        ) -> torch.Tensor:
            mine = tensor.clone()
            some.call(name, among, NAMES.index(name), "allreduce", [mine], options("allreduce"))
            return mine

        for found in some.each(reduce).values():
            assert bits(found.double()) == bits((tensor * len(some.names)).double())
        connected = {name: [len(some.names)] for name in some.names}
        assert some.each(some.exchanges) == connected and not any(before.values())


def test_an_ended_epoch_ends_a_sum_between_its_two_steps(members: Callable[..., Members]) -> None:
    """What the exchange has left when it was cut off is no share: the sum does not count."""
    some = members("abc")
    among = owning(some.plan, range(3))

    def sum_up(name: str) -> None:
        some.call(name, among, NAMES.index(name), "allreduce", [torch.ones(4)], options("allreduce"))

    def be_cut_off(name: str) -> bool:
        epoch = some.epochs[name]
        (group,) = epoch.groups._groups.values()
        exchange = group.alltoall_base

        def cut_off(*arguments: Any) -> Any:
            work = exchange(*arguments)
            epoch.life.abort("a loss")
            return work

        group.alltoall_base = cut_off
        group._allgather_base = lambda *arguments: pytest.fail("of no sum")
        with pytest.raises(EpochChanged):  # by its own abort, or that of another member
            sum_up(name)
        return epoch.life.aborted is not None

    some.each(sum_up)
    assert all(some.each(be_cut_off).values())


def test_the_order_of_a_kind() -> None:
    assert order.order_of(NCCL) is by_rank and order.order_of("gloo") is ring
    assert [list(by_rank(3, 5, 4096))] == [[(n, n + 1, [0, 1, 2]) for n in range(5)]]
    assert list(by_rank(3, 0, 4)) == []
    avg, largest = dist.ReduceOp.AVG, dist.ReduceOp.MAX
    assert not matters(SUM, torch.float32, 2) and not matters(dist.ReduceOp.PRODUCT, torch.bfloat16, 2)
    assert all(matters(operator, torch.float32, 2) for operator in (avg, largest))
    assert all(matters(operator, torch.float16, 3) for operator in (SUM, avg, largest))
    assert not any(matters(operator, torch.int64, 3) for operator in (SUM, avg, largest))
    assert not matters(dist.ReduceOp.PREMUL_SUM, torch.float32, 3)
