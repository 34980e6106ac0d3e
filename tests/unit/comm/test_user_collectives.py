"""What a script does with torch.distributed itself goes on when members are lost and come."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed as dist

from bamboo_ds import PlanView
from bamboo_ds.comm.c10d import registry
from bamboo_ds.comm.calls import order
from bamboo_ds.comm.calls.collectives import Adapter, alone
from bamboo_ds.comm.calls.order import reduced, ring
from bamboo_ds.comm.calls.participants import surviving
from bamboo_ds.comm.calls.script import ScriptCollectives, ScriptWork
from bamboo_ds.comm.calls.table import COLLECTIVES
from bamboo_ds.errors import ProtocolError, UnsupportedError
from bamboo_ds.topology import Layout, Plan
from bamboo_ds.worker import plan_changes as plan_change
from tests.support.gloo import on_threads

pytestmark = pytest.mark.claim("guides/elastic.md", "guides/scripts.md", "reference/limits.md")


# -- who takes part -----------------------------------------------------------------------------------------


def plan(members: str, script_ranks: tuple[int, ...], owners: str) -> Plan:
    return Plan(
        epoch=5, owners=tuple(owners), members=tuple(members), layout=Layout(1, len(owners)),
        script_ranks=script_ranks,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("newest", "ranks", "newcomers", "members", "of_rank", "hosts"),
    [
        (plan("abcd", (0, 1, 2, 3), "abcd"), (0, 1, 2, 3), "", "abcd", "abcd", "abcd"),
        (plan("abc", (2, 0, 1), "bca"), (0, 1, 2), "", "bca", "bca", "bca"),  # in the order of ranks
        (plan("acd", (0, 2, 3), "aacd"), (0, 1, 2, 3), "", "acd", "a-cd", "aacd"),
        # The owner of the lost role is not of the group, and stands for nobody.
        (plan("acd", (0, 2, 3), "aacd"), (1, 2, 3), "", "cd", "-cd", "ccd"),
        (plan("abxy", (0, 1, 0, 1), "ab"), (0, 1), "", "abxy", "ab", "ab"),  # standbys take part
        (plan("axb", (0, 1, 1), "ab"), (0, 1), "x", "ab", "ab", "ab"),
        (plan("ax", (0, 1), "aa"), (0, 1), "x", "a", "a-", "aa"),
    ],
    ids=["all", "order", "stand-in", "owner-outside", "standbys", "newcomer", "newcomer-alone"],
)
def test_who_takes_part(
    newest: Plan, ranks: tuple[int, ...], newcomers: str, members: str, of_rank: str, hosts: str
) -> None:
    group = surviving(newest, ranks, set(newcomers))
    assert group.members == tuple(members) and group.hosts == tuple(hosts)
    assert group.of_rank == tuple(None if name == "-" else name for name in of_rank)
    assert group.complete == (members == of_rank)


# -- what they compute --------------------------------------------------------------------------------------

#: Starts a collective by its name, with its arguments.
Run = Callable[..., Any]


def on_each(plan: Plan, ranks: tuple[int, ...], call: Callable[[Run, str, int], Any]) -> None:
    """``call(run, member, script_rank)`` on every member of a group, each in a thread of its own."""
    group = surviving(plan, ranks)

    def take_part(member: str, inner: Any) -> None:
        script_rank = plan.script_rank(member)
        adapter = Adapter(inner, group, member, ranks.index(script_rank))
        work, finish = call(lambda name, *arguments: adapter.start(COLLECTIVES[name], arguments), member, script_rank)
        work.wait()
        if finish is not None:
            finish()

    on_threads([partial(take_part, member) for member in group.members])


#: Ranks 0 to 3: rank 1 is lost and owned by a, x runs as rank 3 beside d.
LOSSY = plan("acdx", (0, 2, 3, 3), "aacd")
ALL = (0, 1, 2, 3)


def options_of(shape: str, operator: str, root: int = 0) -> Any:
    options: Any = getattr(registry, COLLECTIVES[shape].options)()
    options.reduceOp = getattr(dist.ReduceOp, operator)
    if hasattr(options, "rootRank"):
        options.rootRank = root
    return options


@pytest.mark.parametrize("operator", ["SUM", "MAX", "MIN", "PRODUCT", "AVG"])
@pytest.mark.parametrize("operation", ["allreduce", "allreduce_coalesced", "reduce", "reduce_scatter"])
def test_the_owner_of_a_lost_rank_s_stage_contributes_for_it(operator: str, operation: str) -> None:
    values = {member: [torch.tensor([float(LOSSY.script_rank(member) + 1)]), torch.ones(2)] for member in LOSSY.members}
    values["x"][0].fill_(99.0)  # it runs as rank 3 beside d
    found = {member: torch.zeros(1) for member in LOSSY.members}

    def call(run: Run, member: str, script_rank: int) -> Any:
        options = options_of(operation, operator, 3)
        if operation == "reduce_scatter":
            return run(operation, [found[member]], [[values[member][0].clone() for _ in ALL]], options)
        found[member] = values[member][0].clone()
        tensors = [found[member], values[member][1]] if operation == "allreduce_coalesced" else [found[member]]
        return run(operation, tensors, options)

    on_each(LOSSY, ALL, call)
    # Ranks 0 to 3 with 1, 1, 3, 4.
    expected = {"SUM": 9.0, "MAX": 4.0, "MIN": 1.0, "PRODUCT": 12.0, "AVG": 2.25}[operator]
    for member, value in found.items():
        gets = operation != "reduce" or LOSSY.script_rank(member) == 3
        assert value.item() == (expected if gets else values[member][0].item())


FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
WHOLE = (torch.int64, torch.int32, torch.uint8, torch.bool)
OPERATORS = [(operator, dtype) for operator in ("SUM", "PRODUCT", "MIN", "MAX") for dtype in FLOATS + WHOLE]
OPERATORS += [(operator, dtype) for operator in ("BAND", "BOR", "BXOR") for dtype in WHOLE]


def some_values(dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Values with which sums and products are rounded, or wrap round, and comparisons are not of numbers."""
    generator = torch.Generator().manual_seed(seed)
    if not dtype.is_floating_point:
        return torch.randint(0, 2 if dtype is torch.bool else 200, (37,), generator=generator).to(dtype)
    values = torch.randn(37, generator=generator).to(dtype)
    values[seed % 7], values[10], values[20 + seed % 3] = torch.nan, [-0.0, 0.0][seed % 2], torch.inf
    return values


