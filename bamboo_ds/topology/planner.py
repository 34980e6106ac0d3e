"""The planner: pure functions from one plan to the next.

A job with four stages, one pipeline and members ``a b c d``; ``x/y`` is owner/shadow::

                       stage 0   stage 1   stage 2   stage 3
    initial_plan         a/-       b/-       c/-       d/-
    with_redundancy      a/d       b/a       c/b       d/c
    takeover {c}         a/d       b/a       b/-       d/-
    takeover {a}         d/-       b/-       b/-       d/-
    takeover {b}         d/-       lost      lost      d/-

With healing between losses no role is lost (members on hosts of their own)::

    takeover {c}         a/d       b/a       b/-       d/-
    plan                 a/d       b/a       b/a       d/b
    plan, e has joined   a/d       b/a       e/b       d/b

Tensor slices are planned one by one: layers find their slice in what their process is (the rank of its script, its
groups), so a member has roles of its script's slice only. Thus no member ever has two slices of one stage, whose passes
must go on at the same time.

Equal arguments give equal plans, so any agent that becomes leader writes the plan its predecessor would have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from ..errors import ConfigError
from .costs import Candidate, Costs, Policy, Roster, known, predicted_s
from .division import Divider, still_lent
from .memory import StageMemory
from .moves import builders_for, holders_of
from .partition import SLACK
from .placement import place_owners
from .plan import Plan
from .question import Holders, Question
from .roles import Layout
from .room import Room, Tightness
from .shadows import place_shadows
from .slices import given_up, merged, only

#: How often a target is looked for that is still the target while its copies are made. Mostly the first one is.
_ATTEMPTS = 4
#: A gain that no change has.
_NO_GAIN = 0.999


def initial_plan(members: Sequence[str]) -> Plan:
    """The plan of epoch 1: ``members[rank]`` owns the role of ``rank``, as which its script runs; no role has a shadow.

    Args:
        members: member ids in slot order, one per rank.

    Raises:
        ConfigError: ``members`` is empty or names a member twice.
    """
    owners = tuple(members)
    if not owners:
        raise ConfigError("a job needs at least one member, got none")
    if len(set(owners)) != len(owners):
        raise ConfigError(f"member ids must be unique, got {', '.join(owners)}: give each slot its own id")
    script_ranks = tuple(range(len(owners)))
    return Plan(epoch=1, owners=owners, members=owners, script_ranks=script_ranks)


def with_redundancy(
    plan: Plan,
    layout: Layout,
    redundant: bool,
    members: Sequence[Candidate] = (),
    memory: tuple[StageMemory, ...] = (),
    zones_apart: bool = False,
) -> Plan:
    """The plan after ``plan`` in which the roles are known and, if ``redundant``, shadowed.

    Shadows are those of :func:`plan`, so that no host takes a role away before the first reconfiguration. Where members
    are on hosts of their own a role's shadow is the owner of its predecessor in the pipeline: that member computes the
    role's inputs, so redundant forward passes need no message. Stage 0 is shadowed by the owner of the last stage,
    which loads the same batches.

    Args:
        plan: the plan before; all of its roles are owned by living members.
        layout: the logical world.
        redundant: whether roles are shadowed.
        members: the members with their hosts, leaving or not. One that is not among them has a host of its own.
        memory: by stage what its roles take; empty where that is not known. Where members may not hold so much, shadows
            are given up.
        zones_apart: see :class:`~.costs.Policy`.

    Raises:
        ConfigError: ``layout`` has another number of roles than the plan has owners.
    """
    if layout.size != len(plan.owners):
        raise ConfigError(
            f"{layout.pipelines} pipelines x {layout.stages} stages need {layout.size} workers, "
            f"the job has {len(plan.owners)}: start it with -n {layout.size} (or --ranks {layout.size}) or change the "
            "number of stages"
        )
    laid_out = replace(plan, epoch=plan.epoch + 1, layout=layout, shadows=(None,) * layout.size, lost=(), memory=memory)
    facts, policy = known(plan, members), Policy(zones_apart=zones_apart)
    slices = []
    for number in range(layout.slices):
        sliced = only(laid_out, number)
        script_ranks = zip(sliced.members, sliced.script_ranks, strict=True)
        mine = [replace(facts[member], script_rank=script_rank, leaving=False) for member, script_rank in script_ranks]

        def shadowed(room: Room, sliced: Plan = sliced, mine: Sequence[Candidate] = mine) -> Plan:
            if redundant:
                room = room.eased(sliced.owners)
                question = Question(sliced, Roster(mine), Costs(), policy, room, {})
                sliced = replace(sliced, shadows=place_shadows(question, sliced.owners))
            return _checked(sliced, room, redundant)

        slices.append(_within(Room(sliced, mine), shadowed))
    whole = merged(laid_out, slices)
    told = {name: getattr(whole, name) for name in ("shadows", "unshadowed", "crowded", "parked", "tight")}
    return replace(laid_out, **told)


def _within(room: Room, attempt: Callable[[Room], Plan]) -> Plan:
    """What ``attempt`` makes of ``room``, with roles as they are or in less memory, as little less as serves.

    Fewest members are crowded, then fewest roles are unshadowed. For the sake of these optimizers rest in host memory,
    but no role has fewer micro-batches under way, which slows its pipeline.
    """
    best = attempt(room)
    for tightness in (Tightness.LEAN, Tightness.BOUNDED):
        short = best.crowded or (best.unshadowed and tightness is Tightness.LEAN)
        if short and room.gains(tightness):
            best = min(best, attempt(room.at(tightness)), key=lambda plan: (len(plan.crowded), len(plan.unshadowed)))
    return _held(best, room)


def _checked(plan: Plan, room: Room, redundant: bool) -> Plan:
    """``plan`` with what it cannot do for lack of ``room``."""
    several = len(plan.members) > 1
    bare = [rank for rank, shadow in enumerate(plan.shadows) if shadow is None and redundant and several]
    unshadowed = tuple(bare) if room.limits else ()
    return replace(plan, unshadowed=unshadowed, crowded=room.crowded(plan.owners, plan.shadows))


def _held(plan: Plan, room: Room) -> Plan:
    """``plan`` with how its members hold roles within ``room``, and where replicas are."""
    names = plan.owners, plan.shadows
    tight = room.tight(*names)
    crowded = room.at(Tightness.BOUNDED).crowded(*names) if tight else ()
    return replace(plan, crowded=crowded, parked=tuple(room.waiting(*names)), tight=tight)


def takeover(
    plan: Plan, lost: Collection[str], holders: Holders | None = None, members: Iterable[Candidate] = ()
) -> Plan:
    """The plan after the loss of ``lost``: each of their roles goes to a living holder of its state.

    That is its shadow; else a builder that is ready; else, with several pipelines whose optimizer state is not
    sharded, the owner of the same stage (and slice) in another one, which has the same state and clones it locally.
    Of several, the first by :func:`_preference`. A role without holder keeps its last owner's name and its rank is
    listed in ``lost_roles``: a fatal loss, which the caller has to report. Before the layout is known there are no
    shadows, so every role of a lost member is lost.

    Where members may hold only so much, a shadow may own the role as well (:mod:`.room`). A builder that is ready has
    room for it, too. The owner of another pipeline may not: the loss cannot wait, so it holds its roles in less memory,
    or too much where that does not do, until the next plan.

    Nothing else moves: a surviving owner keeps all its roles, living builders go on learning. Names that the
    plan does not list are ignored (they are gone already); with nobody lost the result is the same topology in
    a new epoch.

    Args:
        plan: the newest written plan, whether or not workers had switched to it: its owners and shadows hold
            valid state under the plan before it, too.
        lost: members that are gone.
        holders: members with a valid copy besides owner and shadow (builders that are ready), by rank.
        members: what is known of members, also of those that are lost.
    """
    facts = known(plan, members)
    survivors = tuple(m for m in plan.members if m not in lost)
    alive = frozenset(survivors)
    owners = list(plan.owners)
    shadows = [m if m in alive else None for m in plan.shadows] if plan.shadows else [None] * len(owners)
    duties = Counter(owner for owner in owners if owner in alive)
    lost_roles = []

    def give(rank: int, candidates: Collection[str]) -> bool:
        able = [m for m in survivors if m in candidates]
        if able:
            gone = facts[plan.owners[rank]]
            owners[rank] = min(able, key=lambda m: _preference(facts[m], gone, duties[m]))
            duties[owners[rank]] += 1
        return bool(able)

    for rank, owner in enumerate(plan.owners):
        if owner in alive:
            continue
        shadow, shadows[rank] = shadows[rank], None
        if not give(rank, [shadow] if shadow else holders.get(rank, ()) if holders else ()):
            lost_roles.append(rank)
    if plan.layout is not None and plan.layout.alike:
        held = {rank: owner for rank, owner in enumerate(owners) if rank not in lost_roles}
        for rank in list(lost_roles):
            twins = map(plan.layout.rank, plan.layout.siblings(plan.layout.role(rank)))
            if give(rank, [held[twin] for twin in twins if twin in held]):
                lost_roles.remove(rank)
    after = replace(
        plan,
        epoch=plan.epoch + 1,
        owners=tuple(owners),
        members=survivors,
        shadows=tuple(shadows) if plan.shadows else (),
        lost=tuple(m for m in plan.members if m in lost),
        lost_roles=tuple(lost_roles),
        builders=tuple((rank, m) for rank, m in plan.builders if m in alive and owners[rank] != m),
        lent=still_lent(plan, owners, shadows),
        script_ranks=tuple(
            script_rank for m, script_rank in zip(plan.members, plan.script_ranks, strict=False) if m in alive
        ),
        when="now",
    )
    return after if plan.layout is None else _held(after, Room(plan, [facts[member] for member in survivors]))


def _preference(heir: Candidate, gone: Candidate, duties: int) -> tuple[int, ...]:
    """The preference of a holder as heir of ``gone``, the smaller the better: that which owns fewest roles."""
    return (duties,)


def plan(
    previous: Plan,
    members: Sequence[Candidate],
    costs: Costs | None = None,
    policy: Policy | None = None,
    holders: Holders | None = None,
) -> Plan:
    """The best topology for ``members``, as a boundary plan.

    Rules, in order: every role is owned by a member that is not leaving; no member holds more than it may, as long as
    roles can be held in less memory for that (:func:`_within`) or replicas given up; every role is shadowed on another
    host where there are two, else by another member; the slowest member has least to do (changed only for a gain of
    ``policy.min_gain``); fewest bytes are moved; roles on one member are neighbours; shadows are where redundant
    passes need no messages; adjacent stages are in different zones, and owner and shadow. Without a violated rule or a
    gain nothing moves, so the plan of a plan is itself, but for the epoch. Nor does the target change while builders
    of ``previous`` make the copies that it needs, as long as members, costs and policy are the same; with unequal costs
    it may, once.

    The roles of a tensor slice without members keep their owners' names, and their ranks are in ``lost_roles``.
    Members that are leaving are not among the result's, unless all (of a slice) are leaving. Their copies may
    still be sources of :func:`~bamboo_ds.topology.moves`.

    Args:
        previous: the newest plan, in which the roles are known.
        members: all living members, in any order, joiners included.
        costs: of the stages; those that workers have told if not given, else equal.
        policy: the user's wishes; the defaults if not given.
        holders: members with a valid copy by rank, see :func:`~bamboo_ds.topology.holders_of`; owners and
            shadows of ``previous`` if not given. Empty: no member holds state, all of it comes from a
            checkpoint; the result lists all ranks as ``lost_roles``, and places them all the same.

    Raises:
        ConfigError: no members, two of one id, or costs of another number of stages.
        ValueError: ``previous`` has no layout.
    """
    costs, policy = (costs or Costs()).with_sizes(previous), policy or Policy()
    costs.check(previous.world.stages)
    holders = holders_of(previous) if holders is None else holders
    slices = previous.world.slices
    roster = Roster(members)
    if slices > 1:
        targets_by_slice = []
        for number in range(slices):
            mine = [
                replace(m, script_rank=m.script_rank // slices) for m in members if m.script_rank % slices == number
            ]
            held = {rank // slices: holders[rank] for rank in holders if rank % slices == number}
            sliced = only(previous, number)
            targets_by_slice.append(plan(sliced, mine, costs, policy, held) if mine else given_up(sliced))
        return merged(previous, targets_by_slice, roster.everyone.values())

    def attempt(room: Room) -> Plan:
        return _target(Question(previous, roster, costs, policy, room, holders))

    target = _within(Room(previous, roster.usable), attempt)
    nobody = (rank for rank in range(previous.world.size) if roster.everyone.keys().isdisjoint(holders.get(rank, ())))
    return replace(target, lost_roles=tuple(nobody))


def _target(question: Question) -> Plan:
    """The answer to ``question``."""
    previous, roster, holders = question.previous, question.roster, question.holders
    targets = _Targets(question)

    # Copies that are under way count as made, lest the target depend on how far they are: wanted is one that is still
    # the target when its own copies are made, or that needs just those that are under way.
    under_way = frozenset(previous.builders)

    def kept(builders: frozenset[tuple[int, str]]) -> Plan | None:
        for _ in range(_ATTEMPTS):
            target = targets.given(_promised(builders, previous, roster, holders))
            before, builders = builders, frozenset(builders_for(previous, target))
            if builders == before or (builders and builders == under_way):
                return target
        return None

    target = kept(under_way)
    if target is None:
        # What owners and shadows hold does not depend on copies at all. Its copies may lead to a target that lasts.
        settled = targets.given(_settled(previous, holders))
        target = kept(frozenset(builders_for(previous, settled))) or settled
    return target


def _promised(builders: Collection[tuple[int, str]], previous: Plan, roster: Roster, holders: Holders) -> Holders:
    """``holders`` and, where there is one to copy from, ``builders``."""
    promised = {rank: frozenset(holders.get(rank, ())) for rank in range(previous.world.size)}
    for rank, builder in builders:
        if not roster.everyone.keys().isdisjoint(holders.get(rank, ())):
            promised[rank] |= {builder}
    return promised


def _settled(previous: Plan, holders: Holders) -> Holders:
    """``holders`` without builders."""
    shadows = previous.shadows or previous.owners
    named = enumerate(zip(previous.owners, shadows, strict=True))
    return {rank: [member for member in holders.get(rank, ()) if member in pair] for rank, pair in named}


class _Targets:
    """The targets by the rules for a question, by who holds copies.

    Owners share the stages by number, as their state lies evenly then, and shadows divide the work. Where that leaves a
    member too much to do, as some stages take longer than others and cannot be divided enough, they share them by time:
    whether they do is settled with the first target.
    """

    def __init__(self, question: Question) -> None:
        self._question, self._divider = question, Divider(question)
        previous, costs = question.previous, question.costs
        #: Costs that owners may be placed by; one, once that is settled.
        self._placing = [costs]
        if previous.costs is not None and not costs.seconds:
            self._placing.append(replace(costs, seconds=tuple(sum(blocks) for blocks in previous.costs.seconds)))

    def given(self, holders: Holders) -> Plan:
        """The target if ``holders`` hold copies."""
        question = replace(self._question, holders=holders)
        costs, min_gain = question.costs, question.policy.min_gain
        placed: dict[tuple[str, ...], Costs] = {}
        for each in self._placing:
            placed.setdefault(place_owners(replace(question, costs=each), min_gain), each)
        # The target whose copies are under way, or with fewer changes, unless the other one is worth it.
        target, *others = sorted((self._completed(question, owners) for owners in placed), key=self._changes)
        for other in others:
            limit = predicted_s(target, costs) * (1 - min_gain) * (1 + SLACK)
            target = other if predicted_s(other, costs) <= limit else target
        self._placing = [placed[target.owners]]
        if target.unshadowed:
            # Nothing moves for the sake of speed that costs replicas.
            owners = place_owners(replace(question, costs=self._placing[0]), _NO_GAIN)
            calm = self._completed(question, owners)
            target = calm if len(calm.unshadowed) < len(target.unshadowed) else target
        return target

    def _changes(self, target: Plan) -> tuple[bool, int]:
        under_way = sorted(self._question.previous.builders)
        others = bool(under_way) and sorted(builders_for(self._question.previous, target)) != under_way
        return others, sum(map(str.__ne__, target.owners, self._question.previous.owners))

    def _completed(self, question: Question, owners: tuple[str, ...]) -> Plan:
        """The target in which the roles have these owners."""
        previous, roster, redundant = question.previous, question.roster, question.policy.redundant
        question = replace(question, room=question.room.eased(owners))
        shadows = place_shadows(question, owners) if redundant else (None,) * len(owners)
        target = replace(
            previous,
            epoch=previous.epoch + 1,
            owners=owners,
            members=tuple(member.id for member in roster.usable),
            shadows=shadows,
            lost=(),
            builders=(),
            script_ranks=tuple(member.script_rank for member in roster.usable),
            when="boundary",
        )
        target = self._divider.divided(target, question.holders, question.room) if previous.cuts else target
        return _checked(target, question.room, redundant)
