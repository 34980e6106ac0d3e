"""``bamboo profile SCRIPT``: what the simulator needs of a script, measured in some iterations under ``bamboo run``."""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import click

from ..config import BLOCK, config_path_from_argv, load_config
from ..control.registry.mirror import Mirror
from ..errors import ConfigError
from ..launchers import jobs
from ..launchers.network import LOOPBACK
from ..launchers.run import LocalSlots
from ..observe.events import Event, Step
from ..observe.spans import Span, read_timelines
from ..processes import adopt_orphans
from ..simulate.profile import Profile
from ..simulate.profiling import WARM_UP, Told, layers_of
from .building import Built
from .demo.jobs import DemoJob, ended_by_signals
from .dry_run import build
from .options import check_script, read_job

#: Seconds without an event or a line of output after which the job is given up: loading data may take long.
_SILENCE_S = 900.0
#: Iterations that are waited for until all members have told what they have measured.
_LATE = 10


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("-n", "--workers", type=click.IntRange(min=2), required=True, help="Local workers: one for each stage,"
              " or a multiple.")  # fmt: skip
@click.option("--steps", type=click.IntRange(min=8), default=20, show_default=True, help="Iterations that are"
              " measured.")  # fmt: skip
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="The file to write.  [default:"
              " SCRIPT's name with .profile.json, in the working directory]")  # fmt: skip
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def profile(workers: int, steps: int, output: Path | None, script: str, arguments: tuple[str, ...]) -> None:
    """Measure SCRIPT with ARGUMENTS, and write the profile of its model that bamboo simulate reads.

    The script runs on local workers as it is; after the iterations that are measured it is stopped.
    """
    target = output or Path(f"{Path(script).stem}.profile.json")
    if not target.parent.is_dir():
        raise ConfigError(f"--output {target}: there is no folder {target.parent}")
    found = measure(script, arguments, workers, steps)
    try:
        target.write_text(found.model_dump_json(indent=1, exclude_defaults=True) + "\n")
    except OSError as error:
        raise ConfigError(f"--output {target} cannot be written: {error}") from error
    click.echo(f"bamboo: the profile is in {target}: bamboo simulate --profile {target}", err=True)


@dataclass
class _Measurement:
    """The figures that the job reports while it runs."""

    steps: int
    name: str
    stages: int
    job: DemoJob
    done: int = 0
    samples: int = 0
    mirror: Mirror | None = None
    complete: bool = field(default=False, init=False)

    def on_event(self, event: Event) -> None:
        if not isinstance(event, Step):
            return
        self.done, self.samples = event.step, event.samples or 0
        if self.done < self.steps or self.complete:
            return
        if jobs.find(self.name) is None:
            return  # it has just ended
        self.mirror = read_job(jobs.locate(self.name, None))
        self.complete = all(each.kept and each.blocks for each in told(self.mirror, self.stages).values())
        if self.complete or self.done >= self.steps + _LATE:
            self.complete = True
            self.job.stop()


def measure(script: str, arguments: Sequence[str], workers: int, steps: int) -> Profile:
    """Runs ``script`` for some iterations, and takes the profile of its model.

    Args:
        script: path of the script.
        arguments: of it. A configuration of DeepSpeed's that they name may lack the block.
        workers: local workers.
        steps: iterations.

    Raises:
        ConfigError: the script is no pipeline job, or ends too soon.
        LaunchError: the job fails.
    """
    check_script(script, False)
    with tempfile.TemporaryDirectory(prefix="bamboo-profile-") as name:
        folder = Path(name)
        command = shlex.join([script, *arguments])
        arguments = with_block(arguments, folder)
        built = _built(script, arguments, workers)
        click.echo(f"bamboo: measuring {steps} iterations of {command} on {workers} workers", err=True)
        cores = os.cpu_count() or 1
        crowded = workers > cores
        if crowded:
            share = f"{workers} workers share {cores} cores"
            click.echo(f"bamboo: {share}: times are too long if they compute there", err=True)
        adopt_orphans()

        what = f"the job of {script}"
        with ended_by_signals() as check, DemoJob(what, folder, lambda line: None, _SILENCE_S) as job:
            run = _Measurement(steps, jobs.random_name(), built.stages, job)
            events = job.follow(run.on_event)
            options = ["run", "--quiet", "--measured", "-n", str(workers), "--job", run.name]
            options += ["--events", str(events), "--logs", str(folder)]
            argv = [sys.executable, "-m", "bamboo_ds.cli.main", *options, script, *arguments]
            # Passes on GPUs are timed where they are launched.
            job.start(argv, {"CUDA_LAUNCH_BLOCKING": "1", **os.environ}, Path.cwd())
            job.serve(check)
        if run.mirror is None:
            raise ConfigError(
                f"{script} ends after {run.done} iterations, --steps asks for {steps}: let it train longer, or choose "
                f"fewer, at least {WARM_UP + 6}"
            )
        spans = chain.from_iterable(timeline.spans for timeline in read_timelines(events))
        stages = told(run.mirror, built.stages)
        notes = _notes(command, built, run.done, stages, crowded)
        reports = [report for report in run.mirror.reports.values() if report.device is None]
        retains = any(report.redundant or report.layout.alike for report in reports)
        return profile_of(Path(script).stem, notes, built, run.samples, stages, spans, retains)


