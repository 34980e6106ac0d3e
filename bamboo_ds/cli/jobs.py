"""``bamboo jobs``: all jobs of this host, or of an etcd."""

from __future__ import annotations

import re
from datetime import datetime, timezone
from pathlib import Path

import click
from pydantic import BaseModel, ConfigDict, TypeAdapter
from rich.table import Table

from ..control.registry.access import jobs_in, open_store
from ..control.registry.mirror import Mirror
from ..control.registry.overview import overview
from ..errors import BambooError
from ..launchers import jobs as launched
from ..launchers.jobs import JobFile
from ..observe.events import parse_event
from ..observe.model import JobModel
from .options import variable_option
from .output import console, printable

_TIMEOUT_S = 3.0
#: Events that count: a file may have a million of them, and all others are not parsed.
_COUNTED = re.compile(rb'"event":"(run_started|member_lost)"')


class JobReport(BaseModel):
    """A job, as ``bamboo jobs`` lists it. What is unknown is ``None``.

    Attributes:
        since: when it was started, in UTC.
        members: how many live.
        step: the newest committed one.
        losses: members that were lost; without ``events``, those that etcd still tells of.
        store: URLs of its etcd.
        events: the file of its events, where this host has it.
        problem: why its etcd cannot be read.
    """

    model_config = ConfigDict(frozen=True)

    job: str
    since: datetime | None = None
    members: int | None = None
    step: int | None = None
    losses: int | None = None
    store: str
    events: str | None = None
    problem: str | None = None


@click.command("jobs")
@variable_option("--store", help="URLs of an etcd: list all jobs in it.  [default: list the jobs of this host]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def jobs(store: str | None, as_json: bool) -> None:
    """List the jobs that this user runs on this host, or all jobs in an etcd."""
    here = {file.job: file for file in launched.running()}
    if store is None:
        found = [report(file.job, file.store, file) for file in here.values()]
    else:
        mine = {name: file for name, file in here.items() if file.store == store}
        found = [report(name, store, mine.get(name)) for name in jobs_in(store, _TIMEOUT_S)]
    if as_json:
        click.echo(_LIST.dump_json(found, indent=2))
    elif found:
        console().print(jobs_table(found))
    else:
        click.echo(f"no job is known at {store}" if store else "no job runs here")


_LIST = TypeAdapter(list[JobReport])


def report(job: str, store: str, file: JobFile | None) -> JobReport:
    """The facts known of a job; ``file``: of its launcher, if that is on this host."""
    events = file.events if file is not None else None
    launcher = file.launcher() if file is not None else None
    since = None if launcher is None else datetime.fromtimestamp(launcher.create_time(), timezone.utc)
    known = JobReport(job=job, since=since, losses=losses(events, job), store=store, events=events)
    try:
        with open_store(store, job, _TIMEOUT_S) as connection:
            mirror = Mirror(connection.get_prefix(""))
        now = overview(mirror)
    except BambooError as error:
        return known.model_copy(update={"problem": str(error)})
    spec = mirror.job
    told: dict[str, object] = {"members": len(mirror.members), "step": now.step}
    if since is None and spec is not None:
        told["since"] = spec.since
    if known.losses is None:
        told["losses"] = sum(member.state.startswith(("lost", "silent", "evicted")) for member in now.members)
    return known.model_copy(update=told)


def losses(events: str | None, job: str) -> int | None:
    """Members of ``job`` that its file of events calls lost since its newest start; ``None`` without a file."""
    if events is None or not Path(events).is_file():
        return None
    found = JobModel()
    with open(events, "rb") as file:
        for line in file:
            if line.endswith(b"\n") and _COUNTED.search(line) and (event := parse_event(line)).job == job:
                found.fold(event)
    return found.totals.losses


def jobs_table(found: list[JobReport]) -> Table:
    """The jobs for people."""
    table = Table(title="jobs", title_justify="left")
    for column in ("job", "since", "members", "step", "losses", "etcd", "events"):
        table.add_column(column, justify="right" if column in ("members", "step", "losses") else "left")
    for each in found:
        table.add_row(
            printable(each.job),
            "-" if each.since is None else f"{each.since.astimezone():%Y-%m-%d %H:%M:%S}",
            *("-" if number is None else str(number) for number in (each.members, each.step, each.losses)),
            printable(each.store),
            printable(each.events or "-"),
        )
    problems = [f"{each.job}: {each.problem}" for each in found if each.problem is not None]
    table.caption = printable("\n".join(problems)) if problems else None
    return table
