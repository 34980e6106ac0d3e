"""1F1B orders, the redundant schedule and the programs of undisturbed iterations."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence

import pytest
from deepspeed.runtime.pipe.schedule import (
    BackwardPass,
    ForwardPass,
    LoadMicroBatch,
    PipeInstruction,
    RecvActivation,
    RecvGrad,
    SendActivation,
    SendGrad,
    TrainSchedule,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from bamboo_ds.errors import ProtocolError
from bamboo_ds.schedule import (
    FillBubble,
    RoleProgress,
    UseRole,
    Work,
    commit_program,
    compute_order,
    epilogue,
    member_program,
    one_f_one_b,
    redundant,
    timeline,
)
from bamboo_ds.schedule.orders import ordered
from bamboo_ds.topology import Layout, Role, initial_plan, takeover
from tests.support.planning import plan_of, undivided

pytestmark = pytest.mark.claim("README.md", "concepts.md", "reference/settings.md")

shapes = st.tuples(st.integers(1, 8), st.integers(1, 24))


def whole(owners: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Who computes what, where every role is computed by its owner."""
    return tuple((owner,) for owner in owners)


def flat(schedule: TrainSchedule) -> list:
    return [instruction for step in schedule.steps() for instruction in step]


def stock_order(micro_batches: int, stages: int, stage: int) -> list[tuple[str, int]]:
    """Compute order of DeepSpeed's own schedule, with micro-batches instead of its cyclic buffers."""
    counts = {"F": 0, "B": 0}
    order = []
    for instruction in flat(TrainSchedule(micro_batches, stages, stage)):
        kind = {ForwardPass: "F", BackwardPass: "B"}.get(type(instruction))
        if kind:
            order.append((kind, counts[kind]))
            counts[kind] += 1
    assert counts == {"F": micro_batches, "B": micro_batches}
    return order


def expected_steps(stages: int, stage: int, order: Sequence[tuple[str, int]], bubbles: bool) -> list[PipeInstruction]:
    """What is around each pass of ``order``."""
    found: list[PipeInstruction] = []
    for kind, m in order:
        if kind == "F":
            if stage > 0:
                found += [FillBubble("activation", m)] if bubbles else []
                found += [RecvActivation(m)]
            found += [LoadMicroBatch(m)] if stage in (0, stages - 1) else []
            found += [ForwardPass(m), *([SendActivation(m)] if stage < stages - 1 else [])]
        else:
            if stage < stages - 1:
                found += [FillBubble("grad", m)] if bubbles else []
                found += [RecvGrad(m)]
            found += [BackwardPass(m), *([SendGrad(m)] if stage > 0 else [])]
    return found


@settings(max_examples=50)
@given(shapes, st.integers(1, 4), st.booleans(), st.booleans())
def test_undisturbed_program(shape: tuple[int, int], pipelines: int, bubbles: bool, redundancy: bool) -> None:
    """Stock 1F1B: a stage exchanges and loads what it does in DeepSpeed's schedule, besides the order of sends."""
    stages, micro_batches = shape
    layout = Layout(pipelines, stages)
    plan = plan_of(layout, redundancy)
    orders = compute_order(layout, whole(plan.owners), micro_batches)
    for role in layout.roles:
        member = plan.owner(role)
        order = stock_order(micro_batches, stages, role.stage)
        assert [(kind, m) for _, kind, m, _ in orders[member]] == order
        assert order == list(one_f_one_b(micro_batches, stages - role.stage))
        program = member_program(plan, member, micro_batches, bubbles=bubbles)
        steps = expected_steps(stages, role.stage, order, bubbles)
        expected = [UseRole(role), *steps, *epilogue(plan, member, bubbles)]
        assert [repr(i) for i in program] == [repr(i) for i in expected]
        stock = Counter(map(type, flat(TrainSchedule(micro_batches, stages, role.stage))))
        for kind in (LoadMicroBatch, SendActivation, RecvActivation, SendGrad, RecvGrad):
            assert Counter(map(type, program))[kind] == stock[kind], kind
        # Cached, also for an explicit absence of progress.
        nothing = dict.fromkeys(layout.roles, undivided())
        assert program is member_program(plan, member, micro_batches, nothing, bubbles)


