"""What members may hold: no plan exceeds it where another one does not, nor do copies on the way, nor takeovers."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bamboo_ds.topology import (
    Candidate,
    Layout,
    Plan,
    Policy,
    Room,
    StageMemory,
    builders_for,
    explain,
    holders_of,
    initial_plan,
    memory_of,
    moves,
    takeover,
    tightness_of,
    while_copying,
    with_redundancy,
)
from bamboo_ds.topology.costs import Costs, Roster
from bamboo_ds.topology.fitting import fitted
from bamboo_ds.topology.memory import StateBytes
from bamboo_ds.topology.planner import plan as best_plan
from bamboo_ds.topology.question import Holders, Question
from bamboo_ds.topology.room import Tightness
from tests.support.planning import Builders, at_rest, drawn, learning

pytestmark = pytest.mark.claim("guides/even-shares.md")


def held(plan: Plan, member: Candidate, count: int | None = None) -> int:
    """Bytes that ``member`` holds, added up role by role.

    With a ``count`` optimizers are in host memory, and with one above 0 so many micro-batches are under way of a role
    that it owns, and one of each other.
    """
    total, script_rank = 0, member.script_rank if member.script_rank < plan.world.size else None
    for rank, role in enumerate(plan.world.roles):
        stage, learns = plan.memory[role.stage], (rank, member.id) in plan.builders
        owns, under_way = plan.owners[rank] == member.id, stage.under_way
        if count:
            under_way = min(under_way, count if owns else 1)
        after = math.ceil(stage.passes * under_way / stage.under_way) + stage.clones
        after -= 0 if count is None or rank == script_rank else stage.resting
        if plan.shadows and plan.shadows[rank] == member.id:
            total += stage.replica + after
        elif owns or (learns and not stage.parked):
            total += stage.own + after
        elif rank == script_rank:
            total += stage.own
    step = max(stage.masters for stage in plan.memory)
    return total + (0 if count is None else step)


def waiting(plan: Plan, members: list[Candidate]) -> tuple[str, ...]:
    """Members whose replicas wait, found role by role."""
    found = set()
    for member in members:
        if member.id not in plan.members:
            continue
        stages = [stage for role in plan.shadowed_by(member.id) if (stage := plan.memory[role.stage]).parked]
        needed = held(plan, member)
        for stage in stages:
            after = stage.passes + stage.clones
            needed += max(0, stage.sums + (stage.redundant or 0) - after)
        unknown = any(stage.redundant is None for stage in plan.memory)
        if (stages and unknown) or (stages and member.memory is not None and needed > member.memory):
            found.add(member.id)
    return tuple(sorted(found))


#: As roles are, with optimizers in host memory, and with one micro-batch under way besides.
WHOLE, LEAN, BOUNDED = (None,), (None, 0), (None, 0, 1)


def exceeding(plan: Plan, members: list[Candidate], ways: tuple[int | None, ...] = BOUNDED) -> set[str]:
    """Members that may not hold their roles in any of these ways."""
    limited = ((m, m.memory) for m in members if m.id in plan.members and m.memory is not None)
    return {m.id for m, limit in limited if all(held(plan, m, count) > limit for count in ways)}


def tight(plan: Plan, members: list[Candidate]) -> tuple[tuple[str, int], ...]:
    """What the plan has to say of members that may not hold roles as they are, found by trying every number."""
    found = []
    for member in members:
        if member.id not in exceeding(plan, [member], WHOLE):
            continue
        mine = [plan.memory[role.stage] for role in plan.owned_by(member.id)]
        most = max((stage.under_way for stage in mine), default=1)
        # As many as 1F1B has need no bound, and a bound that changes nothing is none.
        least = sum(stage.own + stage.clones + math.ceil(stage.passes / stage.under_way) for stage in mine)
        changes = least < sum(stage.owned for stage in mine)
        able = [count for count in range(1, most + 1) if held(plan, member, count) <= (member.memory or 0)]
        count = max(able, default=1 if changes else most)
        lean = member.id not in exceeding(plan, [member], LEAN)
        found.append((member.id, 0 if lean or count == most else count))
    return tuple(found)


def owners_fit(plan: Plan, members: list[Candidate], ways: tuple[int | None, ...] = BOUNDED) -> bool:
    """Whether the roles can be owned at all within what ``members`` may hold, by trying everything."""
    usable = [m for m in members if not m.leaving] or members
    bare = replace(plan, shadows=(None,) * plan.world.size, members=tuple(m.id for m in usable), builders=())
    owners = itertools.product([m.id for m in usable], repeat=plan.world.size)
    return any(not exceeding(replace(bare, owners=each), usable, ways) for each in owners)


def job(layout: Layout, members: list[Candidate], memory: tuple[StageMemory, ...]) -> Plan:
    first = members[: layout.size]
    plan = with_redundancy(initial_plan([m.id for m in first]), layout, True, first, memory)
    return replace(plan, cuts=tuple(tuple(range(1, count)) for count in layout.blocks))


class History:
    """A job whose members may hold so much, through losses and joins."""

    def __init__(self, random: Random) -> None:
        self.random = random
        pipelines, stages = random.choice([(1, 2), (1, 3), (1, 4), (1, 5), (2, 2)])
        blocks = (random.randint(2, 4),) * stages if random.random() < 0.6 else ()
        self.layout = Layout(pipelines, stages, blocks=blocks)
        sizes = [random.choice([10, 10, 10, 16, 25]) if random.random() < 0.6 else 10 for _ in range(stages)]
        more, passes, parked = random.choice([0, 0, 2]), random.choice([0, 0, 3]), random.random() < 0.3
        more = 0 if parked else more
        drawn = random.choice([(), (2, 4, None), (2, 4, 3), (0, 0, 9)]) if parked else random.choice([(), (2, 4)])
        tight = random.random() < 0.5
        passes = random.choice([2, 5]) if tight else passes
        self.memory = tuple(
            StageMemory(
                *(size, size + more, size - 3, passes * (stages - stage if tight else 1), parked, *drawn),
                **({"resting": size * 6 // 10, "masters": size // 5} if tight and parked else {}),
                under_way=stages - stage if tight else 1,
            )
            for stage, size in enumerate(sizes)
        )
        self.hosts = random.choice([1, 3, 8])
        self.typical = random.choice([None, 26, 33, 40, 55])
        self.policy = Policy(
            divides=bool(blocks),
            standby_replicas=bool(blocks) or random.random() < 0.5,
            near_shadows=random.random() < 0.7,
            zones_apart=random.random() < 0.7,
            min_gain=random.choice([0.0, 0.05, 0.05]),
        )
        self.slots = itertools.count()
        self.members = [self.member() for _ in range(self.layout.size)]
        self.plan = job(self.layout, self.members, self.memory)
        self.happened: Counter[str] = Counter()

    def member(self) -> Candidate:
        slot, random = next(self.slots), self.random
        memory = None if self.typical is None or random.random() < 0.1 else self.typical + random.choice([0, 0, 10, -8])
        host, script_rank = slot % self.hosts, slot % self.layout.size
        return Candidate(f"m{slot}", slot, f"h{host}", f"zone{host % 3}", script_rank, memory=memory)

    def disturb(self) -> bool:
        """Somebody is lost, joins, or is to leave; False: a fatal loss."""
        random, event = self.random, self.random.random()
        if event < 0.5 and len(self.members) > 1:
            lost = random.choice(self.members)
            before = self.plan
            self.plan = takeover(before, {lost.id}, members=self.members)
            self.members.remove(lost)
            if self.plan.lost_roles:
                return False
            assert self.plan.crowded == tuple(m for m in self.plan.members if m in exceeding(self.plan, self.members))
            assert self.plan.parked == waiting(self.plan, self.members)
            assert self.plan.tight == tight(self.plan, [m for m in self.members if m.id in self.plan.members])
            self.happened["losses of tight jobs"] += bool(before.tight)
            taken = [o for o, old in zip(self.plan.owners, before.owners, strict=True) if o != old]
            self.happened["takeovers by tight ones"] += any(member in taken for member, _ in self.plan.tight)
            cloned = [
                owner
                for rank, owner in enumerate(self.plan.owners)
                if owner not in (before.owners[rank], before.shadows[rank])
            ]
            assert exceeding(self.plan, self.members) <= exceeding(before, self.members) | set(cloned)
            self.happened["clones that exceed"] += bool(set(cloned) & set(self.plan.crowded))
        elif event < 0.8 and len(self.members) < 7:
            self.members.append(self.member())
        elif len(self.members) > 2:
            place = random.randrange(len(self.members))
            self.members[place] = replace(self.members[place], leaving=True)
        return True

    def settle(self) -> None:
        """Enter what the planner wants, copy by copy, until it wants nothing more."""
        self.plan, targets = at_rest(self.plan, self.members, self.policy, self.random, self.copying, self.check)
        self.check_at_rest()
        assert targets <= 4

    def copying(self, plan: Plan, members: list[Candidate], target: Plan, builders: Builders) -> Plan:
        shadows = tuple(while_copying(plan, target, builders, Room(plan, members, tightness_of(plan, target))))
        self.happened["given up for copies"] += shadows != plan.shadows
        after = learning(plan, members, builders, shadows=shadows, lent=())
        exchanged = exceeding(after, members) - exceeding(plan, members) - set(target.crowded)
        self.happened["exchanges that exceed"] += bool(exchanged)
        assert not exchanged or len(set(self.memory)) > 1
        return after

    def check(self, plan: Plan, target: Plan, holders: Holders) -> None:
        shuffled = self.random.sample(self.members, len(self.members))
        assert target == best_plan(plan, shuffled, policy=self.policy, holders=holders)
        usable = [m for m in self.members if m.id in target.members]
        assert target.crowded == tuple(m for m in target.members if m in exceeding(target, usable))
        assert target.parked == waiting(target, usable)
        assert target.tight == tight(target, usable)
        self.happened["lean"] += any(not count for _, count in target.tight) and not target.crowded
        if any(count for _, count in target.tight):
            self.happened["bounded"] += not target.crowded
            assert not owners_fit(plan, self.members, LEAN), "roles are bounded for less than owners"
        shadowing = {shadow for shadow in target.shadows if shadow is not None}
        self.happened["some wait"] += set() < set(target.parked) < shadowing
        self.happened["wait from now on"] += bool(set(target.parked) - set(plan.parked))
        self.happened["wait no more"] += bool(set(plan.parked) & shadowing - set(target.parked))
        if target.crowded:
            self.happened["nothing fits"] += 1
            assert not owners_fit(plan, self.members), "another plan is within what members may hold"
        bare = tuple(rank for rank, shadow in enumerate(target.shadows) if shadow is None)
        limited = any(m.memory is not None for m in usable)
        assert target.unshadowed == (bare if len(usable) > 1 and limited else ())
        self.happened["given up"] += bool(target.unshadowed)
        self.happened["all shadowed within limits"] += limited and not bare and not target.crowded

    def check_at_rest(self) -> None:
        """No member has room for a replica that was given up."""
        plan, hosts = self.plan, {m.id: m.host for m in self.members}
        bare = replace(plan, shadows=(None,) * len(plan.owners))
        for rank in plan.unshadowed:
            owner = plan.owners[rank]
            for m in self.members:
                if m.id != owner and (len(set(hosts.values())) == 1 or m.host != hosts[owner]):
                    shadows = [m.id if place == rank else shadow for place, shadow in enumerate(plan.shadows)]
                    ways = BOUNDED if m.id in exceeding(bare, [m], LEAN) else LEAN
                    assert m.id in exceeding(replace(plan, shadows=tuple(shadows)), [m], ways)


def live(seed: int, events: int) -> Counter[str]:
    history = History(Random(seed))
    history.settle()
    for _ in range(events):
        if not history.disturb():
            break
        history.settle()
    return history.happened


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.integers(1, 6))
def test_any_history(seed: int, events: int) -> None:
    """No plan exceeds what members may hold where one exists that does not, nor do copies; plans come to rest."""
    live(seed, events)


def test_every_kind_of_event_happens() -> None:
    """The same with fixed seeds, counted: the properties must not hold for lack of what they are about.

    Few copies exceed what a member may hold: where one that is to leave has to exchange a role with a full one.
    """
    happened: Counter[str] = Counter()
    for seed in range(40):
        happened += live(seed, 5)
    wanted = ["nothing fits", "given up", "given up for copies", "all shadowed within limits", "clones that exceed"]
    wanted += ["some wait", "wait from now on", "wait no more"]
    wanted += ["lean", "bounded", "losses of tight jobs", "takeovers by tight ones"]
    assert all(happened[kind] >= 2 for kind in wanted), happened
    assert happened["exchanges that exceed"] <= 2


@settings(max_examples=100)
@given(st.integers(2, 4), st.integers(1, 4), st.lists(st.integers(1, 5), min_size=4, max_size=4), st.integers(0, 1))
def test_as_few_replicas_as_possible_are_given_up(stages: int, hosts: int, room: list[int], spare: int) -> None:
    """Of stages of one size, compared with all ways to place them."""
    members = [
        Candidate(f"m{slot}", slot, f"h{slot % hosts}", script_rank=slot, memory=10 * units + 3 * spare)
        for slot, units in enumerate(room[:stages])
    ]
    plan = job(Layout(1, stages), members, (StageMemory(10, 10, 10),) * stages)
    assert plan.crowded == ()
    ways = itertools.product([None, *plan.members], repeat=stages)
    one_host = len({m.host for m in members}) == 1
    host = {m.id: m.id if one_host else m.host for m in members}
    least = stages
    for way in ways:
        apart = all(s is None or host[s] != host[o] for o, s in zip(plan.owners, way, strict=True))
        if apart and not exceeding(replace(plan, shadows=way), members):
            least = min(least, way.count(None))
    assert len(plan.unshadowed) == plan.shadows.count(None) == least


def test_a_shadow_has_what_an_owner_needs() -> None:
    """So that a takeover takes no member beyond what it may hold."""
    for precision, zero, pipelines, in_fp32, eager in itertools.product(
        ("fp32", "fp16", "bf16"), (False, True), (1, 2, 8), (False, True), (False, True)
    ):
        state = StateBytes(precision, "Adam", zero, pipelines, in_fp32, eager)
        stage = state.of(1000, 10)
        assert stage.replica >= stage.own > stage.copied > 0


def four(memory: int, count: int = 4) -> list[Candidate]:
    return [
        Candidate(f"m{slot}", slot, f"h{slot}", script_rank=slot % 4, memory=memory * 2**20) for slot in range(count)
    ]


def test_a_loss_with_little_room() -> None:
    """Members may hold two stages each: a loss leaves room for six, four owned ones and two replicas."""
    stages = (StageMemory(10 * 2**20, 10 * 2**20, 8 * 2**20),) * 4
    members = four(25)
    plan = job(Layout(1, 4), members, stages)
    assert drawn(plan) == "0/3 1/0 2/1 3/2" and not plan.unshadowed
    hurt = takeover(plan, {"m2"}, members=members)
    assert drawn(hurt) == "0/3 1/0 1/- 3/-" and hurt.crowded == ()
    left = [member for member in members if member.id != "m2"]
    healed = best_plan(hurt, left)
    assert drawn(healed) == "0/3 1/0 1/- 3/-" and healed.unshadowed == (2, 3)
    reasons = "\n".join(explain(hurt, healed, left))
    assert (
        "no replica of (0,2), (0,3): one takes 10.0 MiB; of members that might hold it m0 has most room, 5.0" in reasons
    )
    # With more room there is a replica of each, and nothing to tell.
    roomy = [replace(member, memory=31 * 2**20) for member in left]
    assert drawn(best_plan(hurt, roomy)) == "0/3 1/0 1/0 3/1" and not best_plan(hurt, roomy).unshadowed
    # What passes keep counts on owners and on shadows.
    dear = replace(hurt, memory=tuple(replace(stage, passes=2**20) for stage in stages))
    assert best_plan(dear, roomy).unshadowed == (2, 3)
    # A joiner has the stage of its script's rank in any case.
    grown = best_plan(healed, [*left, replace(four(25, 7)[6], script_rank=2)])
    assert drawn(grown) == "0/3 1/0 6/1 3/6" and not grown.unshadowed


def test_replicas_wait_where_what_they_keep_ahead_of_a_loss_has_no_room() -> None:
    """A loss makes its heir's replica wait and no other; each plan decides anew, from what is known by then."""
    known = StageMemory(10, 10, 8, passes=2, parked=True, clones=1, sums=4, redundant=12)
    members = [replace(member, memory=50) for member in four(0)]
    plan = job(Layout(1, 4), members, (known,) * 4)
    assert drawn(plan) == "0/3 1/0 2/1 3/2"
    # 13 of a role, and 26 of a replica.
    assert plan.parked == () and job(Layout(1, 4), four_with(38), (known,) * 4).parked == ("m0", "m1", "m2", "m3")
    assert job(Layout(1, 4), four_with(39), (known,) * 4).parked == ()
    hurt = takeover(plan, {"m2"}, members=members)
    assert drawn(hurt) == "0/3 1/0 1/- 3/-" and hurt.parked == ()
    left = [member for member in members if member.id != "m2"]
    healed = best_plan(hurt, left)
    assert drawn(healed) == "0/3 1/0 1/0 3/1" and not healed.unshadowed
    assert healed.parked == ("m0", "m1"), "with two replicas, or two roles, beside another one"
    again = best_plan(healed, left)
    assert again.parked == healed.parked and drawn(again) == drawn(healed)
    # A joiner brings room.
    grown = best_plan(healed, [*left, Candidate("m6", 6, "h6", script_rank=2, memory=50)])
    assert drawn(grown) == "0/3 1/0 6/1 3/1" and grown.parked == ("m1",), "who holds it remains"
    # What is not known of all is not decided; lazy replicas wait in any case, and those that cannot wait never do.
    for redundant, parked, expected in ((None, True, 4), (None, False, 0), (100, False, 0), (0, True, 0)):
        stages = (replace(known, redundant=redundant, parked=parked),) * 4
        roomy = [replace(member, memory=1000) for member in members]
        assert len(job(Layout(1, 4), roomy, stages).parked) == expected
    told = (known, replace(known, redundant=None), known, known)
    assert len(job(Layout(1, 4), [replace(member, memory=1000) for member in members], told).parked) == 4
    unlimited = [replace(member, memory=None) for member in members]
    assert job(Layout(1, 4), unlimited, (known,) * 4).parked == ()
    # Each slice by itself.
    sliced = Layout(2, 2, slices=2)
    assert job(sliced, [replace(m, script_rank=m.slot) for m in four_with(39)], (known,) * 2).parked == ()
    assert len(job(sliced, [replace(m, script_rank=m.slot) for m in four_with(38)], (known,) * 2).parked) == 4


