"""The first plans and takeovers: invariants over random layouts and sequences of losses."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bamboo_ds.errors import ConfigError
from bamboo_ds.topology import Candidate, Layout, Plan, initial_plan, takeover, with_redundancy

pytestmark = pytest.mark.claim("README.md", "concepts.md", "guides/elastic.md")

layouts = st.builds(Layout, pipelines=st.integers(1, 4), stages=st.integers(1, 8))


def names(layout: Layout) -> list[str]:
    return [f"m{rank}" for rank in range(layout.size)]


def test_initial_plan() -> None:
    plan = initial_plan(["c", "a", "b"])
    assert plan == Plan(epoch=1, owners=("c", "a", "b"), members=("c", "a", "b"), script_ranks=(0, 1, 2))
    assert [plan.script_rank(member) for member in "cab"] == [0, 1, 2]
    assert plan.layout is None and plan.shadows == () and plan.lost_roles == ()


@pytest.mark.parametrize("members", [[], ["a", "b", "a"]])
def test_initial_plan_refuses(members: list[str]) -> None:
    with pytest.raises(ConfigError):
        initial_plan(members)


def test_with_redundancy_refuses_other_sizes() -> None:
    with pytest.raises(ConfigError, match="need 4 workers"):
        with_redundancy(initial_plan(["a", "b", "c"]), Layout(1, 4), True)


@given(layouts, st.integers(1, 4), st.booleans())
def test_shadows(layout: Layout, slots: int, redundant: bool) -> None:
    """On other hosts than the owners; the owners of the stages before where these are."""
    first = initial_plan(names(layout))
    members = [Candidate(m, slot, f"host{slot // slots}", script_rank=slot) for slot, m in enumerate(first.members)]
    hosts = {member.id: member.host for member in members}
    plan = with_redundancy(first, layout, redundant, members)
    assert (plan.epoch, plan.layout, plan.owners) == (2, layout, first.owners)
    assert plan.script_ranks == first.script_ranks and plan.interrupts()
    for role in layout.roles:
        owner, shadow = plan.owner(role), plan.shadow(role)
        if layout.size == 1 or not redundant:
            assert shadow is None
            continue
        assert shadow is not None and shadow != owner
        assert hosts[shadow] != hosts[owner] or len(set(hosts.values())) == 1
        neighbour = plan.owner(layout.predecessor(role))
        if hosts[neighbour] != hosts[owner]:
            assert shadow == neighbour
    if slots == 1:
        assert with_redundancy(first, layout, redundant) == plan, "who is not known is on a host of its own"


@settings(max_examples=200)
@given(layouts, st.booleans(), st.data())
def test_takeover_invariants(layout: Layout, redundant: bool, data: st.DataObject) -> None:
    plan = with_redundancy(initial_plan(names(layout)), layout, redundant)
    ranks = range(layout.size)
    for _ in range(data.draw(st.integers(1, 4), "losses")):
        pairs = st.tuples(st.sampled_from(ranks), st.sampled_from(names(layout)))
        builders = [
            (rank, m)
            for rank, m in sorted(data.draw(st.sets(pairs, max_size=4), "builders"))
            if m in plan.members and m not in (plan.owners[rank], plan.shadows[rank])
        ]
        ready = data.draw(st.sets(st.sampled_from(builders)), "ready") if builders else set()
        before = replace(plan, builders=tuple(builders), when="boundary")
        holders = {rank: {m for r, m in ready if r == rank} for rank in ranks}
        lost = data.draw(st.sets(st.sampled_from(names(layout)), max_size=3), "lost")
        plan = takeover(before, lost, holders)
        alive = set(before.members) - lost
        assert plan == takeover(before, sorted(lost), holders)
        assert plan.epoch == before.epoch + 1 and plan.layout == layout and plan.interrupts()
        assert plan.members == tuple(m for m in before.members if m in alive)
        assert plan.script_ranks == tuple(before.script_rank(m) for m in plan.members)
        assert plan.lost == tuple(m for m in before.members if m in lost)
        assert set(plan.builders) == {(r, m) for r, m in builders if m in alive and m != plan.owners[r]}
        for rank in ranks:
            held = [m for m in (before.owners[rank], before.shadows[rank]) if m in alive]
            learnt = holders[rank] & alive
            new = (plan.owners[rank], plan.shadows[rank])
            stage = [twin for twin in ranks if twin // layout.pipelines == rank // layout.pipelines]
            copies = {m for twin in stage for m in (before.owners[twin], before.shadows[twin], *holders[twin])} & alive
            assert (rank in plan.lost_roles) == (not copies)
            if held:
                # The first living holder owns; what is left of the holders shadows; nothing else moves.
                assert new == (held[0], held[1] if len(held) > 1 else None)
            elif learnt:
                assert new[0] in learnt and new[1] is None
            elif copies:
                # The owner of the same stage of another pipeline, where the stage has been held all along.
                assert new[0] in copies and new[1] is None
                assert any(plan.owners[twin] == new[0] for twin in stage if twin != rank)
            else:
                assert new == (before.owners[rank], None)
        assert Plan.from_json(plan.to_json()) == plan


def test_succession() -> None:
    """Two pipelines of two stages (ranks 0 1 | 2 3); nobody shadows but where said."""
    plan = with_redundancy(initial_plan("abcd"), Layout(2, 2), False)
    plan = replace(plan, members=(*"abcdefg",), script_ranks=(0, 1, 2, 3, 0, 0, 0), shadows=("e", None, None, None))
    learning = replace(plan, builders=((0, "f"), (1, "f"), (1, "g"), (2, "g")))
    ready = {0: {"f"}, 1: {"f", "g"}}
    # The shadow before a builder that is ready.
    assert takeover(learning, "a", ready).owners[0] == "e"
    # A builder that is ready before the other pipeline; of two, the one that owns less.
    new = takeover(learning, "aeb", ready)
    assert new.owners == ("f", "g", "c", "d") and new.builders == ((1, "f"), (2, "g"))
    # A builder that is not ready does not count: the owner of the same stage in the other pipeline clones.
    new = takeover(learning, "c", ready)
    assert (new.owners, new.lost_roles, new.builders) == (("a", "b", "d", "d"), (), learning.builders)
    # Its owner may just have been its shadow.
    assert takeover(plan, "ab").owners == ("e", "e", "c", "d")
    # Stage 1 is lost in both pipelines.
    assert takeover(plan, "cd").lost_roles == (2, 3)


def test_the_least_loaded_pipeline_clones() -> None:
    plan = with_redundancy(initial_plan("abcdef"), Layout(3, 2), False)
    plan = replace(plan, owners=("a", "b", "c", "a", "e", "f"))
    assert takeover(plan, "c").owners == ("a", "b", "b", "a", "e", "f")
    assert takeover(plan, "be").owners == ("a", "c", "c", "a", "f", "f")


def test_loss_before_the_layout_is_known() -> None:
    plan = takeover(initial_plan("abc"), ["a", "c"])
    assert (plan.lost_roles, plan.shadows) == ((0, 2), ())
