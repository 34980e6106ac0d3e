"""The command ``bamboo``."""

from __future__ import annotations

import importlib
import os
import select
import shutil
import signal
import sys
from dataclasses import replace

import click

from ..control.registry.access import check_secret, open_store, put_once
from ..control.registry.keys import Keys
from ..control.registry.mirror import Mirror
from ..control.registry.records import StopRecord
from ..control.registry.vacancies import is_over
from ..control.settings import MemberOptions
from ..errors import EXIT_OVER, EXIT_STOPPED, BambooError, ConfigError, JobOver, LaunchError
from ..job_settings import JobSettings
from ..launchers import jobs
from ..launchers.folders import with_logs
from ..launchers.narration import banner, marked
from ..launchers.network import LOOPBACK
from ..launchers.owning import EMBEDDED
from ..launchers.run import Launcher, LocalSlots
from ..observe import logs
from ..observe.outlet import Sink
from ..secret import find
from ..version import __version__
from .chaos import chaos
from .checkpoints import checkpoints
from .doctor import doctor
from .events import events
from .goodput import goodput
from .jobs import jobs as list_jobs
from .logs import logs_command
from .options import (
    MEASURED,
    block_of,
    check_ranks,
    member_options,
    new_job,
    ranks_option,
    running_job,
    started,
    variable_option,
)
from .output import Commands
from .plan import plan
from .plot import plot
from .profile import profile
from .simulate import simulate
from .top import status, top
from .trace import trace
from .web import web

_TIMEOUT_S = 5.0

_EXIT_CODES = """
\b
Exit codes:
  0    the workers finished, or have left on notice; members that were lost and taken over do not count
  2    wrong usage or configuration
  86   fatal loss: no living member holds the state of some stage
  130  Ctrl-C
  143  stopped (bamboo stop, SIGTERM)
  any other: that of the first worker whose script failed
"""


_JOIN_EXIT_CODES = """
\b
Exit codes:
  0    the job has finished
  1    no way to etcd, no answer, or no job to join within --wait-s
  2    wrong usage or configuration
  87   the job has evicted this member, which found no way back
  88   this member has left on notice
  89   the job has ended otherwise before this member came
  any other: as those of bamboo run, but of this worker
"""


_VERSION = f"bamboo_ds {__version__} (Python {sys.version.split()[0]})"


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(message=_VERSION)
def cli() -> None:
    """Preemption-resilient pipeline-parallel training for DeepSpeed."""
    logs.configure()


@cli.command(context_settings={"allow_interspersed_args": False}, epilog=_EXIT_CODES)
@click.option("-n", "--workers", type=click.IntRange(min=1), required=True, help="Number of local workers.")
@ranks_option("-n")
@click.option("--pipelines", type=click.IntRange(min=1), help="Number of pipelines; must divide the ranks.")
@new_job
@click.option("--prefix-output", is_flag=True, help="Begin each line of output with its slot.")
@click.option(
    "--emulate-hosts",
    type=click.IntRange(min=1),
    help="Treat the slots as if they were on so many hosts, to try what their loss does.",
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Start no job: run SCRIPT alone up to deepspeed.initialize, and print problems, plan and memory.",
)
@click.option("--measured", is_flag=True, hidden=True, help="As bamboo profile measures a job.")
@member_options
def run(
    member: MemberOptions,
    store: str,
    workers: int,
    ranks: int | None,
    pipelines: int | None,
    logs: str | None,
    config: str | None,
    prefix_output: bool,
    emulate_hosts: int | None,
    dry_run: bool,
    measured: bool,
    quiet: bool,
) -> None:
    """Run SCRIPT with ARGUMENTS on N local workers that survive the loss of any of them."""
    check_ranks(ranks, "-n", workers)
    if pipelines is not None and (ranks or workers) % pipelines:
        size = f"-n {workers}" if ranks is None else f"--ranks {ranks}"
        raise ConfigError(f"--pipelines {pipelines} does not divide {size}")
    member = replace(member, job=member.job or jobs.random_name(), store=store, address=member.address or LOOPBACK)
    slots = LocalSlots(workers, ranks, pipelines, emulate_hosts)
    if dry_run:
        from .dry_run import tell

        sys.exit(tell(member, slots, config))
    if measured:
        member = replace(member, settings=member.settings.overridden(MEASURED))
    sys.exit(Launcher(with_logs(member, logs, default=True), slots, prefix_output).run(quiet))


@cli.command("launch", context_settings={"allow_interspersed_args": False}, epilog=_EXIT_CODES)
@new_job
@variable_option("--address", default=LOOPBACK, show_default=True, help="IP address of the embedded etcd.")
@started
@click.argument("command", nargs=-1, type=click.UNPROCESSED, required=True)
def launch_command(
    store: str,
    job: str | None,
    address: str,
    logs: str | None,
    events: str | None,
    tee: bool,
    check_exact: int | None,
    quiet: bool,
    config: str | None,
    grace_s: float,
    command: tuple[str, ...],
) -> None:
    """Run COMMAND, another launcher (deepspeed, torchrun, srun, mpirun), so that the job survives the loss of ranks.

    No process of a rank whose end the launcher sees ends the others. Write -- before COMMAND.
    """
    from ..launchers.wrap import Wrapper

    if shutil.which(command[0]) is None:
        raise ConfigError(f"there is no command {command[0]!r}")
    options = MemberOptions(
        job=jobs.check_name(job or jobs.random_name()),
        store=store,
        address=address,
        command=command,
        events=None if events is None else os.path.abspath(events),
        tee=tee,
        grace_s=grace_s,
        settings=JobSettings.resolve(block_of(config, command), {"check_exact": check_exact}),
    )
    # Without --logs only where no rank can be on another host, which may not have the folder.
    options = with_logs(options, logs, default=store == EMBEDDED and address == LOOPBACK)
    sys.exit(Wrapper(options, config).run(quiet))


