"""``bamboo plan``: what the planner would do next with a job, or with a job that does not exist."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import click
from pydantic import BaseModel, ConfigDict
from rich.table import Table

from ..config import BambooConfig
from ..control.leader.boundary import as_told, policy_of, ready_copies
from ..control.leader.view import View
from ..control.registry.mirror import Mirror
from ..errors import ConfigError
from ..job_settings import JobSettings
from ..launchers import jobs
from ..topology import (
    Candidate,
    Costs,
    Layout,
    Plan,
    Policy,
    StageMemory,
    explain,
    holders_of,
    initial_plan,
    memory_of,
    moves,
    predicted_s,
    takeover,
    undivided,
    with_redundancy,
)
from ..topology.planner import plan as next_plan
from ..topology.question import Holders
from .options import read_job, running_job
from .output import console

#: Share of a time that is worth telling.
_VISIBLE = 0.001
_GIVEN = click.core.ParameterSource.COMMANDLINE


class _Told(BaseModel):
    model_config = ConfigDict(frozen=True)


class _OfRole(_Told):
    pipeline: int
    stage: int


class HoldersReport(_OfRole):
    """A role's holders now and in the next plan."""

    owner: str
    shadow: str | None
    next_owner: str
    next_shadow: str | None


class DividedReport(_OfRole):
    """Blocks of a stage that its shadow is to compute: from ``begin`` to before ``end``."""

    member: str
    begin: int
    end: int
    blocks: int


class MoveReport(_OfRole):
    """A copy of a stage's state; ``bytes`` is ``None`` where unknown."""

    source: str
    destination: str
    bytes: int | None


class MemoryReport(_Told):
    """Limit and load of a member's memory under the next plan, in bytes."""

    member: str
    limit: int
    held: int


class PlanReport(_Told):
    """The output of ``bamboo plan --json``.

    Attributes:
        job: name of the job; ``None`` for a job that does not exist.
        epoch: of the plan in force.
        members: members of the next plan.
        lost: members whose loss is taken over first.
        lost_roles: (pipeline, stage) of roles whose state nobody has: a fatal loss.
        slowest: time of the slowest member, in the unit that the reasons tell: seconds, or stages of equal cost.
        next_slowest: the same in the next plan.
        iteration_s: what an iteration of the job takes; ``None`` where that is not known.
        next_iteration_s: what one is expected to take under the next plan: as much longer or shorter as the slowest
            member.
        parts: what shadows compute in the next plan.
        memory: of members of the next plan that may not hold any number of bytes, as far as it is known what stages
            take.
        parked: those of the next plan whose replicas wait in host memory until they compute.
        tight: those without room for all that they own and shadow as it is, each with the number of micro-batches that
            its own stages have under way at most; 0: as many as else.
        reasons: one sentence per change, and per rule that cannot be met.
    """

    job: str | None
    epoch: int
    members: list[str]
    lost: list[str]
    lost_roles: list[tuple[int, int]]
    slowest: float
    next_slowest: float
    iteration_s: float | None
    next_iteration_s: float | None
    roles: list[HoldersReport]
    parts: list[DividedReport]
    moves: list[MoveReport]
    memory: list[MemoryReport]
    parked: list[str]
    tight: list[tuple[str, int]]
    reasons: list[str]


@dataclass(frozen=True)
class Situation:
    """The situation that the planner is asked about.

    Attributes:
        plan: the plan in force.
        members: registered members, also those that are to be lost.
        ready: ranks that builders hold completely, by member.
        policy: what the job's settings want.
        job: its name; ``None`` for one that does not exist.
        iteration_s: what an iteration takes; 0 where that is not known.
    """

    plan: Plan
    members: tuple[Candidate, ...]
    ready: dict[str, tuple[int, ...]]
    policy: Policy
    job: str | None = None
    iteration_s: float = 0.0


