"""What redundancy costs in memory: bytes per parameter and retained bytes of every mode against stock DeepSpeed.

See ``--help``.
"""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

import click
from common import (
    TRAININGS,
    WORKERS,
    Job,
    Training,
    console,
    fresh,
    new_figure,
    run_bamboo,
    run_stock,
    save_figure,
    save_json,
    write_config,
)
from overhead import MODES, Mode
from rich.table import Table

BATCH = 64
#: What counts as state, by column.
STATE = ("parameters", "gradients", "optimizer", "replica parameters", "replica gradients", "replica optimizer")
RETAINED = ("saved", "boundary", "redundant saved", "other")
MIB = 2**20
#: What is measured on the device of the tests, of micro-batches of so many samples.
DEVICE_MODES: dict[str, dict[str, Any]] = {
    "none": {"mode": "none"},
    "lazy": {"mode": "lazy-frc-lazy-brc"},
    "lazy, not parked": {"mode": "lazy-frc-lazy-brc", "park": False},
    "eager-frc": {"mode": "eager-frc-lazy-brc"},
}
DEVICE_BATCH = 8


def measure(
    out: Path, mode: Mode | None, training: Training, stages: int, micro_batches: int, width: int
) -> dict[str, Any]:
    """Figures of one mode (``None``: stock): means over members, and the largest member's peak."""
    name = mode.name if mode else "stock"
    folder = fresh(out / "jobs" / f"memory-{name.replace(' ', '-')}")
    block = mode.block if mode else None
    config = write_config(folder, micro_batches, block, train_micro_batch_size_per_gpu=BATCH, **training.config)
    arguments = ["--deepspeed_config", str(config), "--out", str(folder), "--stages", str(stages)]
    arguments += ["--steps", "7", "--width", str(width), "--measure-memory"]
    job: Job = (run_bamboo if mode else run_stock)(
        folder, stages * training.pipelines, WORKERS / "small.py", arguments, 300
    )
    members = [result["memory"] for _, result in sorted(job.results().items())]

    def per_member(when: str, what: str) -> list[int]:
        return [member[when].get(what, 0) for member in members]

    parameters = sum(member["parameters"] for member in members) / training.pipelines
    steps = job.events("step")[3:]
    total = sum(step["frc_total"] for step in steps)
    row: dict[str, Any] = {
        "training": training.name,
        "mode": name,
        "frc_coverage": sum(step["frc_done"] for step in steps) / total if total else None,
        "bytes_per_parameter": {what: sum(per_member("commit", what)) / parameters for what in STATE},
    }
    row["bytes_per_parameter"]["all"] = sum(row["bytes_per_parameter"].values())
    for when in ("commit", "peak"):
        row[f"{when}_mean_bytes"] = {
            what: mean(per_member(when, what)) for what in (*RETAINED, "tensors", "rss", "uss")
        }
        row[f"{when}_largest_bytes"] = {what: max(per_member(when, what)) for what in (*RETAINED, "tensors", "uss")}
    return row


def measure_on_device(out: Path, size: tuple[int, int, int]) -> list[dict[str, Any]]:
    """Peak bytes of the largest member on the device of the tests, whose memory is counted: a row for each mode.

    Stock DeepSpeed has no collectives there; ``none`` holds the tensors that it does, as the figures of CPUs show.

    Args:
        out: folder of the jobs.
        size: stages, micro-batches, width.
    """
    rows: list[dict[str, Any]] = []
    stages, micro_batches, width = size
    for name, redundancy in DEVICE_MODES.items():
        folder = fresh(out / "jobs" / f"device-{name.replace(' ', '-')}")
        block = {"redundancy": {"check_exact": 0, "verify_every": 0, **redundancy}}
        config = write_config(folder, micro_batches, block, train_micro_batch_size_per_gpu=DEVICE_BATCH)
        arguments = ["--deepspeed_config", str(config), "--out", str(folder), "--stages", str(stages), "--device"]
        job = run_bamboo(folder, stages, WORKERS / "small.py", [*arguments, "--steps", "6", "--width", str(width)], 900)
        peak = max(result["device_peak"] for result in job.results().values())
        rows.append({"mode": name, "peak": peak, "ratio": peak / rows[0]["peak"] if rows else 1.0})
        console.print(f"  {name}: {peak / MIB:.0f} MiB, {rows[-1]['ratio']:.2f} of none")
    return rows


