"""Simulates again what ``spot.py`` has measured of bamboo, and compares: samples within 5 %, pauses within 20 %.

What the simulation is told: the nodes, the shape, the time of the job's own steps before its first loss, and how long
starts, notices with agreement, changes of plan, checkpoints and restarts took on that machine. What it predicts: how
fast every plan is, what is redone, what is lost, and so the samples. The recorded run that ``bamboo simulate
--measured`` reads is left in ``--out``. The machine must have no other work.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import click
from common import JobFailed, console

from bamboo_ds.config import BambooConfig
from bamboo_ds.simulate.baselines import Stock
from bamboo_ds.simulate.measured import Done, Measured, compare, simulation
from bamboo_ds.simulate.pace import OVERHEAD
from bamboo_ds.simulate.profile import Layer, Profile
from bamboo_ds.simulate.terms import Terms

#: Steps before an interrupted one whose median tells how long it would have taken.
_BEFORE = 9
_PARAMETERS = 1000


def recorded(spot: dict[str, Any], source: str) -> Measured:
    """The recorded run of bamboo in what ``spot.py`` has written."""
    work, bamboo, options = spot["work"], spot["systems"]["bamboo"], spot["options"]
    pipelines, stages = work["shape"]["pipelines"], work["shape"]["stages"]
    seconds: dict[str, list[float]] = {"takeover": [], "reconfiguration": [], "restart": []}
    for pause in bamboo["pauses"]:
        seconds[pause["kind"]].append(pause["seconds"])
    terms: dict[str, float] = {"network_gb_s": 10.0, "storage_gb_s": 10.0, "rebuild_s": 0.0}
    # Layers have a thousand parameters each, so that a copy to host memory takes as long as it did.
    terms["host_gb_s"] = _PARAMETERS * 16 * work["layers"] / stages / spot["save_s"] / 1e9
    terms |= {"checkpoint_s": max(1, spot["save_every_steps"]) * spot["step_s"]}
    terms |= {"on_demand_price": options["on_demand_price"], "spot_price": options["spot_price"]}
    for name, values in (
        ("detection_s", seconds["takeover"]),
        ("switch_s", seconds["reconfiguration"]),
        ("restart_s", seconds["restart"]),
        ("start_s", bamboo["starts"]),
    ):
        terms |= {name: median(values)} if values else {}
    delays = [delay for pause in bamboo["pauses"] if (delay := _delay(pause, bamboo["done"])) is not None]
    return Measured(
        source=source,
        profile=_profile(work, stages, pipelines, _undisturbed_s(spot), Terms(**terms)),
        pipelines=pipelines,
        stages=stages,
        seconds=bamboo["seconds"],
        changes=_changes(spot["events"], pipelines * stages),
        terms=Terms(**terms),
        bamboo={"topology": {"blocks": _blocks(options["blocks"])}},
        policies={"bamboo": Done(samples=bamboo["samples"], pause_s=fmean(delays) if delays else None)},
    )


def _blocks(text: str) -> str | int:
    return text if text == "auto" else int(text)


def _undisturbed_s(spot: dict[str, Any]) -> float:
    """Seconds of a step, less what this package is assumed to cost: of the steps before the first change of members."""
    first = min((event["at_s"] for event in spot["events"]), default=math.inf)
    before = [step["end"] - step["begin"] for step in spot["systems"]["bamboo"]["done"] if step["end"] <= first]
    return median(before) / OVERHEAD[BambooConfig().redundancy.mode] if before else spot["step_s"]


def _profile(work: dict[str, Any], stages: int, pipelines: int, step_s: float, terms: Terms) -> Profile:
    """Layers of a length with which the undisturbed job's steps take ``step_s``."""

    def made(times: float) -> Profile:
        forward = work["layer_s"] * times
        layer = Layer(count=work["layers"], forward_s=forward, backward_s=2 * forward, parameters=_PARAMETERS)
        batch = work["micro_batches"] * work["size"] * pipelines
        return Profile(
            name="emulated", layers=(layer,), micro_batch=work["size"], global_batch=batch, stages=stages,
            source="EMULATED devices, spot.py",
        )  # fmt: skip

    now = Stock(made(1.0), terms).arrangement(pipelines, stages)
    assert now is not None
    return made(step_s / now.seconds)


def _changes(events: Sequence[dict[str, Any]], size: int) -> list[tuple[float, str, str]]:
    """Nodes of the begin, of which those are named that are lost, and what becomes of them."""
    joined: set[str] = set()
    first: dict[str, None] = {}
    later: list[tuple[float, str, str]] = []
    for event in events:
        if event["kind"] == "join":
            joined.add(event["node"])
        elif event["node"] not in joined:
            first[event["node"]] = None
        later.append((event["at_s"], "add" if event["kind"] == "join" else "remove", event["node"]))
    names = [*first, *(f"stays-{number}" for number in range(size - len(first)))]
    return [*((0.0, "add", name) for name in names), *later]


def _delay(pause: dict[str, Any], done: Sequence[dict[str, Any]]) -> float | None:
    """By how much longer than those before it the step took in which a takeover came."""
    for number, step in enumerate(done):
        if pause["kind"] == "takeover" and step["begin"] <= pause["at"] < step["end"]:
            before = [each["end"] - each["begin"] for each in done[max(0, number - _BEFORE) : number]]
            return max(0.0, step["end"] - step["begin"] - median(before)) if before else None
    return None


@click.command()
@click.argument("spot", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), help="For the recorded run.  [default: beside it]"
)
def main(spot: Path, out: Path | None) -> None:
    """Compare the run of SPOT, a JSON file of spot.py, with a simulation of it."""
    content = json.loads(spot.read_text())
    run = recorded(content, f"benchmarks/spot.py, {content['machine']['time']}")
    path = out or spot.with_name(f"{spot.stem}-recorded.json")
    path.write_text(run.model_dump_json(indent=1) + "\n")
    console.print(f"[dim]{path}[/dim]")
    rows = compare(run, simulation(run).run(["bamboo"])[0])
    for row in rows:
        console.print(str(row), highlight=False)
    if not all(row.holds for row in rows):
        raise JobFailed("a prediction is too far from what was measured")


if __name__ == "__main__":
    main()