#: A stage of which more than half can rest in host memory, and whose passes of 4 micro-batches keep 4.
RESTING = StageMemory(10, 10, 8, passes=4, parked=True, resting=6, masters=2, under_way=4)


def test_optimizers_rest_where_not_all_replicas_fit() -> None:
    """A loss makes two members hold three roles each. As they are, they take 42; with optimizers at rest 32."""
    members = four_with(32)
    plan = job(Layout(1, 4), members, (RESTING,) * 4)
    assert drawn(plan) == "0/3 1/0 2/1 3/2" and plan.tight == ()
    hurt = takeover(plan, {"m2"}, members=members)
    assert drawn(hurt) == "0/3 1/0 1/- 3/-" and hurt.tight == ()
    left = [member for member in members if member.id != "m2"]
    whole = replace(hurt, memory=(replace(RESTING, resting=0, masters=0),) * 4)
    assert best_plan(whole, left).unshadowed == (2, 3)
    healed = best_plan(hurt, left)
    assert drawn(healed) == "0/3 1/0 1/0 3/1" and not healed.unshadowed and not healed.crowded
    assert healed.tight == (("m0", 0), ("m1", 0))
    again = best_plan(healed, left)
    assert again == replace(healed, epoch=again.epoch)
    # A heir stays within its limit: as an owner it holds no more than it did as a shadow.
    heir = takeover(healed, {"m3"}, members=left)
    assert drawn(heir) == "0/- 1/0 1/0 1/-" and heir.tight == (("m0", 0), ("m1", 0)) and heir.crowded == ()
    # With a joiner all fits as it is.
    grown = best_plan(healed, [*left, Candidate("m6", 6, "h6", script_rank=2, memory=32)])
    assert drawn(grown) == "0/3 1/0 6/1 3/6" and grown.tight == () and not grown.unshadowed
    reasons = "\n".join(explain(hurt, healed, left))
    assert (
        "m0 lacks 0.0 MiB to hold its roles as they are: optimizers, but that of its script's own role, are in host "
        "memory between steps" in reasons
    )
    assert "micro-batch" not in reasons and "no replica" not in reasons
    # Optimizers that cannot rest make no difference.
    fixed = replace(hurt, memory=(replace(RESTING, resting=0, masters=0, parked=False),) * 4)
    assert best_plan(fixed, left).unshadowed == (2, 3) and best_plan(fixed, left).tight == ()