def with_block(arguments: Sequence[str], folder: Path) -> list[str]:
    """``arguments`` with a configuration that has the block, beside the user's if that has none."""
    path = config_path_from_argv(arguments)
    if path is None or BLOCK in (loaded := load_config(path)):
        return list(arguments)
    copy = folder / "ds_config.json"
    copy.write_text(json.dumps({**loaded, BLOCK: {}}))
    return [str(copy) if each == path else each.replace(f"={path}", f"={copy}") for each in arguments]


def _built(script: str, arguments: Sequence[str], workers: int) -> Built:
    """The script's model and settings; raises :class:`ConfigError` if they cannot be measured."""
    built = build(LOOPBACK, LocalSlots(workers), [script, *arguments])
    if built.problem is not None:
        raise ConfigError(f"{script} with -n {workers}: {built.problem}")
    if built.unknown is not None:
        raise ConfigError(f"{script}: {built.unknown}; write a profile by hand")
    if built.slices > 1:
        raise ConfigError(f"{script} has tensor slices, which are not simulated: measure it without")
    if not built.block:
        raise ConfigError(
            f'{script}: its configuration has no "{BLOCK}" block that is enabled: add "{BLOCK}": {{}}, or name its '
            "file on the command line with --deepspeed_config"
        )
    return built


def told(mirror: Mirror, stages: int) -> dict[int, Told]:
    """The measurements of each stage that members have reported so far."""
    blocks: dict[int, dict[int, float]] = {stage: {} for stage in range(stages)}
    kept, outputs = dict.fromkeys(range(stages), 0), dict.fromkeys(range(stages), 0)
    for state in mirror.workers.values():
        for row in state.seconds:
            mine = blocks[row.stage]
            mine[row.block] = min(row.least, mine.get(row.block, row.least))
        for stage, count in state.passes.items():
            kept[stage] = max(count, kept[stage])
        for stage, count in state.outputs.items():
            outputs[stage] = max(count, outputs[stage])
    return {
        stage: Told(tuple(blocks[stage][number] for number in sorted(blocks[stage])), kept[stage], outputs[stage])
        for stage in range(stages)
    }


def profile_of(
    name: str, source: str, built: Built, samples: int, stages: dict[int, Told], spans: Iterable[Span], retains: bool
) -> Profile:
    """The profile of a job that was measured.

    Args:
        name, source: of the profile.
        built: what the script builds.
        samples: of an iteration.
        stages: what members have told of them.
        spans: of its members.
        retains: see :func:`~..simulate.profiling.layers_of`.

    Raises:
        ConfigError: not enough was measured, or micro-batches are not equal.
    """
    layers, micro_batches = layers_of(built.layers, built.each, stages, spans, retains)
    size, rest = divmod(samples, micro_batches * built.pipelines)
    if rest or not size:
        raise ConfigError(
            f"{name}: {samples} samples of an iteration are not those of {micro_batches} equal micro-batches of"
            f" {built.pipelines} pipelines: write a profile by hand"
        )
    return Profile(
        name=name,
        source=source,
        device=f"measured on {socket.gethostname()}, {os.cpu_count()} cores",
        layers=tuple(layers),
        micro_batch=size,
        global_batch=samples,
        stages=built.stages,
        precision=built.precision,  # type: ignore[arg-type]
        zero=built.zero > 0,
        optimizer=built.optimizer or "adam",
    )


def _notes(command: str, built: Built, steps: int, stages: dict[int, Told], crowded: bool) -> str:
    """Notes on the origin of the figures, and on their flaws."""
    found = [
        f"medians of {steps - WARM_UP} iterations of {command}: {built.pipelines} x {built.stages} stages",
        "layers of a block share its time, those of a stage its bytes",
    ]
    if not all(each.blocks for each in stages.values()):
        found.append("layers of a stage share its time: blocks were not measured")
    if not all(each.kept for each in stages.values()):
        found.append("bytes that passes keep were not measured, and are left out")
    if crowded:
        found.append("MORE WORKERS THAN CORES: times are too long if they compute there")
    if any(built.frozen):
        found.append("frozen parameters are left out")
    return "; ".join(found)
