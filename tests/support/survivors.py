"""Mutants of the schedule that do the same, as is argued for each: by function and change.

``python -m tests.support.mutants`` fails for one of them that a test finds.
"""

from __future__ import annotations

#: By function of :mod:`bamboo_ds.schedule`, with its module.
SURVIVORS: dict[str, dict[str, str]] = {
    "settling.settle": {
        (
            "for role in layout.roles if layout.slices > 1 else (): -> for role in layout.roles if "
            "layout.slices >= 1 else ():"
        ): "one slice alone is at one place",
        (
            "for role in layout.roles if layout.slices > 1 else (): -> for role in layout.roles if "
            "layout.slices > 0 else ():"
        ): "one slice alone is at one place",
        (
            "if layout.slice_of(role) == 0 and len({roles[each].place for each in together}) > 1: -> if "
            "layout.slice_of(role) != 0 and len({roles[each].place for each in together}) > 1:"
        ): "stages are looked at by another slice of theirs",
        (
            "if layout.slice_of(role) == 0 and len({roles[each].place for each in together}) > 1: -> if "
            "layout.slice_of(role) == 1 and len({roles[each].place for each in together}) > 1:"
        ): "stages are looked at by another slice of theirs",
        "give_way(each, 0) -> give_way(each, -1)": "stages of slices are not divided: the only part is the last one",
    },
    "settling._Settling.given": {
        (
            "kept = self.parts[index].given if now.backwards >= self.parts[index].backwards else 0 -> kept = "
            "self.parts[index].given if now.backwards >= self.parts[index].backwards else -1"
        ): "counters are not negative, and it takes the larger one",
    },
    "settling._Settling.place": {
        "now = self.now(0) -> now = self.now(-1)": "stages of slices are not divided: the only part is the last one",
    },
    "progress.finished": {
        (
            "bare = micro_batches if progress[role].state_only else 0 -> bare = micro_batches if "
            "progress[role].state_only else -1"
        ): "counters are not negative, and it takes the larger one",
        (
            "for first in range(0, layout.size, layout.slices) if layout.slices > 1 else (): -> for first in "
            "range(0, layout.size, layout.slices) if layout.slices >= 1 else ():"
        ): "one slice alone is at one place",
        (
            "for first in range(0, layout.size, layout.slices) if layout.slices > 1 else (): -> for first in "
            "range(0, layout.size, layout.slices) if layout.slices > 0 else ():"
        ): "one slice alone is at one place",
    },
    "progress.beside": {
        (
            "return (rank, len(parts[rank]) - 1 if step < 0 else 0) if 0 <= rank < layout.size else None -> "
            "return (rank, len(parts[rank]) - 1 if step <= 0 else 0) if 0 <= rank < layout.size else None"
        ): "steps are -1 and 1",
        (
            "return (rank, len(parts[rank]) - 1 if step < 0 else 0) if 0 <= rank < layout.size else None -> "
            "return (rank, len(parts[rank]) - 1 if step < 1 else 0) if 0 <= rank < layout.size else None"
        ): "steps are -1 and 1",
    },
    "orders.member_order": {
        (
            "return tuple(spans[0].works(member, spans[0].todo)) -> return tuple(spans[-1].works(member, "
            "spans[0].todo))"
        ): "there is one span",
        (
            "return tuple(spans[0].works(member, spans[0].todo)) -> return tuple(spans[0].works(member, "
            "spans[-1].todo))"
        ): "there is one span",
    },
    "orders._simulated": {
        (
            "spans.sort(key=lambda span: (span.parts[0].roles[0].stage, span.parts[0].roles[0].pipeline)) -> "
            "spans.sort(key=lambda span: (span.parts[0].roles[-1].stage, span.parts[0].roles[0].pipeline))"
        ): "slices of a part are of one stage",
        (
            "spans.sort(key=lambda span: (span.parts[0].roles[0].stage, span.parts[0].roles[0].pipeline)) -> "
            "spans.sort(key=lambda span: (span.parts[0].roles[0].stage, span.parts[-1].roles[0].pipeline))"
        ): "parts of a span are of one pipeline",
        (
            "spans.sort(key=lambda span: (span.parts[0].roles[0].stage, span.parts[0].roles[0].pipeline)) -> "
            "spans.sort(key=lambda span: (span.parts[0].roles[0].stage, span.parts[0].roles[-1].pipeline))"
        ): "slices of a copy of the model come one after the other",
        (
            "span.number, span.shared = (number, any((counts[member] > 1 for member in span.hosts))) -> "
            "span.number, span.shared = (number, any((counts[member] >= 1 for member in span.hosts)))"
        ): "members with one span take a longer way to the same order",
        (
            "span.number, span.shared = (number, any((counts[member] > 1 for member in span.hosts))) -> "
            "span.number, span.shared = (number, any((counts[member] > 0 for member in span.hosts)))"
        ): "members with one span take a longer way to the same order",
        (
            "free: dict[str, float] = dict.fromkeys(counts, 0) -> free: dict[str, float] = dict.fromkeys(counts, -1)"
        ): "no input is there before 0",
    },
    "orders._simulated.all_free": {
        (
            "return free[span.hosts[0]] if len(span.hosts) == 1 else max((free[member] for member in "
            "span.hosts)) -> return free[span.hosts[0]] if len(span.hosts) == 0 else max((free[member] for "
            "member in span.hosts))"
        ): "the largest of one is that one",
    },
    "spans.StageSpan.ends": {
        (
            "return {kind: [0 if m < done else None for m in range(self.micro_batches)] for kind, done in "
            "self._done.items()} -> return {kind: [-1 if m < done else None for m in range(self.micro_batches)] "
            "for kind, done in self._done.items()}"
        ): "nobody is free before 0",
    },
    "spans.StageSpan.connect": {
        (
            "given: list[float | None] = [0] * self.micro_batches -> given: list[float | None] = [-1] * "
            "self.micro_batches"
        ): "nobody is free before 0",
    },
    "spans.StageSpan.run": {
        "if there > free: -> if there >= free:": "what it is set to is the same then",
    },
    "spans.spans_of": {
        (
            "cost = 1 if len(parts) == 1 else (end - part.begin) / blocks -> cost = 1 if len(parts) == 0 else "
            "(end - part.begin) / blocks"
        ): "the only part has all blocks",
    },
}