def test_fewer_micro_batches_are_under_way_only_where_owned_roles_have_no_room() -> None:
    members = four_with(32)
    plan = job(Layout(1, 4), members, (RESTING,) * 4)

    def of(count: int, memory: int) -> Plan:
        few = [replace(member, memory=memory) for member in members[:count]]
        found = best_plan(plan, few, holders={})
        again = best_plan(replace(found, lost_roles=()), few)
        assert again == replace(found, epoch=again.epoch, lost_roles=())
        return found

    # Two own two roles each, 24 with optimizers at rest. A replica would take 8, or 5 with one micro-batch under way.
    pair = of(2, 27)
    assert pair.tight == (("m0", 0), ("m1", 0)) and len(pair.unshadowed) == 4 and pair.crowded == ()
    # One owns all: 40 with optimizers at rest, of which 4 are those of each micro-batch.
    for memory, count in ((40, 0), (39, 3), (32, 2), (31, 1), (28, 1)):
        assert of(1, memory).tight == (("m0", count),) and of(1, memory).crowded == (), memory
    little = of(1, 27)
    assert little.tight == (("m0", 1),) and little.crowded == ("m0",)
    alone = [replace(members[0], memory=32)]
    reasons = "\n".join(explain(plan, of(1, 32), alone))
    assert "between steps; each role that it owns has at most 2 micro-batches under way" in reasons
    assert memory_of(of(1, 32), alone) == [("m0", 32, 32)] and memory_of(of(1, 31), alone) == [("m0", 32, 28)]
    # Without optimizers that can rest.
    fixed = replace(plan, memory=(replace(RESTING, resting=0, masters=0, parked=False),) * 4)
    assert best_plan(fixed, [replace(members[0], memory=50)], holders={}).tight == (("m0", 2),)
    # The owner of another pipeline takes a role over, and lets fewer micro-batches through until the next plan.
    pairs = job(Layout(2, 2), four_with(22), (RESTING,) * 2)
    hurt = takeover(replace(pairs, shadows=(None,) * 4), {"m3"}, members=four_with(22))
    assert hurt.owners == ("m0", "m1", "m2", "m2") and hurt.tight == (("m2", 3),) and hurt.crowded == ()


