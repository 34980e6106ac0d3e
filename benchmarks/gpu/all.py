"""All experiments of this folder in order, within one limit of time; ``gpu-all.json`` is the index of their results.

Each has a share of what is left, by its weight among those that are still to come. See ``--help``.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from bench import Experiment, experiment, table
from common import environment

HERE = Path(__file__).parent
#: Arguments of each, with its weight: about the minutes that it would like to have.
EXPERIMENTS: dict[str, tuple[tuple[str, ...], float]] = {
    "smoke": (("smoke",), 4),
    "exact": (("exact",), 1.5),
    "copies": (("copies",), 1),
    "memory": (("memory",), 4),
    "nccl": (("nccl",), 6),
    "syncs": (("syncs",), 4),
    "overhead": (("overhead",), 7),
    "recovery": (("recovery",), 8),
    "sums": (("recovery", "--kills", "6", "--micro-batches", "32", "--sync-every", "4", "--at", "0.75"), 5),
}


@dataclass
class Figures:
    """One experiment: its exit code (``None``: left out, or ended), seconds, and the file of its results."""

    name: str
    code: int | None = None
    seconds: float = 0.0
    file: str = ""


def code_of(command: list[str], env: dict[str, str], timeout_s: float) -> int | None:
    """The exit code of ``command``; ``None``: it was interrupted after ``timeout_s`` seconds, and ended its jobs."""
    with subprocess.Popen(command, env=env) as process:
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
            return None


@experiment("all")
@click.option("--only", type=click.Choice(list(EXPERIMENTS)), multiple=True, help="[default: all]")
def main(run: Experiment, only: tuple[str, ...]) -> None:
    """Run all experiments, or some."""
    wanted, rows = [name for name in EXPERIMENTS if not only or name in only], []
    view = table("experiments", "name", "exit code", "[s]", " results")
    for place, name in enumerate(wanted):
        (program, *options), weight = EXPERIMENTS[name]
        row, begin = Figures(name), time.monotonic()
        share = run.left_s() * weight / sum(EXPERIMENTS[each][1] for each in wanted[place:])
        out = run.out / name
        command = [sys.executable, str(HERE / f"{program}.py"), *options, "--out", str(out)]
        command += ["--minutes", f"{share / 60 * 0.9:.2f}", *([] if run.gpu else ["--allow-cpu"])]
        if share > 0:
            row.code = code_of(command, environment() | {"DS_ACCELERATOR": run.kind}, share + 10)
        row.seconds, file = time.monotonic() - begin, out / f"gpu-{program}.json"
        row.file = str(file) if file.exists() else ""
        rows.append(row)
        if row.code != 0:
            problems = json.loads(file.read_text())["problems"] if row.file else []
            run.problems.append(f"{name}: exit code {row.code} {problems}")
        view.add_row(name, str(row.code), f"{row.seconds:.0f}", row.file)
        run.save(rows=[asdict(each) for each in rows])
    run.end(view, rows=[asdict(each) for each in rows])


if __name__ == "__main__":
    main()