def bits(tensor: torch.Tensor) -> list[int]:
    """All of them, but those of truth values, and of what is not a number, which depend on the processor's path."""
    flat = tensor.to(torch.int64) if tensor.dtype is torch.bool else tensor.clone()
    if flat.dtype.is_floating_point:
        flat[flat.isnan()] = torch.nan
    return flat.view(torch.uint8).tolist()


def by_gloo(rows: dict[Any, list[torch.Tensor]], operator_of: Callable[[Any], str]) -> dict[Any, torch.Tensor]:
    """What a group of gloo makes of each row, which has a tensor for each rank."""

    def reduce(rank: int, group: Any) -> dict[Any, torch.Tensor]:
        found = {key: row[rank].clone() for key, row in rows.items()}
        for key, tensor in found.items():
            group.allreduce([tensor], options_of("allreduce", operator_of(key))).wait()
        return found

    return on_threads([partial(reduce, rank) for rank in range(len(next(iter(rows.values()))))])[0]


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6])
def test_a_reduction_after_losses_has_the_bits_of_the_whole_group_s(size: int) -> None:
    """Of values that all ranks have, and of such as only a lost rank and its host share, in the ring's order."""
    names = "abcdef"[:size]
    hosts = [("a",) * size]  # what all have alike
    for lost in [lost for count in (1, 2) for lost in combinations(range(size), count) if count < size]:
        alive = [rank for rank in range(size) if rank not in lost]
        owners = "".join(names[rank if rank in alive else alive[rank % len(alive)]] for rank in range(size))
        hosts.append(surviving(plan("".join(names[rank] for rank in alive), tuple(alive), owners), range(size)).hosts)
    rows = {}
    for operator, dtype in OPERATORS:
        own = {name: some_values(dtype, index) for index, name in enumerate(names)}
        rows[operator, dtype] = [torch.cat([own[group[rank]] for group in hosts]) for rank in range(size)]
    expected = by_gloo(rows, lambda key: str(key[0]))
    for key, row in rows.items():
        found = reduced(row[0], size, getattr(dist.ReduceOp, key[0]), ring, lambda begin, end, row=row: row)
        assert bits(found) == bits(expected[key]), key