def test_replicas_are_placed_where_they_bound_nothing() -> None:
    """Members whose own roles do not bound what is under way get no replica that would."""
    members = [replace(member, memory=memory) for member, memory in zip(four(0), (21, 40), strict=False)]
    plan = replace(job(Layout(1, 4), four_with(100), (RESTING,) * 4), members=("m0", "m1"), script_ranks=(0, 1))
    room = Room(plan, members, Tightness.BOUNDED)
    eased = room.eased(("m0", "m1", "m0", "m1"))
    # 24 of two roles is too much for m0. A replica of role 3 takes 5 there, and one of role 2 takes 8 on m1.
    assert (room.shadowed(3, "m0"), room.shadowed(2, "m1")) == (5, 5)
    assert (eased.shadowed(3, "m0"), eased.shadowed(2, "m1")) == (5, 8)
    assert eased.owned(0, "m0") == 1 and eased.owned(1, "m1") == 4, "those of scripts are there"
    lean = Room(plan, members, Tightness.LEAN)
    assert lean.eased(("m0", "m1", "m0", "m1")) is lean
    assert tightness_of(replace(plan, tight=(("m0", 1), ("m1", 0))), replace(plan, tight=(("m1", 2),))) == {
        "m0": Tightness.BOUNDED,
        "m1": Tightness.BOUNDED,
    }


