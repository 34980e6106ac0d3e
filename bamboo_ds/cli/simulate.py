"""``bamboo simulate``: what a job would do on a spot market, against the alternatives."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, get_args

import click

from ..config import BambooConfig, bamboo_config
from ..errors import ConfigError
from ..simulate.given import Found, Given, checked, option
from ..simulate.market import Nodes
from ..simulate.profile import GIB, Profile, load
from ..simulate.terms import Terms
from .options import Command, together

if TYPE_CHECKING:
    from ..simulate.results import Ranked
    from ..simulate.run import Simulation

#: The instance type where none is given.
_DEFAULT = "node"
_POLICIES = "bamboo,checkpoint-restart,sample-dropping,on-demand,limit"
#: Seeds of a sweep where nothing else is asked for.
_SEEDS = 3
#: Options that the sweep chooses, or that it has to itself.
_CHOSEN = {"sweep", "at_least", "instances", "policies", "pipelines", "stages", "limit", "config_file", "seeds",
           "checkpoint_s", "as_json"}  # fmt: skip


def _of_fields(model: type[Given]) -> Callable[[Command], Command]:
    """An option for each field of ``model``."""
    found = []
    for name, each in model.model_fields.items():
        (kind,) = {*(get_args(each.annotation) or [each.annotation])} - {NoneType}
        default = "" if each.default is None else f"  [default: {each.default:g}]"
        found.append(click.option(option(name), name, type=kind, help=f"{each.description}.{default}"))
    return together(*found)


def _made(model: type[Found], options: dict[str, Any]) -> Found:
    """``model`` by what is given of its options, which are taken out of ``options``."""
    given = {name: value for name in model.model_fields if (value := options.pop(name)) is not None}
    return checked("", lambda: model.model_validate(given))


@click.command()
@_of_fields(Nodes)
@click.option("--limit", type=click.IntRange(min=1), help="Nodes that each job rents at most.  [default: as many as"
              " its policy can use]")  # fmt: skip
@click.option("--instance", "instances", multiple=True, metavar="NAME,spot=$,on-demand=$[,memory-gib=G][,speed=X]…",
              help="The instance type: $ per hour, memory of its device, and how many times as fast as that of the"
              " profile; also network-gb-s, trace, climate, rate, nodes. A --sweep takes several.  [default:"
              " --spot-price and --on-demand-price]")  # fmt: skip
@click.option("--profile", "profile_name", metavar="NAME|FILE", help="Of the model: bert-large, gpt-2,"
              " gpt-3-2.7b, gpt-3-6.7b, or a file of JSON, such as bamboo profile writes.")  # fmt: skip
@click.option("--pipelines", type=click.IntRange(min=1), help="Data-parallel pipelines.  [default: as many as there"
              " are nodes for on average; a --sweep tries several]")  # fmt: skip
@click.option("--stages", type=click.IntRange(min=1), help="Stages of each.  [default: the profile's; a --sweep tries"
              " several]")  # fmt: skip
@click.option("--config", "config_file", type=click.Path(exists=True, dir_okay=False), help="ds_config.json, whose"
              ' "bamboo" block the job has.')  # fmt: skip
@click.option("--memory-gib", type=click.FloatRange(min=0), help="Of a device; 0: not looked at.  [default: the"
              " profile's]")  # fmt: skip
@click.option("--policy", "policies", default=_POLICIES, show_default=True, metavar="NAME[,NAME…]", help="What is"
              " compared; bamboo:MODE is one of the modes of redundancy.mode, bamboo-whole-stages divides no stage. A"
              " --sweep tries three modes of bamboo, and has no limit.")  # fmt: skip
@click.option("--seeds", type=click.IntRange(min=1), help="Runs, of which each draws anew what is drawn.  [default: 1;"
              f" of the best of a --sweep {_SEEDS}]")  # fmt: skip
@click.option("--sweep", is_flag=True, help="Find the job of lowest cost per sample: try arrangements, modes, blocks,"
              " spare nodes and checkpoint intervals of each policy, and say whether it is worth it.")  # fmt: skip
@click.option("--at-least", type=click.FloatRange(min=0), help="Samples per second that jobs of a --sweep have to do."
              "  [default: 0.8 of those of the fastest]")  # fmt: skip
@click.option("--events", type=click.Path(dir_okay=False, path_type=Path), help="Write the events of the first policy's"
              " job, which the other commands read.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@_of_fields(Terms)
def simulate(
    limit: int | None,
    instances: tuple[str, ...],
    profile_name: str | None,
    pipelines: int | None,
    stages: int | None,
    config_file: str | None,
    memory_gib: float | None,
    policies: str,
    seeds: int | None,
    sweep: bool,
    at_least: float | None,
    events: Path | None,
    as_json: bool,
    **others: Any,
) -> None:
    """Simulate a job on nodes that come and go, under several policies.

    Nodes are those of a --trace, or drawn like a --climate. The planner, the schedules, the leader's decisions and the
    accounting are those of real jobs; how long passes, messages and starts take is assumed.
    """
    # Only now: what schedules are made of takes its time to load.
    from ..simulate.sweep import Sweep, swept_policies
    from . import simulate_view as view

    fixed_s = others["checkpoint_s"]
    nodes, terms = _made(Nodes, others), _made(Terms, others)
    config = (bamboo_config(config_file) if config_file else None) or BambooConfig()
    types = _types(instances, nodes, profile_of(profile_name, memory_gib), terms, config, limit if sweep else None)
    names = [name.strip() for name in policies.split(",") if name.strip()]
    if not names or len(set(names)) != len(names):
        raise ConfigError(f"--policy {policies!r}: name at least one, and each once")
    if sweep:
        if events is not None:
            raise ConfigError("--events: those of one job, and a --sweep tries many: leave out one of them")
        tried = swept_policies(names)
        swept = Sweep(types, tried, pipelines, stages, seeds or _SEEDS, at_least, fixed_s, _tell).run()
        again = _again(swept.ranking[0], swept.seeds) if swept.paste is not None else None
        click.echo(swept.model_dump_json()) if as_json else view.show_sweep(swept, again)
        return
    if len(types) > 1 or at_least is not None:
        raise ConfigError("several --instance, and --at-least: only with --sweep")
    (only,) = types.values()
    report, outcomes = only.but(pipelines=pipelines, stages=stages, limit=limit).run(names, seeds or 1)
    if events is not None:
        if not outcomes:
            raise ConfigError("--events: on-demand and limit have no events; name another policy first")
        _write(events, next(iter(outcomes.values())).events)
    if as_json:
        click.echo(json.dumps(report.model_dump(mode="json")))
    else:
        view.show(report)


def _tell(text: str) -> None:
    click.echo(f"bamboo: {text}", err=True)


def _given() -> dict[str, click.Parameter]:
    """The options on the command line, by their names."""
    context = click.get_current_context()
    sources = {str(each.name): (each, context.get_parameter_source(str(each.name))) for each in context.command.params}
    return {name: each for name, (each, where) in sources.items() if where is click.core.ParameterSource.COMMANDLINE}


def _again(best: Ranked, seeds: int) -> str | None:
    """The command that simulates the first setup of a sweep alone; ``None``: no options say the same."""
    from ..simulate.instances import of_option

    setup, values = best.setup, click.get_current_context().params
    if values["limit"] not in (None, setup.nodes):
        return None
    command = ["bamboo", "simulate"]
    for name, parameter in _given().items():
        if name not in _CHOSEN:
            command += [parameter.opts[0], str(values[name])]
    for text in values["instances"]:
        if of_option(text).name == setup.instance:
            command += ["--instance", text]
    chosen = {
        "--checkpoint-s": f"{best.checkpoint_s:.12g}",
        "--pipelines": setup.pipelines,
        "--stages": setup.stages,
        "--limit": setup.nodes,
        "--seeds": seeds,
        "--config": "ds_config.json",
    }
    return shlex.join([*command, *(str(part) for pair in chosen.items() for part in pair)])


def _types(
    options: Sequence[str], asked: Nodes, profile: Profile, terms: Terms, config: BambooConfig, limit: int | None
) -> dict[str, Simulation]:
    """The simulations of each ``--instance``, else of one with the assumed prices.

    Args:
        options: the instance types.
        asked: the nodes of the other options.
        profile, terms, config: of the job.
        limit: most nodes of all jobs together; ``None``: any.
    """
    from ..simulate.instances import Instance, of_option, offered

    given, types = _given(), [of_option(text) for text in options]
    priced = [option(name) for name in ("spot_price", "on_demand_price") if types and name in given]
    if priced:
        raise ConfigError(f"{', '.join(priced)}: --instance has prices of its own")
    if twice := {each.name for each in types if [other.name for other in types].count(each.name) > 1}:
        raise ConfigError(f"--instance: {', '.join(twice)} is there more than once: give each type a name of its own")
    types = types or [Instance(name=_DEFAULT, spot=terms.spot_price, on_demand=terms.on_demand_price)]
    own = {each.name: each.own(asked) for each in types}
    wanted = asked.model_dump(exclude_defaults=True)
    unused = [option(name) for name, value in wanted.items() if all(getattr(o, name) != value for o in own.values())]
    if unused:
        raise ConfigError(f"{', '.join(unused)}: every --instance has its own trace, climate, rate or nodes: leave out")
    return {each.name: offered(each, own[each.name].market(limit), profile, terms, config) for each in types}


def profile_of(name: str | None, memory_gib: float | None) -> Profile:
    """The profile that ``--profile`` names, on devices of ``--memory-gib``."""
    if name is None:
        raise ConfigError("--profile is missing: name a preset or a file")
    profile = load(name)
    if memory_gib is None:
        return profile
    return profile.model_copy(update={"memory_bytes": round(memory_gib * GIB) or None})


def _write(path: Path, events: Sequence[Any]) -> None:
    try:
        path.write_text("".join(event.to_json() + "\n" for event in events))
    except OSError as error:
        raise ConfigError(f"--events: cannot write {path}: {error}") from error