@cli.command(context_settings={"allow_interspersed_args": False}, epilog=_JOIN_EXIT_CODES)
@running_job
@click.option(
    "--start",
    type=click.IntRange(min=1),
    metavar="N",
    help="If nobody has started the job, the first N members that come this way do.",
)
@ranks_option("--start")
@click.option("--host", help="Failure domain of this slot.  [default: the host's name]")
@click.option("--zone", default="", help="Availability zone of this host, for the placement of replicas.")
@click.option(
    "--wait-s",
    type=click.FloatRange(min=0),
    default=120.0,
    show_default=True,
    help="For the job to be ready; with --start also for a way to etcd, and for its answer.",
)
@member_options
def join(
    member: MemberOptions,
    store: str | None,
    start: int | None,
    ranks: int | None,
    host: str | None,
    zone: str,
    wait_s: float,
    logs: str | None,
    config: str | None,
    quiet: bool,
) -> None:
    """Add a worker to a running job; SCRIPT and ARGUMENTS are those of the job.

    The worker builds its engine, catches up with the job and is admitted between two iterations, as a standby or with
    the stages that the plan gives to it. This command ends with the worker.
    """
    from ..launchers.join import Starters, become_agent, prepare
    from ..launchers.network import address_towards

    check_ranks(ranks, "--start", start)
    location = jobs.locate(member.job or None, store)
    here = jobs.find(location.job)
    known = here if here is not None and here.store == location.store else None
    options = replace(
        member,
        job=location.job,
        store=location.store,
        # A host that starts a job may itself have just started, and have no network yet.
        address=member.address or address_towards(location.store, 0.0 if start is None else wait_s),
        host=host,
        zone=zone,
        secret=find(location.job),
        logs=None if known is None else known.logs,
        events=member.events or (None if known is None else known.events),
    )
    options = with_logs(options, logs)
    if not quiet:
        Sink(2).write(marked(banner(options, "a member joins", location.store)))
    starters = None if start is None else Starters(start, ranks or start)
    become_agent(prepare(options, starters, wait_s, tells=not quiet))


cli.add_command(plan)
cli.add_command(simulate)
cli.add_command(profile)
cli.add_command(checkpoints)
cli.add_command(chaos)
cli.add_command(doctor)
cli.add_command(goodput)
cli.add_command(events)
cli.add_command(trace)
cli.add_command(plot)
cli.add_command(list_jobs)
cli.add_command(top)
cli.add_command(status)
cli.add_command(web)
cli.add_command(logs_command)


@cli.command()
@running_job
@click.option("--timeout-s", type=float, default=30.0, show_default=True, help="How long to wait.")
def stop(job: str | None, store: str | None, timeout_s: float) -> None:
    """End a job in an orderly way."""
    if store is not None:
        _stop_members(jobs.locate(job, store))
        return
    file = jobs.choose(job)
    launcher = file.launcher()
    if launcher is None:
        return
    try:
        pidfd = os.pidfd_open(launcher.pid)
    except ProcessLookupError:
        return  # it has just ended
    try:
        if file.launcher() is not None:  # else it ended, and the descriptor may be of another process
            if file.foreign:
                _stop_members(jobs.JobLocation(file.job, file.store))
            else:
                signal.pidfd_send_signal(pidfd, signal.SIGTERM)
            if not select.select([pidfd], [], [], timeout_s)[0]:
                raise LaunchError(f"the launcher of {file.job!r} ({file.pid}) still runs")
    finally:
        os.close(pidfd)


def _stop_members(location: jobs.JobLocation) -> None:
    secret = find(location.job)
    with open_store(location.store, location.job, _TIMEOUT_S, secret) as connection:
        snapshot = connection.get_prefix("")
        entries = snapshot.entries
        check_secret(entries.values(), location.job, secret)
        # A job that nobody is there of goes on when members come, unless it is over.
        there = any(key.startswith(Keys.MEMBERS) for key in entries)
        begun = not entries.keys().isdisjoint({Keys.SPEC, Keys.PLAN})
        if not there and (not begun or is_over(Mirror(snapshot))):
            raise ConfigError(f"no job {location.job!r} runs at {location.store}")
        put_once(connection, Keys.STOP, StopRecord(code=EXIT_STOPPED, reason="bamboo stop", by="").to_json())


@cli.command(context_settings={"ignore_unknown_options": True}, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def demo(arguments: tuple[str, ...]) -> None:
    """Train a small GPT, kill stages of it, and compare with an undisturbed run."""
    command: click.Command = importlib.import_module("bamboo_ds.cli.demo.command").demo
    command.main(args=list(arguments), prog_name="bamboo demo")


@cli.command()
def version() -> None:
    """Show the version."""
    click.echo(_VERSION)


def main() -> None:
    """Entry point of the console script."""
    try:
        cli.main(prog_name="bamboo")
    except ConfigError as error:
        click.echo(f"bamboo: {error}", err=True)
        sys.exit(2)
    except JobOver as over:
        click.echo(f"bamboo: {over}", err=True)
        sys.exit(0 if over.finished else EXIT_OVER)
    except BambooError as error:
        click.echo(f"bamboo: {error}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