def test_a_role_alone_needs_no_room_for_another_s_step() -> None:
    """A member with just the memory for its script's role keeps it where another one's optimizers rest."""
    members = [replace(member, memory=memory) for member, memory in zip(four(0), (14, 24), strict=False)]
    plan = job(Layout(1, 3), [*members, Candidate("m2", 2, "h2", script_rank=2)], (RESTING,) * 3)
    hurt = replace(takeover(plan, {"m2"}, members=members), owners=("m0", "m1", "m1"), lost_roles=())
    after = best_plan(hurt, members)
    assert after.owners == ("m0", "m1", "m1") and after.tight == (("m1", 0),) and after.crowded == ()


@pytest.mark.parametrize(("sharded", "expected"), [(False, ("m2", None, "m2", None)), (True, (None, None, "m2", "m2"))])
def test_replicas_come_first_that_the_job_cannot_do_without(sharded: bool, expected: tuple[str | None, ...]) -> None:
    """Each stage of both pipelines is on one member, and there is room for two replicas: one of either stage.

    With sharded optimizers no owner has another one's state, and large replicas come first as ever.
    """
    layout = Layout(2, 2, sharded)
    limits = {"m0": (20, 0), "m1": (24, 2), "m2": (24, 4)}
    members = [
        Candidate(name, slot, f"h{slot}", script_rank=script_rank, memory=memory)
        for slot, (name, (memory, script_rank)) in enumerate(limits.items())
    ]
    memory = (StageMemory(10, 10, 10), StageMemory(12, 12, 12))
    plan = replace(
        with_redundancy(initial_plan(["m0", "x", "m1", "y"]), layout, False, memory=memory),
        owners=("m0", "m0", "m1", "m1"),
        members=tuple(limits),
        script_ranks=(0, 2, 4),
    )

    def shadows(before: Plan) -> tuple[str | None, ...]:
        room, holders = Room(before, members), holders_of(before)
        question = Question(before, Roster(members), Costs(), Policy(), room, holders)
        return fitted(question, before.owners, ("m2",) * 4)

    found = shadows(plan)
    assert found == expected
    assert shadows(replace(plan, shadows=found)) == found


