"""The critical path of an iteration: which passes, messages and redundant passes its duration is made of."""

from __future__ import annotations

from collections import defaultdict
from statistics import median

from common import Job
from timeline import of_kind, spans

from bamboo_ds.observe.spans import REDUNDANT, Kind, Span

#: For each pass the instruction that receives what it needs, and the distance to the source.
_EDGES = {Kind.FORWARD: (Kind.RECV_ACTIVATION, -1), Kind.BACKWARD: (Kind.RECV_GRAD, +1)}


class _Stage:
    """Own passes of a stage in order, and the receives that belong to them."""

    def __init__(self, found: list[Span]) -> None:
        self.redundant = of_kind(found, *REDUNDANT)
        self.passes = sorted(of_kind(found, *_EDGES), key=lambda s: s.begin)
        self.by_kind = {kind: of_kind(found, kind) for kind in _EDGES}
        self.receives = {kind: of_kind(found, receive) for kind, (receive, _) in _EDGES.items()}
        self.iteration = of_kind(found, Kind.ITERATION)[0]


def critical_path(ranks: dict[int, list[Span]]) -> dict[str, float]:
    """Milliseconds of one iteration by cause; they add up to its duration.

    Walks back from the pass that ends last: to the pass whose message it waited for (or which a redundant pass kept
    waiting), else to the stage's previous pass.
    """
    stages = {rank: _Stage(found) for rank, found in ranks.items()}
    rank = max(stages, key=lambda r: stages[r].passes[-1].end)
    stage, current = stages[rank], stages[rank].passes[-1]
    parts: dict[str, float] = defaultdict(float, tail=(stage.iteration.end - current.end) * 1000)
    while True:
        parts["passes"] += (current.end - current.begin) * 1000
        parts["number of passes"] += 1
        kind = current.kind
        number, place = stage.by_kind[kind].index(current), stage.passes.index(current)
        before = stage.passes[place - 1].end if place else stage.iteration.begin
        source = rank + _EDGES[kind][1]
        if source in stages:
            origin = stages[source].by_kind[kind][number]
            running = [r for r in stage.redundant if r.begin < origin.end < r.end]
            if running or stage.receives[kind][number].begin < origin.end:
                late = running[0].end - origin.end if running else 0.0
                parts["redundant"] += late * 1000
                parts["messages"] += (current.begin - origin.end - late) * 1000
                parts["number of messages"] += 1
                rank, stage, current = source, stages[source], origin
                continue
        inside = sum(r.end - r.begin for r in stage.redundant if before <= r.begin and r.end <= current.begin)
        parts["redundant"] += inside * 1000
        if not place:
            parts["start"] += (current.begin - before - inside) * 1000
            return parts
        parts["between passes"] += (current.begin - before - inside) * 1000
        current = stage.passes[place - 1]


def critical_path_line(job: Job, warm_up: int) -> str:
    """Medians over the counted iterations, in milliseconds."""
    paths = [critical_path(ranks) for ranks in spans(job, warm_up)]
    names = [*dict.fromkeys(name for path in paths for name in path)]
    medians = {name: median(path[name] for path in paths) for name in names}
    shown = [f"{name} {medians[name]:.0f}" if "number" in name else f"{name} {medians[name]:.1f}" for name in names]
    return f"critical path [ms]: {', '.join(shown)}"
