"""The verdict for people and for machines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from .faults import FaultKind, FaultRecord
from .verify import Verdict

#: Of an effect, by the names of its attributes.
_FIGURES = ("pause_s", "redo_s", "delay_s", "healed_s", "healed_steps")


def by_kind(verdict: Verdict, records: Sequence[FaultRecord]) -> list[dict[str, Any]]:
    """A row for every kind of fault that was tried; times are seconds."""
    rows = []
    for kind, asked in ((kind, asked) for kind in FaultKind for asked in (True, False)):
        tried = [record for record in records if record.kind is kind and (record.number is not None) == asked]
        effects = [e for e in verdict.effects if e.record.kind is kind and (e.record.number is not None) == asked]
        if not tried:
            continue
        rows.append(
            {
                "kind": kind.value if asked else f"({kind.value} to keep up members)",
                "injected": sum(record.outcome == "injected" for record in tried),
                "confirmed": sum(record.confirmed for record in tried),
                "not_done": sum(record.outcome != "injected" for record in tried),
                "members_lost": sum(len(effect.lost) for effect in effects),
                **{name: _figures([x for e in effects if (x := getattr(e, name)) is not None]) for name in _FIGURES},
            }
        )
    return rows


def _figures(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    values = sorted(values)
    p95 = values[max(0, -(-95 * len(values) // 100) - 1)]
    return {"n": len(values), "p50": median(values), "p95": p95, "max": values[-1]}


def _milliseconds(figures: dict[str, float] | None) -> str:
    return " / ".join(f"{figures[p] * 1000:.0f}" for p in ("p50", "p95", "max")) if figures else "-"


def table(verdict: Verdict, records: Sequence[FaultRecord], title: str) -> Table:
    """Pauses by kind of fault."""
    view = Table(title=title, title_justify="left")
    view.add_column("fault")
    pause, late, healed = "pause p50 / p95 / max [ms]", "training late by p50 / max [s]", "healed p50 / max [s]"
    for column in ("injected", "confirmed", "not done", "members lost", pause, late, healed, "in steps (max)"):
        view.add_column(column, justify="right")
    for row in by_kind(verdict, records):
        counts = [str(row[name]) for name in ("injected", "confirmed", "not_done", "members_lost")]
        pause, delay, healed, steps = (row[name] for name in ("pause_s", "delay_s", "healed_s", "healed_steps"))
        view.add_row(
            row["kind"],
            *counts,
            _milliseconds(pause),
            f"{delay['p50']:.2f} / {delay['max']:.2f}" if delay else "-",
            f"{healed['p50']:.2f} / {healed['max']:.2f}" if healed else "-",
            f"{steps['max']:.0f}" if steps else "-",
        )
    if verdict.healing_s:
        view.add_row("(healing)", str(len(verdict.healing_s)), "", "", "", _milliseconds(_figures(verdict.healing_s)))
    injected = sum(record.outcome == "injected" and record.number is not None for record in records)
    view.caption = f"{injected} faults, {verdict.steps} steps, {verdict.plans} plans"
    return view


def save_json(path: Path, verdict: Verdict, records: Sequence[FaultRecord], **more: Any) -> None:
    """The verdict with everything that it rests on."""
    effects = [{**asdict(effect), "record": effect.record.number} for effect in verdict.effects]
    content = {
        "verified": not verdict.problems,
        "problems": verdict.problems,
        "notes": verdict.notes,
        "steps": verdict.steps,
        "plans": verdict.plans,
        "by_kind": by_kind(verdict, records),
        "healing_s": verdict.healing_s,
        "effects": effects,
        **more,
    }
    path.write_text(json.dumps(content, indent=1) + "\n")
