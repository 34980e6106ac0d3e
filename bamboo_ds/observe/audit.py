"""Verifies a ledger: every micro-batch consumed exactly once. Pure.

A step is identified by (run, step). The *history* counts in the end: the steps whose updates are in the final
weights, by DeepSpeed's ``global_step``. Loading a checkpoint sets that back; the steps after it are done again and
replace those that they repeat.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from .ledger import LedgerLine

Step = dict[int, LedgerLine]
"""The lines of one step, by pipeline."""


@dataclass
class Audit:
    """Result of verifying a ledger.

    Attributes:
        problems: violations; none: every micro-batch was consumed exactly once.
        runs: starts of the job, in order.
        history: the steps that count, by global step.
        steps: how many were committed, those included that were undone later.
        repeated: lines that two members have written.
        alike: micro-batches of the history that contain what one before them contained, by their checksums.
    """

    problems: list[str] = field(default_factory=list)
    runs: list[str] = field(default_factory=list)
    history: dict[int, Step] = field(default_factory=dict)
    steps: int = 0
    repeated: int = 0
    alike: int = 0

    @property
    def micro_batches(self) -> int:
        """Micro-batches of the history."""
        return sum(line.micro_batches for step in self.history.values() for line in step.values())

    @property
    def samples(self) -> int:
        """Samples of the history, as far as their indices are known."""
        lines = (line for step in self.history.values() for line in step.values())
        return sum(len(indices) for line in lines for indices in line.indices or ())


def audit(lines: Iterable[LedgerLine], distinct: bool = False, steps: int | None = None) -> Audit:
    """Verify a ledger by itself.

    Args:
        lines: in any order.
        distinct: no two micro-batches have equal contents.
        steps: the global step that the job ended with.
    """
    found = Audit()
    runs: dict[str, dict[int, Step]] = defaultdict(dict)
    for line in sorted(lines, key=lambda each: each.time):
        step = runs[line.run].setdefault(line.step, {})
        first = step.setdefault(line.pipeline, line)
        if first is not line:
            found.repeated += 1
            if first.contents() != line.contents():
                found.problems.append(f"{_name(line)}: {first.member} and {line.member} say {_difference(first, line)}")
    found.runs = list(runs)
    for run, steps_of_run in runs.items():
        # A job that was started again goes on counting where the checkpoint was saved; the history has no gap.
        _check_run(steps_of_run, 1 if run == found.runs[0] else min(steps_of_run), found)
        _append(steps_of_run, found)
    if not found.history:
        found.problems.append("the ledger has no lines")
    found.problems += [missing for step in found.history.values() if (missing := _missing(step))]
    if steps is not None and found.history and _newest(found.history) != steps:
        found.problems.append(f"the last step is global step {_newest(found.history)}, not {steps}")
    _check_indices(found)
    _check_contents(found, distinct)
    return found


def compare(mine: Audit, other: Audit) -> list[str]:
    """Differences between the histories of two ledgers, of which ``other`` is right."""
    problems = []
    for what, one, two in (("missing", other, mine), ("not in the other ledger", mine, other)):
        if only := sorted(one.history.keys() - two.history.keys()):
            problems.append(f"global steps {_ranges(only)} are {what}")
    for global_step in sorted(mine.history.keys() & other.history.keys()):
        here, there = mine.history[global_step], other.history[global_step]
        for pipeline in sorted(here.keys() | there.keys()):
            name = f"global step {global_step}, pipeline {pipeline}"
            if pipeline not in here or pipeline not in there:
                problems.append(f"{name} is {'missing' if pipeline not in here else 'not in the other ledger'}")
            elif difference := _difference(here[pipeline], there[pipeline], runs=False):
                problems.append(f"{name}: {difference}")
    return problems


def _check_run(steps: dict[int, Step], first: int, found: Audit) -> None:
    """The steps of one run: none missing from ``first`` on, all of one shape, batches in order."""
    found.steps += len(steps)
    last = max(steps)
    run = next(iter(steps[last].values())).run
    if absent := sorted(set(range(first, last + 1)) - steps.keys()):
        found.problems.append(f"run {run}: steps {_ranges(absent)} are missing")
    shapes = {(line.pipelines, line.micro_batches) for step in steps.values() for line in step.values()}
    if len(shapes) > 1:
        shown = " and ".join(f"{d} x {m}" for d, m in sorted(shapes))
        found.problems.append(f"run {run}: steps of {shown} pipelines x micro-batches")
    for number in sorted(steps):
        step = steps[number]
        if len({line.global_step for line in step.values()}) > 1:
            found.problems.append(f"run {run}, step {number}: the pipelines tell different global steps")
    for before, after in pairwise(sorted(steps)):
        for pipeline, line in steps[after].items() if after == before + 1 else ():
            earlier = steps[before].get(pipeline)
            if earlier is None or earlier.position is None or line.position is None:
                continue
            expected = earlier.position + earlier.micro_batches
            if line.position != expected:
                found.problems.append(f"{_name(line)} begins at micro-batch {line.position}, expected {expected}")


def _append(steps: dict[int, Step], found: Audit) -> None:
    """Add a run to the history, which it may take up at an earlier step."""
    history = found.history
    for number in sorted(steps):
        line = next(iter(steps[number].values()))
        while history and _newest(history) >= line.global_step:
            del history[_newest(history)]
        if history and line.global_step > _newest(history) + 1:
            before = _newest(history)
            found.problems.append(f"{_name(line)} is global step {line.global_step}, the one before is {before}")
        history[line.global_step] = steps[number]


def _newest(history: dict[int, Step]) -> int:
    """The newest global step; they are in order."""
    return next(reversed(history))


def _check_indices(found: Audit) -> None:
    """No index twice in a pass over the data, but for those that fill up a pass that the pipelines do not divide."""
    used: dict[int, Counter[int]] = defaultdict(Counter)
    first: dict[tuple[int, int], str] = {}
    for line, m in _entries(found):
        if line.indices is None or line.passes is None or line.samples is None:
            continue
        number, share = line.passes[m], -(-line.samples // line.pipelines)
        for index in line.indices[m]:
            used[number][index] += 1
            allowed = len(range(index, share * line.pipelines, line.samples))
            here = f"{_name(line)}, micro-batch {m}"
            if used[number][index] > allowed:
                before = first[number, index] if allowed else "no dataset"
                found.problems.append(f"sample {index} of pass {number} is used by {before} and by {here}")
            first.setdefault((number, index), here)


def _check_contents(found: Audit, distinct: bool) -> None:
    first: dict[tuple[str, str], str] = {}
    for line, m in _entries(found):
        here = f"{_name(line)}, micro-batch {m}"
        before = first.setdefault((line.inputs[m], line.labels[m]), here)
        if before is not here:
            found.alike += 1
            if distinct:
                found.problems.append(f"{here} contains what {before} contained")


def _entries(found: Audit) -> Iterator[tuple[LedgerLine, int]]:
    for _, step in sorted(found.history.items()):
        for _, line in sorted(step.items()):
            for m in range(line.micro_batches):
                yield line, m


def _missing(step: Step) -> str | None:
    line = next(iter(step.values()))
    absent = [d for d in range(line.pipelines) if d not in step]
    return f"run {line.run}, step {line.step}: pipelines {_ranges(absent)} are missing" if absent else None


def _name(line: LedgerLine) -> str:
    return f"run {line.run}, step {line.step}, pipeline {line.pipeline}"


def _difference(one: LedgerLine, other: LedgerLine, runs: bool = True) -> str:
    """Difference between two lines of one step and pipeline; empty if there is none."""
    if (one.pipelines, one.micro_batches) != (other.pipelines, other.micro_batches):
        shapes = f"{one.pipelines} x {one.micro_batches} and {other.pipelines} x {other.micro_batches}"
        return f"{shapes} pipelines x micro-batches"
    parts: list[tuple[str, Callable[[LedgerLine], Sequence[object]]]] = [
        ("inputs", lambda line: line.inputs),
        ("labels", lambda line: line.labels),
        ("indices", lambda line: line.indices or []),
        ("passes", lambda line: line.passes or []),
    ]
    for part, get in parts:
        here, there = get(one), get(other)
        # A job's own iterator tells no indices, so such a ledger is compared by contents only.
        for m, (a, b) in enumerate(zip(here, there, strict=False)):
            if a != b:
                return f"{part} of micro-batch {m}: {a} and {b}"
    for what in ("global_step", "position", "samples", "indices", "passes") if runs else ():
        if getattr(one, what) != getattr(other, what):
            return f"{what} {getattr(one, what)} and {getattr(other, what)}"
    return ""


def _ranges(numbers: Sequence[int]) -> str:
    """``1, 4 to 9``"""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in found)
