"""``bamboo plot``: the schedule of an iteration as it was, as a picture."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from ..errors import ConfigError
from ..observe import pictures
from ..observe.iterations import LOST, REDONE, Cell, IterationGrid, MemberRow, Recorded
from .trace import read_job

_COLOURS = {
    "forward": "#4c78a8",
    "backward": "#59a14f",
    "redundant forward": "#b7d0ea",
    "redundant backward": "#bfe0b9",
    REDONE: "#f28e2b",
    "wait for a message": "#eeeeee",
    "reduction, gradients to shadows": "#a08a7c",
    "commit": "#7b5ea7",
    "optimizer step, of replicas too": "#d3a6c8",
    "pause: new plan": "#e15759",
    "pause: new connections": "#ef9a9a",
    "pause: agreement": "#f7cccb",
    "rehearsal": "#d9d9d9",
    "copy of state": "#8cc5c0",
    LOST: "#ffffff",
}
_DARK = {"forward", "backward"}
#: Inches.
_WIDTH, _LANE, _FRAME = 13.0, 0.30, 0.95
#: Of all lanes together: matplotlib draws no picture of more than 65,535 points.
_TALLEST = 300.0
_FONT = 7.5
#: Width of a digit by the size of its font.
_DIGIT = 0.62


@click.command()
@click.argument("events", metavar="EVENTS", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--step", type=click.IntRange(min=1), help="Draw this iteration alone.")
@click.option("--member", "members", multiple=True, help="Draw this member, m2 or its whole id; may be repeated.")
@click.option("--title", help="What is said above.  [default: the job's name]")
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), required=True, help="The PNG file to write."
)
def plot(events: Path, step: int | None, members: tuple[str, ...], title: str | None, output: Path) -> None:
    """Draw the schedule of an iteration: members by time, from the EVENTS of a job and the timelines beside them.

    Without --step: the newest iteration with a loss, below an undisturbed one before it.
    """
    told, timelines = read_job(events)
    recorded = Recorded(told, timelines)
    steps = [step] if step is not None else recorded.chosen()
    grids = [_only(recorded.grid(each), members) for each in steps]
    draw(output, grids, f"job {timelines[0].head.job}" if title is None else title)


def _only(grid: IterationGrid, members: tuple[str, ...]) -> IterationGrid:
    """The rows of ``members``, if any are named; raises :class:`ConfigError` if there is none of them."""
    rows = tuple(row for row in grid.rows if {row.member, row.member.partition("-")[0]} & set(members))
    if members and not rows:
        known = ", ".join(row.member for row in grid.rows)
        raise ConfigError(f"--member {' --member '.join(members)}: iteration {grid.step} is recorded of {known}")
    return replace(grid, rows=rows) if members else grid


def draw(path: Path, grids: list[IterationGrid], title: str) -> None:
    """Writes the picture; raises :class:`ConfigError` if it cannot be made."""
    pyplot = pictures.pyplot("bamboo plot")
    from matplotlib.patches import Patch

    lanes = [sum(len(row.lanes) or 1 for row in grid.rows) + 0.35 * len(grid.rows) for grid in grids]
    height = min(_LANE * sum(lanes), _TALLEST) + _FRAME * len(grids) + 0.75
    figure, axes = pyplot.subplots(
        len(grids), 1, figsize=(_WIDTH, height), sharex=True, squeeze=False, gridspec_kw={"height_ratios": lanes}
    )
    longest = max(grid.seconds for grid in grids)
    used: dict[str, None] = {}
    for axis, grid in zip(axes[:, 0], grids, strict=True):
        _panel(axis, grid, longest, used)
    axes[-1, 0].set_xlabel("milliseconds since the iteration's begin", fontsize=_FONT + 1)
    shown = [style for style in _COLOURS if style in used]
    patches = [Patch(label=style, edgecolor="#888888", linewidth=0.4, **_fill(style)) for style in shown]
    figure.suptitle(title, fontsize=_FONT + 3, x=0.01, ha="left", weight="bold")
    figure.legend(handles=patches, ncols=5, fontsize=_FONT, loc="lower left", frameon=False, handlelength=1.4)
    figure.tight_layout(rect=(0, 0.62 / height, 1, 1))
    pictures.save(figure, path, 110)


def _fill(style: str) -> dict[str, Any]:
    return {"facecolor": _COLOURS[style], "hatch": "////" if style == LOST else None}


def _panel(axis: Any, grid: IterationGrid, longest: float, used: dict[str, None]) -> None:
    """One iteration: rows from above."""
    place, ticks, names = 0.0, [], []
    for row in grid.rows:
        height = float(len(row.lanes) or 1)
        for number, lane in enumerate(row.lanes):
            _bars(axis, lane.cells, place + number, 1.0, longest, used)
            ticks.append(place + number + 0.5)
            pipeline, stage = lane.role
            name = f"stage {stage}" if not pipeline else f"stage {stage} of pipeline {pipeline}"
            name = f"replica of {name}" if lane.replica else name
            names.append(f"{row.member.partition('-')[0]}   {name}" if number == 0 else name)
        if not row.lanes:
            ticks.append(place + 0.5)
            names.append(row.member.partition("-")[0])
        _bars(axis, row.across, place, height, longest, used)
        if row.died is not None:
            _mark_loss(axis, grid, row, place, height, used)
        place += height + 0.35
    for row in grid.rows:
        if row.died is not None:
            axis.axvline(row.died * 1000, color="#c00000", linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
    axis.set_ylim(place - 0.25, -0.1)
    axis.set_xlim(0, longest * 1000)
    axis.set_yticks(ticks, names, fontsize=_FONT)
    axis.tick_params(axis="x", labelsize=_FONT, labelbottom=True)
    axis.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    facts = [f"iteration {grid.step}", f"{grid.seconds * 1000:.0f} ms", *(grid.notes or ("undisturbed",))]
    axis.set_title(", ".join(facts), fontsize=_FONT + 1, loc="left")


def _bars(
    axis: Any, cells: tuple[Cell, ...], place: float, height: float, longest: float, used: dict[str, None]
) -> None:
    by_style: dict[str, list[Cell]] = defaultdict(list)
    for cell in cells:
        by_style[cell.style].append(cell)
    points = 72 * _WIDTH * 0.9 / longest  # per second
    for style, found in by_style.items():
        used[style] = None
        flat = style == "wait for a message"
        extent = (place + 0.38, 0.24) if flat else (place + 0.04, height - 0.08)
        axis.broken_barh(
            [(cell.begin * 1000, (cell.end - cell.begin) * 1000) for cell in found],
            extent,
            edgecolor="none" if flat else "#ffffff",
            linewidth=0 if flat else 0.4,
            zorder=2 if flat else 3,
            **_fill(style),
        )
        for cell in found:
            if cell.label and (cell.end - cell.begin) * points > _DIGIT * _FONT * len(cell.label):
                axis.text(
                    (cell.begin + cell.end) * 500,
                    place + height / 2,
                    cell.label,
                    ha="center",
                    va="center_baseline",
                    fontsize=_FONT,
                    color="white" if style in _DARK else "#222222",
                    zorder=4,
                )


def _mark_loss(
    axis: Any, grid: IterationGrid, row: MemberRow, place: float, height: float, used: dict[str, None]
) -> None:
    """The member is gone from here on."""
    assert row.died is not None
    used[LOST] = None
    rest = max(0.0, grid.seconds - row.died) * 1000
    axis.broken_barh(
        [(row.died * 1000, rest)], (place + 0.04, height - 0.08), edgecolor="#cccccc", linewidth=0.4, **_fill(LOST)
    )
    axis.plot([row.died * 1000], [place + height / 2], marker="X", color="#c00000", markersize=9, zorder=6)