def test_epilogue_of_one_role() -> None:
    plan = plan_of(Layout(1, 3))
    own, shadowed = "Role(pipeline=0, stage=1)", "Role(pipeline=0, stage=2)"
    assert [repr(i) for i in epilogue(plan, "m1")] == [
        f"UseRole(role={own}, part=0)",
        "ReduceTiedGrads()",
        f"UseRole(role={own}, part=0)",
        "ReduceGrads()",
        f"UseRole(role={own}, part=0)",
        "SendReplica()",
        f"FillBubble(awaits='replica', buffer_id=None, role={shadowed})",
        f"RecvReplica(role={shadowed})",
        "Commit()",
        f"UseRole(role={own}, part=0)",
        "OptimizerStep()",
        f"StepReplica(role={shadowed})",
    ]
    assert [repr(i) for i in commit_program(plan, "m1")] == [repr(i) for i in epilogue(plan, "m1")[8:]]


def test_epilogue_of_several_roles() -> None:
    """After a takeover: replicas only where a shadow is left, roles by stage."""
    plan = takeover(plan_of(Layout(2, 3)), ["m3"])  # stage 1 of pipeline 1 goes to m1 (stage 0)
    names = [(i.name, str(i.role) if "role" in i.kwargs else "") for i in epilogue(plan, "m1", bubbles=False)]
    assert names == [
        ("UseRole", "(1,0)"),
        ("ReduceTiedGrads", ""),
        ("UseRole", "(1,1)"),
        ("ReduceTiedGrads", ""),
        ("UseRole", "(1,0)"),
        ("ReduceGrads", ""),
        ("UseRole", "(1,1)"),
        ("ReduceGrads", ""),
        ("UseRole", "(1,0)"),
        ("SendReplica", ""),
        ("Commit", ""),
        ("UseRole", "(1,0)"),
        ("OptimizerStep", ""),
        ("UseRole", "(1,1)"),
        ("OptimizerStep", ""),
    ]


def test_no_program_without_a_place_in_the_plan() -> None:
    plan = plan_of(Layout(1, 3))
    with pytest.raises(ProtocolError, match="does not list member m1"):
        member_program(takeover(plan, ["m1"]), "m1", 4)
    with pytest.raises(ProtocolError, match="lost roles"):
        member_program(takeover(plan, ["m1", "m2"]), "m0", 4)
    with pytest.raises(ProtocolError, match="lost roles"):
        commit_program(takeover(plan, ["m1", "m2"]), "m0")
    with pytest.raises(ValueError, match="no layout"):
        member_program(initial_plan("ab"), "a", 4)


def test_progress_must_fit() -> None:
    plan = plan_of(Layout(1, 2))
    with pytest.raises(ProtocolError, match="every role"):
        member_program(plan, "m0", 4, {Role(0, 0): undivided()})
    with pytest.raises(ProtocolError, match="of 4 micro-batches"):
        member_program(plan, "m0", 4, {Role(0, 0): undivided(5, 0), Role(0, 1): undivided()})
    with pytest.raises(ProtocolError, match="impossible"):
        undivided(1, 2)


def test_no_bubble_before_a_local_message() -> None:
    plan = takeover(plan_of(Layout(1, 3)), ["m1"])  # m0 owns stages 0 and 1
    bubbles: dict[Role, set[str]] = {}
    role = None
    for instruction in member_program(plan, "m0", 6):
        if isinstance(instruction, UseRole):
            role = instruction.role
        elif isinstance(instruction, FillBubble):
            bubbles.setdefault(role, set()).add(instruction.awaits)
    assert bubbles == {Role(0, 1): {"grad"}}


