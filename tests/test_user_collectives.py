"""What a script does with torch.distributed itself goes on when members are lost and come."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from itertools import combinations
from pathlib import Path
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

from .support.gloo import on_threads
from .support.jobs import SUPPORT, Result, RunningJob, run_bamboo, run_stock, write_config

pytestmark = pytest.mark.claim("guides/elastic.md", "guides/scripts.md", "reference/limits.md")

SCRIPT = SUPPORT / "train_with_collectives.py"
RANKS = 4


# -- a job ------------------------------------------------------------------------------------------------


def said(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """What each process has told, by its file; a line that is being written is left out."""
    found = {}
    for file in folder.glob("said-*.jsonl"):
        lines = file.read_text().splitlines(keepends=True)
        found[file.stem] = [json.loads(line) for line in lines if line.endswith("\n")]
    return found


@pytest.mark.integration
def test_losses_inside_collectives_of_the_script_and_a_joiner(tmp_path: Path) -> None:
    # The agents tell how the members were lost, however late, before the others accuse them.
    config = write_config(tmp_path, {"recovery": {"max_restarts": 0, "suspect_after_s": 30}}, 6)
    with RunningJob(tmp_path, RANKS, ["--faults"], config, SCRIPT) as job:

        def alive() -> int:
            newest = [lines[-1] for lines in said(tmp_path).values() if lines and not lines[-1]["replaying"]]
            last = max((line for line in newest), key=lambda line: line["step"], default=None)
            return len({told["rank"] for told in last["objects"]}) if last else RANKS

        job.wait_for("both faults", lambda: len(list(tmp_path.glob("fault-*"))) == 2)
        job.wait_for("two ranks alone", lambda: alive() == 2)
        job.join()
        job.wait_for("three ranks", lambda: alive() == 3, 120)
        (tmp_path / "over").touch()
        result = job.finish()
    assert result.exit_code == 0, result.output[-6000:]
    assert [(e["reason"], e["detail"]) for e in result.events("member_lost")] == [("signal", "SIGKILL")] * 2
    members = said(tmp_path)
    by_step: dict[int, list[dict[str, Any]]] = {}
    for lines in members.values():
        for line in lines:
            if not line["replaying"]:
                by_step.setdefault(line["step"], []).append(line)
    last = max(by_step)
    counts, totals = list[int](), list[list[float]]()
    assert not any(line["speaks"] for lines in members.values() for line in lines if line["replaying"])
    for step in range(last + 1):
        lines = sorted(by_step[step], key=lambda line: line["rank"])
        assert sorted(rank for line in lines for rank in line["speaks"]) == list(range(RANKS)), (step, lines)
        assert all(line["rank"] in line["speaks"] for line in lines)
        for name in ("counted", "alike", "greatest", "broadcast", "gathered", "objects", "told"):
            assert len({json.dumps(line[name]) for line in lines}) == 1, (step, name, lines)
        assert lines[0]["counted"] == [RANKS] * 3
        totals.append(lines[0]["alike"])
        assert lines[0]["greatest"] == 3
        assert len({line["own"] for line in lines if "own" in line}) == 1
        assert [o["step"] for o in lines[0]["objects"]] == [step] * RANKS
        assert {o["rank"] for o in lines[0]["objects"]} == {line["rank"] for line in lines}
        (of_rank_0,) = (line["rank"] for line in lines if 0 in line["speaks"])
        assert lines[0]["told"] == [{"rank": of_rank_0, "step": step}, "x" * step]
        counts.append(len(lines))
    assert counts[:5] == [4] * 5 and counts[5] == 3
    assert sorted(counts[6:], reverse=True)[0] == 3 and counts[-1] == 3 and 2 in counts
    check_the_lost(members)
    check_what_is_told(result, members)
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    stock = run_stock(undisturbed, RANKS, ["--steps", str(last + 1)], write_config(undisturbed, None, 6), script=SCRIPT)
    assert stock.exit_code == 0, stock.output[-4000:]
    expected = {f.read_text() for f in undisturbed.glob("losses-*.json")}
    assert len(expected) == 1
    assert {f.read_text() for f in tmp_path.glob("losses-*.json")} == expected
    (stock_lines, *_) = said(undisturbed).values()
    assert totals == [line["alike"] for line in stock_lines]


@pytest.mark.exhaustive
@pytest.mark.integration
def test_a_loss_before_training_begins_again(tmp_path: Path) -> None:
    """Scripts count ranks there, and wait for files that one of them writes."""
    runs = {name: tmp_path / name for name in ("stock", "ours")}
    for folder in runs.values():
        folder.mkdir()
    command = ["--steps", "3"]
    stock = run_stock(runs["stock"], RANKS, command, write_config(runs["stock"], None, 6), SCRIPT)
    assert stock.exit_code == 0, stock.output[-4000:]
    config = write_config(runs["ours"], {}, 6)
    result = run_bamboo(runs["ours"], RANKS, [*command, "--fault-in-setup"], config, SCRIPT)
    assert result.exit_code == 0, result.output[-4000:]
    assert (runs["ours"] / "fault-2").exists()
    (event,) = result.events("restart")
    assert (event["number"], event["checkpoint"]) == (1, None)
    assert [e["step"] for e in result.events("step")] == [1, 2, 3]
    assert "sets up together before it trains" in result.output
    (expected,) = {f.read_text() for f in runs["stock"].glob("losses-*.json")}
    assert {f.read_text() for f in runs["ours"].glob("losses-*.json")} == {expected}


def check_the_lost(members: dict[str, list[dict[str, Any]]]) -> None:
    """What rank 3 saw of ranks 2 and 0, which were lost in this order."""
    (lines,) = (lines for name, lines in members.items() if name.startswith("said-3-"))
    losses = [line for line in lines if any("lost" in reason for _, reason, _, _ in line["plans"])]
    assert [line["to"] for line in losses if "to" in line] == [2, 0]
    assert {line["from"] for line in lines if "from" in line} == {0.5}
    assert [line["heard"] for line in lines] == [line["step"] for line in lines]
    assert all(line["reduced"] == line["own"] for line in lines)
    # The group of ranks 0, 2, 3: sums of rank + 1, in which ranks 0 or 3 stand for the lost ones, too; or a joiner.
    own = [line["own"] for line in lines]
    assert own[:5] == [8] * 5 and set(own[6:]) <= {6, 9, 10, 11, 12} and own[6] in (6, 9) and 12 in own
    after = next(line for line in lines if line["gathered"][0] != 0.0)
    assert after["broadcast"][0] in (after["step"], -1.0)


def check_what_is_told(result: Result, members: dict[str, list[dict[str, Any]]]) -> None:
    """Each place whose collective lacks a rank is told once, by the first member of its group, with the stand-in."""
    told = [event for event in result.events("collective_incomplete") if event["lost_ranks"] == [2]]
    places = [(e["operation"], e["place"].rpartition(" in ")[0], *e["ranks"], e["member"]) for e in told]
    assert len(set(places)) == len(places)
    assert all("train_with_collectives.py:" in place for _, place, *_ in places)
    operations = {operation for operation, *_ in places}
    assert {"allreduce", "allgather", "reduce", "send", "recv"} <= operations
    assert not {"barrier", "broadcast"} & operations, "they lack nothing: the root lives"
    assert "no process runs as ranks (2) now, and in the place of their shares are those that the" in result.output
    broadcasts = [e for e in result.events("collective_incomplete") if e["operation"] == "broadcast"]
    assert all(0 in event["lost_ranks"] for event in broadcasts) and len(broadcasts) >= 1


# -- who takes part -----------------------------------------------------------------------------------------


def plan(members: str, homes: tuple[int, ...], owners: str) -> Plan:
    return Plan(
        epoch=5, owners=tuple(owners), members=tuple(members), layout=Layout(1, len(owners)),
        homes=homes,
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
    """``call(run, member, home)`` on every member of a group, each in a thread of its own."""
    group = surviving(plan, ranks)

    def take_part(member: str, inner: Any) -> None:
        home = plan.home(member)
        adapter = Adapter(inner, group, member, ranks.index(home))
        work, finish = call(lambda name, *arguments: adapter.start(COLLECTIVES[name], arguments), member, home)
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
    values = {member: [torch.tensor([float(LOSSY.home(member) + 1)]), torch.ones(2)] for member in LOSSY.members}
    values["x"][0].fill_(99.0)  # it runs as rank 3 beside d
    found = {member: torch.zeros(1) for member in LOSSY.members}

    def call(run: Run, member: str, home: int) -> Any:
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
        gets = operation != "reduce" or LOSSY.home(member) == 3
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

    def call(run: Run, member: str, home: int) -> Any:
        given = torch.tensor([float(home) if member != "x" else 99.0])
        return run("allgather", [outputs[member]], [given], registry.AllgatherOptions())

    on_each(LOSSY, ALL, call)
    assert all([float(t) for t in row] == [0.0, 0.0, 2.0, 3.0] for row in outputs.values())


@pytest.mark.parametrize(("root", "expected"), [(2, 2.0), (1, 0.0)])
def test_a_broadcast_from_a_lost_rank_is_from_its_stand_in(root: int, expected: float) -> None:
    values = {member: torch.tensor([float(LOSSY.home(member))]) for member in LOSSY.members}

    def call(run: Run, member: str, home: int) -> Any:
        options = registry.BroadcastOptions()
        options.rootRank = root
        return run("broadcast", [values[member]], options)

    on_each(LOSSY, ALL, call)
    assert {float(value) for value in values.values()} == {expected}


@pytest.mark.parametrize(("root", "expected"), [(3, [0.0, 2.0, 3.0, 3.0]), (1, [-1.0] * 4)])
def test_scatter_and_gather(root: int, expected: list[float]) -> None:
    outputs = {member: torch.tensor([-1.0]) for member in LOSSY.members}
    collected = {member: [torch.tensor([-1.0]) for _ in ALL] for member in LOSSY.members}

    def scatter(run: Run, member: str, home: int) -> Any:
        options = registry.ScatterOptions()
        options.rootRank = root
        given = [[torch.tensor([float(rank)]) for rank in ALL]] if home == root else []
        return run("scatter", [outputs[member]], given, options)

    def gather(run: Run, member: str, home: int) -> Any:
        options = registry.GatherOptions()
        options.rootRank = root
        return run("gather", [collected[member]] if home == root else [], [torch.tensor([float(home)])], options)

    on_each(LOSSY, ALL, scatter)
    assert [float(outputs[member]) for member in "acdx"] == expected
    on_each(LOSSY, ALL, gather)
    for member, row in collected.items():
        assert [float(t) for t in row] == ([0.0, 0.0, 2.0, 3.0] if LOSSY.home(member) == root else [-1.0] * 4)


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
    plan_change.tell(Plan(**{**vars(plan("acx", (0, 2, 1), "axcc")), "epoch": 7, "immediate": False}), "a")
    plan_change.tell(Plan(**{**vars(plan("acx", (0, 2, 1), "axcx")), "epoch": 8, "immediate": False}), "a")
    assert [view.reason for view in views] == ["lost b", "left d; joined x", "stages or replicas move"]
    assert [view.ranks for view in views] == [(0, 2, 3), (0, 1, 2), (0, 1, 2)]
    assert views[0].roles == ((0, 0), (0, 1)) and views[1].roles == ((0, 0),)
    assert views[0].immediate and not views[1].immediate


def test_a_member_that_joins_is_told_of_its_admission() -> None:
    view = plan_change.view_of(None, plan("ab", (0, 1), "ab"), "b")
    assert (view.reason, view.joined, view.roles) == ("this member was admitted", (), ((0, 1),))