@click.command("plan")
@running_job
@click.option("--stages", type=click.IntRange(min=1), help="Ask about a job that does not exist, of so many stages.")
@click.option("--pipelines", type=click.IntRange(min=1), help="Its data-parallel pipelines.  [default: 1]")
@click.option("--slices", type=click.IntRange(min=1), help="Its tensor slices, a member each.  [default: 1]")
@click.option(
    "--members",
    "groups",
    multiple=True,
    metavar="N[,host=H][,zone=Z][,memory=B]",
    help="So many members of it, on hosts of their own or on one, which may hold so many bytes of stages; may be "
    "repeated.",
)
@click.option(
    "--blocks", type=click.IntRange(min=1), help="Blocks that each of its stages may be divided into.  [default: 1]"
)
@click.option("--lose", multiple=True, metavar="MEMBER", help="What if this member vanished; may be repeated.")
@click.option("--leave", multiple=True, metavar="MEMBER", help="What if this one were to leave; may be repeated.")
@click.option("--seconds", metavar="S,S,..", help="Time of each stage per micro-batch.  [default: equal]")
@click.option("--bytes", "sizes", metavar="B,B,..", help="Size of each stage's state.  [default: equal]")
@click.option("--min-gain", type=float, help="Share that a change has to win.  [default: the job's setting, or 0.05]")
@click.option("--standby-replicas", is_flag=True, help="As if the job's standby.replicas were true.")
@click.option("--explain", "explained", is_flag=True, help="Say why.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plan(
    job: str | None,
    store: str | None,
    stages: int | None,
    pipelines: int | None,
    slices: int | None,
    groups: tuple[str, ...],
    blocks: int | None,
    lose: tuple[str, ...],
    leave: tuple[str, ...],
    seconds: str | None,
    sizes: str | None,
    min_gain: float | None,
    standby_replicas: bool,
    explained: bool,
    as_json: bool,
) -> None:
    """Show what the planner would do next: who owns and who shadows which stage, and what is copied.

    About a job that runs, or with --stages and --members about one that does not exist.
    """
    costs = Costs(_numbers("--seconds", seconds, float), _numbers("--bytes", sizes, int))
    if stages is None and pipelines is None and slices is None and blocks is None and not groups:
        situation = _running(job, store)
    elif any(click.get_current_context().get_parameter_source(n) is _GIVEN for n in ("job", "store")):
        raise ConfigError("--job and --store are about a job that runs, --stages and --members about one that does not")
    elif stages is None or not groups:
        raise ConfigError("a job that does not exist needs --stages and --members")
    else:
        count = slices or 1
        divided = (blocks,) * stages if blocks is not None and blocks > 1 and count == 1 else ()
        layout = Layout((pipelines or 1) * count, stages, slices=count, blocks=divided)
        situation = imagined(layout, _parse_members(groups), costs.state_bytes)
    policy = replace(
        situation.policy,
        min_gain=situation.policy.min_gain if min_gain is None else min_gain,
        standby_replicas=standby_replicas or situation.policy.standby_replicas,
    )
    report = plan_report(situation, costs, policy, lose, leave)
    if as_json:
        click.echo(report.model_dump_json(indent=2))
        return
    console().print(plan_table(report))
    for move in report.moves:
        size = "" if move.bytes is None else f" ({move.bytes} bytes)"
        click.echo(f"copy of ({move.pipeline},{move.stage}){size}: {move.source} -> {move.destination}")
    if explained:
        for each in report.memory:
            waits = ", its replicas in host memory" if each.member in report.parked else ""
            held = f"{each.held / 2**20:.1f} MiB{waits}"
            click.echo(f"{each.member} may hold {each.limit / 2**20:.1f} MiB, and holds {held}")
        click.echo("\n".join(report.reasons))


