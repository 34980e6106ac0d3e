"""Members without room: no role of theirs has more micro-batches under way than their count, and nobody waits for ever.

Any division, costs and progress: :mod:`tests.unit.schedule.test_orders`; losses: :mod:`tests.model.test_integers`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, product

import pytest
from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass
from hypothesis import given, settings
from hypothesis import strategies as st

from bamboo_ds.errors import ProtocolError
from bamboo_ds.schedule import RoleProgress, Tight, UseRole, compute_order, hosts, member_program, one_f_one_b, orders
from bamboo_ds.schedule.spans import StageSpan, spans_of, warm_ups
from bamboo_ds.topology import Layout, Plan, Role, takeover
from tests.support.planning import plan_of, undivided
from tests.support.programs import play

pytestmark = pytest.mark.claim("concepts.md", "reference/guarantees.md")


def check_under_way(plan: Plan, micro_batches: int, progress: Mapping[Role, RoleProgress]) -> bool:
    """After each forward pass no role has more under way than its owner's count; whether a role has had so many."""
    full = False
    for member, count in plan.tight:
        role, under_way = Role(0, 0), Counter[Role]()
        for each, done in progress.items():
            under_way[each] = done.parts[0].forwards - done.parts[0].backwards
        for instruction in member_program(plan, member, micro_batches, progress):
            if isinstance(instruction, UseRole):
                role = instruction.role
            elif isinstance(instruction, ForwardPass):
                under_way[role] += 1
                assert not count or under_way[role] <= count, (plan.owners, plan.tight, progress)
                full |= under_way[role] == count
            elif isinstance(instruction, BackwardPass):
                under_way[role] -= 1
    return full