def test_a_large_tensor_is_reduced_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "_AT_ONCE", 0)
    values = {member: some_values(torch.float32, index) for index, member in enumerate(LOSSY.members)}
    given = {member: value.clone() for member, value in values.items()}
    on_each(LOSSY, ALL, lambda run, member, _: run("allreduce", [values[member]], options_of("allreduce", "SUM")))
    expected = by_gloo({0: [given[host] for host in "aacd"]}, lambda _: "SUM")[0]
    assert all(bits(value) == bits(expected) for value in values.values())


def test_reductions_that_gloo_does_not_have_are_refused() -> None:
    group = surviving(LOSSY, ALL)
    adapter = Adapter(None, group, "a", 0)
    with pytest.raises(UnsupportedError, match="use SUM, AVG"):
        adapter.start(COLLECTIVES["allreduce"], ([torch.ones(1)], SimpleNamespace(reduceOp=dist.ReduceOp.PREMUL_SUM)))
    with pytest.raises(UnsupportedError, match=r"to_dense"):
        adapter.start(COLLECTIVES["allreduce"], ([torch.ones(2).to_sparse()], options_of("allreduce", "SUM")))


def test_every_rank_has_a_part_of_what_is_gathered() -> None:
    outputs = {member: [torch.zeros(1) for _ in ALL] for member in LOSSY.members}

    def call(run: Run, member: str, script_rank: int) -> Any:
        given = torch.tensor([float(script_rank) if member != "x" else 99.0])
        return run("allgather", [outputs[member]], [given], registry.AllgatherOptions())

    on_each(LOSSY, ALL, call)
    assert all([float(t) for t in row] == [0.0, 0.0, 2.0, 3.0] for row in outputs.values())


@pytest.mark.parametrize(("root", "expected"), [(2, 2.0), (1, 0.0)])
def test_a_broadcast_from_a_lost_rank_is_from_its_stand_in(root: int, expected: float) -> None:
    values = {member: torch.tensor([float(LOSSY.script_rank(member))]) for member in LOSSY.members}

    def call(run: Run, member: str, script_rank: int) -> Any:
        options = registry.BroadcastOptions()
        options.rootRank = root
        return run("broadcast", [values[member]], options)

    on_each(LOSSY, ALL, call)
    assert {float(value) for value in values.values()} == {expected}


@pytest.mark.parametrize(("root", "expected"), [(3, [0.0, 2.0, 3.0, 3.0]), (1, [-1.0] * 4)])
def test_scatter_and_gather(root: int, expected: list[float]) -> None:
    outputs = {member: torch.tensor([-1.0]) for member in LOSSY.members}
    collected = {member: [torch.tensor([-1.0]) for _ in ALL] for member in LOSSY.members}

    def scatter(run: Run, member: str, script_rank: int) -> Any:
        options = registry.ScatterOptions()
        options.rootRank = root
        given = [[torch.tensor([float(rank)]) for rank in ALL]] if script_rank == root else []
        return run("scatter", [outputs[member]], given, options)

    def gather(run: Run, member: str, script_rank: int) -> Any:
        options = registry.GatherOptions()
        options.rootRank = root
        return run(
            "gather", [collected[member]] if script_rank == root else [], [torch.tensor([float(script_rank)])], options
        )

    on_each(LOSSY, ALL, scatter)
    assert [float(outputs[member]) for member in "acdx"] == expected
    on_each(LOSSY, ALL, gather)
    for member, row in collected.items():
        assert [float(t) for t in row] == ([0.0, 0.0, 2.0, 3.0] if LOSSY.script_rank(member) == root else [-1.0] * 4)


def test_whoever_has_no_peers_sees_a_group_of_the_full_size() -> None:
    for operator, expected in ((dist.ReduceOp.SUM, 12.0), (dist.ReduceOp.MAX, 3.0), (dist.ReduceOp.PRODUCT, 81.0)):
        options, tensor = registry.AllreduceOptions(), torch.tensor([3.0])
        options.reduceOp = operator
        alone(COLLECTIVES["allreduce"], ([tensor], options), 1, 4, each=True)
        assert tensor.item() == expected


# -- what a loss leaves of them -------------------------------------------------------------------------------


class _Handle:
    key, ranks, timeout = "world/0.1", (0, 1), None

    def rank(self) -> int:
        return 0


