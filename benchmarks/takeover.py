"""The picture of a takeover: a stage is killed in the middle of an iteration of a pipeline of EMULATED devices.

The picture is what ``bamboo plot`` makes of the timelines that the job has recorded. See ``--help``.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from statistics import median

import click
from common import WORKERS, Job, Watcher, bamboo_job, console, ended_well, fresh, write_config
from recovery import members

from bamboo_ds.cli.plot import plot

#: Steps before the kill: redundant passes have found their places by then.
BEFORE, STEPS = 8, 12


@click.command()
@click.option("--stages", type=click.IntRange(min=2), default=4, show_default=True)
@click.option("--micro-batches", type=click.IntRange(min=1), default=8, show_default=True)
@click.option("--victim", type=click.IntRange(min=0), default=2, show_default=True, help="Its stage.")
@click.option("--at", type=click.FloatRange(0, 1), default=0.5, show_default=True, help="Share of the iteration.")
@click.option("--forward-ms", type=float, default=20.0, show_default=True)
@click.option("--backward-ms", type=float, default=40.0, show_default=True)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("out"), show_default=True)
def main(
    stages: int, micro_batches: int, victim: int, at: float, forward_ms: float, backward_ms: float, out: Path
) -> None:
    """Draw an undisturbed iteration and one with a loss, on EMULATED devices."""
    folder = fresh(out.resolve() / "takeover")
    config = write_config(folder, micro_batches, {})
    arguments = ["--deepspeed_config", str(config), "--out", str(folder), "--stages", str(stages)]
    arguments += ["--steps", str(STEPS), "--forward-s", str(forward_ms / 1000), "--backward-s", str(backward_ms / 1000)]
    with bamboo_job(folder, stages, WORKERS / "emulated.py", arguments) as process:
        watcher = Watcher(Job(folder), process)
        watcher.step(1)
        worker = members(process)[victim]
        watcher.step(BEFORE)
        seconds = median(event["seconds"] for event in watcher.seen if event["event"] == "step")
        time.sleep(at * seconds)
        os.kill(worker.pid, signal.SIGKILL)
        job = ended_well(folder, [process], 120)
    events, picture = job.folder / "events.jsonl", folder / "takeover.png"
    title = (
        f"{stages} stages, {micro_batches} micro-batches, SIGKILL of stage {victim}'s worker. EMULATED devices: a pass "
        f"holds its device for {forward_ms:g} ms forward, {backward_ms:g} ms backward"
    )
    plot.main([str(events), "-o", str(picture), "--title", title], standalone_mode=False)
    console.print(f"bamboo plot {events} -o {picture}")


if __name__ == "__main__":
    main()
