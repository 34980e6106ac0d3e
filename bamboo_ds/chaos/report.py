"""The verdict for people, for machines, and as a picture."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from ..errors import ConfigError
from ..observe import pictures
from ..observe.events import Event, PlanWritten, Step
from .faults import FaultKind, FaultRecord
from .verify import Effect, Verdict


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
                **{name: _summary(effects, value) for name, value in _FIGURES.items()},
            }
        )
    return rows


_FIGURES: dict[str, Callable[[Effect], float | int | None]] = {
    "pause_s": lambda effect: effect.pause_s,
    "pause_alone_s": lambda effect: effect.pause_s if effect.alone else None,
    "redo_s": lambda effect: effect.redo_s,
    "delay_s": lambda effect: effect.delay_s,
    "healed_s": lambda effect: effect.healed_s,
    "healed_steps": lambda effect: effect.healed_steps,
}


def _summary(effects: Sequence[Effect], value: Callable[[Effect], float | int | None]) -> dict[str, float] | None:
    return _figures([found for effect in effects if (found := value(effect)) is not None])


def _figures(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    values = sorted(values)
    p95 = values[max(0, -(-95 * len(values) // 100) - 1)]
    return {"n": len(values), "p50": median(values), "p95": p95, "max": values[-1]}


def _milliseconds(figures: dict[str, float] | None) -> str:
    return " / ".join(f"{figures[p] * 1000:.0f}" for p in ("p50", "p95", "max")) if figures else "-"


def table(verdict: Verdict, records: Sequence[FaultRecord], title: str) -> Table:
    """Pauses by kind of fault; "alone": of those in which no other fault held a member or etcd still."""
    view = Table(title=title, title_justify="left")
    view.add_column("fault")
    pause, late, healed = "pause p50 / p95 / max [ms]", "training late by p50 / max [s]", "healed p50 / max [s]"
    alone = "max alone [ms]"
    for column in ("injected", "confirmed", "not done", "members lost", pause, alone, late, healed, "in steps (max)"):
        view.add_column(column, justify="right")
    for row in by_kind(verdict, records):
        counts = [str(row[name]) for name in ("injected", "confirmed", "not_done", "members_lost")]
        pause, delay, healed, steps = (row[name] for name in ("pause_s", "delay_s", "healed_s", "healed_steps"))
        undisturbed = row["pause_alone_s"]
        view.add_row(
            row["kind"],
            *counts,
            _milliseconds(pause),
            f"{undisturbed['max'] * 1000:.0f}" if undisturbed else "-",
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


def check_pictures() -> None:
    """Raise :class:`ConfigError` unless pictures can be drawn."""
    _pyplot()


def _pyplot() -> Any:
    return pictures.pyplot("a picture", ", or leave it out with --no-picture")


def draw(path: Path, events: Sequence[Event], records: Sequence[FaultRecord], title: str) -> None:
    """Members over time, roles per member, throughput; faults are marked.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    pyplot = _pyplot()
    plans = [event for event in events if isinstance(event, PlanWritten)]
    steps = [event for event in events if isinstance(event, Step)]
    if not plans:
        raise ConfigError("there is no plan to draw a picture of")
    begin = plans[0].time.timestamp()
    end = max(event.time.timestamp() for event in (*plans, *steps)) - begin
    figure, (top, middle, bottom) = pyplot.subplots(
        3, 1, sharex=True, figsize=(12, 9), gridspec_kw={"height_ratios": [1, 2.2, 1]}
    )
    times = [plan.time.timestamp() - begin for plan in plans]
    top.step([*times, end], [len(p.members) for p in plans] + [len(plans[-1].members)], where="post", label="members")
    owning = [len(set(plan.owners)) for plan in plans]
    top.step([*times, end], [*owning, owning[-1]], where="post", label="members that own roles")
    top.set_ylabel("members")
    top.set_ylim(bottom=0)
    top.legend(fontsize=7, loc="lower left")
    _draw_roles(middle, plans, [*times, end])
    _draw_throughput(bottom, [step.time.timestamp() - begin for step in steps], end)
    colours = pyplot.get_cmap("tab20")
    for number, kind in enumerate(FaultKind):
        at = [d.time - begin for d in records if d.kind is kind and d.time is not None and d.outcome == "injected"]
        if at:
            height = [number / len(FaultKind)] * len(at)
            place = top.get_xaxis_transform()
            top.scatter(at, height, s=9, color=colours(number), label=kind.value, transform=place, zorder=3)
    top.legend(fontsize=6, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    bottom.set_xlabel("seconds since the first plan")
    bottom.set_xlim(0, end)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    pictures.save(figure, path, 130)


def _draw_roles(axis: Any, plans: Sequence[PlanWritten], times: Sequence[float]) -> None:
    """A line per member, the darker the more roles it owns."""
    pyplot = _pyplot()
    order: dict[str, int] = {}
    for plan in plans:
        for member in plan.members:
            order.setdefault(member, len(order))
    owned = sorted({plan.owners.count(owner) for plan in plans for owner in plan.owners})
    most = owned[-1]
    shades = pyplot.get_cmap("viridis_r")
    for plan, left, right in zip(plans, times, times[1:], strict=False):
        for member in plan.members:
            roles = plan.owners.count(member)
            colour = "0.85" if roles == 0 else shades(0.15 + 0.85 * roles / most)
            axis.barh(order[member], right - left, left=left, height=0.9, color=colour, linewidth=0)
    kinds = [("0.85", "standby")] + [(shades(0.15 + 0.85 * n / most), f"{n} role{'s' * (n > 1)}") for n in owned]
    patches = [pyplot.Rectangle((0, 0), 1, 1, color=colour) for colour, _ in kinds]
    axis.legend(patches, [name for _, name in kinds], fontsize=6, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    if len(order) <= 40:
        axis.set_yticks(range(len(order)), [member.split("-")[0] for member in order], fontsize=6)
    axis.invert_yaxis()
    axis.set_ylabel("members")


def _draw_throughput(axis: Any, times: Sequence[float], end: float) -> None:
    """Steps per second in equal pieces of time."""
    if not times:
        return
    width = max(0.5, end / 200)
    edges = [width * piece for piece in range(int(end / width) + 1)]
    rates = [sum(edge <= time < edge + width for time in times) / width for edge in edges]
    axis.step(edges, rates, where="post", linewidth=0.9)
    axis.set_ylabel("steps/s")
    axis.set_ylim(bottom=0)
