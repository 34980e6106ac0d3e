"""What an interrupted iteration could go on from at most, found by trying all there is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from math import prod

from bamboo_ds.engine.recovery.reports import Reports, _progress
from bamboo_ds.schedule import Decision, PartProgress, RoleProgress, beside, ways
from bamboo_ds.topology import Plan, Role

from .case import Case

#: What a role goes on from: with its reduced gradients, or not; and its parts.
_Way = tuple[bool, tuple[PartProgress, ...]]
#: So many combinations are tried.
_MOST = 400


def check_furthest(case: Case, plan: Plan, reports: Reports, decision: Decision) -> bool:
    """No role of an iteration that is resumed could build on more than it does; whether that could be tried."""
    told = {member: report for member, report in reports.items() if not report.joining}
    found: dict[Role, RoleProgress] = {}
    for report in told.values():
        for each in report.roles:
            done = _progress(plan, each, report.step, told, decision.step)
            found[Role(*each.role)] = done if report.step == decision.step else done.afresh()
    options = {role: list(_ways(found[role])) for role in plan.world.roles}
    if prod(map(len, options.values())) > _MOST:
        return False
    taken = {role: (done.reduced, done.parts) for role, done in decision.progress.items()}
    assert _fits(case, plan, found, taken), f"{taken} does not fit together"
    for combined in product(*options.values()):
        others = dict(zip(options, combined, strict=True))
        if any(_more(found[role], others[role], taken[role]) for role in others):
            assert not _fits(case, plan, found, others), f"{others} is more than {taken}"
    return True


def _ways(done: RoleProgress) -> Iterator[_Way]:
    parts = [ways(part) for part in done.parts]
    if done.reduced:
        yield True, tuple(each[0] for each in parts)
    for combined in product(*parts):
        yield False, combined


def _more(done: RoleProgress, one: _Way, other: _Way) -> bool:
    """Whether ``one`` has some part that is further than in ``other``."""
    if one[0] != other[0]:
        return one[0]
    places = [ways(part) for part in done.parts]
    return any(each.index(a) < each.index(b) for each, a, b in zip(places, one[1], other[1], strict=True))


def _fits(case: Case, plan: Plan, told: Mapping[Role, RoleProgress], taken: Mapping[Role, _Way]) -> bool:
    layout, every = plan.world, case.micro_batches
    parts: list[tuple[PartProgress, ...]] = []
    for role in layout.roles:
        reduced, mine = taken[role]
        if reduced:
            if role.stage in case.tied or not all(taken[each][0] for each in layout.siblings(role)):
                return False
            bare = told[role].state_only
            mine = tuple(part.passes(every, every, every if bare else part.since) for part in mine)
        parts.append(mine)
    for rank, role in enumerate(layout.roles):
        slices = [parts[layout.rank(each)][0] for each in layout.slices_with(role)]
        if len({(part.backwards, part.forwards) for part in slices}) > 1:
            return False
        for index, part in enumerate(parts[rank]):
            behind, before = (beside(layout, parts, rank, index, step) for step in (1, -1))
            if behind is not None and parts[behind[0]][behind[1]].forwards < part.since:
                return False
            if before is not None:
                theirs, was = parts[before[0]][before[1]], told[layout.roles[before[0]]].parts[before[1]]
                given = was.given if theirs.backwards >= was.backwards else 0
                if max(theirs.backwards, given) < part.since:
                    return False
    return True
