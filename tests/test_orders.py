"""Resumed orders from any progress: parts of one linear extension, greedy, with matching messages."""

from __future__ import annotations

from collections import defaultdict, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bamboo_ds.schedule import RoleProgress, compute_order, one_f_one_b
from bamboo_ds.schedule.orders import Work
from bamboo_ds.topology import Layout, Plan, Role, takeover

from .support.planning import plan_of

pytestmark = pytest.mark.claim("concepts.md", "guides/even-shares.md")


@st.composite
def interrupted(draw: st.DrawFn) -> tuple[Plan, int, dict[Role, RoleProgress]]:
    """A plan after some takeovers and any counters at all, which includes every reachable one."""
    plan = plan_of(Layout(draw(st.integers(1, 3)), draw(st.integers(2, 6))))
    micro_batches = draw(st.integers(1, 12))
    for _ in range(draw(st.integers(0, 3))):
        after = takeover(plan, {draw(st.sampled_from(plan.members))})
        plan = plan if after.unheld else after
    progress = {}
    for role in plan.world.roles:
        forwards = draw(st.integers(0, micro_batches))
        progress[role] = RoleProgress(forwards, draw(st.integers(0, forwards)), draw(st.booleans()))
    return plan, micro_batches, progress


def spans_of(plan: Plan) -> list[list[Role]]:
    """Successive stages of a pipeline that one member owns, by the rank of the first one."""
    spans: list[list[Role]] = []
    for pipeline in range(plan.world.pipelines):
        for stage in range(plan.world.stages):
            role = Role(pipeline, stage)
            if stage and plan.owner(role) == plan.owner(spans[-1][-1]):
                spans[-1].append(role)
            else:
                spans.append([role])
    return sorted(spans, key=lambda span: plan.world.rank(span[0]))


def order_of(
    plan: Plan, micro_batches: int, progress: dict[Role, RoleProgress], *costs: float
) -> dict[str, list[Work]]:
    hosts = tuple((owner,) for owner in plan.owners)
    orders = compute_order(plan.world, hosts, micro_batches, progress, *costs)
    return {member: list(order) for member, order in orders.items()}


def counted(progress: RoleProgress, micro_batches: int) -> dict[str, int]:
    return dict.fromkeys("FB", micro_batches) if progress.reduced else {"F": progress.forwards, "B": progress.backwards}


@settings(max_examples=100)
@given(interrupted(), st.sampled_from([(1, 2), (2, 2), (3, 1)]))
def test_the_earliest_start_goes_first(
    case: tuple[Plan, int, dict[Role, RoleProgress]], costs: tuple[int, int]
) -> None:
    """The order is that of the rule applied naively: of all next passes the earliest, B before F, short spans first."""
    plan, micro_batches, progress = case
    cost = dict(zip("FB", costs, strict=True))
    counts = {role: counted(progress[role], micro_batches) for role in plan.world.roles}
    spans = spans_of(plan)
    chains: dict[int, list[int]] = defaultdict(list)
    for number in sorted(range(len(spans)), key=lambda number: spans[number][0].stage):
        chains[spans[number][0].pipeline].append(number)
    end: dict[tuple[int, str, int], int] = {}
    queues: dict[int, deque[tuple[str, int]]] = {}
    for number, span in enumerate(spans):
        done = {kind: min(counts[role][kind] for role in span) for kind in "FB"}
        end.update({(number, kind, m): 0 for kind in "FB" for m in range(done[kind])})
        chain = chains[span[0].pipeline]
        passes = one_f_one_b(micro_batches, len(chain), chain.index(number))
        queues[number] = deque((kind, m) for kind, m in passes if m >= done[kind])
    free = dict.fromkeys(plan.owners, 0)
    expected: dict[str, list[Work]] = {owner: [] for owner in plan.owners}
    while any(queues.values()):
        candidates = []
        for number, queue in queues.items():
            if queue:
                kind, m = queue[0]
                chain = chains[spans[number][0].pipeline]
                place = chain.index(number) + (-1 if kind == "F" else 1)
                ready = end.get((chain[place], kind, m)) if 0 <= place < len(chain) else 0
                if ready is not None:
                    start = max(ready, free[plan.owner(spans[number][0])])
                    candidates.append((start, kind, len(spans[number]), m, number))
        start, kind, _, _, number = min(candidates)
        span = spans[number]
        _, m = queues[number].popleft()
        member = plan.owner(span[0])
        for role in span if kind == "F" else reversed(span):
            if m >= counts[role][kind]:
                expected[member].append((role, kind, m, 0))  # type: ignore[arg-type]
                start += cost[kind]
        free[member] = end[number, kind, m] = start
    assert order_of(plan, micro_batches, progress, *costs) == expected
