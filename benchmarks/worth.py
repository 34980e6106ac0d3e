"""When is it worth it? Speed-up over checkpoint-restart, and cost against on-demand nodes, over the losses of a cluster
in an hour and the seconds that a restart takes, for four models.

SIMULATED; the device's speed, prices and the time until a node is replaced are ASSUMED. Every policy has its best
arrangement: this package, for each rate of losses, the best of the fastest few and of two modes, checkpoint-restart
the fastest one that its nodes allow after each restart, and asynchronous checkpoints at the interval of Young and Daly.
See ``--help``.
"""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
from common import HERE, console, new_figure, save_figure, save_json
from literature import A40, MODELS, TERMS, Choice, Model, best_job, profile_of, settings_of
from rich.table import Table

from bamboo_ds.config import RedundancyMode
from bamboo_ds.simulate.market import CLIMATES, Market, drawn, parse
from bamboo_ds.simulate.run import Simulation
from bamboo_ds.simulate.terms import Terms

#: Published throughput of 30 of them (Oobleck, SOSP 2023) comes to 6 to 16 % of the device's peak.
DEVICE = replace(A40, utilisation=0.12, text="NVIDIA A40 48 GB, ASSUMED to reach 12 % of its peak")
CLIMATE = CLIMATES["bamboo-33"]
CHOSEN = tuple(model for model in MODELS if model.name != "GPT-3-medium")
#: Shares of the nodes that are lost in an hour; the paper's are 10, 16 and 33 %.
RATES = (0.05, 0.10, 0.16, 0.33)
#: Seconds of a restart.
RESTARTS = (15.0, 60.0, 300.0, 900.0)
TRACES = HERE.parent.parent / "shared" / "traces"


@dataclass(frozen=True)
class Cell:
    """One point of the picture.

    Attributes:
        losses: at once or one by one, of the whole cluster in an hour.
        size: pipelines and stages.
        mode: this package's redundancy mode.
        speed, restarting, on_demand: samples per second of this package, of checkpoint-restart, and of the fastest job
            on demand.
        cost, restarting_cost, on_demand_cost: $ per million samples.
        fatal: restarts of this package's job.
    """

    model: str
    rate: float
    restart_s: float
    losses: float
    size: tuple[int, int]
    mode: RedundancyMode
    speed: float
    restarting: float
    on_demand: float
    cost: float | None
    restarting_cost: float | None
    on_demand_cost: float | None
    fatal: float

    @property
    def ratio(self) -> float:
        """Speed-up over checkpoint-restart."""
        return self.speed / self.restarting if self.restarting else float("inf")

    @property
    def saved(self) -> float:
        """How many times as much samples cost on demand."""
        return self.on_demand_cost / self.cost if self.cost and self.on_demand_cost else 0.0


def terms_of(restart_s: float) -> Terms:
    """A node that comes needs as long as a restart until its worker is ready."""
    return TERMS.model_copy(update={"restart_s": restart_s, "start_s": restart_s})


def cell(model: Model, market: Market, rate: float, restart_s: float, choice: Choice, nodes: int) -> dict[str, Any]:
    """Simulate one; for a process of its own."""
    (pipelines, stages), mode = choice
    profile = profile_of(model, DEVICE)
    config = settings_of(profile, mode)
    whole = Simulation(lambda _: market, profile, terms_of(restart_s), config, pipelines=pipelines, stages=stages)
    own, other, steady = whole.alone("bamboo"), whole.alone("checkpoint-restart"), whole.on_demand(nodes)
    return asdict(
        Cell(
            model.name,
            rate,
            restart_s,
            market.losses / market.seconds * 3600,
            (pipelines, stages),
            mode,
            own.samples_per_s,
            other.samples_per_s,
            steady.samples_per_s,
            own.cost_per_million,
            other.cost_per_million,
            steady.cost_per_million,
            own.restarts,
        )
    )


def market_of(rate: float, nodes: int, hours: float) -> Market:
    """The nodes of a cluster."""
    return drawn(replace(CLIMATE, hourly=rate), nodes, hours * 3600, 0)


def recorded() -> dict[str, float]:
    """Losses in an hour of the traces that are there, by name."""
    found = {}
    for path in sorted(TRACES.glob("*.csv")):
        market = parse(path.read_text(), str(path), 0)
        found[path.stem] = market.losses / market.seconds * 3600
    return found


