"""A recorded spot market, compressed in time, against systems that train on it, one after the other: what each makes
of the same window of the same trace, on emulated devices, with real processes.

    python benchmarks/spot.py                                    the three worst hours of 12 of EC2's p3 instances
    python benchmarks/spot.py --trace parcae-p3-high-availability-high-preemption-1h.csv --begin-h 0 --end-h 1
                              --compress 20 --mapping scale      an hour in which nodes are not replaced at once
    python benchmarks/spot.py --failures 3000                    so many steps with seeded losses instead of a trace

Table, picture and JSON in ``--out``. Exit code 1 if the result of a system is not what it claims. See ``--help``.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import click
from click.core import ParameterSource
from common import HERE, TRAININGS, JobFailed, console

sys.path.insert(0, str(HERE.parent))  # for tests.support

from spotting import fault_tolerant, pipelines, report
from spotting.elastic import Elastic
from spotting.market import Choice, Shape, Work, between_losses_s, market, save_every, seeded, window
from spotting.outcome import Outcome, prove
from spotting.restarts import Restarts

from bamboo_ds.chaos.faults import Fault
from bamboo_ds.chaos.schedule import Change, initial_nodes, parse_trace

TRACES = HERE.parent.parent / "shared" / "traces"
TITLES = {
    "on-demand": "stock DeepSpeed, no node is lost",
    "bamboo": "this package",
    "checkpoint-restart": "stock DeepSpeed, whole pipelines of the members at hand",
    "torchft": "stock DeepSpeed's pipelines as replica groups of torchft",
    "sample-dropping": "stock DeepSpeed, the samples of a pipeline that has lost a member are left out",
}
#: Largest relative difference of a loss between two orders of the same sum.
ROUNDING = 1e-4
#: Steps from whose time that of more is concluded, where no node is lost.
ON_DEMAND_STEPS = 100
#: Steps that systems do before those of the window besides the ones to their first checkpoint, and after it, at most.
MORE_STEPS = 200
NOT_MEASURED = "not measured"
#: Systems that are compared with ``--failures``.
WITH_FAILURES = ("bamboo", "checkpoint-restart")


@dataclass(frozen=True)
class Plan:
    """What all systems are measured on.

    Attributes:
        changes: of the market, in milliseconds of the trace, and ``faults`` what they do to the job.
        seconds: how long the window is here; ``None``: until ``steps`` are done.
        prices: of a node for an hour: on demand, on the spot market.
        spare_holders: losses wait until bamboo can bear them.
        spares: nodes beyond those of a full job.
        save_every: steps between two checkpoints of the others; ``None``: by Young and Daly.
    """

    work: Work
    changes: Sequence[Change]
    faults: Sequence[Fault]
    compress: float
    seconds: float | None
    steps: int | None
    mapping: str
    prices: tuple[float, float]
    spare_holders: bool
    spares: int
    save_every: int | None
    blocks: str
    torchft: Path
    folder: Path

    @property
    def founders(self) -> list[str]:
        """Names of the nodes of the begin."""
        return initial_nodes(self.changes, self.work.shape.size)

    @property
    def until_loss_s(self) -> float:
        """Mean seconds between two losses."""
        return between_losses_s(self.faults, self.seconds or self.faults[-1].at_s)


@dataclass
class Undisturbed:
    """What the job without losses has shown.

    Attributes:
        losses: by step.
        every: steps between two checkpoints for the other systems.
        step_s: seconds of a step.
        save_s: seconds for which a checkpoint holds training.
    """

    losses: dict[int, float]
    every: int
    step_s: float
    save_s: float


def on_demand(plan: Plan, outcome: Outcome) -> Undisturbed:
    """The limit, which also measures what the others are told: times of a step and of a checkpoint."""
    job = Restarts(plan.work, plan.folder / "on-demand", plan.founders, (), 0, float("inf"))
    job.run(outcome, plan.seconds, None if plan.steps is None else min(plan.steps, ON_DEMAND_STEPS))
    losses = job.losses
    step_s = median(step.end - step.begin for step in outcome.done)
    save_s = median(outcome.saves)
    every = plan.save_every or save_every(save_s, plan.until_loss_s, step_s)
    found = Undisturbed(losses, every, step_s, save_s)
    if plan.steps is not None:  # the rest of the losses does not need the time
        quick = Restarts(replace(plan.work, layer_s=0.0), plan.folder / "losses", plan.founders, (), 0, float("inf"))
        quick.run(Outcome("losses", "", 0.0), None, plan.steps + bamboo_every(plan, found) + MORE_STEPS)
        losses |= quick.losses
    outcome.proof = prove("the run that the others are compared with", outcome.kept, losses, 0.0)
    return found


def bamboo_every(plan: Plan, undisturbed: Undisturbed) -> int:
    """Steps between two checkpoints: it goes back to one after fatal losses only, one in a window, to be prepared."""
    return save_every(undisturbed.save_s, plan.seconds or plan.until_loss_s * 20, undisturbed.step_s)


def bamboo(plan: Plan, outcome: Outcome, undisturbed: Undisturbed) -> None:
    """See :mod:`spotting.elastic`."""
    folder, every = plan.folder / "bamboo", bamboo_every(plan, undisturbed)
    limit = plan.work.shape.size + plan.spares
    job = Elastic(plan.work, folder, plan.changes, plan.compress, every, limit, plan.spare_holders, plan.blocks)
    losses = job.run(outcome, plan.seconds, plan.steps)
    wrong = [step for step, loss in losses.items() if undisturbed.losses.get(step, loss) != loss]
    detail = f"workers that came to the end have seen {len(losses)} losses, {len(wrong)} of which differ"
    claim = "losses bit-equal to the undisturbed run's"
    outcome.proof = prove(claim, outcome.kept, undisturbed.losses, 0.0, detail, bool(losses) and not wrong)


def checkpoint_restart(plan: Plan, outcome: Outcome, undisturbed: Undisturbed) -> None:
    """See :mod:`spotting.restarts`."""
    folder = plan.folder / "checkpoint-restart"
    job = Restarts(plan.work, folder, plan.founders, plan.faults, undisturbed.every, plan.until_loss_s)
    job.run(outcome, plan.seconds, plan.steps)
    alike = {generation.shape.pipelines for generation in job.generations} == {plan.work.shape.pipelines}
    claim = "losses bit-equal to the undisturbed run's" if alike else "losses equal up to the order of sums"
    detail = "" if alike else "the number of pipelines has changed"
    outcome.proof = prove(claim, outcome.kept, undisturbed.losses, 0.0 if alike else ROUNDING, detail)


def without_others(plan: Plan, outcome: Outcome, undisturbed: Undisturbed, problems: Sequence[str], checks: int,
                   of: str = "") -> None:  # fmt: skip
    """What a system can claim whose steps are the mean over the pipelines that are there."""
    first = next((step.number for step in outcome.kept if step.dropped), None)
    alike = [step for step in outcome.kept if first is None or step.number < first]
    rest = [step for step in outcome.kept if first is not None and step.number >= first]
    later = prove("", rest, undisturbed.losses, float("inf"))
    dropped = sum(step.dropped > 0 for step in outcome.kept)
    detail = f"{checks} times the weights were compared; {dropped} steps have left samples out"
    if later.largest is not None:
        detail += f", from the first on losses differ by up to {later.largest:.2g}"
    detail = "; ".join([detail, *problems])
    claim = f"pipelines have the same weights{of}; losses of the undisturbed run until samples are left out, not after"
    compared = checks > 0 or plan.work.shape.pipelines == 1
    holds = not problems and compared and (not rest or later.holds)
    outcome.proof = prove(claim, alike, undisturbed.losses, ROUNDING, detail, holds)


def sample_dropping(plan: Plan, outcome: Outcome, undisturbed: Undisturbed) -> None:
    """See :mod:`spotting.pipelines`."""
    folder, every = plan.folder / "sample-dropping", undisturbed.every
    window = (plan.seconds, plan.steps)
    hub = pipelines.sample_dropping(plan.work, folder, plan.founders, plan.faults, every, outcome, *window)
    without_others(plan, outcome, undisturbed, hub.problems, hub.checks)


def torchft(plan: Plan, outcome: Outcome, undisturbed: Undisturbed) -> None:
    """See :mod:`spotting.fault_tolerant`."""
    market_of = (plan.work, plan.folder / "torchft", plan.founders, plan.faults, undisturbed.every)
    problems, checks = fault_tolerant.torchft(*market_of, outcome, plan.seconds, plan.steps, plan.torchft)
    without_others(plan, outcome, undisturbed, problems, checks, " in their first stages")


SYSTEMS: dict[str, Callable[[Plan, Outcome, Undisturbed], None]] = {
    "bamboo": bamboo,
    "checkpoint-restart": checkpoint_restart,
    "sample-dropping": sample_dropping,
    "torchft": torchft,
}


def compare(plan: Plan, systems: Sequence[str]) -> tuple[list[Outcome], Undisturbed]:
    """Measure all systems, the undisturbed job first."""
    first = Outcome("on-demand", TITLES["on-demand"], plan.prices[0])
    console.print(f"[bold]on-demand[/bold]: {first.title}")
    undisturbed = on_demand(plan, first)
    outcomes = [first]
    console.print(
        f"  {undisturbed.step_s:.3f} s per step; a checkpoint holds training for {undisturbed.save_s * 1000:.0f} ms; a "
        f"loss every {plan.until_loss_s:.1f} s; a checkpoint every {undisturbed.every} steps"
    )
    for name in systems:
        outcome = Outcome(name, TITLES[name], plan.prices[1])
        console.print(f"[bold]{name}[/bold]: {outcome.title}")
        begin = time.monotonic()
        try:
            SYSTEMS[name](plan, outcome, undisturbed)
        except fault_tolerant.Missing as error:
            outcome.failed = f"{NOT_MEASURED}: {error}"
            console.print(f"  {outcome.failed}", highlight=False, markup=False)
        except JobFailed as error:
            outcome.failed = str(error)
            console.print(f"  failed: {error}", highlight=False, markup=False, style="red")
        else:
            console.print(f"  {outcome.samples} samples in {outcome.seconds:.0f} s ({time.monotonic() - begin:.0f} s)")
        outcomes.append(outcome)
    return outcomes, undisturbed


def find_trace(name: str) -> Path:
    """The file of a trace: a path, or a name below ``--traces``."""
    for path in (Path(name), TRACES / name, TRACES / f"{name}.csv"):
        if path.is_file():
            return path
    known = ", ".join(sorted(file.name for file in TRACES.glob("*.csv"))) or f"none in {TRACES}"
    raise click.BadParameter(f"there is no trace {name!r}; known are: {known}", param_hint="--trace")


def check_failures(failures: int | None, systems: Sequence[str]) -> None:
    """Refuse what has no meaning without a trace, or with one."""
    given = click.get_current_context().get_parameter_source
    options, why = ("--mtbf-s", "--seed", "--spares"), "only with --failures"
    if failures is not None:
        options, why = ("--trace", "--begin-h", "--end-h", "--compress", "--mapping"), "--failures has no trace"
        others = [name for name in systems if name not in WITH_FAILURES]
        if others:
            text = f"{', '.join(others)}: not compared with --failures; choose of {', '.join(WITH_FAILURES)}"
            raise click.BadParameter(text, param_hint="--system")
    for option in options:
        if given(option[2:].replace("-", "_")) is not ParameterSource.DEFAULT:
            raise click.BadParameter(f"{why}: leave it out", param_hint=option)


@click.command()
@click.option("--trace", default="ec2-p3-us-east-12h.csv", show_default=True, help="A file of lines "
              "ms,add|remove,node, or the name of one in ../shared/traces.")  # fmt: skip
@click.option("--begin-h", type=click.FloatRange(min=0), default=5.5, show_default=True, help="Of the window.")
@click.option("--end-h", type=click.FloatRange(min=0), default=8.5, show_default=True, help="Of the window.")
@click.option("--compress", type=click.FloatRange(min=1), default=60.0, show_default=True, help="How many times "
              "faster than the trace.")  # fmt: skip
@click.option("--mapping", type=click.Choice(["replace", "scale"]), default="replace", show_default=True,
              help="How nodes of the trace, which has more, become members: further ones wait to replace those that "
              "go, or every n-th node of the trace only.")  # fmt: skip
@click.option("--pipelines", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--stages", type=click.IntRange(min=2), default=4, show_default=True)
@click.option("--layers", type=click.IntRange(min=1), default=4, show_default=True, help="Of a stage.")
@click.option("--micro-batches", type=click.IntRange(min=1), default=8, show_default=True, help="Of a pipeline.")
@click.option("--size", type=click.IntRange(min=1), default=2, show_default=True, help="Samples of a micro-batch.")
@click.option("--layer-ms", type=click.FloatRange(min=0), default=5.0, show_default=True, help="Of a layer's emulated "
              "forward pass; its backward pass takes twice as long.")  # fmt: skip
@click.option("--training", type=click.Choice(["bf16-zero1", "fp32"]), help="fp32: all pipelines hold a stage's "
              "state, checkpoints have one number of stages.  [default: fp32, bf16-zero1 to scale nodes]")  # fmt: skip
@click.option("--start-s", type=click.FloatRange(min=0), default=0.0, show_default=True, help="Seconds of the trace "
              "(with --failures: seconds) that the start of a process takes besides, which are emulated: of all "
              "systems alike.")  # fmt: skip
@click.option("--blocks", default="auto", show_default=True, help="bamboo's setting topology.blocks; 1: whole stages.")
@click.option("--spare-holders/--no-spare-holders", default=False, show_default=True, help="Losses wait until bamboo "
              "can bear them. Without it fatal ones happen, and the job restarts.")  # fmt: skip
@click.option("--system", "systems", type=click.Choice(list(SYSTEMS)), multiple=True, help="Besides on-demand; may be "
              "repeated.  [default: all]")  # fmt: skip
@click.option("--on-demand-price", type=float, default=3.06, show_default=True, help="Of a node, per hour.")
@click.option("--spot-price", type=float, default=0.918, show_default=True, help="Of a node, per hour.")
@click.option("--failures", type=click.IntRange(min=10), metavar="STEPS", help="No trace: so many steps, with seeded "
              "losses, each replaced at once; only bamboo and checkpoint-restart.")  # fmt: skip
@click.option("--mtbf-s", type=click.FloatRange(min=0.1), default=20.0, show_default=True, help="Mean time between two "
              "of these, each of which is up to a quarter shorter or longer.")  # fmt: skip
@click.option("--spares", type=click.IntRange(min=0), default=0, show_default=True, help="Nodes in reserve beyond "
              "those of the full job: the newest ones, which are not lost.")  # fmt: skip
@click.option("--save-every", "every", type=click.IntRange(min=1), metavar="STEPS", help="Between two checkpoints of "
              "systems other than bamboo.  [default: by Young and Daly]")  # fmt: skip
@click.option("--seed", type=int, default=1, show_default=True, help="Of these.")
@click.option("--torchft", type=click.Path(file_okay=False, path_type=Path), default=HERE.parent / "out" / "torchft",
              help="Virtual environment that has torchft.  [default: out/torchft]")  # fmt: skip
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("out"), show_default=True)
def main(trace: str, begin_h: float, end_h: float, compress: float, mapping: Choice, pipelines: int, stages: int,
         layers: int, micro_batches: int, size: int, layer_ms: float, training: str | None, start_s: float,
         failures: int | None, mtbf_s: float, spares: int, every: int | None, seed: int, systems: tuple[str, ...],
         on_demand_price: float, spot_price: float, spare_holders: bool, blocks: str, torchft: Path,
         out: Path) -> None:  # fmt: skip
    """Measure what systems make of a spot market, on EMULATED devices."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started ends with this
    check_failures(failures, systems)
    compress = compress if failures is None else 1.0
    training = training or ("fp32" if failures is not None or mapping == "replace" else "bf16-zero1")
    settings = {**TRAININGS[training].config, "communication_data_type": "fp32"}
    times = layer_ms / 1000, start_s / compress
    work = Work(Shape(pipelines, stages), stages * layers, micro_batches, size, *times, settings, training != "fp32")
    if failures is None:
        path = find_trace(trace)
        if not end_h > begin_h:
            raise click.BadParameter("the window ends before it begins", param_hint="--end-h")
        part = window(parse_trace(path.read_text(), str(path)), begin_h * 3600, end_h * 3600)
        source, seconds = f"{path.stem}, hours {begin_h:g} to {end_h:g}", (end_h - begin_h) * 3600 / compress
    else:
        systems = systems or WITH_FAILURES
        # Longer than any system that is of use needs.
        part = seeded(work.shape.size, mtbf_s, 20 * failures * work.step_s(work.shape) + 3600, seed, spares)
        source, seconds, mapping = f"seeded losses, one in {mtbf_s:g} s, seed {seed}", None, "replace"
    changes, faults = market(part, work.shape.size, mapping, compress, spares)
    plan = Plan(work, changes, faults, compress, seconds, failures, mapping, (on_demand_price, spot_price),
                spare_holders, spares, every, blocks, torchft.absolute(),
                out.resolve() / "jobs" / "spot")  # fmt: skip
    facts = report.facts(source, training, plan.work, mapping, compress, seconds, failures, spares, faults)
    for line in facts:
        console.print(line, highlight=False)
    outcomes, undisturbed = compare(plan, systems or tuple(SYSTEMS))
    more: dict[str, Any] = {
        "options": {
            key: value for key, value in click.get_current_context().params.items() if not isinstance(value, Path)
        },
        "step_s": undisturbed.step_s,
        "save_s": undisturbed.save_s,
        "save_every_steps": undisturbed.every,
        "between_losses_s": plan.until_loss_s,
    }
    name = "spot" if failures is None else "spot-failures"
    report.tell(out.resolve(), name, facts, outcomes, work, faults, more)
    broken = [f"{o.system}: {o.proof.claim}: {o.proof.detail}" for o in outcomes if o.proof and not o.proof.holds]
    broken += [f"{o.system}: {o.failed}" for o in outcomes if o.failed and not o.failed.startswith(NOT_MEASURED)]
    if broken:
        raise JobFailed("\n".join(broken))


if __name__ == "__main__":
    main()