def plan_report(
    situation: Situation, costs: Costs, policy: Policy, lose: Collection[str] = (), leave: Collection[str] = ()
) -> PlanReport:
    """The planner's answer to ``situation`` if ``lose`` vanish and ``leave`` are to leave.

    Raises:
        ConfigError: nobody is left, a name is unknown, or ``costs`` are of another number of stages.
    """
    known = {member.id for member in situation.members}
    for name in (*lose, *leave):
        if name not in known:
            raise ConfigError(f"there is no member {name!r}; members are {', '.join(sorted(known))}")
    members = [replace(m, leaving=m.leaving or m.id in leave) for m in situation.members if m.id not in lose]
    now = situation.plan
    alive = {member.id for member in members}
    lost = [member for member in now.members if member not in alive]
    costs = costs.with_sizes(now)
    current = takeover(now, lost, holders_of(now, situation.ready), situation.members) if lost else now
    holders = holders_of(current, situation.ready)
    target = next_plan(current, members, costs, policy, holders)
    before, after = predicted_s(now, costs), predicted_s(target, costs)
    iteration_s = situation.iteration_s or None
    next_s = iteration_s * after / before if iteration_s and before else None
    reasons = _takeover_reasons(now, current, lost) + explain(current, target, members, costs, holders)
    if iteration_s and next_s:
        reasons.append(f"an iteration takes {iteration_s:.3g} s, and is expected to take {next_s:.3g} s")
    reasons += _not_worth(current, target, members, costs, policy, holders) + undivided(target)
    shadows = now.shadows or (None,) * len(now.owners)
    return PlanReport(
        job=situation.job,
        epoch=now.epoch,
        members=list(target.members),
        lost=lost,
        lost_roles=[_place(target.world, rank) for rank in current.lost_roles],
        slowest=predicted_s(current, costs),
        next_slowest=after,
        iteration_s=iteration_s,
        next_iteration_s=next_s,
        roles=[
            HoldersReport(
                pipeline=role.pipeline,
                stage=role.stage,
                owner=now.owners[rank],
                shadow=shadows[rank],
                next_owner=target.owners[rank],
                next_shadow=target.shadows[rank],
            )
            for rank, role in enumerate(now.world.roles)
        ],
        parts=[
            DividedReport(
                pipeline=target.world.role(lent.rank).pipeline,
                stage=target.world.role(lent.rank).stage,
                member=str(target.shadows[lent.rank]),
                begin=target.lent_blocks(lent)[0],
                end=target.lent_blocks(lent)[1],
                blocks=target.world.blocks_of(target.world.role(lent.rank).stage),
            )
            for lent in target.lent
        ],
        moves=[
            MoveReport(
                pipeline=target.world.role(move.rank).pipeline,
                stage=target.world.role(move.rank).stage,
                source=move.source,
                destination=move.destination,
                bytes=move.bytes if costs.state_bytes else None,
            )
            for move in moves(current, target, holders, costs)
        ],
        memory=[MemoryReport(member=m, limit=limit, held=held) for m, limit, held in memory_of(target, members)],
        parked=list(target.parked),
        tight=list(target.tight),
        reasons=reasons,
    )


def _not_worth(
    current: Plan, target: Plan, members: Sequence[Candidate], costs: Costs, policy: Policy, holders: Holders
) -> list[str]:
    """The line on a faster plan that ``topology.min_gain`` forbids, if any."""
    wish, now = (
        predicted_s(each, costs)
        for each in (next_plan(current, members, costs, replace(policy, min_gain=0), holders), target)
    )
    if now == 0 or wish > now * (1 - _VISIBLE):
        return []
    return [f"another plan would be {1 - wish / now:.1%} faster: topology.min_gain asks for {policy.min_gain:.1%}"]


def _takeover_reasons(now: Plan, current: Plan, lost: Sequence[str]) -> list[str]:
    if not lost:
        return []
    found = [f"lost: {', '.join(lost)}"]
    for rank, role in enumerate(now.world.roles):
        if rank in current.lost_roles:
            found.append(f"role {role}: nobody holds its state any more")
        elif current.owners[rank] != now.owners[rank]:
            how = "its shadow" if now.shadows and now.shadows[rank] == current.owners[rank] else "which has its state"
            found.append(f"role {role}: taken over from {now.owners[rank]} by {current.owners[rank]}, {how}")
    return found


def _place(layout: Layout, rank: int) -> tuple[int, int]:
    role = layout.role(rank)
    return role.pipeline, role.stage


def plan_table(report: PlanReport) -> Table:
    """The report for people."""
    table = Table(
        title=f"job {report.job or '(imagined)'}   after epoch {report.epoch}", title_justify="left", min_width=64
    )
    for column in ("pipeline", "stage", "owner", "shadow"):
        table.add_column(column, justify="right" if column in ("pipeline", "stage") else "left", no_wrap=True)
    for role in report.roles:
        owner, shadow = _change(role.owner, role.next_owner), _change(role.shadow, role.next_shadow)
        for part in report.parts:
            if (part.pipeline, part.stage) == (role.pipeline, role.stage):
                shadow += f" (computes {part.end - part.begin} of {part.blocks} blocks)"
        table.add_row(str(role.pipeline), str(role.stage), owner, shadow)
    busy = {role.next_owner for role in report.roles} | {part.member for part in report.parts}
    standbys = [m for m in report.members if m not in busy]
    table.caption = f"{len(report.members)} members; standbys: {', '.join(standbys) or 'none'}"
    return table