def in_the_middle(script: ScriptCollectives, computed: bool) -> tuple[ScriptWork, torch.Tensor]:
    """A sum that has written over what the script has passed."""
    tensor: Any = torch.tensor([1.0])
    handle: Any = _Handle()
    number = script._begun[handle.key] = script._begun.get(handle.key, 0) + 1
    work = ScriptWork(script, handle, number, COLLECTIVES["allreduce"], ([tensor], registry.AllreduceOptions()))
    epoch: Any = object()
    work._epoch, work._computed = epoch, computed
    tensor.fill_(3.0)
    script._open.append(work)
    return work, tensor


def told(gap: int, done: int, joining: bool = False) -> dict[str, Any]:
    return {
        "joining": joining,
        "script": {"gap": gap, "done": {"world/0.1": done}, "newcomers": {}, "had": {}, "missed": None},
    }


def script_at(gap: int) -> ScriptCollectives:
    session: Any = SimpleNamespace(member="a")
    script = ScriptCollectives(session, lambda: "script", lambda: None)
    script.begin_gap(gap)
    return script


def test_a_result_that_somebody_has_come_out_with_counts_for_all() -> None:
    script = script_at(4)
    work, tensor = in_the_middle(script, computed=True)
    script.agree({"a": told(4, 0), "b": told(4, 1)}, step=4)
    script.complete(work)
    assert work.over and tensor.item() == 3.0
    assert script.record() == {
        "gap": 4,
        "done": {"world/0.1": 1},
        "open": 0,
        "newcomers": {},
        "had": {},
        "missed": None,
    }


def test_a_result_that_nobody_has_come_out_with_is_dropped() -> None:
    script = script_at(4)
    work, _ = in_the_middle(script, computed=True)
    # Another gap's collectives, and those of a member that joins, say nothing of this one.
    script.agree({"a": told(4, 0), "b": told(3, 9), "c": told(4, 9, joining=True)}, step=4)
    assert not work.over and work._epoch is None and not work._computed
    assert script.absent == {"c"}
    script.begin_gap(5)
    assert script.absent == set()


def test_all_know_who_replays_a_gap_where_some_have_missed_the_plan_it_came_with() -> None:
    """A loss ends the epoch that admits ``x`` after ``a`` has all reports, and before ``b`` has."""
    scripts = {member: script_at(4) for member in "abx"}
    admitting = {member: {"joining": member == "x", "script": script.record()} for member, script in scripts.items()}
    scripts["a"].agree(admitting, step=4)
    scripts["x"].agree(admitting, step=4)
    next_ = {member: {"joining": False, "script": script.record()} for member, script in scripts.items()}
    for script in scripts.values():
        script.agree(next_, step=4)
    assert [script.absent for script in scripts.values()] == [{"x"}] * 3


def test_a_result_that_others_have_and_this_member_lacks_is_a_defect() -> None:
    script = script_at(4)
    in_the_middle(script, computed=False)
    with pytest.raises(ProtocolError, match="allreduce number 1 of group world"):
        script.agree({"a": told(4, 0), "b": told(4, 1)}, step=4)


# -- callbacks ----------------------------------------------------------------------------------------------


def test_listeners_get_what_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    import bamboo_ds

    monkeypatch.setattr(plan_change, "_listeners", [])
    monkeypatch.setattr(plan_change, "_known", None)
    views: list[PlanView] = []
    assert bamboo_ds.on_plan_change(views.append) is not None
    plan_change.begin(plan("abcd", (0, 1, 2, 3), "abcd"))
    assert not views
    lost = Plan(**{**vars(plan("acd", (0, 2, 3), "aacd")), "lost": ("b",), "epoch": 6})
    plan_change.tell(lost, "a")
    plan_change.tell(Plan(**{**vars(plan("acx", (0, 2, 1), "axcc")), "epoch": 7, "when": "boundary"}), "a")
    plan_change.tell(Plan(**{**vars(plan("acx", (0, 2, 1), "axcx")), "epoch": 8, "when": "boundary"}), "a")
    assert [view.reason for view in views] == ["lost b", "left d; joined x", "stages or replicas move"]
    assert [view.ranks for view in views] == [(0, 2, 3), (0, 1, 2), (0, 1, 2)]
    assert views[0].roles == ((0, 0), (0, 1)) and views[1].roles == ((0, 0),)
    assert views[0].immediate and not views[1].immediate


def test_a_member_that_joins_is_told_of_its_admission() -> None:
    view = plan_change.view_of(None, plan("ab", (0, 1), "ab"), "b")
    assert (view.reason, view.joined, view.roles) == ("this member was admitted", (), ((0, 1),))
