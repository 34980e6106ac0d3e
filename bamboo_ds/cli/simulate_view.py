"""``bamboo simulate`` for people."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

import click
from rich.table import Table

from ..observe.words import counted
from ..simulate.profile import GIB
from ..simulate.results import Ranked, Swept
from ..simulate.run import PolicyReport, Report
from .output import console

#: Setups of a sweep that are shown, and of those that do not fit.
_SHOWN, _UNFIT = 8, 5
_LEFT = {"policy", "instance", "blocks"}
#: Columns that the table of a sweep has no place for.
_LONG = {"nodes", "samples", "of the limit", "lost s", "redone s", "restarts"}


def show(report: Report) -> None:
    """Prints what policies come to."""
    _print([({"policy": name}, each) for name, each in report.policies.items()])
    idle = chain.from_iterable(_troubles(name, policy) for name, policy in report.policies.items())
    click.echo("\n".join([*_facts(report), *map(_unmodelled, report.unmodelled), *idle]))


def show_sweep(swept: Swept, again: str | None) -> None:
    """Prints what a sweep has found.

    Args:
        swept: that.
        again: the command that simulates the first setup anew with the configuration that is printed, if there is one.
    """
    click.echo("\n".join(_market(swept)))
    shown = swept.ranking[:_SHOWN]
    own = [(_arranged(each, str(place)), each.figures) for place, each in enumerate(shown, 1)]
    _print([*own, *((_arranged(each, ""), each.figures) for each in swept.alternatives)], brief=True)
    click.echo("\n".join(_notes(swept)))
    click.echo(f"\nIs it worth it? {swept.verdict}")
    click.echo("Simulated, not measured: no run on a real cloud has shown these figures to be right.")
    if swept.paste is not None:
        joining = f"; {swept.paste.joining} more may join" if swept.paste.joining else ""
        ranks = f", --ranks {swept.paste.ranks}" if swept.paste.ranks > swept.paste.members else ""
        steps = counted(swept.paste.save_every_steps, "step")
        click.echo(
            f"\nTo run the first one: {swept.paste.members} members{ranks}{joining}, num_stages="
            f"{swept.paste.num_stages}, a checkpoint every\n{steps}, and in ds_config.json\n"
            f"{json.dumps(swept.paste.ds_config, indent=2)}"
        )
    if again is not None:
        click.echo(f"\nWith that file the same is simulated by\n{again}")


def _print(rows: Sequence[tuple[Mapping[str, str], PolicyReport]], brief: bool = False) -> None:
    """The table of what policies come to: how each is arranged, and its figures."""
    if not rows:
        return
    told = [{**arranged, **_figures(policy, brief)} for arranged, policy in rows]
    table = Table(box=None)
    for column in told[0]:
        table.add_column(column, justify="left" if column in _LEFT else "right", no_wrap=True)
    for row in told:
        table.add_row(*row.values())
    console().print(table)


def _figures(policy: PolicyReport, brief: bool) -> dict[str, str]:
    """A policy's figures, by column; ``brief``: only those for a decision."""

    def ranged(name: str, form: str, digits: str) -> str:
        value, found = getattr(policy, name), (policy.range or {}).get(name)
        half = "" if found is None else f" ± {(found[1] - found[0]) / 2:{digits}}"
        return "–" if value is None else f"{value:{form}}{half}"

    columns = {
        "nodes": f"{policy.nodes:.1f}",
        "samples": f"{policy.samples:,.0f}",
        "samples/s": ranged("samples_per_s", ".3f", ".3g"),
        "of the limit": ranged("limit_share", ".3f", ".3g"),
        "goodput": "–" if policy.goodput is None else f"{policy.goodput:.3f}",
        "lost s": f"{policy.lost_s:,.0f}",
        "redone s": f"{policy.redone_s:,.0f}",
        "restarts": f"{policy.restarts:g}",
        "$/million": ranged("cost_per_million", ",.2f", ",.2f"),
    }
    return {name: text for name, text in columns.items() if not brief or name not in _LONG}


