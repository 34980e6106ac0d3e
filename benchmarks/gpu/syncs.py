"""Where main threads wait for the device, and how many redundant passes they queue at once: torch's profiler.

Boundary tensors of 1, 16 and 64 MB; two jobs for each size: one under the profiler, one that records its timeline. Two
waits of each iteration are the script's own: for the loss, and at its end. See ``--help``.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from itertools import chain

import click
from bench import Experiment, experiment, table
from common import TRAININGS, Job, JobFailed
from jobs import BACKENDS, WARM_UP, Case, Jobs, Model, seconds
from overhead import MODES
from rich.markup import escape
from timeline import spans

from bamboo_ds.observe.spans import PASSES, REDUNDANT, Span

#: Megabytes of a boundary tensor, by rows of a micro-batch of 256 tokens of 1024 fp32 values each.
ROWS = {1: 1, 16: 16, 64: 64}


@dataclass
class Figures:
    """One size.

    Attributes:
        waits, elsewhere, items, copies: of the rank that waits most, per iteration; see ``profiled`` of
            ``workers/transformer.py``.
        queued: redundant passes between two passes of the member's own: how often so many, per iteration of all ranks.
        most: of them, where there are any.
        problem: why there are no figures.
    """

    megabytes: float
    seconds: float = 0.0
    waits: dict[str, float] = field(default_factory=dict)
    elsewhere: dict[str, float] = field(default_factory=dict)
    items: dict[str, float] = field(default_factory=dict)
    copies: dict[str, float] = field(default_factory=dict)
    queued: dict[int, float] = field(default_factory=dict)
    most: int = 0
    problem: str = ""


def bubbles(found: list[Span]) -> list[int]:
    """Numbers of redundant passes between two passes of the member's own, in the order of an iteration; none is 0."""
    counts = [0]
    for span in found:
        if span.kind in PASSES:
            counts.append(0)
        elif span.kind in REDUNDANT:
            counts[-1] += 1
    return counts


def measure(jobs: Jobs, case: Case, row: Figures, mode: str, iterations: int) -> None:
    """Both jobs."""
    block = next(each.block for each in MODES if each.name == mode)
    steps, more = WARM_UP + iterations, ["--no-checkpoint"]
    profiled = jobs.block(case, f"{row.megabytes:g}-profiled", steps, block, [*more, "--profile", str(iterations)])
    ranks = [json.loads(file.read_text()) for file in sorted(profiled.folder.glob("syncs-*.json"))]
    if len(ranks) != case.workers:
        raise JobFailed(f"{profiled.folder}: {len(ranks)} of {case.workers} workers have left a profile")
    busiest = max(ranks, key=lambda rank: sum(rank["waits"].values()) or sum(rank["items"].values()))
    row.waits, row.elsewhere, row.items, row.copies = (busiest[w] for w in ("waits", "elsewhere", "items", "copies"))
    timed: Job = jobs.block(case, f"{row.megabytes:g}", steps, {**block, "observe": {"timeline": "all"}}, more)
    row.seconds = seconds(timed)
    recorded = list(spans(timed, WARM_UP))
    counts = Counter(chain.from_iterable(bubbles(found) for ranks in recorded for found in ranks.values()))
    row.queued = {count: number / len(recorded) for count, number in sorted(counts.items()) if count}
    row.most = max(row.queued, default=0)


@experiment("syncs")
@click.option("--stages", type=click.IntRange(min=2), default=4, show_default=True)
@click.option("--micro-batches", type=click.IntRange(min=1), default=8, show_default=True)
@click.option("--iterations", type=click.IntRange(min=1), default=10, show_default=True)
@click.option("--mode", type=click.Choice([mode.name for mode in MODES]), default="eager-frc", show_default=True)
@click.option("--backend", type=click.Choice(BACKENDS), default="gloo", show_default=True)
def main(run: Experiment, stages: int, micro_batches: int, iterations: int, mode: str, backend: str) -> None:
    """Count waits of main threads for the device, and redundant passes that are queued at once."""
    if not run.gpu:
        stages, micro_batches, iterations = 2, 4, 2
    view = table(
        f"M={micro_batches}, {mode}, {backend}",
        "MB",
        "[s]",
        "waits",
        " of them",
        "elsewhere",
        "items",
        "copies",
        "queued",
        " times",
    )
    rows = []
    for megabytes, size in ROWS.items() if run.gpu else {1 / 64: 4}.items():
        # Both of 4 bytes in each element: (size, 256, 1024), and (4, 16, 64).
        model = Model(2 * stages, 1024, 256, 16, size, "fused") if run.gpu else Model(4, 64, 16, 4, size, "fused")
        row, case = Figures(megabytes), Case(TRAININGS["fp32"], stages)
        try:
            measure(Jobs(run, model, micro_batches, backend), case, row, mode, iterations)
        except JobFailed as error:
            row.problem = error.message
            run.blame(f"{megabytes:g} MB: {error.message}")
        rows.append(row)
        names = ", ".join(f"{name} {count:g}" for name, count in row.waits.items())
        often = ", ".join(f"{count}: {number:g}" for count, number in row.queued.items())
        sums = [f"{sum(each.values()):g}" for each in (row.waits, row.elsewhere, row.items, row.copies)]
        cells = (sums[0], names or escape(row.problem), *sums[1:], str(row.most), often)
        view.add_row(f"{megabytes:g}", f"{row.seconds:.3f}", *cells)
        run.save(rows=[asdict(each) for each in rows])
    run.end(view, rows=[asdict(each) for each in rows])


if __name__ == "__main__":
    main()