def test_slices_tell_of_tight_members() -> None:
    layout = Layout(2, 4, slices=2)
    members = [Candidate(f"m{slot}", slot, f"h{slot}", script_rank=slot, memory=32) for slot in range(8)]
    plan = job(layout, members, (RESTING,) * 4)
    left = [member for member in members if member.id != "m5"]
    healed = best_plan(takeover(plan, {"m5"}, members=members), left)
    assert healed.tight == (("m1", 0), ("m3", 0)) and not healed.unshadowed


def four_with(memory: int) -> list[Candidate]:
    return [replace(member, memory=memory) for member in four(0)]


def test_copies_of_gradients_count() -> None:
    """Those that owners average do; sums that shadows hold and redundant passes go by what is free."""
    kinds = ((1, False), (1, True), (2, False), (2, True))
    found = [StateBytes("bf16", "Adam", pipelines=count, syncs=syncs).of(100) for count, syncs in kinds]
    assert [(each.clones, each.sums) for each in found] == [(0, 0), (0, 800), (400, 0), (400, 800)]
    assert {(each.own, each.replica, each.copied) for each in found} == {(1800, 1800, 1400)}
    stage = replace(found[3], passes=50, redundant=3000)
    assert (stage.owned, stage.shadowed, stage.ahead) == (2250, 2250, 5600)
    replicas = job(Layout(1, 4), four_with(4500), (stage,) * 4)
    assert None not in replicas.shadows and not replicas.parked, "no replica is given up for the sake of passes"


