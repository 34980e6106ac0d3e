"""``bamboo goodput``: what the seconds of a job's members were spent on, and whether each sample was consumed once."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from rich.table import Table

from ..errors import ConfigError
from ..observe import pictures
from ..observe.consumption import Consumption
from ..observe.events import read_events
from ..observe.goodput import account
from ..observe.goodput.accounted import GoodputReport
from .output import console

#: Parts of the time that the picture shows.
_BINS = 240
#: Problems that are printed; the others are counted.
_SHOWN = 20


@click.command()
@click.argument("events", metavar="EVENTS", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with every member.")
@click.option("--png", type=click.Path(dir_okay=False, path_type=Path), help="Draw the categories over time.")
def goodput(events: Path, as_json: bool, png: Path | None) -> None:
    """Account for every second of every member of a job, from its EVENTS (a file of JSON lines).

    Goodput is the productive share of the member-seconds.

    With bamboo.observe.checksums also verify that every sample was consumed once: exit code 1 if not.
    """
    consumption = Consumption()
    report = account(consumption.watching(read_events(events)))
    if not report.members:
        raise ConfigError(f"{events}: no event tells of a member")
    if png is not None:
        _draw(png, report)
    if as_json:
        click.echo(report.model_dump_json(indent=2))
        _verify(consumption)
        return
    table = Table(box=None)
    for column in ("category", "member-seconds", "share"):
        table.add_column(column, justify="left" if column == "category" else "right")
    for category, seconds in report.categories.items():
        table.add_row(category.value, f"{seconds:.1f}", f"{seconds / (report.seconds or 1):.2%}")
    table.add_row("sum", f"{report.seconds:.1f}", "")
    console().print(table)
    facts = [f"{len(report.members)} members in {report.wall_seconds:.1f} s", f"{report.steps} steps"]
    for what in ("losses", "leaves", "restarts", "repeated_steps"):
        if number := getattr(report, what):
            facts.append(f"{number} {what.replace('_', ' ')}")
    if report.steps_per_second is not None:
        facts.append(f"{report.steps_per_second:.3f} steps/s")
    click.echo(", ".join(facts))
    click.echo("goodput " + ("unknown" if report.goodput is None else f"{report.goodput:.2%}"))
    _verify(consumption)


def _verify(consumption: Consumption) -> None:
    """Tells on stderr whether each sample was consumed once, if the events have what it takes; exits if not."""
    steps, problems = len(consumption.history()), consumption.problems()
    if not steps:
        return
    for problem in problems[:_SHOWN]:
        click.echo(problem, err=True)
    if len(problems) > _SHOWN:
        click.echo(f"and {len(problems) - _SHOWN} problems more", err=True)
    alike = f", {number} of them with the contents of one before" if (number := consumption.alike()) else ""
    verdict = (
        f"samples: not each consumed once, {len(problems)} problems" if problems else "samples: each consumed once"
    )
    click.echo(f"{verdict} ({steps} steps{alike})", err=True)
    if problems:
        sys.exit(1)


def _draw(path: Path, report: GoodputReport) -> None:
    """Stacked areas: members per category over time."""
    pyplot = pictures.pyplot("--png")
    times, members = report.over_time(_BINS)
    shown = {category: counts for category, counts in members.items() if any(counts)}
    colours = dict(zip(members, pyplot.get_cmap("tab20").colors, strict=False))
    figure, axis = pyplot.subplots(figsize=(12, 5))
    axis.stackplot(
        times, *shown.values(), labels=[c.value for c in shown], colors=[colours[c] for c in shown], step="mid"
    )
    axis.set_xlabel("seconds since the first event")
    axis.set_ylabel("members")
    axis.set_xlim(times[0], times[-1])
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    axis.set_title(f"goodput {report.goodput or 0:.1%}", fontsize=10)
    figure.tight_layout()
    pictures.save(figure, path, 130)
