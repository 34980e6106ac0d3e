"""Iteration time and memory of redundancy against stock DeepSpeed: transformer blocks, all workers on one GPU.

Blocks are of the sizes of BERT-large and GPT-2 with 1.5 billion parameters, two for each stage. See ``--help``.
"""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass, replace
from typing import Any

import click
from bench import MIB, Experiment, experiment, table
from common import TRAININGS, Job, JobFailed
from jobs import BACKENDS, WARM_UP, Case, Jobs, Model, peaks, seconds
from overhead import MODES
from rich.markup import escape

BLOCKS_PER_STAGE = 2
MODELS = {
    "bert-large": Model(layers=0, width=1024, context=512, heads=16, attention="fused"),
    "gpt2-1.5b": Model(layers=0, width=1600, context=1024, heads=25, attention="fused"),
}
TINY = {"tiny": Model(layers=0, width=64, context=16, heads=4, attention="fused")}
WANTED = ("none", "lazy", "eager-frc")


@dataclass
class Figures:
    """One mode of one job (``stock``: without the block).

    Attributes:
        seconds: median of an iteration.
        ratio: of that to stock DeepSpeed's, if that has run.
        peaks: bytes of each worker, by rank; see :func:`jobs.peaks`.
        frc: share of the redundant forward passes that have run.
        problem: why there are no figures.
    """

    model: str
    workers: int
    mode: str
    seconds: float = 0.0
    ratio: float | None = None
    peaks: tuple[int, ...] = ()
    frc: float | None = None
    problem: str = ""


def coverage(job: Job) -> float | None:
    """Share of the redundant forward passes that have run, after the first steps; ``None``: there are none."""
    steps = job.events("step")[WARM_UP:]
    total = sum(step["frc_total"] for step in steps)
    return sum(step["frc_done"] for step in steps) / total if total else None


def measure(jobs: Jobs, case: Case, model: str, mode: str, steps: int) -> Figures:
    """One job."""
    found = Figures(model, case.workers, mode)
    try:
        if mode == "stock":
            job = jobs.stock(case, steps, ["--no-checkpoint"])
        else:
            block = next(each.block for each in MODES if each.name == mode)
            job = jobs.block(case, mode, steps, block, ["--no-checkpoint"])
    except JobFailed as error:
        found.problem = error.message
        return found
    found.seconds, found.peaks, found.frc = seconds(job), tuple(peaks(job)), coverage(job)
    return found


def cells(row: Figures) -> list[str]:
    """A line of the table."""
    names = [row.model, str(row.workers), row.mode]
    if row.problem:
        return [*names, f"[red]{escape(row.problem.splitlines()[0])}[/red]"]
    ratio, share = ("" if each is None else f"{each:.2f}" for each in (row.ratio, row.frc))
    return [*names, f"{row.seconds:.3f}", ratio, " ".join(f"{p / MIB:.0f}" for p in row.peaks), share]


@experiment("overhead")
@click.option("--model", "wanted", type=click.Choice(list(MODELS)), multiple=True, help="[default: all]")
@click.option("--stages", type=click.IntRange(min=2), multiple=True, default=(4, 2), show_default=True)
@click.option("--micro-batches", type=click.IntRange(min=1), default=16, show_default=True)
@click.option("--iterations", type=click.IntRange(min=1), default=6, show_default=True, help="Counted ones.")
@click.option("--training", type=click.Choice(["fp32", "fp16", "bf16"]), default="bf16", show_default=True)
@click.option("--backend", type=click.Choice(BACKENDS), default="gloo", show_default=True)
def main(
    run: Experiment,
    wanted: tuple[str, ...],
    stages: tuple[int, ...],
    micro_batches: int,
    iterations: int,
    training: str,
    backend: str,
) -> None:
    """Measure what redundancy costs without losses: none, lazy and eager against stock DeepSpeed."""
    models: dict[str, Any] = {name: MODELS[name] for name in wanted or MODELS} if run.gpu else TINY
    if not run.gpu:
        stages, micro_batches, iterations = (2,), 4, 2
    rows: list[Figures] = []
    view = table(f"M={micro_batches}, {training}, {backend}", "model", "workers", " mode", "[s]", "ratio", "MiB", "FRC")
    for (name, model), count in itertools.product(models.items(), stages):
        jobs = Jobs(run, replace(model, layers=BLOCKS_PER_STAGE * count), micro_batches, backend)
        for mode in ("stock", *WANTED):
            row = measure(jobs, Case(TRAININGS[training], count), name, mode, WARM_UP + iterations)
            rows.append(row)
            stock = next(r for r in rows if (r.model, r.workers, r.mode) == (name, count, "stock"))
            row.ratio = None if stock.problem else row.seconds / stock.seconds
            view.add_row(*cells(row))
            run.say(" | ".join(cells(row)))
            if row.problem:
                run.problems.append(f"{name}, {count} stages, {mode}: {row.problem.splitlines()[0]}")
            run.save(rows=[asdict(each) for each in rows])
    run.end(view, micro_batches=micro_batches, training=training, backend=backend, rows=[asdict(each) for each in rows])


if __name__ == "__main__":
    main()
