"""Where the stages of a traced job spend their time, and how long its messages take."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from statistics import median

from common import Job, percentile
from rich.table import Table

from bamboo_ds.observe.spans import REDUNDANT, Kind, Span, read_timelines

#: Column of each kind of span.
_COLUMNS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.REDUNDANT_FORWARD: "redundant",
    Kind.REDUNDANT_BACKWARD: "redundant",
    Kind.RECV_ACTIVATION: "wait act",
    Kind.RECV_GRAD: "wait grad",
    Kind.SEND_ACTIVATION: "send",
    Kind.SEND_GRAD: "send",
    Kind.LOAD: "load",
    Kind.SEND_REPLICA: "send repl",
    Kind.RECV_REPLICA: "wait repl",
    Kind.REDUCE: "reduce",
    Kind.REDUCE_TIED: "reduce",
    Kind.COMMIT: "commit",
    Kind.STEP: "step",
    Kind.STEP_REPLICA: "step repl",
    Kind.ITERATION: "iteration",
}


def spans(job: Job, warm_up: int) -> Iterator[dict[int, list[Span]]]:
    """Spans by rank in the order of their begins, for every counted iteration."""
    steps: dict[int, dict[int, list[Span]]] = defaultdict(lambda: defaultdict(list))
    for timeline in read_timelines(job.folder / "events.jsonl"):
        for span in timeline.spans:
            if span.step > warm_up:
                steps[span.step][timeline.head.rank].append(span)
    for _, ranks in sorted(steps.items()):
        yield ranks


def breakdown_table(title: str, job: Job, warm_up: int) -> Table:
    """Median over iterations of the milliseconds per kind of instruction, by stage.

    ``rest`` is what no instruction accounts for.
    """
    sums: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for ranks in spans(job, warm_up):
        for rank, found in ranks.items():
            parts: dict[str, float] = defaultdict(float)
            for span in found:
                if span.kind in _COLUMNS:
                    parts[_COLUMNS[span.kind]] += (span.end - span.begin) * 1000
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


def of_kind(found: list[Span], *kinds: Kind) -> list[Span]:
    """Spans of some kinds."""
    return [span for span in found if span.kind in kinds]


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
            redundant = of_kind(found, *REDUNDANT)
            for kind in (Kind.FORWARD, Kind.BACKWARD):
                passes[kind.value] += [span.end - span.begin for span in of_kind(found, kind)]
            for produced, received, source in (
                (Kind.FORWARD, Kind.RECV_ACTIVATION, rank - 1),
                (Kind.BACKWARD, Kind.RECV_GRAD, rank + 1),
            ):
                made = of_kind(ranks[source], produced) if source in ranks else []
                for origin, receive in zip(made, of_kind(found, received), strict=False):
                    if receive.begin < origin.end:
                        latency[received.value].append(receive.end - origin.end)
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