def _change(now: str | None, then: str | None) -> str:
    return then or "-" if now == then else f"{now or '-'} -> {then or '-'}"


# -- a job that runs ------------------------------------------------------------------------------------


def _running(job: str | None, store: str | None) -> Situation:
    location = jobs.locate(job, store)
    return observed(location.job, read_job(location))


def observed(job: str, mirror: Mirror) -> Situation:
    """The situation that a job's keys tell. Joiners count once their engines are built.

    Raises:
        ConfigError: the engines are not built yet.
    """
    current = mirror.plan
    if current is None or current.layout is None:
        raise ConfigError(f"job {job!r} has not built its engines yet: there is nothing to plan")
    view = View.of(mirror, len(current.owners))
    leaving = {r.id for r in view.members.values() if r.state == "leaving" or r.id in view.left}
    facts = view.candidates(current, leaving)
    members = tuple(facts[m] for m in view.members if m in current.members or m in view.reports)
    redundant = any(report.redundant for report in mirror.reports.values())
    settings = mirror.job.settings if mirror.job is not None else JobSettings()
    policy = policy_of(current.world, redundant, settings.values)
    current = as_told(mirror.workers, current)
    iteration_s = max((mirror.workers[m].iteration_s for m in current.members if m in mirror.workers), default=0.0)
    return Situation(current, members, ready_copies(mirror.workers, current), policy, job, iteration_s)


# -- a job that does not exist --------------------------------------------------------------------------


def imagined(layout: Layout, members: Sequence[Candidate], sizes: Sequence[int] = ()) -> Situation:
    """A job that began with a member for every role and has now ``members``.

    Where these are fewer, the others were lost one by one, with healing between, but for the last one; where they are
    more, they have just joined.

    Args:
        layout: the logical world.
        members: the members.
        sizes: bytes that each stage takes on its owner, and on its shadow.

    Raises:
        ConfigError: members may hold only so much, and ``sizes`` are not given.
    """
    Costs(state_bytes=tuple(sizes)).check(layout.stages)
    if not sizes and any(member.memory is not None for member in members):
        raise ConfigError("--members memory=BYTES needs --bytes, the size of each stage's state")
    memory = tuple(StageMemory(own=size, replica=size, copied=size) for size in sizes)
    everybody = list(members)
    for slot in range(len(members), layout.size):
        everybody.append(Candidate(f"m{slot}", slot, f"gone{slot}", script_rank=slot))
    present = everybody[: layout.size]
    policy = policy_of(layout, True, BambooConfig())
    current = with_redundancy(initial_plan([m.id for m in present]), layout, True, present, memory, True)
    current = replace(current, cuts=tuple(tuple(range(1, count)) for count in layout.blocks))
    while len(present) > max(len(members), 1):
        gone = present.pop()
        current = takeover(current, [gone.id], members=everybody)
        if len(present) > len(members):
            current = next_plan(current, present, policy=policy)
    return Situation(current, tuple(members), {}, policy)


def _parse_members(groups: Sequence[str]) -> list[Candidate]:
    """Members ``m0``, ``m1``, ... of ``N[,host=H][,zone=Z][,memory=B]`` each."""
    found: list[Candidate] = []
    for group in groups:
        count, *settings = group.split(",")
        values = dict(setting.partition("=")[::2] for setting in settings)
        room = values.get("memory", "0")
        known = set(values) <= {"host", "zone", "memory"} and room.isdecimal()
        if not count.isdecimal() or int(count) < 1 or not known:
            raise ConfigError(
                f"--members {group!r}: write a number, then host=NAME, zone=NAME and memory=BYTES if wanted"
            )
        memory = int(room) if "memory" in values else None
        for slot in range(len(found), len(found) + int(count)):
            host, zone = values.get("host", f"host{slot}"), values.get("zone", "")
            found.append(Candidate(f"m{slot}", slot, host, zone, slot, memory=memory))
    return found


def _numbers(option: str, text: str | None, kind: type[int] | type[float]) -> tuple:
    try:
        return tuple(kind(part) for part in text.split(",")) if text else ()
    except ValueError as error:
        raise ConfigError(f"{option} {text!r}: write a number for each stage, separated by commas") from error
