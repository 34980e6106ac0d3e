"""``bamboo simulate``: what a job would do on a spot market, against the alternatives."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from pydantic import ValidationError
from rich.table import Table

from ..config import BambooConfig, bamboo_config
from ..errors import ConfigError
from ..simulate.market import CLIMATES, Market, drawn, parse
from ..simulate.profile import Profile, load
from ..simulate.terms import Terms
from .options import Command, together
from .output import console

if TYPE_CHECKING:
    from ..simulate.run import Report

_GIB = 2**30
#: How long nodes are drawn for, unless told otherwise.
_HOURS = 24.0

#: What of the climate options replace.
WEATHER = ("rate", "bulk", "zones", "lifetime_h", "replaced_s")


def term_options(*without: str) -> Callable[[Command], Command]:
    """An option for each of the assumptions but some."""
    return together(
        *(
            click.option(
                f"--{name.replace('_', '-')}",
                name,
                type=float,
                help=f"{each.description}.  [default: {each.default:g}]",
            )
            for name, each in Terms.model_fields.items()
            if name not in without
        )
    )


#: Options of the nodes, which :func:`market_of` takes.
market_options = together(
    click.option(
        "--trace",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="File of lines ms,add|remove,node or s,count.",
    ),
    click.option("--climate", type=click.Choice(list(CLIMATES)), help="Draw the nodes instead, like this."),
    click.option("--nodes", type=click.IntRange(min=1), help="Nodes that are wanted, where they are drawn."),
    click.option(
        "--hours",
        type=click.FloatRange(min=0, min_open=True),
        help=f"How long, where they are drawn.  [default: {_HOURS:g}]",
    ),
    click.option("--rate", type=float, help="Share of the nodes that is lost in an hour, in place of the climate's."),
    click.option("--bulk", type=float, help="Nodes that go at once, on average."),
    click.option("--zones", type=int, help="Zones; those that go at once are of one."),
    click.option("--lifetime-h", type=float, help="Hours after which a node goes in any case."),
    click.option("--replaced-s", type=float, help="Seconds until another node comes in place of one, on average."),
    click.option("--from-s", type=float, default=0.0, show_default=True, help="Begin so far into the trace."),
    click.option("--seconds", type=click.FloatRange(min=0, min_open=True), help="Only so much of it."),
    click.option("--compress", type=float, default=1.0, show_default=True, help="How many times as fast as the trace."),
)


@click.command()
@market_options
@click.option("--limit", type=click.IntRange(min=1), help="Nodes that each job rents at most.  [default: as many as"
              " its policy can use]")  # fmt: skip
@click.option("--profile", "profile_name", metavar="NAME|FILE", help="Of the model: bert-large, gpt-2,"
              " gpt-3-2.7b, gpt-3-6.7b, or a file of JSON.")  # fmt: skip
@click.option("--pipelines", type=click.IntRange(min=1), help="Data-parallel pipelines.  [default: as many as there"
              " are nodes for on average]")  # fmt: skip
@click.option("--stages", type=click.IntRange(min=1), help="Stages of each.  [default: the profile's]")
@click.option("--config", "config_file", type=click.Path(exists=True, dir_okay=False), help="ds_config.json, whose"
              ' "bamboo" block the job has.')  # fmt: skip
@click.option("--memory-gib", type=click.FloatRange(min=0), help="Of a device; 0: not looked at.  [default: the"
              " profile's]")  # fmt: skip
@click.option("--policy", "policies", default="bamboo,checkpoint-restart,sample-dropping,on-demand,limit",
              show_default=True, metavar="NAME[,NAME…]", help="What is compared; bamboo:MODE is one of the modes of"
              " redundancy.mode, bamboo-whole-stages divides no stage.")  # fmt: skip
@click.option("--seeds", type=click.IntRange(min=1), default=1, show_default=True, help="Runs, of which each draws"
              " anew what is drawn.")  # fmt: skip
@click.option("--measured", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Simulate a recorded"
              " run again, a file of JSON, and compare.")  # fmt: skip
@click.option("--events", type=click.Path(dir_okay=False, path_type=Path), help="Write the events of the first policy's"
              " job, which the other commands read.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@term_options()
def simulate(
    trace: Path | None,
    climate: str | None,
    nodes: int | None,
    hours: float | None,
    from_s: float,
    seconds: float | None,
    compress: float,
    limit: int | None,
    profile_name: str | None,
    pipelines: int | None,
    stages: int | None,
    config_file: str | None,
    memory_gib: float | None,
    policies: str,
    seeds: int,
    measured: Path | None,
    events: Path | None,
    as_json: bool,
    **others: Any,
) -> None:
    """Simulate a job on nodes that come and go, under several policies.

    Nodes are those of a --trace, or drawn like a --climate. The planner, the schedules, the leader's decisions and the
    accounting are those of real jobs; how long passes, messages and starts take is assumed.
    """
    # Only now: what schedules are made of takes its time to load.
    from ..simulate import measured as recorded
    from ..simulate.run import Simulation

    weather = {name: others.pop(name) for name in WEATHER}
    rows: Sequence[recorded.Row] = ()
    if measured is not None:
        _only("--measured has its nodes, its profile and its policies")
        run = recorded.load(measured)
        report, outcomes = recorded.simulation(run).run(list(run.policies), recorded.PHASES)
        rows = recorded.compare(run, report)
    else:
        market = market_of(trace, climate, weather, nodes, hours, from_s, seconds, compress)
        config = (bamboo_config(config_file) if config_file else None) or BambooConfig()
        simulation = Simulation(
            market, profile_of(profile_name, memory_gib), given_terms(others), config, pipelines, stages, limit
        )
        names = [name.strip() for name in policies.split(",") if name.strip()]
        if not names or len(set(names)) != len(names):
            raise ConfigError(f"--policy {policies!r}: name at least one, and each once")
        report, outcomes = simulation.run(names, seeds)
    if events is not None:
        if not outcomes:
            raise ConfigError("--events: on-demand and limit have no events; name another policy first")
        _write(events, next(iter(outcomes.values())).events)
    if as_json:
        shown = report.model_dump(mode="json")
        click.echo(json.dumps({**shown, "measured": [row.model_dump() for row in rows]} if rows else shown))
        return
    console().print(_table(report))
    click.echo("\n".join([*_facts(report), *map(str, rows)]))


def _only(why: str) -> None:
    """Raise :class:`ConfigError` if there are options that do not go with ``--measured``."""
    context = click.get_current_context()
    given = [
        parameter.opts[0]
        for parameter in context.command.params
        if context.get_parameter_source(parameter.name or "") is click.core.ParameterSource.COMMANDLINE
        and parameter.name not in ("measured", "events", "as_json")
    ]
    if given:
        raise ConfigError(f"{why}: leave out {', '.join(given)}")


def profile_of(name: str | None, memory_gib: float | None) -> Profile:
    """The profile that ``--profile`` names, on devices of ``--memory-gib``."""
    if name is None:
        raise ConfigError("--profile is missing: name a preset or a file")
    profile = load(name)
    if memory_gib is None:
        return profile
    return profile.model_copy(update={"memory_bytes": round(memory_gib * _GIB) or None})


def given_terms(values: dict[str, float | None]) -> Terms:
    """The assumptions, with what options say of them."""
    try:
        return Terms(**{name: value for name, value in values.items() if value is not None})
    except ValidationError as error:
        faults = error.errors(include_url=False)
        named = [f"--{str(fault['loc'][0]).replace('_', '-')} {fault['input']}: {fault['msg']}" for fault in faults]
        raise ConfigError("; ".join(named)) from error


def market_of(
    trace: Path | None,
    climate: str | None,
    weather: dict[str, float | None],
    nodes: int | None,
    hours: float | None,
    from_s: float,
    seconds: float | None,
    compress: float,
) -> Callable[[int], Market]:
    """The nodes, by seed, of the options :data:`market_options`; ``weather``: those of :data:`WEATHER`."""
    if (trace is None) == (climate is None):
        raise ConfigError("give one of --trace and --climate")
    if not 0 < compress < math.inf:
        raise ConfigError(f"--compress is {compress}: it must be a positive number")
    given: dict[str, Any] = {"hourly" if n == "rate" else n: value for n, value in weather.items() if value is not None}
    text = ""
    if trace is not None:
        options = [f"--{name.replace('_', '-')}" for name, value in weather.items() if value is not None]
        options += [name for name, value in (("--nodes", nodes), ("--hours", hours)) if value is not None]
        if options:
            raise ConfigError(
                f"{', '.join(options)}: only for a --climate; --limit bounds the nodes of a trace, --seconds its length"
            )
        text = trace.read_text()
    elif nodes is None:
        raise ConfigError("--climate needs --nodes: how many are wanted")

    @lru_cache(maxsize=1)
    def market(seed: int) -> Market:
        if trace is not None:
            whole = parse(text, str(trace), seed)
        else:
            whole = drawn(replace(CLIMATES[str(climate)], **given), nodes or 0, 3600 * (hours or _HOURS), seed)
        return whole.window(from_s, seconds).compressed(compress)

    return market


def _write(path: Path, events: Sequence[Any]) -> None:
    try:
        path.write_text("".join(event.to_json() + "\n" for event in events))
    except OSError as error:
        raise ConfigError(f"--events: cannot write {path}: {error}") from error


def _table(report: Report) -> Table:
    table = Table(box=None)
    columns = (
        "policy",
        "nodes",
        "samples",
        "samples/s",
        "of the limit",
        "goodput",
        "lost s",
        "redone s",
        "restarts",
        "$/million",
    )
    for column in columns:
        table.add_column(column, justify="left" if column == "policy" else "right", no_wrap=True)
    for name, policy in report.policies.items():
        half = {}
        for each, (low, high) in (policy.range or {}).items():
            half[each] = f" ± {(high - low) / 2:.3g}"
        share = "–" if policy.limit_share is None else f"{policy.limit_share:.3f}{half.get('limit_share', '')}"
        cost = "–" if policy.cost_per_million is None else f"{policy.cost_per_million:,.2f}"
        table.add_row(
            name,
            f"{policy.nodes:.1f}",
            f"{policy.samples:,.0f}",
            f"{policy.samples_per_s:.3f}{half.get('samples_per_s', '')}",
            share,
            "–" if policy.goodput is None else f"{policy.goodput:.3f}",
            f"{policy.lost_s:,.0f}",
            f"{policy.redone_s:,.0f}",
            f"{policy.restarts:g}",
            cost,
        )
    return table


def _facts(report: Report) -> list[str]:
    memory = report.memory
    found = [
        f"{report.profile}: {report.pipelines} pipelines of {report.stages} stages, {report.micro_batches}"
        f" micro-batches each; {report.seconds / 3600:.2f} h, {report.nodes[0]:.1f} nodes on average,"
        f" {report.nodes[1]} at most of a policy,"
        f" {report.losses:.0f} lost" + (f"; means of {report.seeds} seeds, ± 95 %" if report.seeds > 1 else "")
    ]
    # In a mode without replicas nothing is said of any.
    what, verbs, how = ("replicas", ("FIT", "do NOT fit"), "with replicas")
    if not memory.mode.replicas:
        what, verbs, how = ("the job", ("FITS", "does NOT fit"), f"with redundancy.mode {memory.mode.value}")
    needs = f"a device needs {memory.without / _GIB:.1f} GiB, {how} {memory.replicas / _GIB:.1f} GiB"
    if memory.device is None:
        found.append(f"memory is not looked at: {needs}")
    else:
        least = f"; down to {memory.least_members} members" if memory.least_members else ""
        found.append(f"{what} {verbs[not memory.fits]} into {memory.device / _GIB:.1f} GiB: {needs}{least}")
    found += [f"{name} is not modelled: it changes nothing here" for name in report.unmodelled]
    for name, policy in report.policies.items():
        if policy.refused:
            found.append(f"{name}: {policy.refused:g} plans were not used, since they do not fit")
        if policy.idle:
            found.append(f"{name} does not train: {policy.idle}")
    return found