def table(rows: list[dict[str, Any]], title: str) -> Table:
    """The figures for people."""
    result = Table(title=title, caption="state at the commit, over all members; MiB: largest member's peak")
    columns = ("mode", "own [B/param]", "replica [B/param]", "all [B/param]", "vs stock", "FRC", "own saved [MiB]")
    for column in (*columns, "boundary", "redundant saved", "other", "tensors", "USS"):
        result.add_column(column, justify="left" if column == "mode" else "right")
    stock = rows[0]["bytes_per_parameter"]["all"]
    for row in rows:
        state, peak, coverage = row["bytes_per_parameter"], row["peak_largest_bytes"], row["frc_coverage"]
        result.add_row(
            row["mode"],
            f"{sum(state[name] for name in STATE[:3]):.1f}",
            f"{sum(state[name] for name in STATE[3:]):.1f}",
            f"{state['all']:.1f}",
            f"{state['all'] / stock:.2f}x",
            "" if coverage is None else f"{coverage:.0%}",
            *(f"{peak[name] / MIB:.1f}" for name in (*RETAINED, "tensors", "uss")),
        )
    return result


def plot(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """State per parameter, and retained bytes at the peak."""
    figure, (left, right) = new_figure(1, 2, figsize=(11, 4.5))
    names = [row["mode"] for row in rows]
    bottom = [0.0] * len(rows)
    for part in STATE:
        values = [row["bytes_per_parameter"][part] for row in rows]
        left.bar(names, values, bottom=bottom, label=part)
        bottom = [a + b for a, b in zip(bottom, values, strict=True)]
    left.set_ylabel("bytes per parameter at the commit")
    bottom = [0.0] * len(rows)
    for part in RETAINED:
        values = [row["peak_largest_bytes"][part] / MIB for row in rows]
        right.bar(names, values, bottom=bottom, label=part)
        bottom = [a + b for a, b in zip(bottom, values, strict=True)]
    right.set_ylabel("MiB retained at the peak, largest member")
    for axis in (left, right):
        axis.tick_params(axis="x", rotation=30, labelsize=7)
        axis.legend(fontsize=7)
    figure.suptitle(title, fontsize=9)
    save_figure(figure, path)


@click.command()
@click.option("--stages", type=int, default=4, show_default=True)
@click.option("--micro-batches", type=int, default=8, show_default=True)
@click.option("--width", type=int, default=1024, show_default=True, help="Of the model's linear layers.")
@click.option(
    "--training", type=click.Choice([name for name in TRAININGS if name != "tied"]), default="fp32", show_default=True
)
@click.option("--device", is_flag=True, help="Instead: peaks on the device of the tests, which is EMULATED.")
@click.option("--quick", is_flag=True, help="Stock, lazy and eager-frc only.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("out"), show_default=True)
def main(stages: int, micro_batches: int, width: int, training: str, device: bool, quick: bool, out: Path) -> None:
    """Measure the memory of every mode on a small real CPU model with Adam."""
    out = out.resolve()
    if device:
        rows = measure_on_device(out, (stages, micro_batches, width))
        save_json(out / "memory-device.json", {"emulated": True, "size": [stages, micro_batches, width], "rows": rows})
        return
    modes = [mode for mode in MODES if not quick or mode.name in ("lazy", "eager-frc")]
    rows = []
    for mode in (None, *modes):
        rows.append(measure(out, mode, TRAININGS[training], stages, micro_batches, width))
        console.print(f"  {rows[-1]['mode']}: {rows[-1]['bytes_per_parameter']['all']:.1f} bytes per parameter")
    size = f"P={stages} D={TRAININGS[training].pipelines} M={micro_batches}"
    title = f"Memory: {training} Adam, {size}, micro-batches of {BATCH}, width {width} (real CPU model)"
    console.print(table(rows, title))
    save_json(out / "memory.json", {"title": title, "rows": rows})
    plot(rows, title, out / "memory.png")


if __name__ == "__main__":
    main()