def _arranged(each: Ranked, place: str) -> dict[str, str]:
    """The arrangement of a setup of a sweep, by column."""
    setup = each.setup
    return {
        "": place if each.fast_enough else "slow",
        "policy": setup.policy,
        "instance": setup.instance,
        "D x P": f"{setup.pipelines} x {setup.stages}" if setup.pipelines else f"up to {setup.nodes}",
        "spares": str(setup.spares) if setup.pipelines else "",
        "blocks": "" if setup.blocks is None else str(setup.blocks),
        "save every": "" if each.checkpoint_steps is None else counted(each.checkpoint_steps, "step"),
        "GiB": ""
        if each.need_gib is None
        else f"{each.need_gib:.1f}"
        if each.need_gib >= 1
        else f"{each.need_gib:.2g}",
        "overhead": "" if each.overhead is None else f"{each.overhead:.1%}",
    }


def _market(swept: Swept) -> Iterator[str]:
    yield f"{swept.profile}: {swept.hours:.2f} h on nodes that come and go"
    for name, nodes in swept.rented.items():
        device = (
            "memory is NOT looked at: give memory-gib"
            if nodes.memory_gib is None
            else f"{nodes.memory_gib:.1f} GiB each"
        )
        many = f"{nodes.mean:.1f} nodes on average, {nodes.most} at most"
        yield f"{name}: {many}, {device}; {nodes.lost:.1%} of them are lost in an hour"
    how = f"{swept.share:g} of the fastest setup's" if swept.share is not None else "as --at-least says"
    yield f"by cost per sample, of those that do at least {swept.at_least:.3g} samples/s ({how})"


def _notes(swept: Swept) -> Iterator[str]:
    if swept.seeds > 1:
        yield f"means of {swept.seeds} seeds, ± 95 %, where there is a ±; of one seed elsewhere"
    yield f"{swept.simulated} setups were simulated: the first ones are shown, and the best of each other policy"
    yield "GiB: of a device with its role and replica; overhead: of iterations without losses, against no redundancy"
    yield from map(_unmodelled, swept.unmodelled)
    for each in (*swept.ranking[:_SHOWN], *swept.alternatives):
        yield from _troubles(str(each.setup), each.figures)
    if swept.unfit:
        verb = "do" if len(swept.unfit) > 1 else "does"
        yield f"{counted(len(swept.unfit), 'setup')} {verb} not fit, among them those that miss least:"
        for what, need in sorted(swept.unfit.items(), key=lambda found: found[1])[:_UNFIT]:
            yield f"  {what}: a device needs {need:.1f} GiB"


def _unmodelled(name: str) -> str:
    return f"{name} is not modelled: it changes nothing here"


def _troubles(name: str, policy: PolicyReport) -> Iterator[str]:
    if policy.refused:
        yield f"{name}: {policy.refused:.3g} plans were not used, since they do not fit"
    if policy.idle:
        yield f"{name} does not train: {policy.idle}"


def _facts(report: Report) -> Iterator[str]:
    memory = report.memory
    yield (
        f"{report.profile}: {report.pipelines} pipelines of {report.stages} stages, {report.micro_batches}"
        f" micro-batches each; {report.seconds / 3600:.2f} h, {report.nodes[0]:.1f} nodes on average,"
        f" {report.nodes[1]} at most of a policy,"
        f" {report.losses:.0f} lost" + (f"; means of {report.seeds} seeds, ± 95 %" if report.seeds > 1 else "")
    )
    # In a mode without replicas nothing is said of any.
    what, verbs, how = ("replicas", ("FIT", "do NOT fit"), "with replicas")
    if not memory.mode.replicas:
        what, verbs, how = ("the job", ("FITS", "does NOT fit"), f"with redundancy.mode {memory.mode.value}")
    needs = f"a device needs {memory.without / GIB:.1f} GiB, {how} {memory.replicas / GIB:.1f} GiB"
    if memory.device is None:
        yield f"memory is not looked at: {needs}"
    else:
        least = f"; down to {memory.least_members} members" if memory.least_members else ""
        yield f"{what} {verbs[not memory.fits]} into {memory.device / GIB:.1f} GiB: {needs}{least}"
