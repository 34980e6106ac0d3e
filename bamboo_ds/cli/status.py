"""What ``bamboo status`` tells."""

from __future__ import annotations

import time
from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict
from rich.live import Live
from rich.table import Table

from ..control.registry.access import open_store
from ..control.registry.mirror import Mirror
from ..control.registry.overview import overview
from ..errors import ConfigError, StoreUnavailable
from ..launchers import jobs
from ..observe.view import KnownMember
from ..topology.plan import Plan
from .output import console, printable

_TIMEOUT_S = 5.0
_WATCH_S = 1.0


class MemberStatus(BaseModel):
    """One member, registered or gone. ``pid`` and ``agent_pid`` are ``None`` when it is gone.

    ``doing`` is what its worker does that takes long outside of training, such as compiling an extension.
    ``roles`` and ``shadows`` are lists of ``[pipeline, stage]``.
    """

    model_config = ConfigDict(frozen=True)

    id: str
    slot: int
    state: str
    host: str | None = None
    address: str | None = None
    pid: int | None = None
    agent_pid: int | None = None
    roles: list[tuple[int, int]] = []
    shadows: list[tuple[int, int]] = []
    leader: bool = False
    doing: str | None = None


class JobStatus(BaseModel):
    """A job at one moment.

    ``epoch`` is 0 before the first plan, ``step`` the newest committed one, ``global_step`` that in DeepSpeed's count,
    ``checkpoint`` the folder of the newest complete checkpoint. ``unshadowed`` are the roles without a shadow, as
    ``[pipeline, stage]``; ``None`` where none has one (before the engines are built, or without redundancy).
    """

    model_config = ConfigDict(frozen=True)

    job: str
    epoch: int
    step: int | None
    global_step: int | None = None
    checkpoint: str | None
    unshadowed: list[tuple[int, int]] | None = None
    members: list[MemberStatus]


def job_status(job: str, mirror: Mirror) -> JobStatus:
    """The status that a job's keys tell."""
    plan, known = mirror.plan, overview(mirror)
    return JobStatus(
        job=job,
        epoch=plan.epoch if plan else 0,
        step=known.step,
        global_step=known.global_step,
        checkpoint=known.checkpoint,
        unshadowed=_unshadowed(plan),
        members=sorted(
            (_member(each, mirror, plan) for each in known.members), key=lambda member: (member.slot, member.id)
        ),
    )


def _member(known: KnownMember, mirror: Mirror, plan: Plan | None) -> MemberStatus:
    record = mirror.members.get(known.id)
    here = {} if record is None else {"address": record.address, "pid": record.pid, "agent_pid": record.agent_pid}
    return MemberStatus(
        id=known.id,
        slot=known.slot,
        state=known.state,
        host=known.host,
        roles=_roles(plan, known.id, shadows=False) if record else [],
        shadows=_roles(plan, known.id, shadows=True) if record else [],
        leader=known.id == mirror.leader,
        doing=known.doing,
        **here,
    )


def _roles(plan: Plan | None, member: str, shadows: bool) -> list[tuple[int, int]]:
    if plan is None or plan.layout is None:
        return []
    roles = plan.shadowed_by(member) if shadows else plan.owned_by(member)
    return [(role.pipeline, role.stage) for role in roles]


def _unshadowed(plan: Plan | None) -> list[tuple[int, int]] | None:
    if plan is None or plan.layout is None or not any(plan.shadows):
        return None
    return [(r.pipeline, r.stage) for r, shadow in zip(plan.layout.roles, plan.shadows, strict=True) if shadow is None]


def status_table(status: JobStatus) -> Table:
    """The status for people."""
    step = "-" if status.step is None else str(status.step)
    if status.global_step not in (None, status.step):
        step += f" (DeepSpeed's {status.global_step})"
    table = Table(title=f"job {status.job}   epoch {status.epoch}   step {step}", title_justify="left")
    for column in ("slot", "member", "state", "host", "worker", "agent", "owns", "shadows"):
        table.add_column(column, justify="right" if column in ("slot", "worker", "agent") else "left")
    for member in status.members:
        table.add_row(
            str(member.slot),
            member.id + (" *" if member.leader else ""),
            printable(member.state),
            printable(member.host or "-"),
            str(member.pid or "-"),
            str(member.agent_pid or "-"),
            _listed(member.roles),
            _listed(member.shadows),
        )
    table.caption = "* leads; roles are (pipeline,stage)"
    for member in status.members:
        if member.doing is not None:
            table.caption += f"\nthe worker of {member.id} {member.doing}"
    if status.unshadowed:
        table.caption += f"\nwithout a shadow: {_listed(status.unshadowed)}"
    if status.checkpoint is not None:
        table.caption += f"\nnewest checkpoint: {status.checkpoint}"
    return table


def _listed(roles: list[tuple[int, int]]) -> str:
    return " ".join(f"({pipeline},{stage})" for pipeline, stage in roles) or "-"


def snapshots(location: jobs.JobLocation) -> Iterator[Mirror]:
    """The keys of a job every second until it has ended.

    Raises:
        ConfigError: there is no such job.
        StoreError: etcd cannot be used, and the job has not ended as far as this host knows.
    """
    seen = False
    with open_store(location.store, location.job, _TIMEOUT_S) as store:
        while True:
            try:
                snapshot = store.get_prefix("")
            except StoreUnavailable:  # that of the job ends with it
                if not seen or location.launcher is None or jobs.find(location.job) is not None:
                    raise
                return
            if not snapshot.entries and not seen:
                raise ConfigError(f"no job {location.job!r} is known at {location.store}")
            if not snapshot.entries:
                return
            seen = True
            yield Mirror(snapshot)
            time.sleep(_WATCH_S)


def watch(location: jobs.JobLocation) -> None:
    """Show the status every second until the job has ended, or Ctrl-C; raises as :func:`snapshots`."""
    with Live(console=console(), auto_refresh=False) as live:
        try:
            for mirror in snapshots(location):
                live.update(status_table(job_status(location.job, mirror)), refresh=True)
        except KeyboardInterrupt:
            return
    console().print(f"job {location.job} has ended")
