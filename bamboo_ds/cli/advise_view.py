"""``bamboo advise`` for people."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import click
from rich.table import Table

from ..advise.advice import Advice, Figures, Range, Ranked
from ..advise.setups import Rejected
from ..observe.words import counted
from .output import console

#: Setups that do not fit of which is told without --explain.
_SHOWN = 5
_NAMES = {"on-demand": "stock, on demand", "checkpoint-restart": "checkpoint-restart, spot"}


def show(advice: Advice, explained: bool, again: str | None) -> None:
    """Print ``advice``.

    Args:
        advice: what was found.
        explained: with what everything costs, and why others were left out.
        again: the command that simulates the first setup anew with the configuration that is printed, if there is one.
    """
    click.echo("\n".join(_market(advice)))
    if advice.ranking or advice.alternatives:
        console().print(_table(advice))
    click.echo("\n".join(_notes(advice)))
    click.echo(f"\nIs it worth it? {advice.verdict.sentence}")
    click.echo("Simulated, not measured: no run on a real cloud has shown these figures to be right.")
    if advice.paste is not None:
        click.echo("\n".join(["", *_paste(advice)]))
        if again is not None:
            click.echo(f"\nWith that file the same is simulated by\n{again}")
    if explained:
        click.echo("\n".join(["", *_explained(advice)]))


def _market(advice: Advice) -> Iterator[str]:
    yield f"{advice.profile}: {advice.hours:.2f} h on nodes that come and go"
    for name, (mean, most) in advice.nodes.items():
        lost = f"{advice.losses[name]:.1%} of them are lost in an hour"
        memory = advice.memory_gib[name]
        device = "memory is NOT looked at: give memory-gib" if memory is None else f"{memory:.1f} GiB each"
        yield f"{name}: {mean:.1f} nodes on average, {most} at most, {device}; {lost}"
    bound = f"{advice.at_least:.3g} samples/s"
    how = f"{advice.share:g} of the fastest setup's" if advice.share is not None else "as --at-least says"
    yield f"setups by cost per sample, of those that do at least {bound} ({how})"


def _table(advice: Advice) -> Table:
    table = Table(box=None)
    left = ("instance", "redundancy", "blocks")
    columns = "", "instance", "D x P", "spares", "redundancy", "blocks", "$/million", "samples/s", "goodput", "GiB"
    for column in (*columns, "overhead", "save every"):
        table.add_column(column, justify="left" if column in left else "right", no_wrap=True)
    for number, each in enumerate(advice.ranking, 1):
        setup = each.setup
        table.add_row(
            str(number) if each.fast_enough else "slow",
            setup.instance,
            f"{setup.pipelines} x {setup.stages}",
            str(setup.spares),
            setup.mode.value,
            str(setup.blocks),
            *_figures(each),
            _gib(each.need_gib),
            f"{each.overhead:.1%}",
            f"{counted(each.checkpoint_steps, 'step')}",
        )
    for other in advice.alternatives:
        size = f"{other.pipelines} x {other.stages}" if other.pipelines else f"up to {other.nodes}"
        name = _NAMES[other.policy]
        table.add_row("" if other.fast_enough else "slow", other.instance, size, "", name, "", *_figures(other))
    return table


def _figures(each: Figures) -> tuple[str, str, str]:
    cost = "–" if each.cost_per_million is None else f"{each.cost_per_million:,.2f}{_half(each.cost_range, ',.2f')}"
    goodput = "–" if each.goodput is None else f"{each.goodput:.3f}{_half(each.goodput_range, '.3f')}"
    speed = each.samples_per_s
    form = ",.0f" if speed >= 100 else ".1f" if speed >= 10 else ".3g"
    return cost, f"{speed:{form}}{_half(each.samples_per_s_range, form)}", goodput


def _half(found: Range, form: str) -> str:
    return "" if found is None else f" ± {(found[1] - found[0]) / 2:{form}}"


def _gib(count: float) -> str:
    return f"{count:.1f}" if count >= 1 else f"{count:.2g}"


def _notes(advice: Advice) -> Iterator[str]:
    several = sum(each.seeds > 1 for each in advice.ranking)
    if several:
        yield f"means of {advice.seeds} seeds, ± 95 %, where there is a ±; of one seed elsewhere"
    if any(each.seeds > 1 and each.cost_per_million and not each.cost_range for each in advice.ranking):
        yield "costs without a ± beside other figures with one: seeds that have trained nothing are paid for in them"
    yield f"{advice.estimated} setups were estimated, {len(advice.ranking)} simulated"
    yield "GiB: of a device with its role and replica; overhead: of iterations without losses, against no redundancy"
    for each in advice.ranking:
        if each.refused:
            yield f"{each.setup}: {each.refused:.1f} plans were not used, since they do not fit"
        if each.idle:
            yield f"{each.setup} does not train: {each.idle}"
    unfit = [each for each in advice.rejected if each.need_gib is not None]
    if unfit:
        verb = "do" if len(unfit) > 1 else "does"
        yield f"{counted(len(unfit), 'setup')} {verb} not fit, among them those that miss least:"
        for one in sorted(unfit, key=lambda found: found.need_gib or 0.0)[:_SHOWN]:
            yield f"  {one.what}: {one.why}"


def _paste(advice: Advice) -> Iterator[str]:
    paste = advice.paste
    assert paste is not None
    more = f"; {paste.joining} more may join" if paste.joining else ""
    yield f"To run the first one: {paste.members} members{more}, num_stages={paste.num_stages}, a checkpoint every"
    yield f"{counted(paste.save_every_steps, 'step')}, and in ds_config.json"
    yield json.dumps(paste.ds_config, indent=2)


def _explained(advice: Advice) -> Iterator[str]:
    yield f"profile: {advice.source or 'no source is named'}"
    yield "What a million samples pay for:"
    for each in advice.ranking:
        yield f"  {each.setup}: {_dollars(each)}"
        yield f"    {_facts(each)}"
    for other in advice.alternatives:
        yield f"  {_NAMES[other.policy]}, {other.instance}, {counted(other.nodes, 'node')}: {_dollars(other)}"
    if advice.rejected:
        yield "Not simulated:"
        yield from (f"  {line}" for line in _grouped(advice.rejected))


def _dollars(each: Figures) -> str:
    parts = sorted(each.dollars.items(), key=lambda found: -found[1])
    return ", ".join(f"{what} {cost:,.2f} $" for what, cost in parts if cost >= 0.005) or "nothing"


def _facts(each: Ranked) -> str:
    estimate = "no end" if each.estimate is None else f"{each.estimate:,.2f} $"
    least = "" if each.least_members is None else f"; fits down to {counted(each.least_members, 'member')}"
    losses = f"{each.losses:.0f} losses, {each.restarts:.1f} restarts"
    return f"{losses}{least}; a checkpoint every {each.checkpoint_s:,.0f} s (Young, Daly); estimated at {estimate}"


def _grouped(rejected: Sequence[Rejected]) -> Iterator[str]:
    """Those that were left out for the same reason in one line, those that were estimated by their shape."""
    reasons: dict[str, list[str]] = {}
    of_shape: dict[str, list[Rejected]] = {}
    for each in rejected:
        if each.shape is not None:
            of_shape.setdefault(each.shape, []).append(each)
        else:
            reasons.setdefault(each.why, []).append(each.what)
    for why, what in reasons.items():
        yield f"{'; '.join(what)}: {why}"
    for shape, setups in sorted(of_shape.items(), key=lambda found: min(map(_cost, found[1]))):
        speeds = _span([setup.samples_per_s or 0.0 for setup in setups], ".3g")
        costs = _span([_cost(setup) for setup in setups], ",.2f")
        yield f"{shape}, {counted(len(setups), 'setup')}: estimated at {costs} $/million, {speeds} samples/s"


def _cost(each: Rejected) -> float:
    return float("inf") if each.cost_per_million is None else each.cost_per_million


def _span(values: Sequence[float], form: str) -> str:
    low, high = f"{min(values):{form}}", f"{max(values):{form}}"
    return low if low == high else f"{low} to {high}"