def test_speed_and_cache() -> None:
    """Orders of a whole world; programs of members of a large one, whose neighbour was lost or not."""
    layout = Layout(4, 8)
    plan = takeover(plan_of(layout), ["m9", "m14"])
    progress = {role: undivided(min(64, 20 - role.stage), 20 - 2 * role.stage) for role in layout.roles}
    best = float("inf")
    for _ in range(5):
        ordered.cache_clear()
        start = time.process_time()
        order = compute_order(layout, whole(plan.owners), 64, progress)
        best = min(best, time.process_time() - start)
    assert best < 0.06
    assert compute_order(layout, whole(plan.owners), 64, dict(reversed(progress.items()))) is order
    times = []
    for lost in range(3, 6):
        large = takeover(plan_of(Layout(8, 64)), [f"m{8 * lost}"])
        for member in (large.owner(Role(0, lost)), "m1"):
            start = time.process_time()
            member_program(large, member, 256)
            times.append(time.process_time() - start)
    assert sorted(times)[len(times) // 2] < 0.1


# --- the grids drawn in docstrings -------------------------------------------------------------------------


def times(
    layout: Layout, owners: Sequence[str], micro_batches: int, progress: Mapping[Role, RoleProgress] | None = None
) -> dict[Work, tuple[int, int]]:
    """Start and end of every pass when each member runs its order as early as it can (1 and 2 long)."""
    played = timeline(layout, whole(owners), micro_batches, lambda _, kind, *more: 1 + (kind == "B"), progress)
    return {work: (int(begin), int(end)) for spans in played.spans.values() for begin, end, work in spans}


def lines(docstring: str | None, starts: tuple[str, ...]) -> list[list[str]]:
    found = [line.split() for line in (docstring or "").splitlines() if line.strip().startswith(starts)]
    assert len(found) == len(starts)
    return found


def test_grid_of_the_redundant_schedule() -> None:
    stages, micro_batches = 3, 4
    layout = Layout(1, stages)
    owners = tuple(f"m{stage}" for stage in range(stages))
    spans = times(layout, owners, micro_batches)
    drawn = lines(redundant.__doc__, ("stage 0 ", "stage 1 ", "stage 2 "))
    for stage in range(stages):
        end = max(e for (role, *_), (_, e) in spans.items() if role.stage == stage)
        cells = [".."] * end
        for (role, kind, m, _), (start, stop) in spans.items():
            if role.stage == stage:
                cells[start:stop] = [f"{kind}{m}"] * (stop - start)
        covered = 0
        for now in range(end):
            if cells[now] != ".." or covered == micro_batches:
                continue
            if stage == stages - 1 or spans[Role(0, stage), "F", covered, 0][1] <= now:
                cells[now] = f"r{covered}"
                covered += 1
        assert drawn[stage] == ["stage", str(stage), *cells]


def test_grid_of_a_takeover() -> None:
    layout = Layout(1, 4)
    owners = ("a", "b", "b", "d")
    counters = [(2, 0), (2, 0), (1, 0), (2, 2)]
    progress = {role: undivided(*done) for role, done in zip(layout.roles, counters, strict=True)}
    orders = compute_order(layout, whole(owners), 2, progress)
    spans = times(layout, owners, 2, progress)
    drawn = lines(compute_order.__doc__, ("a (0)", "b (1 and 2)", "d (3)"))
    for member, cells_drawn in zip("abd", drawn, strict=True):
        works = orders[member]
        cells = ["."] * max((spans[work][1] for work in works), default=0)
        for role, kind, m, part in works:
            start, stop = spans[role, kind, m, part]
            cells[start:stop] = [f"{role.stage}.{kind}{m}"] * (stop - start)
        assert cells_drawn[len(cells_drawn) - len(cells) :] == cells
        assert cells_drawn[0] == member and "." not in "".join(cells_drawn[: len(cells_drawn) - len(cells)])