def divisions(roles: int) -> Iterator[tuple[int, ...]]:
    """All ways to give ``roles`` to members, who are numbered as they come."""

    def more(given: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(given) == roles:
            yield given
            return
        for member in range(max(given, default=-1) + 2):
            yield from more((*given, member))

    return more(())


def tight_plans(layout: Layout, counts: Sequence[int]) -> Iterator[Plan]:
    """All divisions of ``layout``, with all ``counts`` of all members."""
    plan = plan_of(layout, False)
    for division in divisions(layout.size):
        owners = tuple(f"m{member}" for member in division)
        for drawn in product(counts, repeat=max(division) + 1):
            tight = tuple((f"m{member}", count) for member, count in enumerate(drawn))
            yield replace(plan, owners=owners, tight=tight)


@pytest.mark.parametrize("layout", [Layout(1, 4), Layout(2, 2)], ids=["line", "two pipelines"])
def test_small_worlds_come_to_their_end(layout: Layout) -> None:
    """Every division, every count of every member: with blocking receives, in whatever order members go on."""
    met: Counter[str] = Counter()
    progress = dict.fromkeys(layout.roles, undivided())
    for plan, micro_batches in product(tight_plans(layout, (0, 1, 2)), (1, 2, 4)):
        play(plan, micro_batches, progress)
        met["full"] += check_under_way(plan, micro_batches, progress)
        free = replace(plan, tight=())
        met["held"] += any(
            member_program(plan, member, micro_batches) != member_program(free, member, micro_batches)
            for member in plan.owners
        )
    assert met["full"] > 500 and met["held"] > 100, met


def test_small_worlds_come_to_their_end_from_any_progress() -> None:
    layout, held = Layout(1, 3), 0
    counters = [(forwards, backwards) for forwards in range(3) for backwards in range(forwards + 1)]
    for plan, done in product(tight_plans(layout, (0, 1)), product(counters, repeat=3)):
        progress = {role: undivided(*each) for role, each in zip(layout.roles, done, strict=True)}
        play(plan, 2, progress)
        held += check_under_way(plan, 2, progress)
    assert held > 1000


@settings(max_examples=150)
@given(st.data())
def test_what_was_under_way_before_a_takeover_is_finished_first(data: st.DataObject) -> None:
    """An heir becomes tight by it: its forwards were all done, with no count."""
    plan = plan_of(Layout(data.draw(st.integers(1, 2)), data.draw(st.integers(3, 6))))
    lost = data.draw(st.sampled_from(plan.members))
    plan = takeover(plan, {lost})
    count, micro_batches = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 8))
    plan = replace(plan, tight=tuple((member, count) for member in plan.members))
    progress = {}
    for role in plan.world.roles:
        forwards = data.draw(st.sampled_from([0, micro_batches // 2, micro_batches]))
        progress[role] = undivided(forwards, data.draw(st.sampled_from([0, forwards // 2])))
    play(plan, micro_batches, progress)
    check_under_way(plan, micro_batches, progress)
    found = compute_order(plan.world, hosts(plan, progress), micro_batches, progress, tight=plan.tight)
    left = sum(2 * micro_batches - p.parts[0].forwards - p.parts[0].backwards for p in progress.values())
    assert sum(map(len, found.values())) == left


def test_all_is_under_way_and_one_may_be() -> None:
    """Eight forwards of the first stage are done: the other stages keep to one, and what it has becomes less."""
    plan = replace(plan_of(Layout(1, 3)), tight=(("m0", 1),))
    progress = {role: undivided(8 if role.stage == 0 else 0) for role in plan.world.roles}
    play(plan, 8, progress)
    found = compute_order(plan.world, hosts(plan, progress), 8, progress, tight=plan.tight)
    assert [(kind, m) for _, kind, m, _ in found["m0"]] == [("B", m) for m in range(8)]
    assert [(kind, m) for _, kind, m, _ in found["m1"]] == [(kind, m) for m in range(8) for kind in "FB"]


# --- why warm-ups do not increase along a pipeline ---------------------------------------------------------


def ends(micro_batches: int, counts: Sequence[int]) -> bool:
    """Whether stages with these warm-ups come to their end, with blocking receives."""
    left = [list(one_f_one_b(micro_batches, count)) for count in counts]
    done: set[tuple[int, str, int]] = set()
    again = True
    while again:
        again = False
        for stage, passes in enumerate(left):
            while passes:
                kind, m = passes[0]
                source = stage + (-1 if kind == "F" else 1)
                if 0 <= source < len(left) and (source, kind, m) not in done:
                    break
                done.add((stage, *passes.pop(0)))
                again = True
    return not any(left)


@pytest.mark.parametrize("stages", range(1, 6))
def test_stages_wait_for_ever_where_a_warm_up_is_larger_than_that_before(stages: int) -> None:
    """There alone: all warm-ups of all stages."""
    found: Counter[bool] = Counter()
    for counts, micro_batches in product(product(range(1, stages + 2), repeat=stages), range(1, 5)):
        effective = [min(count, micro_batches) for count in counts]
        increases = any(before < after for before, after in pairwise(effective))
        assert ends(micro_batches, counts) != increases, (counts, micro_batches)
        found[increases] += 1
    assert found[False] >= 8 and (found[True] >= 8 or stages == 1)


def _each_for_itself(*args: object) -> list[StageSpan]:
    """Spans that go by their own members' counts alone."""
    *given_, tight = args
    found = spans_of(*given_, ())  # type: ignore[arg-type]
    for span in found:
        bounds = [dict(tight).get(member, 0) for member in span.hosts]  # type: ignore[call-overload]
        span.warm_up = min([span.warm_up, *filter(None, bounds)])
    return found


@pytest.mark.parametrize(("member", "waits"), [("m0", True), ("m1", True), ("m2", False), ("m3", False)])
def test_members_that_go_by_their_own_counts_wait_for_each_other(
    member: str, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless no stage behind has a larger warm-up than theirs."""
    plan = replace(plan_of(Layout(1, 4)), tight=((member, 1),))
    progress = dict.fromkeys(plan.world.roles, undivided())
    play(plan, 5, progress)
    # Two programs of one plan would be one.
    other = replace(plan, epoch=plan.epoch + 1)
    monkeypatch.setattr(orders, "spans_of", _each_for_itself)
    orders.member_order.cache_clear()
    orders.ordered.cache_clear()
    try:
        if not waits:
            play(other, 5, progress)
            return
        with pytest.raises(AssertionError, match="nobody can go on"):
            play(other, 5, progress)
        with pytest.raises(ProtocolError, match="wait for each other"):
            compute_order(other.world, hosts(other, progress), 5, progress, tight=other.tight)
    finally:
        orders.member_order.cache_clear()
        orders.ordered.cache_clear()


# --- what counts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("owners", "tight", "expected"),
    [
        ("abcd", (), [4, 3, 2, 1]),
        ("abcd", (("b", 1),), [4, 1, 1, 1]),
        ("abcd", (("b", 0), ("c", 9)), [4, 3, 2, 1]),
        ("abcd", (("a", 2),), [2, 2, 1, 1]),
        ("abcd", (("a", 3), ("c", 1)), [3, 3, 1, 1]),
        ("abcd", (("a", 3), ("b", 1)), [3, 1, 1, 1]),
        ("aabc", (("b", 1), ("standby", 1)), [3, 1, 1]),  # a span of two stages
        ("aabc", (("a", 2),), [2, 1, 1]),
        ("abac", (("a", 3),), [3, 3, 2, 1]),  # two spans of one member
    ],
)
def test_warm_ups(owners: str, tight: Tight, expected: list[int]) -> None:
    layout = Layout(1, 4)
    found = spans_of(layout, 0, tuple((owner,) for owner in owners), 8, ((undivided().parts[0],),) * 4, None, tight)
    assert [span.warm_up for span in found] == expected


def test_slices_go_by_the_smallest_count() -> None:
    layout = Layout(2, 3, slices=2)
    who = tuple((f"m{rank}",) for rank in range(6))
    found = spans_of(layout, 0, who, 8, ((undivided().parts[0],),) * 6, None, (("m0", 2), ("m1", 1)))
    assert [span.warm_up for span in found] == [1, 1, 1]


def test_the_drawn_orders() -> None:
    """Those of a tight member in :func:`warm_ups`."""
    drawn = [line.split() for line in (warm_ups.__doc__ or "").splitlines() if line.strip()[1:3] == " ("]
    assert [row[0] for row in drawn] == list("abcd")
    found = compute_order(Layout(1, 4), tuple((member,) for member in "abcd"), 4, tight=(("a", 2),))
    for member, _, *cells in drawn:
        assert [f"{kind}{m}" for _, kind, m, _ in found[member]] == cells
