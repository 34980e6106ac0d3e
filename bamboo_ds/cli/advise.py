"""``bamboo advise``: the job of lowest cost per sample on a spot market, and whether it is worth it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..advise.instances import Instance, distinct, of_file, of_option
from ..config import BambooConfig, RedundancyMode, bamboo_config, config_path_from_argv
from ..errors import ConfigError
from ..simulate.market import Market
from ..simulate.profile import Profile
from ..simulate.settings import unmodelled
from ..simulate.terms import Terms
from ..simulate.training import import_simpy
from .simulate import WEATHER, given_terms, market_of, market_options, profile_of, simulate, term_options

if TYPE_CHECKING:
    from ..advise.advice import Ranked
    from ..advise.offers import Offer

#: The instance type where none is given.
_DEFAULT = "node"


@click.command(context_settings={"allow_interspersed_args": False})
@market_options
@click.option("--limit", type=click.IntRange(min=1), help="Nodes that are rented at most.  [default: all that there"
              " are]")  # fmt: skip
@click.option("--profile", "profile_name", metavar="NAME|FILE", help="Of the model, in place of a SCRIPT: bert-large,"
              " gpt-2, gpt-3-2.7b, gpt-3-6.7b, or a file of JSON.")  # fmt: skip
@click.option("-n", "--workers", type=click.IntRange(min=2), help="Local workers that SCRIPT is measured with: one for"
              " each stage, or a multiple.")  # fmt: skip
@click.option("--steps", type=click.IntRange(min=8), default=20, show_default=True, help="Iterations of SCRIPT that are"
              " measured.")  # fmt: skip
@click.option("--write-profile", type=click.Path(dir_okay=False, path_type=Path), help="File for the profile of SCRIPT."
              "  [default: its name with .profile.json, in the working directory]")  # fmt: skip
@click.option("--instance", "instances", multiple=True, metavar="NAME,spot=$,on-demand=$[,memory-gib=G][,speed=X]…",
              help="An instance type: $ per hour, memory of its device, and how many times as fast as that of the"
              " profile; also network-gb-s, trace, climate, rate, nodes. May be repeated.  [default: --spot-price and"
              " --on-demand-price]")  # fmt: skip
@click.option("--instances", "instances_file", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="File with a list of such types, as JSON.")  # fmt: skip
@click.option("--memory-gib", type=click.FloatRange(min=0), help="Of a device; 0: not looked at.  [default: the"
              " profile's]")  # fmt: skip
@click.option("--pipelines", type=click.IntRange(min=1), help="Try so many data-parallel pipelines only.")
@click.option("--stages", type=click.IntRange(min=2), help="Try so many stages only.")
@click.option("--mode", "modes", multiple=True, type=click.Choice([mode.value for mode in RedundancyMode]),
              help="Try this redundancy.mode; may be repeated.  [default: none, lazy-frc-lazy-brc,"
              " eager-frc-lazy-brc]")  # fmt: skip
@click.option("--config", "config_file", type=click.Path(exists=True, dir_okay=False), help="ds_config.json, whose"
              ' "bamboo" block the job has besides.  [default: that of SCRIPT\'s command line]')  # fmt: skip
@click.option("--at-least", type=click.FloatRange(min=0), help="Samples per second that the job has to do.  [default:"
              " 0.8 of those of the fastest setup]")  # fmt: skip
@click.option("--finalists", type=click.IntRange(min=1), default=8, show_default=True, help="Setups that are"
              " simulated.")  # fmt: skip
@click.option("--seeds", type=click.IntRange(min=1), default=3, show_default=True, help="Runs of the best of them.")
@click.option("--explain", "explained", is_flag=True, help="Say what every simulated setup pays for, and why others are"
              " none of them.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@term_options("checkpoint_s")
@click.argument("script", required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def advise(
    trace: Path | None,
    climate: str | None,
    nodes: int | None,
    hours: float | None,
    from_s: float,
    seconds: float | None,
    compress: float,
    limit: int | None,
    profile_name: str | None,
    workers: int | None,
    steps: int,
    write_profile: Path | None,
    instances: tuple[str, ...],
    instances_file: Path | None,
    memory_gib: float | None,
    pipelines: int | None,
    stages: int | None,
    modes: tuple[str, ...],
    config_file: str | None,
    at_least: float | None,
    finalists: int,
    seeds: int,
    explained: bool,
    as_json: bool,
    script: str | None,
    arguments: tuple[str, ...],
    **others: Any,
) -> None:
    """Find the job of lowest cost per sample on nodes that come and go, and say whether it is worth it.

    Of a --profile, or of SCRIPT, which is run with ARGUMENTS on this machine and measured first. Pipelines, stages,
    redundancy, blocks, spare nodes, checkpoints and instance types are chosen by simulation, as by bamboo simulate.
    """
    weather = {name: others.pop(name) for name in WEATHER}
    terms = given_terms(others)
    types = _instances(instances, instances_file, terms)

    def market(of: Instance) -> Callable[[int], Market]:
        own = dict(weather)
        if of.rate is not None:
            own["rate"] = of.rate
        given, wanted, long = (trace, climate), of.nodes or nodes, hours
        if of.trace is not None:
            given, own, wanted, long = (Path(of.trace), None), dict.fromkeys(WEATHER), None, None
        elif of.climate is not None:
            given = None, of.climate
        elif trace is not None and (of.rate is not None or of.nodes is not None):
            raise ConfigError(
                f"instance {of.name}: rate and nodes are those of a climate, and --trace has its own: leave them out,"
                " or name a climate"
            )
        whole = market_of(*given, own, wanted, long, from_s, seconds, compress)
        return whole if limit is None else lambda seed: whole(seed).rented(limit)

    # All that can be wrong with the options is, before anything is started.
    _mean_something(types, {**weather, "trace": trace, "climate": climate, "nodes": nodes, "hours": hours})
    markets = [market(each) for each in types]
    for each in markets:
        each(0)
    base = config_file or (config_path_from_argv(arguments) if script is not None else None)
    config = (bamboo_config(base) if base else None) or BambooConfig()
    for name in unmodelled(config):
        click.echo(f"bamboo: {name} is not modelled: it changes nothing here", err=True)
    import_simpy()
    if script is None:
        _only_with_a_script(workers=workers, write_profile=write_profile)
        profile = profile_of(profile_name, memory_gib)
    elif profile_name is not None:
        raise ConfigError(f"--profile {profile_name} and the script {script}: give one of them")
    else:
        profile_name = str(write_profile or f"{Path(script).stem}.profile.json")
        profile = _measured(script, arguments, workers, steps, Path(profile_name), memory_gib)
    # Only now: what schedules are made of takes its time to load.
    from ..advise.offers import offered

    _advise(
        [offered(one, nodes_of, profile, terms) for one, nodes_of in zip(types, markets, strict=True)],
        str(profile_name),
        explained,
        as_json,
        config=config,
        pipelines=pipelines,
        stages=stages,
        finalists=finalists,
        seeds=seeds,
        at_least=at_least,
        **({"modes": [RedundancyMode(mode) for mode in dict.fromkeys(modes)]} if modes else {}),
    )


def _advise(offers: Sequence[Offer], profile_name: str, explained: bool, as_json: bool, **wanted: Any) -> None:
    from ..advise.search import Search
    from .advise_view import show

    advice = Search(offers, **wanted, tell=lambda text: click.echo(f"bamboo: {text}", err=True)).run()
    if as_json:
        click.echo(advice.model_dump_json())
    else:
        show(advice, explained, _again(advice.best, advice.seeds, {o.instance.name: o for o in offers}, profile_name))


def _again(best: Ranked | None, seeds: int, offers: Mapping[str, Offer], profile_name: str) -> str | None:
    """The command of ``bamboo simulate`` that repeats the simulation of the best setup, if options can say it."""
    if best is None:
        return None
    offer = offers[best.setup.instance]
    own = offer.instance
    context = click.get_current_context()
    limited = context.params["limit"] not in (None, best.setup.nodes)
    if own.speed != 1 or limited or (own.trace, own.climate, own.rate, own.nodes) != (None,) * 4:
        return None
    given = ["bamboo", "simulate"]
    for parameter in simulate.params:
        name = str(parameter.name)
        chosen = name in ("pipelines", "stages", "limit", "config_file", "seeds", "policies", "events", "as_json")
        if chosen or context.get_parameter_source(name) is not click.core.ParameterSource.COMMANDLINE:
            continue
        if name not in ("profile_name", "memory_gib", "spot_price", "on_demand_price", "network_gb_s"):
            given += [parameter.opts[0], str(context.params[name])]
    memory, terms = offer.profile.memory_bytes, offer.terms
    values = {
        "--profile": profile_name,
        "--memory-gib": f"{(memory or 0) / 2**30:.12g}",
        "--spot-price": f"{terms.spot_price:.12g}",
        "--on-demand-price": f"{terms.on_demand_price:.12g}",
        "--network-gb-s": f"{terms.network_gb_s:.12g}",
        "--checkpoint-s": f"{best.checkpoint_s:.12g}",
        "--pipelines": str(best.setup.pipelines),
        "--stages": str(best.setup.stages),
        "--limit": str(best.setup.nodes),
        "--seeds": str(seeds),
        "--config": "ds_config.json",
    }
    return shlex.join([*given, *(part for pair in values.items() for part in pair)])


def _only_with_a_script(**options: object) -> None:
    given = [f"--{name.replace('_', '-')}" for name, value in options.items() if value is not None]
    if given:
        raise ConfigError(f"{', '.join(given)}: only for a SCRIPT; name one, or leave it out")


def _instances(options: Sequence[str], file: Path | None, terms: Terms) -> Sequence[Instance]:
    """The instance types of the command line; else the one of the prices that are assumed."""
    found = [*map(of_option, options), *(of_file(file) if file is not None else ())]
    if not found:
        return [Instance(name=_DEFAULT, spot=terms.spot_price, on_demand=terms.on_demand_price)]
    context = click.get_current_context()
    for name in ("spot_price", "on_demand_price"):
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise ConfigError(f"--{name.replace('_', '-')}: --instance and --instances have prices of their own")
    for each in found:
        if each.trace is not None and not Path(each.trace).is_file():
            raise ConfigError(f"instance {each.name}: there is no trace {each.trace}")
    return distinct(found)


def _mean_something(types: Sequence[Instance], market: Mapping[str, object]) -> None:
    """Refuse options of the market in whose place all instance types have their own."""
    unused = [name for name, value in market.items() if value is not None and all(t.replaces(name) for t in types)]
    if unused:
        named = ", ".join(f"--{name.replace('_', '-')}" for name in unused)
        raise ConfigError(f"{named}: every instance type has its own trace, climate, rate or nodes: leave it out")


def _measured(
    script: str,
    arguments: tuple[str, ...],
    workers: int | None,
    steps: int,
    target: Path,
    memory_gib: float | None,
) -> Profile:
    from .advise_job import measure

    if workers is None:
        raise ConfigError(f"-n is missing: how many local workers {script} is measured with, one for each stage")
    if not target.parent.is_dir():
        raise ConfigError(f"--write-profile {target}: there is no folder {target.parent}")
    profile = measure(script, arguments, workers, steps)
    try:
        target.write_text(profile.model_dump_json(indent=1, exclude_defaults=True) + "\n")
    except OSError as error:
        raise ConfigError(f"--write-profile {target} cannot be written: {error}") from error
    click.echo(f"bamboo: the profile is in {target}", err=True)
    return profile_of(str(target), memory_gib)
