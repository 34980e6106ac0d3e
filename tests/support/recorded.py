"""What the timelines of a job must be, whatever it has gone through."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from bamboo_ds.observe.events import Event, Recovered, TakeoverPlanned, read_events
from bamboo_ds.observe.spans import Kind, Span, Timeline, read_timelines
from bamboo_ds.observe.trace import chrome_trace

#: Seconds that a time in a file may be off.
_ROUNDING = 1e-6
_FORWARDS = (Kind.FORWARD, Kind.REDUNDANT_FORWARD)
_BACKWARDS = (Kind.BACKWARD, Kind.REDUNDANT_BACKWARD)


def check_recorded(path: Path, micro_batches: int, steps: set[int]) -> list[Timeline]:
    """Check the timelines beside the events in ``path``: iterations ``steps`` are there, complete and free of overlaps.

    Returns:
        The timelines.
    """
    events, timelines = list(read_events(path)), read_timelines(path)
    for timeline in timelines:
        _check_main_thread(timeline)
    for found in ([], timelines):
        check_rules(chrome_trace(events, found))
    whole = {step: _of_step(timelines, step) for step in steps}
    planned = {event.epoch for event in events if isinstance(event, TakeoverPlanned)}
    overtaken = planned - {event.epoch for event in events if isinstance(event, Recovered)}
    for step, members in whole.items():
        assert members, f"iteration {step} is not recorded"
        recoveries = [event for event in events if isinstance(event, Recovered) and event.step == step]
        _check_passes(members, step, micro_batches, recoveries, overtaken)
        _check_redone(events, timelines, members, step)
    return timelines


def _of_step(timelines: list[Timeline], step: int) -> dict[str, list[Span]]:
    """Spans of an iteration, by the members that have finished it."""
    found = {t.member: [span for span in t.spans if span.step == step] for t in timelines}
    return {member: spans for member, spans in found.items() if any(s.kind is Kind.ITERATION for s in spans)}


def _check_main_thread(timeline: Timeline) -> None:
    """Spans of a main thread follow each other, inside of iterations or between them."""
    iterations = [span for span in timeline.spans if span.kind is Kind.ITERATION]
    others = [span for span in timeline.spans if span.kind is not Kind.ITERATION]
    for found in (iterations, others):
        for before, after in pairwise(found):
            assert before.end <= after.begin + _ROUNDING, f"{timeline.member}: {before} and {after} overlap"
    for span in others:
        inside = [i for i in iterations if i.step == span.step and span.begin < i.end - _ROUNDING]
        for iteration in inside:
            assert iteration.begin <= span.begin + _ROUNDING, f"{span} is not in its iteration"
            assert span.end <= iteration.end + _ROUNDING, f"{span} is not in its iteration"


def _check_passes(
    members: dict[str, list[Span]],
    step: int,
    micro_batches: int,
    recoveries: Sequence[Recovered],
    overtaken: set[int],
) -> None:
    """Who has computed a stage to the end of the iteration did each of its passes once, redundant ones included.

    But for those that the sums of a lost worker have made needless: the recoveries tell how many.
    """
    done = [(member, span) for member, spans in members.items() for span in spans if not span.cut]
    finished = {(m, s.role, s.part) for m, s in done if s.kind is Kind.BACKWARD and s.micro_batch == micro_batches - 1}
    spared = 0
    for member, role, part in finished:
        own = [s for m, s in done if (m, s.role, s.part) == (member, role, part)]
        forwards, backwards = (
            Counter(s.micro_batch for s in own if s.kind in kinds) for kinds in (_FORWARDS, _BACKWARDS)
        )
        # Behind the last gap: what had been done before it is in the sums.
        first = max(m for m in range(micro_batches) if not m or m - 1 not in backwards)
        superseded = {m for m in backwards if m is not None and m < first}
        spared += first
        expected = Counter(range(first, micro_batches))
        told = f"{member} has done of {role} in iteration {step}: {forwards} forward, {backwards} backward"
        assert backwards == expected + Counter(superseded), told
        # Forward passes that were done before the sums came. With sums that come a shadow begins anew, behind them;
        # where a loss goes back to earlier ones, its passes do not follow on those, and are done again.
        redundant = {s.micro_batch for s in own if s.kind is Kind.REDUNDANT_FORWARD and s.micro_batch is not None}
        if max((m for m in redundant if m - 1 not in redundant), default=0) > first:
            forwards.subtract(redundant)
        assert max(forwards.values()) == 1 and forwards.keys() >= expected.keys(), told
        assert first or forwards == expected, told
    kept = sum(each.backwards_kept for each in recoveries)
    # Of several recoveries of an iteration the last one is told.
    several = any(epoch < each.epoch for epoch in overtaken for each in recoveries)
    assert spared == kept or (spared > kept and several), (spared, kept)


def _check_redone(events: list[Event], timelines: list[Timeline], members: dict[str, list[Span]], step: int) -> None:
    """As many passes are marked as the recovery says, and those that the neighbours had seen before they paused."""
    told = [e for e in events if isinstance(e, Recovered) and e.step == step]
    marked = [span for spans in members.values() for span in spans if span.redone]
    counts = [sum(span.kind is kind for span in marked) for kind in (Kind.FORWARD, Kind.BACKWARD)]
    assert counts == [sum(e.forwards_redone for e in told), sum(e.backwards_redone for e in told)], (step, marked)
    if any(span.part for spans in members.values() for span in spans):
        return  # a stage's other part is a neighbour, too
    for kind, distance in ((Kind.FORWARD, +1), (Kind.BACKWARD, -1)):
        for role in {span.role for span in marked if span.kind is kind and span.role is not None}:
            beside = role[0], role[1] + distance
            seen = max(_before_pause(t, kind, beside, step) for t in timelines)
            assert max(s.micro_batch or 0 for s in marked if (s.kind, s.role) == (kind, role)) == seen - 1


def _before_pause(timeline: Timeline, kind: Kind, role: tuple[int, int], step: int) -> int:
    """How many passes of ``role`` a member had done as its owner when the recovery of iteration ``step`` began."""
    spans = [span for span in timeline.spans if span.step == step]
    pauses = [span.begin for span in spans if span.kind is Kind.AWAIT_PLAN]
    return sum(s.kind is kind and s.role == role and s.end <= min(pauses, default=s.end) for s in spans)


def check_rules(found: dict[str, Any]) -> dict[tuple[int, int], str]:
    """Chrome's Trace Event Format as Perfetto reads it; returns names of threads by process and thread."""
    assert set(found) <= {"traceEvents", "displayTimeUnit", "otherData"} and found["displayTimeUnit"] in ("ms", "ns")
    found = json.loads(json.dumps(found, allow_nan=False))
    processes, threads = {}, {}
    spans, opened = defaultdict(list), {}
    for event in found["traceEvents"]:
        assert isinstance(event["name"], str) and isinstance(event["pid"], int) and isinstance(event["tid"], int)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name", "thread_sort_index")
            place = processes if event["name"].startswith("process") else threads
            key = event["pid"] if place is processes else (event["pid"], event["tid"])
            place.setdefault(key, {}).update(event["args"])
            continue
        assert event["ts"] >= 0 and event["cat"] and event["pid"] in processes
        assert (event["pid"], event["tid"]) in threads, "threads are named before they are used"
        if event["ph"] == "X":
            assert event["dur"] >= 0
            spans[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] == "b":
            assert event["id"] not in opened
            opened[event["id"]] = event
        elif event["ph"] == "e":
            begin = opened.pop(event["id"])
            assert begin["ts"] <= event["ts"] and begin["cat"] == event["cat"]
        else:
            assert event["ph"] == "i" and event["s"] in ("g", "p", "t")
    assert not opened
    for track in spans.values():  # spans of a thread follow each other or contain each other
        around: list[float] = []
        for begin, end in track:
            while around and around[-1] <= begin + 0.6:
                around.pop()
            assert not around or end <= around[-1] + 0.6
            around.append(end)
    for named in (*processes.values(), *threads.values()):
        assert set(named) == {"name", "sort_index"}
    return {place: named["name"] for place, named in threads.items()}
