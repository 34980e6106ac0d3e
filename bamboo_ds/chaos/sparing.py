"""Victims that a fault may hit, so that every stage keeps a holder. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ..control.registry.records import MemberRecord, in_slot_order
from ..topology import Candidate, Plan, Role, holders_of, takeover
from ..topology.planner import plan as next_plan
from .faults import Fault, FaultKind, Target
from .situation import JobSituation


@dataclass(frozen=True)
class Aim:
    """Members that a fault would hit together.

    Attributes:
        members: in the order of their slots; empty for faults that hit no member.
        refusal: why they must not be hit now; ``None``: they may.
    """

    members: tuple[MemberRecord, ...]
    refusal: str | None = None


@dataclass(frozen=True)
class Choice:
    """The rules of choosing.

    Attributes:
        spare_holders: hit nobody whose loss would leave a stage without holder.
        min_members: nor anybody whose loss would leave fewer members.
        slots_per_host: so many slots are of one host, which is simulated; ``None``: hosts are what they are.
        nodes: member by node of a trace.
        reachable: whether a member's processes can be acted on.
    """

    spare_holders: bool = True
    min_members: int = 1
    slots_per_host: int | None = None
    nodes: Mapping[str, str] = field(default_factory=dict)
    reachable: Callable[[MemberRecord], bool] = lambda record: True

    def host(self, record: MemberRecord) -> str:
        """The host that a member counts as being on."""
        return record.host if self.slots_per_host is None else f"host{record.slot // self.slots_per_host}"


def lost_roles_after(plan: Plan, lost: Collection[str], ready: Mapping[str, Collection[int]]) -> tuple[Role, ...]:
    """Roles whose state nobody would have if ``lost`` vanished together under ``plan``.

    Args:
        plan: the newest plan, with a layout.
        lost: member ids; those that ``plan`` does not list do not matter.
        ready: ranks of the complete replicas by member.
    """
    after = takeover(plan, lost, holders_of(plan, ready))
    return tuple(plan.world.role(rank) for rank in after.lost_roles)


def refusal(situation: JobSituation, at_risk: Collection[str], victims: Collection[str], choice: Choice) -> str | None:
    """The reason to spare ``victims``, or ``None``.

    Args:
        situation: the newest known.
        at_risk: members that are dead, or may die of a fault that is under way.
        victims: whom a fault would hit.
        choice: the rules.
    """
    plan = situation.plan
    if plan is None or plan.layout is None:
        return "the engines are not built"
    lost = {*at_risk, *victims, *situation.vanished}
    left = [m for m in plan.members if m not in lost]
    if set(victims) & set(plan.members) and len(left) < choice.min_members:
        return f"{len(left)} members would be left, fewer than {choice.min_members}"
    if not choice.spare_holders:
        return None
    # Between our look and the fault the leader may write its next plan: both must bear the loss.
    for candidate, ready in ((plan, situation.ready), (_wanted(situation, plan), {})):
        roles = lost_roles_after(candidate, lost, ready)
        if roles:
            return f"nobody would hold {', '.join(map(str, roles))}"
    return None


def _wanted(situation: JobSituation, plan: Plan) -> Plan:
    """The plan that the leader makes for next, as soon as all copies for it are there."""
    script_ranks = dict(zip(plan.members, plan.script_ranks, strict=False))
    candidates = [
        Candidate(r.id, r.slot, r.host, r.zone, script_ranks.get(r.id, r.script_rank), leaving=r.state == "leaving")
        for r in in_slot_order(situation.members.values())
        if r.id in plan.members or r.id in situation.built
    ]
    return next_plan(plan, candidates, holders=holders_of(plan, situation.ready)) if candidates else plan


def aim(fault: Fault, situation: JobSituation, at_risk: Collection[str], choice: Choice) -> Aim | None:
    """The victims of ``fault``, or ``None``.

    Of several possible victims the first that need not be spared, counted from where the fault's ``draw`` falls.
    """
    if not fault.kind.aimed:
        return Aim(())
    groups = _groups(fault, situation, at_risk, choice)
    if not groups:
        return None
    first = int(fault.draw * len(groups))
    reasons = []
    for group in (*groups[first:], *groups[:first]):
        reason = None
        if fault.kind.risky or fault.kind is FaultKind.NOTICE:
            reason = refusal(situation, at_risk, [record.id for record in group], choice)
        if reason is None:
            return Aim(tuple(group))
        reasons.append(reason)
    return Aim(tuple(groups[first]), reasons[0])


def _groups(
    fault: Fault, situation: JobSituation, at_risk: Collection[str], choice: Choice
) -> list[Sequence[MemberRecord]]:
    """Sets of members, each of which the fault could hit."""
    alive = [
        record
        for record in in_slot_order(situation.members.values())
        if record.id not in at_risk and record.id not in situation.left and choice.reachable(record)
    ]
    if fault.kind is FaultKind.NOTICE:
        alive = [record for record in alive if record.state == "running"]
    chosen = [record for record in alive if fault.target is None or _meant(fault.target, record, situation, choice)]
    if fault.kind is not FaultKind.HOST:
        return [[record] for record in chosen]
    hosts = dict.fromkeys(choice.host(record) for record in chosen)
    return [[record for record in alive if choice.host(record) == host] for host in hosts]


def _meant(target: Target, record: MemberRecord, situation: JobSituation, choice: Choice) -> bool:
    """Whether ``record`` is one that ``target`` means."""
    plan = situation.plan
    if target.what in ("owner", "shadow"):
        assert target.role is not None
        role = Role(*target.role)
        if plan is None or plan.layout is None or role not in plan.layout.roles:
            return False
        return record.id == (plan.owner(role) if target.what == "owner" else plan.shadow(role))
    if target.what in ("standby", "joiner"):
        admitted = plan is not None and record.id in plan.members
        if target.what == "joiner":
            return not admitted
        return admitted and plan is not None and record.id not in plan.owners
    meaning = {
        "leader": situation.leader,
        "slot": record.id if str(record.slot) == target.name else None,
        "member": target.name,
        "host": record.id if choice.host(record) == target.name else None,
        "node": choice.nodes.get(target.name),
    }
    return record.id == meaning[target.what]