def test_owners_that_hold_too_much_pass_roles_on() -> None:
    """The loss of a stage whose shadow is lost, too, makes the owner of the other pipeline hold both."""
    stages = (StageMemory(10, 10, 8),) * 2
    members = [
        Candidate(f"m{slot}", slot, f"h{slot}", script_rank=slot, memory=memory)
        for slot, memory in enumerate((29, 20, 15, 20))
    ]
    plan = job(Layout(2, 2), members, stages)
    bare = replace(plan, shadows=(None,) * 4)
    hurt = takeover(bare, {"m3"}, members=members)
    assert hurt.owners == ("m0", "m1", "m2", "m2") and hurt.crowded == ("m2",)
    left = members[:3]
    after = best_plan(hurt, left)
    assert not after.crowded and set(after.owners) == {"m0", "m1", "m2"}
    text = "\n".join(explain(hurt, after, left))
    assert "because m2 held more than it may" in text
    # No plan is without.
    little = [replace(member, memory=12) for member in left]
    crowded = best_plan(hurt, little)
    assert crowded.crowded and set(crowded.shadows) == {None}
    assert "more than the 0.0 MiB that it may: no plan is without" in "\n".join(explain(hurt, crowded, little))


def test_replicas_that_go_make_room_for_copies() -> None:
    stages = (StageMemory(10, 10, 8),) * 4
    members = [replace(member, memory=25) for member in four(0)]
    plan = job(Layout(1, 4), members, stages)
    target = replace(plan, shadows=("m2", "m0", "m1", "m2"))
    builders = tuple(builders_for(plan, target))
    assert builders == ((0, "m2"),)
    assert while_copying(plan, target, builders, Room(plan, members)) == list(plan.shadows), (
        "there is nothing to give up"
    )
    target = replace(plan, shadows=("m2", "m0", "m1", None))
    assert while_copying(plan, target, builders, Room(plan, members)) == ["m3", "m0", "m1", None]
    roomy = [replace(member, memory=30) for member in members]
    assert while_copying(plan, target, builders, Room(plan, roomy)) == list(plan.shadows)
    # A member that has to bound what is under way in any case need not give up replicas as well.
    kept = replace(plan, memory=tuple(replace(stage, passes=4, under_way=4) for stage in stages))
    bound = replace(kept, tight=(("m2", 1),))
    some = [replace(member, memory=36) for member in members]
    for before, third in ((kept, None), (bound, "m2")):
        room = Room(before, some, tightness_of(before, target))
        assert while_copying(before, target, builders, room) == ["m3", "m0", "m1", third]
    assert room.tight(bound.owners, bound.shadows, builders) == (("m2", 0),), "what it owns has room"
    assert Room(plan, [replace(member, memory=None) for member in members]).limits == {}
    assert Room(replace(plan, memory=()), members).limits == {}


def test_fewest_bytes_are_moved() -> None:
    """By the sizes that workers tell: two members with two roles each pass the smaller one on to a joiner."""
    members = [replace(member, memory=None) for member in four(0)]
    stages = tuple(StageMemory(size, size, size - 2) for size in (10, 20, 40, 80))
    plan = job(Layout(1, 4), members, stages)
    pairs = {"owners": ("m0", "m0", "m1", "m1"), "shadows": ("m1", "m1", "m0", "m0")}
    plan = replace(plan, members=("m0", "m1"), script_ranks=(0, 1), **pairs)
    for known, expected in ((stages, {0, 2}), ((), {1, 3})):
        before = replace(plan, memory=known)
        target = best_plan(before, members)
        assert {rank for rank, owner in enumerate(target.owners) if owner in ("m2", "m3")} == expected
        copies = moves(before, target, holders_of(before), Costs().with_sizes(before))
        assert all(copy.bytes == (known[copy.rank].copied if known else 0) for copy in copies) and copies