def plot(cells: list[Cell], marks: dict[str, float], nodes: int, path: Path) -> None:
    """Above the speed-up over checkpoint-restart, below what on-demand nodes cost against this package's."""
    from matplotlib.colors import TwoSlopeNorm

    names = list(dict.fromkeys(each.model for each in cells))
    figure, axes = new_figure(2, len(names), figsize=(3.6 * len(names), 6.6), squeeze=False)
    for column, name in enumerate(names):
        own = [each for each in cells if each.model == name]
        rows, columns = sorted({c.restart_s for c in own}), sorted({c.losses for c in own})
        table = {(c.restart_s, c.losses): c for c in own}
        for line, what in enumerate(("ratio", "saved")):
            axis = axes[line][column]
            values = [[getattr(table[row, each], what) for each in columns] for row in rows]
            axis.imshow(
                values, origin="lower", aspect="auto", cmap="RdYlGn",
                norm=TwoSlopeNorm(1.0, 0.5, 2.0 if line == 0 else 4.0),
            )  # fmt: skip
            for y, row in enumerate(values):
                for x, value in enumerate(row):
                    axis.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=9)
            low, high = min(map(min, values)), max(map(max, values))
            if low < 1 < high:
                axis.contour(values, levels=[1.0], colors="black", linewidths=2)
            axis.set_xticks(range(len(columns)), [f"{each:.1f}\n{table[rows[0], each].rate:.0%}/h" for each in columns])
            axis.set_yticks(range(len(rows)), [f"{row:.0f}" for row in rows])
            axis.set_title(f"{name}\n" + ("speed-up over checkpoint-restart" if line == 0 else "on-demand cost / cost"),
                           fontsize=9)  # fmt: skip
            if column == 0:
                axis.set_ylabel("seconds of a restart")
            axis.set_xlabel("losses of the cluster in an hour", fontsize=8)
            for trace, losses in marks.items():
                if columns[0] <= losses <= columns[-1]:
                    place = next(i for i in range(len(columns) - 1) if losses <= columns[i + 1])
                    x = place + (losses - columns[place]) / (columns[place + 1] - columns[place])
                    axis.axvline(x, color="gray", linestyle=":", linewidth=1)
                    if line == 0:
                        axis.text(x, len(rows) - 0.55, trace.partition("-p3")[0], fontsize=6, rotation=90, va="top")
    figure.suptitle(f"SIMULATED: {nodes} nodes of {DEVICE.text}", fontsize=10)
    save_figure(figure, path)


@click.command()
@click.option("--nodes", type=int, default=64, show_default=True)
@click.option("--hours", type=float, default=4.0, show_default=True)
@click.option("--rate", "rates", type=float, multiple=True, help=f"Share lost in an hour.  [default: {RATES}]")
@click.option("--restart-s", "restarts", type=float, multiple=True, help=f"Of a restart.  [default: {RESTARTS}]")
@click.option("--model", "models", multiple=True, help="Only these.")
@click.option("--tried", type=int, default=3, show_default=True, help="Arrangements that are tried first.")
@click.option("--processes", type=int, default=multiprocessing.cpu_count(), show_default=True)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("out"), show_default=True)
def main(nodes: int, hours: float, rates: tuple[float, ...], restarts: tuple[float, ...], models: tuple[str, ...],
         tried: int, processes: int, out: Path) -> None:  # fmt: skip
    """SIMULATE when this package is worth it: a picture and a table."""
    begin = time.monotonic()
    chosen = [model for model in CHOSEN if not models or model.name in models]
    rates, restarts = rates or RATES, restarts or RESTARTS
    markets = {rate: market_of(rate, nodes, hours) for rate in rates}
    with ProcessPoolExecutor(processes) as pool:
        found = {
            (model, rate): pool.submit(
                best_job, markets[rate], profile_of(model, DEVICE), terms_of(RESTARTS[1]), tried
            )
            for model in chosen for rate in rates
        }  # fmt: skip
        best = {key: each.result() for key, each in found.items()}
        for (model, rate), ((pipelines, stages), mode) in best.items():
            console.print(f"{model.name}, {rate:.0%}: {pipelines} pipelines of {stages} stages, {mode.value}")
        waiting = [
            pool.submit(cell, model, markets[rate], rate, restart_s, choice, nodes)
            for (model, rate), choice in best.items() for restart_s in restarts
        ]  # fmt: skip
        cells = [Cell(**each.result()) for each in waiting]
    table = Table("model", "D x P", "mode", "lost in an hour", "restart [s]", "samples/s", "checkpoint-restart",
                  "speed-up", "$ / million", "on demand / cost", "fatal",
                  title=f"SIMULATED: {nodes} nodes, {hours:g} h")  # fmt: skip
    for each in cells:
        cost = "" if each.cost is None else f"{each.cost:.0f}"
        what = each.model, f"{each.size[0]} x {each.size[1]}", each.mode.partition("-")[0]
        where = f"{each.rate:.0%}, {each.losses:.1f} losses", f"{each.restart_s:.0f}"
        speeds = f"{each.speed:.1f}", f"{each.restarting:.1f}", f"{each.ratio:.2f}"
        table.add_row(*what, *where, *speeds, cost, f"{each.saved:.2f}", f"{each.fatal:.0f}")
    console.print(table)
    marks = recorded()
    console.print(f"losses in an hour of recorded markets: {marks}; {time.monotonic() - begin:.0f} s")
    save_json(
        out / "worth.json",
        {"simulated": True, "device": DEVICE.text, "cells": [asdict(each) for each in cells], "recorded": marks},
    )
    plot(cells, marks, nodes, out / "worth.png")


if __name__ == "__main__":
    main()
