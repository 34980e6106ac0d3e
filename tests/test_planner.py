"""The planner's invariants over random layouts and sequences of losses."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bamboo_ds.errors import ConfigError
from bamboo_ds.topology import Layout, Plan, initial_plan, takeover, with_redundancy

layouts = st.builds(Layout, pipelines=st.integers(1, 4), stages=st.integers(1, 8))


def names(layout: Layout) -> list[str]:
    return [f"m{rank}" for rank in range(layout.size)]


def test_initial_plan() -> None:
    plan = initial_plan(["c", "a", "b"])
    assert plan == Plan(epoch=1, owners=("c", "a", "b"), members=("c", "a", "b"), store_host="c")
    assert plan.layout is None and plan.shadows == () and plan.unheld == ()


@pytest.mark.parametrize("members", [[], ["a", "b", "a"]])
def test_initial_plan_refuses(members: list[str]) -> None:
    with pytest.raises(ConfigError):
        initial_plan(members)


def test_with_redundancy_refuses_other_sizes() -> None:
    with pytest.raises(ConfigError, match="need 4 workers"):
        with_redundancy(initial_plan(["a", "b", "c"]), Layout(1, 4), True)


@given(layouts, st.booleans())
def test_shadows(layout: Layout, redundant: bool) -> None:
    first = initial_plan(names(layout))
    plan = with_redundancy(first, layout, redundant)
    assert (plan.epoch, plan.layout, plan.owners) == (2, layout, first.owners)
    for role in layout.roles:
        if redundant and layout.stages > 1:
            neighbour = plan.owner(layout.predecessor(role))
            assert plan.shadow(role) == neighbour != plan.owner(role)
        else:
            assert plan.shadow(role) is None
    # The shadow of stage 0 is the owner of the last stage of the same pipeline.
    if redundant and layout.stages > 1:
        for pipeline in range(layout.pipelines):
            rank_of_last = (layout.stages - 1) * layout.pipelines + pipeline
            assert plan.shadows[pipeline] == plan.owners[rank_of_last]


def test_takeover_example() -> None:
    """The example drawn in the planner's docstring."""
    plan = with_redundancy(initial_plan("abcd"), Layout(1, 4), True)
    assert (plan.owners, plan.shadows) == (("a", "b", "c", "d"), ("d", "a", "b", "c"))
    plan = takeover(plan, {"c"})
    assert (plan.owners, plan.shadows) == (("a", "b", "b", "d"), ("d", "a", None, None))
    plan = takeover(plan, {"a"})
    assert (plan.owners, plan.shadows) == (("d", "b", "b", "d"), (None, None, None, None))
    assert (plan.store_host, plan.lost, plan.unheld, plan.epoch) == ("d", ("a",), (), 4)
    plan = takeover(plan, {"b"})
    assert (plan.owners, plan.unheld) == (("d", "b", "b", "d"), (1, 2))


@settings(max_examples=200)
@given(layouts, st.booleans(), st.data())
def test_takeover_invariants(layout: Layout, redundant: bool, data: st.DataObject) -> None:
    plan = with_redundancy(initial_plan(names(layout)), layout, redundant)
    for _ in range(data.draw(st.integers(1, 4), "losses")):
        before = plan
        lost = data.draw(st.sets(st.sampled_from(names(layout)), max_size=3), "lost")
        plan = takeover(before, lost)
        alive = set(before.members) - lost
        assert plan == takeover(before, sorted(lost))
        assert plan.epoch == before.epoch + 1 and plan.layout == layout
        assert plan.members == tuple(m for m in before.members if m in alive)
        assert plan.lost == tuple(m for m in before.members if m in lost)
        for rank in range(layout.size):
            old = (before.owners[rank], before.shadows[rank])
            new = (plan.owners[rank], plan.shadows[rank])
            held = [m for m in old if m in alive]
            assert (rank in plan.unheld) == (not held)
            if held:
                # The first living holder owns; what is left of the holders shadows; nothing else moves.
                assert new == (held[0], held[1] if len(held) > 1 else None)
            else:
                assert new == (old[0], None)
        if before.store_host in alive:
            assert plan.store_host == before.store_host
        elif any(owner in alive for owner in plan.owners):
            assert plan.store_host == next(owner for owner in plan.owners if owner in alive)
        assert Plan.from_json(plan.to_json()) == plan


@given(layouts, st.data())
def test_one_loss_is_survived(layout: Layout, data: st.DataObject) -> None:
    plan = with_redundancy(initial_plan(names(layout)), layout, True)
    victim = data.draw(st.sampled_from(plan.members))
    assert takeover(plan, [victim]).unheld == (() if layout.stages > 1 else (plan.owners.index(victim),))


def test_loss_before_the_layout_is_known() -> None:
    plan = takeover(initial_plan("abc"), ["a", "c"])
    assert (plan.unheld, plan.shadows, plan.store_host) == ((0, 2), (), "b")


def test_losing_nobody_is_a_new_epoch_only() -> None:
    plan = takeover(with_redundancy(initial_plan("ab"), Layout(1, 2), True), ["stranger"])
    assert (plan.epoch, plan.owners, plan.shadows, plan.lost) == (3, ("a", "b"), ("b", "a"), ())
