"""Orders from any progress: the rule applied naively to the whole world, and each member's part of that."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from random import Random

import pytest
from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass
from hypothesis import given, settings
from hypothesis import strategies as st

from bamboo_ds.schedule import (
    Hosts,
    PartProgress,
    RoleProgress,
    UseRole,
    Work,
    compute_order,
    hosts,
    member_program,
    not_begun,
    one_f_one_b,
    orders,
    spans,
)
from bamboo_ds.schedule.orders import member_order
from bamboo_ds.schedule.progress import finished
from bamboo_ds.topology import BlockCosts, Layout, Lent, Plan, Role, takeover
from tests.support.planning import plan_of, undivided

pytestmark = pytest.mark.claim("concepts.md", "guides/even-shares.md")

Progress = Mapping[Role, RoleProgress]


@st.composite
def interrupted(draw: st.DrawFn) -> tuple[Plan, int, Progress]:
    """A plan after some takeovers and any counters at all, which includes every reachable one."""
    plan = plan_of(Layout(draw(st.integers(1, 3)), draw(st.integers(2, 6))))
    micro_batches = draw(st.integers(1, 12))
    for _ in range(draw(st.integers(0, 3))):
        after = takeover(plan, {draw(st.sampled_from(plan.members))})
        plan = plan if after.lost_roles else after
    counts = draw(st.dictionaries(st.sampled_from(plan.members), st.integers(0, 6)))
    plan = replace(plan, tight=tuple(counts.items()))
    progress = {}
    for role in plan.world.roles:
        forwards = draw(st.integers(0, micro_batches))
        progress[role] = undivided(forwards, draw(st.integers(0, forwards)), draw(st.booleans()))
    return plan, micro_batches, progress


def anything(random: Random) -> tuple[Plan, int, Progress]:
    """Owners, shadows, builders, standbys anywhere, lent parts, costs, tight members, tensor slices, any progress."""
    slices, micro_batches = random.choice([1, 1, 1, 2]), random.randint(1, 8)
    stages, pipelines = random.randint(1, 6), random.randint(1, 4) * slices
    blocks = tuple(random.randint(1, 4) for _ in range(stages)) if slices == 1 and random.random() < 0.6 else ()
    layout = Layout(pipelines, stages, slices=slices, blocks=blocks)
    plan, moved = plan_of(layout), random.random()
    names = (*plan.members, *(f"standby{number}" for number in range(slices + 1)))
    owners = [
        random.choice(plan.members[rank % slices :: slices]) if random.random() < moved else owner
        for rank, owner in enumerate(plan.owners)
    ]
    shadows = [random.choice([None, *(m for m in names if m != owner)]) for owner in owners]
    lent = [
        Lent(rank, random.randint(1, blocks[role.stage] - 1), random.choice(("front", "rear")))
        for rank, role in enumerate(layout.roles)
        if blocks and blocks[role.stage] > 1 and shadows[rank] is not None and random.random() < 0.4
    ]
    builders = [(rank, random.choice(names)) for rank in range(layout.size) if random.random() < 0.1]
    plan = replace(plan, members=names, owners=tuple(owners), shadows=tuple(shadows))
    plan = replace(plan, lent=tuple(lent), builders=tuple(builders))
    if random.random() < 0.5:
        seconds = [[random.choice((1.0, 1.0, 0.35, 2.1)) for _ in range(layout.blocks_of(s))] for s in range(stages)]
        slow = tuple((member, random.choice((1.5, 0.7))) for member in names if random.random() < 0.2)
        plan = replace(plan, costs=BlockCosts(tuple(map(tuple, seconds)), slow))
    if random.random() < 0.5:
        plan = replace(plan, tight=tuple((member, random.randint(0, 4)) for member in names if random.random() < 0.4))
    progress = {role: not_begun(plan.world.blocks_of(role.stage), plan.lending(role)) for role in layout.roles}
    if random.random() < 0.3:
        return plan, micro_batches, progress

    def counters() -> tuple[int, int]:
        forwards = random.randint(0, micro_batches)
        return forwards, random.randint(0, forwards)

    for role, done in progress.items():
        if layout.slice_of(role):
            progress[role] = progress[layout.slices_with(role)[0]]
            continue
        bounds = [part.blocks for part in done.parts]
        if len(bounds) == 1 and layout.blocks_of(role.stage) > 1 and random.random() < 0.2:
            cut = random.randint(1, blocks[role.stage] - 1)  # its owner computes both parts
            bounds = [(0, cut), (cut, blocks[role.stage])]
        parts = tuple(PartProgress(*each, *counters()) for each in bounds)
        progress[role] = replace(done, parts=parts, reduced=random.random() < 0.2)
    return plan, micro_batches, progress


# --- the rule, applied naively -----------------------------------------------------------------------------


@dataclass
class Run:
    """Successive parts of stages that the same members compute; of each: roles, first block, cost, what is done."""

    hosts: tuple[str, ...]
    parts: list[tuple[tuple[Role, ...], int, float, dict[str, int]]] = field(default_factory=list)

    def work(self) -> float:
        return sum(cost for _, _, cost, _ in self.parts)

    def done(self, kind: str) -> int:
        return min(done[kind] for *_, done in self.parts)


def warm_ups(chain: list[Run], tight: Mapping[str, int]) -> list[int]:
    """Forwards of runs before their first backwards: of all that fit, where the slowest of those with as many is least.

    Of these the largest ones.
    """
    most = [
        min([len(chain) - n, *(tight[member] for member in run.hosts if tight.get(member))])
        for n, run in enumerate(chain)
    ]
    if most == list(range(len(chain), 0, -1)):
        return most
    found: list[list[int]] = [[]]
    for bound in most:
        found = [[*before, n] for before in found for n in range(1, min([bound, *before[-1:]]) + 1)]

    def slowest(counts: list[int]) -> float:
        times: dict[int, float] = {}
        for count, run in zip(counts, chain, strict=True):
            times[count] = times.get(count, 0.0) + run.work()
        return max(times.values())

    return min(found, key=lambda counts: (slowest(counts), [-count for count in counts]))


def runs_of(plan: Plan, progress: Progress, micro_batches: int) -> list[list[Run]]:
    """By copy of the model."""
    layout, who, found = plan.world, hosts(plan, progress), []
    for copy in range(layout.copies):
        runs: list[Run] = []
        for stage in range(layout.stages):
            roles = tuple(role for role in layout.roles if (role.stage, layout.copy_of(role)) == (stage, copy))
            parts, blocks = progress[roles[0]].parts, layout.blocks_of(stage)
            for index, part in enumerate(parts):
                members = tuple(who[layout.rank(role)][index] for role in roles)
                end = parts[1].begin if index == 0 and len(parts) > 1 else blocks
                cost = (end - part.begin) / blocks
                if plan.costs is not None:
                    cost = plan.costs.part(stage, part.begin, end) * plan.costs.slow(members[0])
                done = {"F": part.forwards, "B": part.backwards}
                if progress[roles[0]].reduced:
                    done = dict.fromkeys("FB", micro_batches)
                if not runs or runs[-1].hosts != members:
                    runs.append(Run(members))
                runs[-1].parts.append((roles, part.begin, cost, done))
        found.append(runs)
    return found


def naive_orders(
    plan: Plan, micro_batches: int, progress: Progress, ratio: tuple[float, float] = (1, 2)
) -> dict[str, list[Work]]:
    """Of the next passes of all runs in the world the earliest; of the run with most left, B before F, short runs."""
    length = dict(zip("FB", ratio, strict=True))
    chains = runs_of(plan, progress, micro_batches)
    places = [(copy, n) for copy, chain in enumerate(chains) for n in range(len(chain))]
    places.sort(key=lambda place: (chains[place[0]][place[1]].parts[0][0][0].stage, place[0]))
    end: dict[tuple[int, int, str, int], float] = {}
    queues: list[deque[tuple[str, int]]] = []
    counts = [warm_ups(chain, dict(plan.tight)) for chain in chains]
    for copy, n in places:
        run = chains[copy][n]
        end.update({(copy, n, kind, m): 0 for kind in "FB" for m in range(run.done(kind))})
        order = one_f_one_b(micro_batches, counts[copy][n])
        queues.append(deque((kind, m) for kind, m in order if m >= run.done(kind)))
    free: dict[str, float] = {member: 0 for members in hosts(plan, progress) for member in members}
    found: dict[str, list[Work]] = {member: [] for member in free}
    while any(queues):
        candidates = []
        for number, (copy, n) in enumerate(places):
            if queues[number]:
                (kind, m), run = queues[number][0], chains[copy][n]
                source = n + (-1 if kind == "F" else 1)
                there = end.get((copy, source, kind, m)) if 0 <= source < len(chains[copy]) else 0
                if there is not None:
                    start = max(there, *(free[member] for member in run.hosts))
                    candidates.append((start, -len(queues[number]), kind, run.work(), number))
        start, *_, number = min(candidates)
        copy, n = places[number]
        run = chains[copy][n]
        kind, m = queues[number].popleft()
        for roles, begin, cost, done in run.parts if kind == "F" else reversed(run.parts):
            if m >= done[kind]:
                start += cost * length[kind]
                for role, member in zip(roles, run.hosts, strict=True):
                    found[member].append((role, kind, m, begin))  # type: ignore[arg-type]
        end[copy, n, kind, m] = start
        free.update(dict.fromkeys(run.hosts, start))
    return found


@settings(max_examples=100)
@given(interrupted(), st.sampled_from([(1, 2), (2, 2), (3, 1)]))
def test_the_earliest_start_goes_first(case: tuple[Plan, int, Progress], ratio: tuple[int, int]) -> None:
    plan, micro_batches, progress = case
    found = compute_order(plan.world, hosts(plan, progress), micro_batches, progress, *ratio, tight=plan.tight)
    assert found == {
        member: tuple(order) for member, order in naive_orders(plan, micro_batches, progress, ratio).items()
    }


def passes_of(plan: Plan, member: str, micro_batches: int, progress: Progress) -> list[Work]:
    """The passes in the program of ``member``."""
    found: list[Work] = []
    role, part = Role(0, 0), 0
    for instruction in member_program(plan, member, micro_batches, progress):
        if isinstance(instruction, UseRole):
            role, part = instruction.role, instruction.part
        elif isinstance(instruction, ForwardPass | BackwardPass):
            kind = "F" if isinstance(instruction, ForwardPass) else "B"
            found.append((role, kind, instruction.buffer_id, part))  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("block", range(4))
def test_every_member_finds_its_part_of_the_order_of_the_whole_world(block: int) -> None:
    """From the copies alone that it is connected with: with losses, standbys, builders, lent parts and slices."""
    met: Counter[str] = Counter()
    for seed in range(100 * block, 100 * (block + 1)):
        plan, micro_batches, progress = anything(Random(seed))
        layout, who = plan.world, hosts(plan, progress)
        expected = naive_orders(plan, micro_batches, progress)
        whole = compute_order(layout, who, micro_batches, progress, costs=plan.costs, tight=plan.tight)
        assert {member: list(order) for member, order in whole.items()} == expected, seed
        for member in plan.members:
            assert passes_of(plan, member, micro_batches, progress) == expected.get(member, []), (seed, member)
        computed = [run for chain in runs_of(plan, progress, micro_batches) for run in chain]
        counts = Counter(member for run in computed for member in run.hosts)
        met["one run"] += 1 in counts.values()
        met["several runs"] += any(count > 1 for count in counts.values())
        met["of several copies"] += any(len({layout.copy_of(work[0]) for work in each}) > 1 for each in whole.values())
        met["lent"] += any(done.lent is not None for done in progress.values())
        met["slices"] += layout.slices > 1
        met["measured costs"] += plan.costs is not None
        met["tight"] += whole != compute_order(layout, who, micro_batches, progress, costs=plan.costs)
    assert all(met[what] >= 10 for what in met) and len(met) == 7, met


# --- what is simulated for that ----------------------------------------------------------------------------


def test_a_member_simulates_the_copies_that_it_is_connected_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """The world that is drawn in the docstring."""
    rows = [line.split() for line in (member_order.__doc__ or "").splitlines() if line.strip().startswith("copy ")]
    copies = [row[2:6] for row in rows]
    layout, micro_batches = Layout(4, 4), 6
    who: Hosts = tuple((copies[role.pipeline][role.stage],) for role in layout.roles)
    done = finished(layout, micro_batches, dict.fromkeys(layout.roles, undivided()))
    whole = compute_order(layout, who, micro_batches)
    planned: list[int] = []
    simulated: list[list[str]] = []
    monkeypatch.setattr(orders, "spans_of", lambda *args: planned.append(args[1]) or spans.spans_of(*args))
    simulate = orders._simulated
    monkeypatch.setattr(orders, "_simulated", lambda chains, *more: simulated.append(chains) or simulate(chains, *more))
    for member in whole:
        planned.clear()
        simulated.clear()
        assert member_order(layout, who, micro_batches, done, member) == whole[member]
        if member in "ag":
            assert [[span.hosts[0] for span in chain] for chain in simulated[0]] == copies[:3], member
            assert 3 not in planned
        else:
            assert not simulated and planned == [next(n for n, row in enumerate(copies) if member in row)], member
    assert set(whole) == set("abcdfghijkmnop")
    assert member_order(layout, who, micro_batches, done, "standby") == ()
