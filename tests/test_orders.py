"""Resumed orders from any progress: parts of one linear extension, greedy, with matching messages."""

from __future__ import annotations

from collections import defaultdict, deque

from hypothesis import given, settings
from hypothesis import strategies as st

from bamboo_ds.schedule import RoleProgress, compute_order, member_program, one_f_one_b
from bamboo_ds.topology import Layout, Plan, Role, initial_plan, takeover, with_redundancy


def plan_of(pipelines: int, stages: int, redundant: bool = True) -> Plan:
    layout = Layout(pipelines, stages)
    return with_redundancy(initial_plan([f"m{rank}" for rank in range(layout.size)]), layout, redundant)


@st.composite
def interrupted(draw: st.DrawFn) -> tuple[Plan, int, dict[Role, RoleProgress]]:
    """A plan after some takeovers and any counters at all, which includes every reachable one."""
    plan = plan_of(draw(st.integers(1, 3)), draw(st.integers(2, 6)))
    micro_batches = draw(st.integers(1, 12))
    for _ in range(draw(st.integers(0, 3))):
        after = takeover(plan, {draw(st.sampled_from(plan.members))})
        plan = plan if after.unheld else after
    progress = {}
    for role in plan.world.roles:
        forwards = draw(st.integers(0, micro_batches))
        progress[role] = RoleProgress(forwards, draw(st.integers(0, forwards)), draw(st.booleans()))
    return plan, micro_batches, progress


@settings(deadline=None, max_examples=200)
@given(interrupted())
def test_orders_are_parts_of_one_linear_extension(case: tuple[Plan, int, dict[Role, RoleProgress]]) -> None:
    plan, micro_batches, progress = case
    layout = plan.world
    orders = compute_order(layout, plan.owners, micro_batches, progress)
    assert set(orders) == set(plan.owners)
    done = set()
    for role in layout.roles:
        now = progress[role]
        counts = (micro_batches,) * 2 if now.reduced else (now.forwards, now.backwards)
        done |= {(role, "F", m) for m in range(counts[0])} | {(role, "B", m) for m in range(counts[1])}
        # A role's own order is its 1F1B without what is done.
        own = [(kind, m) for r, kind, m in orders[plan.owner(role)] if r == role]
        all_passes = one_f_one_b(micro_batches, layout.stages, role.stage)
        assert own == [(kind, m) for kind, m in all_passes if (role, kind, m) not in done]
    # Taking every member's order in turn, as far as it goes, comes to the end of all of them.
    queues = {member: deque(order) for member, order in orders.items()}
    while any(queues.values()):
        before = len(done)
        for queue in queues.values():
            while queue:
                role, kind, m = queue[0]
                needs = [(role, "F", m)] if kind == "B" else []
                if kind == "F" and role.stage > 0:
                    needs.append((layout.predecessor(role), "F", m))
                if kind == "B" and role.stage < layout.stages - 1:
                    needs.append((layout.successor(role), "B", m))
                if not done.issuperset(needs):
                    break
                done.add(queue.popleft())
        assert len(done) > before, f"deadlock: {queues}"


@settings(deadline=None, max_examples=100)
@given(interrupted(), st.sampled_from([(1, 2), (2, 2), (3, 1)]))
def test_the_earliest_start_goes_first(
    case: tuple[Plan, int, dict[Role, RoleProgress]], costs: tuple[int, int]
) -> None:
    """The order is that of the rule applied naively: of all next passes the earliest, B before F, by rank."""
    plan, micro_batches, progress = case
    layout, cost = plan.world, dict(zip("FB", costs, strict=True))
    end: dict[tuple[Role, str, int], int] = {}
    queues: dict[Role, deque[tuple[str, int]]] = {}
    for role in layout.roles:
        now = progress[role]
        counts = {"F": now.forwards, "B": now.backwards}
        counts = dict.fromkeys("FB", micro_batches) if now.reduced else counts
        end.update({(role, kind, m): 0 for kind in "FB" for m in range(counts[kind])})
        passes = one_f_one_b(micro_batches, layout.stages, role.stage)
        queues[role] = deque((kind, m) for kind, m in passes if m >= counts[kind])
    free = dict.fromkeys(plan.owners, 0)
    expected: dict[str, list[tuple[Role, str, int]]] = {owner: [] for owner in plan.owners}
    while any(queues.values()):
        candidates = []
        for role, queue in queues.items():
            if queue:
                kind, m = queue[0]
                ends = role.stage == (0 if kind == "F" else layout.stages - 1)
                neighbour = layout.predecessor(role) if kind == "F" else layout.successor(role)
                ready = 0 if ends else end.get((neighbour, kind, m))
                if ready is not None:
                    candidates.append((max(ready, free[plan.owner(role)]), kind, layout.rank(role)))
        start, kind, rank = min(candidates)
        role = layout.role(rank)
        _, m = queues[role].popleft()
        expected[plan.owner(role)].append((role, kind, m))
        free[plan.owner(role)] = end[role, kind, m] = start + cost[kind]
    orders = compute_order(layout, plan.owners, micro_batches, progress, *costs)
    assert {owner: list(order) for owner, order in orders.items()} == expected


@settings(deadline=None, max_examples=200)
@given(interrupted())
def test_messages_of_every_edge_match(case: tuple[Plan, int, dict[Role, RoleProgress]]) -> None:
    """On each edge the messages sent, in order, are those received, in order."""
    plan, micro_batches, progress = case
    sent, received = defaultdict(list), defaultdict(list)
    for member in plan.members:
        role = None
        for i in member_program(plan, member, micro_batches, progress):
            role = i.role if i.name == "UseRole" else role
            if i.name in ("SendActivation", "ResendActivation"):
                sent["activation", plan.world.successor(role)].append(i.buffer_id)
            elif i.name in ("SendGrad", "ResendGrad"):
                sent["grad", plan.world.predecessor(role)].append(i.buffer_id)
            elif i.name == "SendReplica":
                sent["replica", role].append(0)
            elif i.name in ("RecvActivation", "RecvGrad"):
                received["activation" if i.name == "RecvActivation" else "grad", role].append(i.buffer_id)
            elif i.name == "RecvReplica":
                received["replica", i.role].append(0)
    assert sent == received
