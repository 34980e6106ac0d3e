"""This package beside published simulations, on their traces: throughput by live nodes that Oobleck's authors measured
(SOSP 2023), and what their simulators of Bamboo, Varuna and Oobleck make of a spot market; the same models on others.

The device's speed is chosen so that the fastest job of as many nodes as their largest is as fast as theirs; everything
else is this package's planner, schedules, decisions and measured pauses. See ``--help``.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import click
from common import HERE, console, save_json
from rich.table import Table

from bamboo_ds.config import BambooConfig, RedundancyMode
from bamboo_ds.simulate.bamboo import planned
from bamboo_ds.simulate.baselines import Stock
from bamboo_ds.simulate.market import Market, parse
from bamboo_ds.simulate.pace import Pace, Stretch
from bamboo_ds.simulate.profile import Device, Profile, Shape, transformer
from bamboo_ds.simulate.run import LIMIT, Report, Simulation
from bamboo_ds.simulate.terms import Terms

SHARED = HERE.parent.parent / "shared"
MODES = RedundancyMode.LAZY, RedundancyMode.EAGER_FORWARD
POLICIES = ("bamboo", "checkpoint-restart", LIMIT)
_GIB = 2**30
A40 = Device(149.7e12, 0.3, 696e9, 48 * _GIB, "NVIDIA A40 48 GB, speed ASSUMED: that of the published throughput")
#: 200 Gbit/s between the nodes of Oobleck's testbed.
TERMS = Terms(network_gb_s=25.0)
#: Pipelines and stages, and the redundancy mode.
Choice = tuple[tuple[int, int], RedundancyMode]
_GPT3 = "GPT-3: Brown et al., NeurIPS 2020, table 2.1"


@dataclass(frozen=True)
class Model:
    """A model of theirs; batches are those of their simulators, rounded to whole micro-batches."""

    name: str
    result: str
    shape: Shape
    micro_batch: int
    global_batch: int


MODELS = (
    Model("BERT-large", "BERT-large", Shape(24, 1024, 16, 512, 30522, "BERT-large"), 32, 8192),
    Model("GPT-2-ours", "GPT-2", Shape(24, 1024, 16, 1024, 50257, "ASSUMED: GPT-2 of 345 million"), 8, 1024),
    Model("GPT-3-medium", "GPT-3-medium", Shape(24, 1024, 16, 2048, 50257, _GPT3), 4, 816),
    Model("GPT-3-2_7b", "GPT-3-2_7b", Shape(32, 2560, 32, 2048, 50257, _GPT3), 4, 512),
    Model("GPT-3-6_7b", "GPT-3-6_7b", Shape(32, 4096, 32, 2048, 50257, _GPT3), 4, 1024),
)


def profile_of(model: Model, device: Device) -> Profile:
    """The profile of a model on a device."""
    return transformer(model.name, model.shape, 8, model.micro_batch, model.global_batch, True, device)


def sizes(profile: Profile, terms: Terms, nodes: int, least: int) -> list[tuple[int, int]]:
    """Pipelines and stages for ``nodes``: those that fit on ``least`` as well, then those that fit, the fastest first.

    Where none does: the one that needs least memory comes first.
    """
    config, whole = BambooConfig(), profile.global_batch // profile.micro_batch
    found: list[tuple[int, float, tuple[int, int]]] = []
    for stages in range(2, len(profile.each) + 1):
        for pipelines in range(1, whole // stages + 1):
            if whole % pipelines or not 0.6 * nodes <= pipelines * stages <= 1.5 * nodes:
                continue
            pace = Pace(profile, terms, pipelines, stages, config.redundancy.mode)
            plans = [planned(pace, count, config) for count in (nodes, least)]
            fit = [pace.footprint.fits(plan) for plan in plans]
            rating = Stretch(pace, plans[0]).seconds if fit[0] else pace.footprint.need(plans[0])
            found.append((-sum(fit) if fit[0] else 0, rating, (pipelines, stages)))
    return [size for *_, size in sorted(found)]


def settings_of(profile: Profile, mode: RedundancyMode = RedundancyMode.EAGER_FORWARD) -> BambooConfig:
    """What a job on such devices goes by: its planner knows their memory."""
    assert profile.memory_bytes is not None
    limit = (profile.memory_bytes - profile.workspace_bytes) // 2**20
    return BambooConfig().overridden({"topology.memory_limit_mb": limit, "redundancy.mode": mode})


def best_job(market: Market, profile: Profile, terms: Terms, tried: int) -> Choice:
    """The job that trains most on ``market``, of the fastest few without losses in either mode, by simulation."""
    counts = [count for *_, count in market.counts(terms.start_s)]
    able = sizes(profile, terms, round(market.node_seconds / market.seconds), min(counts))[:tried]

    def samples(choice: Choice) -> float:
        (pipelines, stages), mode = choice
        config = settings_of(profile, mode)
        whole = Simulation(lambda _: market, profile, terms, config, pipelines=pipelines, stages=stages)
        return whole.alone("bamboo").samples_per_s

    return max(((size, mode) for size in able for mode in MODES), key=samples)


def calibrated(model: Model, speed: float, nodes: int) -> Profile:
    """The profile with which the fastest job of ``nodes`` has ``speed`` samples per second."""
    device = A40
    for _ in range(3):
        best = Stock(profile_of(model, device), TERMS).best(nodes)
        assert best is not None, f"{model.name} does not fit on {nodes} nodes"
        device = replace(device, utilisation=device.utilisation * speed / best.speed)
    return profile_of(model, device)


def replayed(market: Market, throughput: dict[str, float], start_s: float) -> float:
    """Samples per second of the live nodes at every moment, by a table of theirs."""
    least, most = min(map(int, throughput)), max(map(int, throughput))
    total = sum(
        (end - begin) * throughput[str(min(count, most))]
        for begin, end, count in market.counts(start_s)
        if count >= least
    )
    return total / market.seconds


def undisturbed(simulation: Simulation) -> float:
    """Samples per second of a job that divides its work evenly among the live nodes of every moment, at no cost."""
    market, samples = simulation.market(0), 0.0
    for begin, end, count in market.counts(simulation.terms.start_s):
        if stretch := simulation.stretch(count):
            samples += (end - begin) * simulation.profile.global_batch / stretch.seconds
    return samples / market.seconds


def needed_gib(profile: Profile, size: tuple[int, int], count: int) -> float:
    """Memory with which replicas fit on ``count`` members."""
    pace = Pace(profile, TERMS, *size, BambooConfig().redundancy.mode)
    return pace.footprint.need(planned(pace, count, BambooConfig())) / _GIB


def on_market(market: Market, profile: Profile, tried: int) -> dict[str, Any]:
    """The best job of a model on a market, and the other policies."""
    counts = [count for *_, count in market.counts(TERMS.start_s)]
    size, mode = best_job(market, profile, TERMS, tried)
    config = settings_of(profile, mode)
    simulation = Simulation(lambda _: market, profile, TERMS, config, pipelines=size[0], stages=size[1])
    needed = [needed_gib(profile, size, count) for count in (round(market.node_seconds / market.seconds), min(counts))]
    report, _ = simulation.run(POLICIES)
    found = {"size": size, "mode": mode.value, "needed_gib": needed, "undisturbed": undisturbed(simulation)}
    return found | ours(report)


def against_oobleck(trace: Path, reference: dict[str, Any], chosen: list[Model], tried: int) -> list[dict[str, Any]]:
    """A row for each model."""
    market, rows = parse(trace.read_text(), str(trace), 0), []
    for model in chosen:
        begin, table = time.process_time(), reference["throughput"][model.name]
        row: dict[str, Any] = {"model": model.name, "published": reference["results_scaled_p3"][model.result]}
        row["limit_replayed"] = replayed(market, table, TERMS.start_s)
        row |= on_market(market, calibrated(model, table["30"], 30), tried)
        row["seconds"] = time.process_time() - begin
        rows.append(row)
        console.print(f"{model.name}: {row}", highlight=False)
    return rows


def ours(report: Report) -> dict[str, Any]:
    """What is told of a report."""
    keep = ("samples_per_s", "limit_share", "goodput", "restarts", "refused", "pause_s")
    figures = {name: {key: getattr(policy, key) for key in keep} for name, policy in report.policies.items()}
    return {"policies": figures, "fits": report.memory.fits}


def elsewhere(traces: list[Path], reference: dict[str, Any], chosen: list[Model], tried: int) -> list[dict[str, Any]]:
    """A row for each trace and model."""
    rows = []
    for trace in traces:
        market = parse(trace.read_text(), str(trace), 0)
        for model in chosen:
            profile = calibrated(model, reference["throughput"][model.name]["30"], 30)
            rows.append({"trace": trace.stem, "model": model.name, **on_market(market, profile, tried)})
            console.print(rows[-1], highlight=False)
    return rows


def halved(trace: Path, seed: int) -> Market:
    """The market of a trace without those of its nodes, half of them or so, that ``seed`` draws."""
    draw, kept = Random(seed), dict[str, bool]()
    lines = [line for line in trace.read_text().splitlines() if line.strip()]
    there = [line for line in lines if kept.setdefault(line.split(",")[-1].strip(), draw.random() < 0.5)]
    return parse("\n".join(there), str(trace), 0)


def scarce(traces: list[Path], seeds: list[int], reference: dict[str, Any], jobs: list[str]) -> list[dict[str, Any]]:
    """A row for each of ``jobs``, MODEL=PxS, on each market of half the nodes: jobs with more roles than members."""
    rows = []
    for job in jobs:
        name, _, size = job.partition("=")
        pipelines, stages = map(int, size.split("x"))
        (model,) = [model for model in MODELS if model.name == name]
        profile = calibrated(model, reference["throughput"][name]["30"], 30)
        config = settings_of(profile, RedundancyMode.LAZY)
        for trace, seed in product(traces, seeds):
            market = halved(trace, seed)
            of_trace = partial(lambda given, _: given, market)
            simulation = Simulation(of_trace, profile, TERMS, config, pipelines=pipelines, stages=stages)
            report, _ = simulation.run(POLICIES)
            where = {"trace": trace.stem, "half": seed, "nodes": market.node_seconds / market.seconds}
            rows.append({**where, "model": name, "size": size, **ours(report)})
            console.print(rows[-1], highlight=False)
    return rows


@click.command()
@click.option("--trace", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              default=SHARED / "traces" / "oobleck-p3-scaled-11h.csv", show_default=True)  # fmt: skip
@click.option("--reference", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              default=SHARED / "reference" / "oobleck-sosp23.json", show_default=True)  # fmt: skip
@click.option("--other", "others", type=click.Path(exists=True, dir_okay=False, path_type=Path), multiple=True,
              help="Further traces, of which nothing is published.")  # fmt: skip
@click.option("--model", "models", multiple=True, help="Only these.")
@click.option("--tried", type=int, default=4, show_default=True, help="Arrangements that are tried first.")
@click.option("--job", "jobs", multiple=True, metavar="MODEL=PxS",
              help="Only these, on the --other traces with half of the nodes.")  # fmt: skip
@click.option("--half", "seeds", type=int, multiple=True, default=(1, 3, 4), show_default=True,
              help="Seeds of the draws of these nodes.")  # fmt: skip
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("out"), show_default=True)
def main(trace: Path, reference: Path, others: tuple[Path, ...], models: tuple[str, ...], tried: int,
         jobs: tuple[str, ...], seeds: tuple[int, ...], out: Path) -> None:  # fmt: skip
    """SIMULATE this package on published traces, beside published simulations."""
    if jobs:
        found = scarce(list(others), list(seeds), json.loads(reference.read_text()), list(jobs))
        save_json(out / "scarce.json", {"simulated": True, "scarce": found})
        return
    chosen, known = [model for model in MODELS if not models or model.name in models], json.loads(reference.read_text())
    rows = against_oobleck(trace, known, chosen, tried)
    table = Table("model", "limit", "bamboo*", "varuna*", "oobleck*", "here", "of the limit", "of its own", "size",
                  "GiB", title="samples/s; *: published; all SIMULATED; its own: what this job would train if losses "
                                "cost nothing; GiB: needed with mean and least nodes")  # fmt: skip
    for row in rows:
        told, own = row["published"], row["policies"]["bamboo"]
        limit = row["policies"][LIMIT]["samples_per_s"]
        cells = [f"{told['limit']} ({limit:.1f} here)", told["bamboo"], told["varuna"], told["oobleck"]]
        share = "does not fit" if not own["limit_share"] else f"{own['limit_share']:.3f}"
        alone = f"{own['samples_per_s'] / row['undisturbed']:.3f}"
        memory = ", ".join(f"{each:.0f}" for each in row["needed_gib"])
        cells += [f"{own['samples_per_s']:.1f}", share, alone, str(row["size"]), memory]
        table.add_row(row["model"], *map(str, cells))
    console.print(table)
    further = elsewhere(list(others), known, chosen, tried)
    save_json(out / "literature.json", {"simulated": True, "oobleck": rows, "elsewhere": further})


if __name__ == "__main__":
    main()
