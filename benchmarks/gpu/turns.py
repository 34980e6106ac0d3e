"""Several commands of this folder in turn, within one limit of time, each with a share of what is left."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from bench import Experiment, table
from common import environment

HERE = Path(__file__).parent
#: By name: a command's program and arguments, with its weight: about the minutes that it would like to have.
Turns = Mapping[str, tuple[tuple[str, ...], float]]


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


def run_in_turn(run: Experiment, turns: Turns) -> None:
    """Run them; what ``run`` saves after each is the index of their results, with the results themselves."""
    rows, results = [], {}
    view = table("experiments", "name", "exit code", "[s]", " results")
    for place, (name, ((program, *options), weight)) in enumerate(turns.items()):
        row, begin = Figures(name), time.monotonic()
        share = run.left_s() * weight / sum(each for _, each in list(turns.values())[place:])
        out = run.out / name
        command = [sys.executable, str(HERE / f"{program}.py"), *options, "--out", str(out)]
        command += ["--minutes", f"{share / 60 * 0.9:.2f}", *([] if run.gpu else ["--allow-cpu"])]
        if share > 0:
            row.code = code_of(command, environment() | {"DS_ACCELERATOR": run.kind}, share + 10)
        row.seconds, file = time.monotonic() - begin, out / f"gpu-{program}.json"
        row.file = str(file) if file.exists() else ""
        rows.append(row)
        if row.file:
            results[name] = json.loads(file.read_text())
        if row.code != 0:
            run.problems.append(f"{name}: exit code {row.code} {results.get(name, {}).get('problems', [])}")
        view.add_row(name, str(row.code), f"{row.seconds:.0f}", row.file)
        run.save(rows=[asdict(each) for each in rows], results=results)
    run.end(view, rows=[asdict(each) for each in rows], results=results)
