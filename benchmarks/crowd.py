"""Many real workers on this machine, of EMULATED devices: how long a loss stops them, and what each of them has open.

Several pipelines lose one worker after the other. See ``--help``.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import click
import psutil
from common import WORKERS, Job, Watcher, bamboo_job, console, fresh, save_json, versions, write_config
from recovery import members
from rich.table import Table


def opened(pids: list[int]) -> tuple[int, int]:
    """Threads, and TCP connections, of the worker that has most of them."""
    processes = [psutil.Process(pid) for pid in pids]
    connections = [
        sum(each.status == psutil.CONN_ESTABLISHED for each in process.net_connections("tcp")) for process in processes
    ]
    return max(process.num_threads() for process in processes), max(connections)


def measure(folder: Path, checkout: Path | None, pipelines: int, stages: int, losses: int, seed: int) -> dict[str, Any]:
    """Run a job, and kill some of its workers."""
    config = write_config(fresh(folder), 2 * stages, {})
    stop, size, chosen = folder / "stop", pipelines * stages, random.Random(seed)
    arguments = ["--stages", str(stages), "--steps", "100000", "--forward-s", "0.001", "--backward-s", "0.002"]
    arguments += ["--stop-file", str(stop), "--out", str(folder), "--deepspeed_config", str(config)]
    with bamboo_job(folder, size, WORKERS / "emulated.py", arguments, checkout=checkout) as process:
        watcher = Watcher(Job(folder), process, patience_s=600)
        watcher.step(5)
        alive = members(process)
        threads, connections = opened([worker.pid for worker in alive.values()])
        pauses = []
        for _ in range(losses):
            rank = chosen.choice(sorted(alive))
            at = time.time()
            os.kill(alive.pop(rank).pid, signal.SIGKILL)
            lost = len(watcher.job.events("member_lost"))
            watcher.wait("a loss", lambda seen, lost=lost: sum(e["event"] == "member_lost" for e in seen) > lost)
            epoch = watcher.job.events("member_lost")[-1]["epoch"]
            watcher.wait(
                "its end", lambda seen, e=epoch: any(x["event"] == "recovered" and x["epoch"] > e for x in seen)
            )
            watcher.step(watcher.step(0) + 4)
            found = [e for e in watcher.job.events("recovered") if e["epoch"] > epoch]
            first = min(e["epoch"] for e in found)
            pauses.append(max(e["pause_seconds"] for e in found if e["epoch"] == first))
            console.print(f"[dim]rank {rank} at {at:.3f}: paused {pauses[-1]:.3f} s[/dim]")
        stop.with_suffix(".new").write_text(str(watcher.step(0) + 3))
        stop.with_suffix(".new").rename(stop)
        process.wait(300)
    return {"pauses_s": pauses, "threads": threads, "connections": connections, "exit": process.returncode}


@click.command(help="Measure pauses, threads and connections of many workers, on EMULATED devices.")
@click.option("--pipelines", default=8, show_default=True)
@click.option("--stages", default=4, show_default=True)
@click.option("--losses", default=3, show_default=True)
@click.option("--seed", default=1, show_default=True)
@click.option("--against", type=click.Path(path_type=Path, exists=True), help="Another checkout of the project.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("out"), show_default=True)
def main(pipelines: int, stages: int, losses: int, seed: int, against: Path | None, out: Path) -> None:
    """Run each version once."""
    table = Table(title=f"{pipelines} pipelines of {stages} stages, EMULATED devices", title_justify="left")
    for column in ("", "longest pause, s", "threads", "connections"):
        table.add_column(column, justify="right")
    found = {}
    for number, checkout in enumerate(versions(against)):
        name = "this checkout" if checkout is None else str(checkout)
        found[name] = one = measure(out / f"crowd-{number}", checkout, pipelines, stages, losses, seed)
        table.add_row(name, f"{max(one['pauses_s']):.2f}", str(one["threads"]), str(one["connections"]))
    console.print(table)
    save_json(out / "crowd.json", found)


if __name__ == "__main__":
    main()
