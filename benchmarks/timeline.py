"""Where the stages of a traced job spend their time, and how long its messages take."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from common import Job, percentile
from rich.table import Table

#: Column of each kind of instruction.
_COLUMNS = {
    "ForwardPass": "forward",
    "BackwardPass": "backward",
    "Redundant": "redundant",
    "RecvActivation": "wait act",
    "RecvGrad": "wait grad",
    "SendActivation": "send",
    "SendGrad": "send",
    "LoadMicroBatch": "load",
    "SendReplica": "send repl",
    "RecvReplica": "wait repl",
    "ReduceGrads": "reduce",
    "ReduceTiedGrads": "reduce",
    "Commit": "commit",
    "OptimizerStep": "step",
    "StepReplica": "step repl",
    "Iteration": "iteration",
}


@dataclass(frozen=True)
class Span:
    """One instruction of one stage; times on the host's monotonic clock, in seconds."""

    name: str
    begin: float
    end: float


def spans(job: Job, warm_up: int) -> Iterator[dict[int, list[Span]]]:
    """Spans by rank in the order of their ends, for every counted iteration."""
    results = job.results()
    steps: dict[int, dict[int, list[Span]]] = defaultdict(lambda: defaultdict(list))
    for rank, result in results.items():
        for step, name, _, begin, end in result["trace"]:
            if step >= warm_up:
                steps[step][rank].append(Span(name, begin, end))
    for _, ranks in sorted(steps.items()):
        yield ranks


def breakdown_table(title: str, job: Job, warm_up: int) -> Table:
    """Median over iterations of the milliseconds per kind of instruction, by stage.

    Redundant passes are timed by themselves. ``rest`` is what no instruction accounts for; CPU is that of the whole
    process from its start on.
    """
    sums: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for ranks in spans(job, warm_up):
        for rank, found in ranks.items():
            parts: dict[str, float] = defaultdict(float)
            for span in found:
                if span.name in _COLUMNS:
                    parts[_COLUMNS[span.name]] += (span.end - span.begin) * 1000
            parts["rest"] = 2 * parts["iteration"] - sum(parts.values())
            for name, value in parts.items():
                sums[rank][name].append(value)
    present = {name for parts_of in sums.values() for name in parts_of}
    names = [name for name in [*dict.fromkeys(_COLUMNS.values()), "rest"] if name in present]
    table = Table(title=title, title_justify="left")
    for column in ("stage", *names):
        table.add_column(column, justify="right")
    for rank, parts_of in sorted(sums.items()):
        table.add_row(str(rank), *(f"{median(parts_of.get(name, [0.0])):.1f}" for name in names))
    return table


def named(found: list[Span], name: str) -> list[Span]:
    """Spans of one kind."""
    return [span for span in found if span.name == name]


def latency_lines(job: Job, warm_up: int) -> list[str]:
    """How long messages take, and by how much redundant passes keep them waiting.

    The n-th pass of a stage produces the n-th message of its edge. Latency counts where the receiver waited already
    when the pass ended; a message is late where a redundant pass was running then.
    """
    latency: dict[str, list[float]] = defaultdict(list)
    late: list[float] = []
    passes: dict[str, list[float]] = defaultdict(list)
    iterations = 0
    for ranks in spans(job, warm_up):
        iterations += 1
        for rank, found in ranks.items():
            redundant = named(found, "Redundant")
            for name in ("ForwardPass", "BackwardPass"):
                passes[name] += [span.end - span.begin for span in named(found, name)]
            for produced, received, source in (
                ("ForwardPass", "RecvActivation", rank - 1),
                ("BackwardPass", "RecvGrad", rank + 1),
            ):
                made = named(ranks[source], produced) if source in ranks else []
                if produced == "ForwardPass" and source in ranks:
                    made = own_passes(ranks[source], produced)
                for origin, receive in zip(made, named(found, received), strict=False):
                    if receive.begin < origin.end:
                        latency[received].append(receive.end - origin.end)
                    running = [r for r in redundant if r.begin < origin.end < r.end]
                    if running:
                        late.append(running[0].end - origin.end)
    lines = []
    for name, values in {**passes, **latency}.items():
        shown = [f"{1000 * percentile(values, share):.2f}" for share in (0.1, 0.5, 0.9)]
        what = "pass" if name in passes else "end of the pass until received"
        lines.append(f"{name}: {what}, p10/p50/p90 {' / '.join(shown)} ms ({len(values) // iterations} per iteration)")
    if late:
        lines.append(
            f"messages kept waiting by a redundant pass: {len(late) / iterations:.1f} per iteration, "
            f"{1000 * sum(late) / iterations:.1f} ms in all, worst {1000 * max(late):.1f} ms"
        )
    return lines


def own_passes(found: list[Span], name: str) -> list[Span]:
    """Passes of the stage itself, without those inside redundant passes."""
    redundant = named(found, "Redundant")
    return [s for s in named(found, name) if not any(r.begin <= s.begin and s.end <= r.end for r in redundant)]
