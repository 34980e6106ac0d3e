"""Explains a plan in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .board import beside
from .costs import Candidate, Costs, Roster, predicted_s
from .moves import holders_of, moves
from .plan import Plan
from .question import Holders
from .roles import Role
from .room import Room, Tightness, tightness_of


def explain(
    previous: Plan,
    new: Plan,
    members: Sequence[Candidate],
    costs: Costs | None = None,
    holders: Holders | None = None,
) -> list[str]:
    """Reasons for every role whose owner or shadow changes, and for every rule that cannot be met.

    Args:
        previous: the plan in force.
        new: what :func:`~bamboo_ds.topology.planner.plan` made of it.
        members: as given to the planner.
        costs: as given to the planner.
        holders: as given to the planner.
    """
    return _Explanation(previous, new, Roster(members), (costs or Costs()).with_sizes(previous), holders).lines()


def short_of_memory(plan: Plan, members: Sequence[Candidate]) -> list[str]:
    """Lines on what ``plan`` lacks since ``members`` have not the memory for it, and on the limits that bind."""
    roster = Roster(member for member in members if member.id in plan.members)
    whole = Room(plan, roster.usable)
    room = whole.at(dict.fromkeys(whole.limits, Tightness.LEAN) | tightness_of(plan))
    left = room.left(plan.owners, plan.shadows)
    alike: dict[tuple[int, str], list[Role]] = {}
    for rank in plan.unshadowed if left else ():
        able = [member for member in left if roster.apart(plan.owners[rank], member)]
        most = max(able, key=lambda member: left[member], default="")
        alike.setdefault((room.size(rank), most), []).append(plan.world.role(rank))
    found = [
        f"no replica of {', '.join(map(str, roles))}: one takes {_mib(size)}"
        + (f"; of members that might hold it {most} has most room, {_mib(max(0, left[most]))}" if most else "")
        for (size, most), roles in sorted(alike.items())
    ]
    missing = {member: -most for member, most in whole.left(plan.owners, plan.shadows).items()}
    rests = whole.gains(Tightness.LEAN)
    for member, count in plan.tight:
        measures = ["optimizers, but that of its script's own role, are in host memory between steps"] if rests else []
        measures += [f"each role that it owns has at most {_micro_batches(count)} under way"] if count else []
        if measures:
            lacking = f"{member} lacks {_mib(missing[member])} to hold its roles as they are"
            found.append(f"{lacking}: {'; '.join(measures)}")
    least = whole.at(Tightness.BOUNDED).left(plan.owners, plan.shadows)
    return found + [
        f"{member} has to hold {_mib(min(-least[member], missing[member]))} more than the "
        f"{_mib(whole.limits[member])} that it may: no plan is without"
        for member in plan.crowded
        if member in left
    ]


def memory_of(plan: Plan, members: Iterable[Candidate]) -> list[tuple[str, int, int]]:
    """The memory of each member of ``plan`` with a limit: its id, bytes that it may hold, and that it holds."""
    room = Room(plan, [member for member in members if member.id in plan.members])
    return [(member, room.limits[member], held) for member, held in room.held(plan).items()]


def undivided(plan: Plan) -> list[str]:
    """Lines on the stages of ``plan`` that are computed whole in any case, and why."""
    layout = plan.world
    if layout.slices > 1:
        return ["all stages are computed whole: with tensor slices they cannot be divided"]
    if not layout.blocks:
        return ["all stages are computed whole: they are not cut into blocks (topology.blocks)"]
    cuts = plan.cuts or (None,) * layout.stages
    several = [stage for stage, blocks in enumerate(layout.blocks) if blocks > 1]
    found = [
        ("it is of one block", [stage for stage in range(layout.stages) if stage not in several]),
        ("its owner has not found out yet where it may be divided", [s for s in several if cuts[s] is None]),
        ("there is no place in it where one tensor goes on", [s for s in several if cuts[s] == ()]),
    ]
    return [f"computed whole: stage {', '.join(map(str, stages))}, as {reason}" for reason, stages in found if stages]


class _Explanation:
    def __init__(self, previous: Plan, new: Plan, roster: Roster, costs: Costs, holders: Holders | None) -> None:
        self._previous, self._new, self._roster, self._costs = previous, new, roster, costs
        self._holders = holders_of(previous) if holders is None else holders
        self._sources = {(move.rank, move.destination): move for move in moves(previous, new, self._holders, costs)}

    def lines(self) -> list[str]:
        found = []
        for rank, role in enumerate(self._new.world.roles):
            owner, old = self._new.owners[rank], self._previous.owners[rank]
            if owner != old:
                found.append(f"role {role}: {old} -> {owner}, {self._why_owner(old)}; {self._how(rank, owner)}")
            line = self._shadow(rank, role)
            if line is not None:
                found.append(line)
            found += self._division(role)
        found += self._placement()
        if not found:
            found.append("no role changes: no rule is violated, and no change would gain enough")
        return found + self._pace() + self._unmet()

    # -- changes ------------------------------------------------------------------------------------

    def _why_owner(self, old: str) -> str:
        away = self._away(old)
        if away is not None:
            return away
        if old in self._previous.crowded:
            return f"because {old} held more than it may"
        count = self._previous.owners.count(old)
        return f"because {old} had {_roles(count)} and the slowest member gets less to do"

    def _away(self, old: str) -> str | None:
        """The reason why ``old`` can have no role any more, or ``None``."""
        if old not in self._roster.everyone:
            return f"because {old} is gone"
        return None if old in self._roster.order else f"because {old} is leaving"

    def _how(self, rank: int, member: str) -> str:
        move = self._sources.get((rank, member))
        if move is None:
            if rank in self._new.lost_roles:
                return "nobody holds its state, which comes from a checkpoint"
            return "which holds its state already"
        size = f" ({move.bytes / 2**20:.1f} MiB)" if self._costs.state_bytes else ""
        return f"which copies its state from {move.source}{size}"

    def _shadow(self, rank: int, role: Role) -> str | None:
        new = self._new.shadows[rank] if self._new.shadows else None
        old = self._previous.shadows[rank] if self._previous.shadows else None
        if new == old or new is None:
            why = "no member has room for it" if rank in self._new.unshadowed else "there is none to choose"
            return None if new == old else f"shadow of {role}: {old} -> nobody, because {why}"
        return f"shadow of {role}: {old or 'nobody'} -> {new}, {self._why_shadow(rank, old)}; {self._where(rank, new)}"

    def _division(self, role: Role) -> list[str]:
        old, new = self._previous.lending(role), self._new.lending(role)
        before = None if old is None else (old.cut, old.side, self._previous.shadow(role))
        after = None if new is None else (new.cut, new.side, self._new.shadow(role))
        if before == after:
            return []
        if new is None:
            return [f"stage of {role}: its owner computes all of it again"]
        blocks = self._new.world.blocks_of(role.stage)
        begin, end = self._new.lent_blocks(new)
        which = f"{'last' if begin else 'first'} {end - begin}"
        return [
            f"stage of {role}: {self._new.shadow(role)} computes the {which} of {blocks} blocks as its shadow, "
            "so that the slowest member gets less to do"
        ]

    def _placement(self) -> list[str]:
        """Lines on members whose replicas wait in host memory from now on, or compute ahead of a loss."""
        old, new = self._previous, self._new
        lacking = Room(new, self._roster.usable).waiting(new.owners, new.shadows)
        found = []
        for member in sorted({*new.parked} - {*old.parked}):
            why, missing = f"replicas of {member} wait in host memory until they compute", lacking.get(member)
            if missing is not None:
                why += f", as {member} lacks {_mib(missing)} to have them compute ahead of a loss"
            found.append(why)
        shadowing = [member for member in old.parked if member in new.shadows and member not in new.parked]
        return found + [f"replicas of {member} compute ahead of a loss: there is room for that" for member in shadowing]

    def _why_shadow(self, rank: int, old: str | None) -> str:
        owner = self._new.owners[rank]
        if old is None:
            return "because it had none"
        away = self._away(old)
        if away is not None:
            return away
        if old == owner:
            return f"because {old} owns the role now"
        if not self._roster.apart(owner, old):
            return f"because {old} is on host {self._roster.everyone[old].host}, as the owner {owner} is"
        if owner != self._previous.owners[rank]:
            return "because the owner changes"
        layout, new, zone = self._new.world, str(self._new.shadows[rank]), self._roster.everyone[owner].zone
        near = new == self._new.owner(layout.predecessor(layout.role(rank)))  # which is a reason, too
        if zone and self._roster.everyone[old].zone == zone != self._roster.everyone[new].zone and not near:
            return f"because {old} is in zone {zone}, as the owner {owner} is"
        if self._new.memory and self._roster.everyone[old].memory is not None:
            return f"because {old} has no room for it, or does not compute its inputs"
        if self._new.shadows[rank] not in self._new.owners:
            return "so that a standby takes the role over if need be"
        return f"because {old} does not compute its inputs"

    def _where(self, rank: int, shadow: str) -> str:
        layout = self._new.world
        if shadow == self._new.owner(layout.predecessor(layout.role(rank))):
            reason = "which computes its inputs"
        elif shadow not in self._new.owners:
            reason = "a standby"
        elif (rank, shadow) in self._sources:
            reason = "which has fewest replicas"
        else:
            return self._how(rank, shadow)
        return f"{reason} and {self._how(rank, shadow).removeprefix('which ')}"

    # -- the whole ----------------------------------------------------------------------------------

    def _pace(self) -> list[str]:
        members = self._new.members
        before, after = predicted_s(self._previous, self._costs), predicted_s(self._new, self._costs)
        unit = "stages, taken as equal"
        if self._costs.seconds:
            unit = "s per micro-batch"
        elif self._new.costs is not None:
            unit = "s of passes per iteration"
        costs = self._new.costs
        slow = [] if costs is None or self._costs.seconds else [each for each in costs.slowness if each[0] in members]
        found = [f"{member} takes {times:.2g} times as long as most members" for member, times in slow]
        if before == after:
            return [*found, f"slowest member: {after:.4g} {unit}"]
        return [*found, f"slowest member: {before:.4g} -> {after:.4g} {unit} ({after / before - 1:+.0%} time)"]

    def _unmet(self) -> list[str]:
        new, roster, found = self._new, self._roster, []
        size, usable = new.world.size, len(roster.usable)
        leaving = [member.id for member in roster.usable if member.leaving]
        if leaving:
            found.append("everybody is leaving, so members that are leaving keep their roles")
        if new.lost_roles:
            held = ", ".join(str(new.world.role(rank)) for rank in new.lost_roles)
            found.append(f"no living member holds {held}: only a checkpoint helps")
        if usable == 1:
            found.append(f"no role has a shadow: {roster.usable[0].id} is the only member")
        elif not any(new.shadows) and not new.unshadowed:
            found.append("no role has a shadow: redundancy is switched off")
        elif len(roster.hosts) == 1:
            found.append(f"shadows share their owners' host: {next(iter(roster.hosts))} is the only one")
        found += short_of_memory(new, roster.usable)
        standbys = [member.id for member in roster.usable if member.id not in new.owners]
        if standbys and usable <= size:
            names = ", ".join(standbys)
            found.append(f"stand by: {names}; with {usable} members for {_roles(size)} they would not improve the pace")
        elif standbys:
            found.append(f"stand by: {', '.join(standbys)}; all {_roles(size)} have owners")
        close = self._same_zone()
        if close:
            found.append(f"in one zone with the stage before: {', '.join(close)}; members for that are missing")
        return found

    def _same_zone(self) -> list[str]:
        zones = {member.zone for member in self._roster.usable}
        if len(zones) < 2:
            return []
        layout = self._new.world
        zone = {role: self._roster.everyone[self._new.owner(role)].zone for role in layout.roles}
        return [
            str(role)
            for role in layout.roles
            for other in beside(layout, role)
            if other.stage < role.stage and zone[role] == zone[other] != ""
        ]


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


def _micro_batches(count: int) -> str:
    return f"{count} micro-batch" if count == 1 else f"{count} micro-batches"


def _roles(count: int) -> str:
    return f"{count} role" if count == 1 else f"{count} roles"
