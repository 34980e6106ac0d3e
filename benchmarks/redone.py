"""What a loss costs besides its pause: work that is done again, on emulated devices, beside the simulator's forecast.

One job loses a worker in the middle of an iteration (SIGKILL), a new one joins, and once every stage has a member of
its own and a shadow again the next one is lost. See ``--help``.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import click
from common import (
    WORKERS,
    Job,
    JobFailed,
    Watcher,
    bamboo_job,
    console,
    ending,
    fresh,
    join,
    save_json,
    wall,
    write_config,
)
from recovery import members as workers_of
from rich.table import Table

from bamboo_ds.config import RedundancyMode
from bamboo_ds.simulate.pace import OVERHEAD, Pace, Stretch
from bamboo_ds.simulate.profile import Layer, Profile
from bamboo_ds.simulate.terms import Terms
from bamboo_ds.topology import initial_plan, takeover, with_redundancy

#: Steps that the median of an undisturbed iteration is of, at most, and at least before a kill.
STEADY, BEFORE = 8, 3
#: Nothing but passes takes time in the forecast.
FREE = Terms(network_gb_s=1e9, message_ms=0, detection_s=0, rebuild_s=0, switch_s=0)
JOB = "redone"


@dataclass(frozen=True)
class Loss:
    """One kill; costs are in iterations.

    Attributes:
        stage: of the victim.
        at: share of the iteration that was over.
        cost: by how much longer the iteration took, without the pause.
        expected: the same as the simulator has it.
        pause_s: from the notice to the agreement, on the slowest survivor.
        kept, backwards: backward passes of the victim whose sums were gone on from, and those done again.
    """

    stage: int
    at: float
    cost: float
    expected: float
    pause_s: float
    kept: int
    backwards: int


class Forecast:
    """What the simulator expects of a loss.

    Args:
        stages, micro_batches, sync_every: of the job.
        mode: of redundancy.
    """

    def __init__(self, stages: int, micro_batches: int, mode: RedundancyMode, sync_every: int) -> None:
        layers = (Layer(count=stages, forward_s=1.0, backward_s=2.0, parameters=10**3),)
        profile = Profile(name="redone", layers=layers, micro_batch=1, global_batch=micro_batches, stages=stages)
        pace = Pace(profile, FREE, 1, stages, mode, 1, sync_every)
        self._plan = with_redundancy(initial_plan([f"m{stage}" for stage in range(stages)]), pace.layout, True)
        self._whole = Stretch(pace, self._plan)

    def cost(self, stage: int, at: float) -> float:
        """Of the loss of the member of ``stage`` when a share ``at`` of an iteration is over, in iterations."""
        at_s = at * self._whole.seconds
        after = takeover(self._plan, {self._plan.owners[stage]})
        return (at_s + self._whole.after(after, at_s).seconds) / self._whole.seconds - 1

    def mean(self, instants: int = 24) -> float:
        """The mean over all stages and instants."""
        shares = [(number + 0.5) / instants for number in range(instants)]
        return fmean(self.cost(stage, at) for stage in range(len(self._plan.owners)) for at in shares)


def healed(seen: list[dict[str, Any]], stages: int) -> bool:
    """Whether every stage has a member of its own, whose predecessor shadows it, for some steps."""
    plan = [event for event in seen if event["event"] == "plan"][-1]
    owners, shadows = plan["owners"], plan["shadows"]
    steps = sum(event["event"] == "step" and event["epoch"] == plan["epoch"] for event in seen)
    alone = len(set(owners)) == stages and not plan["lent"]
    return alone and shadows == [owners[stage - 1] for stage in range(stages)] and steps >= BEFORE


def strike(
    watcher: Watcher, processes: list[subprocess.Popen[bytes]], stage: int, at: float, forecast: Forecast
) -> Loss:
    """Kill the worker of ``stage`` when a share ``at`` of an iteration is over, and account for it."""
    last = watcher.step(watcher.step(0) + 1)
    plan = [event for event in watcher.seen if event["event"] == "plan"][-1]
    steps = [e for e in watcher.seen if e["event"] == "step"]
    # A member that has just come to wait has changed the plan, but not who computes what.
    alike = [e for e in steps if e["epoch"] == plan["epoch"]][-STEADY:] or steps[-BEFORE:]
    normal_s = median(e["seconds"] for e in alike)
    victim = plan["owners"][stage]
    pid = next(w.pid for process in processes for w in workers_of(process).values() if w.id == victim)
    begin = next(wall(e) for e in watcher.seen if e["event"] == "step" and e["step"] == last)
    time.sleep(max(0.0, begin + at * normal_s - time.time()))
    at = (time.time() - begin) / normal_s
    os.kill(pid, signal.SIGKILL)

    def over(seen: list[dict[str, Any]]) -> bool:
        told = {e["member"] for e in seen if e["event"] == "recovered" and e["epoch"] > plan["epoch"]}
        # Those that only wait need not recover.
        lost = any(e["event"] == "plan" and victim in e["lost"] for e in seen)
        done = lost and told >= {*plan["owners"]} - {victim}
        return done and any(e["event"] == "step" and e["step"] > last for e in seen)

    seen = watcher.wait(f"the recovery from the loss of stage {stage}", over)
    found = [e for e in seen if e["event"] == "recovered" and e["epoch"] > plan["epoch"]]
    interrupted = found[0]["step"]
    took_s = next(e["seconds"] for e in seen if e["event"] == "step" and e["step"] == interrupted)
    at -= interrupted - last - 1  # it may have come late, in the next iteration
    pause_s = max(e["pause_seconds"] for e in found)
    return Loss(
        stage,
        at,
        (took_s - pause_s) / normal_s - 1,
        forecast.cost(stage, min(max(at, 0.0), 1.0)),
        pause_s,
        sum(e["backwards_kept"] for e in found),
        max(e["backwards_redone"] for e in found),
    )


@click.command()
@click.option("--stages", type=click.IntRange(min=3), default=8, show_default=True)
@click.option("--micro-batches", type=click.IntRange(min=1), default=16, show_default=True)
@click.option("--sync-every", type=click.IntRange(min=0), default=4, show_default=True)
@click.option(
    "--mode", type=click.Choice([each.value for each in OVERHEAD]), default="lazy-frc-lazy-brc", show_default=True
)
@click.option("--kills", type=click.IntRange(min=1), default=60, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--forward-ms", type=float, default=20.0, show_default=True)
@click.option("--backward-ms", type=float, default=40.0, show_default=True)
@click.option("--minutes", type=float, help="Kill no more after so many minutes.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("out"), show_default=True)
def main(
    stages: int,
    micro_batches: int,
    sync_every: int,
    mode: str,
    kills: int,
    seed: int,
    forward_ms: float,
    backward_ms: float,
    minutes: float | None,
    out: Path,
) -> None:
    """Measure what losses cost on EMULATED devices."""
    name = f"redone-{mode}-{stages}-{micro_batches}-{sync_every}"
    folder, draw, end = (
        fresh(out.resolve() / "jobs" / name),
        random.Random(seed),
        time.monotonic() + 60 * (minutes or 1e9),
    )
    forecast = Forecast(stages, micro_batches, RedundancyMode(mode), sync_every)
    # Stages computed whole: what a loss costs, not how evenly the rest is shared.
    block = {"redundancy": {"mode": mode, "sync_every": sync_every}, "topology": {"blocks": 1}}
    config = write_config(folder, micro_batches, block)
    arguments = ["--deepspeed_config", str(config), "--out", str(folder), "--stages", str(stages), "--steps", "1000000"]
    arguments += ["--forward-s", str(forward_ms / 1000), "--backward-s", str(backward_ms / 1000)]
    script, losses = WORKERS / "emulated.py", []
    with ExitStack() as stack:
        process = stack.enter_context(bamboo_job(folder, stages, script, arguments, JOB))
        processes, watcher = [process], Watcher(Job(folder), process)
        watcher.step(1)
        order: list[int] = []
        while len(losses) < kills and time.monotonic() < end:
            order = order or draw.sample(range(stages), stages)
            watcher.wait("every stage has its member and its shadow", lambda seen: healed(seen, stages))
            losses.append(strike(watcher, processes, order.pop(), draw.random(), forecast))
            console.print(f"  {len(losses)}: {losses[-1]}")
            joiner = join(folder, len(losses), JOB, script, arguments)
            stack.enter_context(ending(joiner))
            processes.append(joiner)
    if not losses:
        raise JobFailed("no worker was lost")
    cost, expected = fmean(loss.cost for loss in losses), fmean(loss.expected for loss in losses)
    view = Table(title=f"{len(losses)} losses, P={stages}, M={micro_batches}, {mode} (EMULATED devices)")
    for column in ("sums every", "cost [iterations]", "forecast of these", "ratio", "forecast of any"):
        view.add_column(column, justify="right")
    view.add_row(str(sync_every), f"{cost:.3f}", f"{expected:.3f}", f"{cost / expected:.2f}", f"{forecast.mean():.3f}")
    console.print(view)
    content = {"title": "redone", "emulated": True, "seed": seed, "cost": cost, "expected": expected}
    content |= {"stages": stages, "micro_batches": micro_batches, "sync_every": sync_every, "mode": mode}
    save_json(out / f"{name}.json", {**content, "mean": forecast.mean(), "losses": [asdict(loss) for loss in losses]})


if __name__ == "__main__":
    main()
