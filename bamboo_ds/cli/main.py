"""The command ``bamboo``."""

from __future__ import annotations

import importlib
import os
import select
import signal
import sys
from collections.abc import Sequence

import click
from rich.console import Console

from ..config import MembershipConfig, bamboo_config, config_path_from_argv
from ..control.access import open_store
from ..control.agent_settings import script_command
from ..control.membership import Keys, StopRecord
from ..control.mirror import Mirror
from ..errors import BambooError, ConfigError, LaunchError
from ..observe import logs
from ..version import __version__
from . import jobs
from .launcher import EMBEDDED, Launcher, RunOptions
from .plan import plan
from .status import JobStatus, job_status, status_table

_TIMEOUT_S = 5.0
#: Exit code of a job that ``bamboo stop`` has ended: as if by SIGTERM.
EXIT_STOPPED = 143

_EXIT_CODES = """
\b
Exit codes:
  0    the workers finished; members that were lost and taken over do not count
  2    wrong usage or configuration
  86   fatal loss: no living member holds the state of some stage
  130  Ctrl-C
  143  stopped (bamboo stop, SIGTERM)
  any other: that of the first worker whose script failed
"""


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Preemption-resilient pipeline-parallel training for DeepSpeed."""
    logs.configure()


@cli.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True}, epilog=_EXIT_CODES)
@click.option("-n", "--workers", type=click.IntRange(min=1), required=True, help="Number of local workers.")
@click.option("--pipelines", type=click.IntRange(min=1), help="Number of pipelines; must divide the workers.")
@click.option("--store", default=EMBEDDED, show_default=True, help="URLs of etcd, separated by commas.")
@click.option("--job", help="Name of the job.  [default: random]")
@click.option("--events", type=click.Path(dir_okay=False), help="File to append events to, as JSON lines.")
@click.option("--address", default="127.0.0.1", show_default=True, help="IP address to bind to.")
@click.option("--config", type=click.Path(exists=True, dir_okay=False), help="DeepSpeed configuration to read.")
@click.option("--lease-ttl-s", type=click.FloatRange(min=1), help="Overrides bamboo.membership.lease_ttl_s.")
@click.option("--heartbeat-timeout-s", type=click.FloatRange(min=0.5), help="Overrides the block's setting.")
@click.option("--settle-ms", type=click.FloatRange(min=0), help="Overrides the block's setting.")
@click.option(
    "--grace-s", type=click.FloatRange(min=0), default=5.0, show_default=True, help="From SIGTERM to SIGKILL."
)
@click.option("--prefix-output", is_flag=True, help="Begin each line of output with its slot.")
@click.option(
    "--emulate-hosts",
    type=click.IntRange(min=1),
    help="Treat the slots as if they were on so many hosts, to try what their loss does.",
)
@click.option("-m", "--module", is_flag=True, help="SCRIPT is the name of a module.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(
    workers: int,
    pipelines: int | None,
    store: str,
    job: str | None,
    events: str | None,
    address: str,
    config: str | None,
    lease_ttl_s: float | None,
    heartbeat_timeout_s: float | None,
    settle_ms: float | None,
    grace_s: float,
    prefix_output: bool,
    emulate_hosts: int | None,
    module: bool,
    script: str,
    arguments: tuple[str, ...],
) -> None:
    """Run SCRIPT with ARGUMENTS on N local workers that survive the loss of any of them."""
    if pipelines is not None and workers % pipelines:
        raise ConfigError(f"--pipelines {pipelines} does not divide -n {workers}")
    membership = _membership(config, arguments)
    ttl = lease_ttl_s if lease_ttl_s is not None else float(membership.lease_ttl_s)
    options = RunOptions(
        workers=workers,
        store=store,
        job=jobs.check_name(job or f"job-{os.urandom(4).hex()}"),
        address=address,
        events=None if events is None else os.path.abspath(events),
        pipelines=pipelines,
        lease_ttl_s=ttl,
        heartbeat_timeout_s=heartbeat_timeout_s or membership.heartbeat_timeout_s or ttl,
        settle_s=(membership.settle_ms if settle_ms is None else settle_ms) / 1000,
        grace_s=grace_s,
        prefix_output=prefix_output,
        emulate_hosts=emulate_hosts,
        command=script_command(script, arguments, module),
    )
    sys.exit(Launcher(options).run())


@cli.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
@click.option("--store", help="URLs of the job's etcd.  [default: found through the launcher on this host]")
@click.option("--job", help="Name of the job.  [default: the only one that runs here]")
@click.option("--address", default="127.0.0.1", show_default=True, help="IP address to bind to.")
@click.option("--host", help="Failure domain of this slot.  [default: the host's name]")
@click.option("--zone", default="", help="Availability zone of this host, for the placement of replicas.")
@click.option("--events", type=click.Path(dir_okay=False), help="File to append events to, as JSON lines.")
@click.option("--config", type=click.Path(exists=True, dir_okay=False), help="DeepSpeed configuration to read.")
@click.option("--lease-ttl-s", type=click.FloatRange(min=1), help="Overrides bamboo.membership.lease_ttl_s.")
@click.option("--heartbeat-timeout-s", type=click.FloatRange(min=0.5), help="Overrides the block's setting.")
@click.option("--settle-ms", type=click.FloatRange(min=0), help="Overrides the block's setting.")
@click.option(
    "--grace-s", type=click.FloatRange(min=0), default=5.0, show_default=True, help="From SIGTERM to SIGKILL."
)
@click.option(
    "--wait-s", type=click.FloatRange(min=0), default=120.0, show_default=True, help="For the job to be ready."
)
@click.option("-m", "--module", is_flag=True, help="SCRIPT is the name of a module.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def join(
    store: str | None,
    job: str | None,
    address: str,
    host: str | None,
    zone: str,
    events: str | None,
    config: str | None,
    lease_ttl_s: float | None,
    heartbeat_timeout_s: float | None,
    settle_ms: float | None,
    grace_s: float,
    wait_s: float,
    module: bool,
    script: str,
    arguments: tuple[str, ...],
) -> None:
    """Add a worker to a running job; SCRIPT and ARGUMENTS are those of the job.

    The worker builds its engine, catches up with the job and is admitted between two iterations, as a standby or with
    the stages that the plan gives to it. This command ends with the worker.
    """
    from .join import JoinOptions
    from .join import join as start

    job, store = _located(job, store)
    membership = _membership(config, arguments)
    ttl = lease_ttl_s if lease_ttl_s is not None else float(membership.lease_ttl_s)
    start(
        JoinOptions(
            store=store,
            job=jobs.check_name(job),
            address=address,
            host=host,
            zone=zone,
            events=None if events is None else os.path.abspath(events),
            lease_ttl_s=ttl,
            heartbeat_timeout_s=heartbeat_timeout_s or membership.heartbeat_timeout_s or ttl,
            settle_s=(membership.settle_ms if settle_ms is None else settle_ms) / 1000,
            grace_s=grace_s,
            wait_s=wait_s,
            command=script_command(script, arguments, module),
        )
    )


cli.add_command(plan)


def _membership(config: str | None, arguments: Sequence[str]) -> MembershipConfig:
    """The block's membership settings, from ``--config`` or from the script's own configuration."""
    path = config or config_path_from_argv(arguments)
    block = bamboo_config(path) if path else None
    return block.membership if block else MembershipConfig.model_validate({})


@cli.command()
@click.option("--job", help="Name of the job.  [default: the only one that runs here]")
@click.option("--store", help="URLs of its etcd.  [default: found through the launcher on this host]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status(job: str | None, store: str | None, as_json: bool) -> None:
    """Show members, roles, epoch and step of a job."""
    report = _status(*_located(job, store))
    if as_json:
        click.echo(report.model_dump_json(indent=2))
    else:
        Console().print(status_table(report))


def _located(job: str | None, store: str | None) -> tuple[str, str]:
    """Name and etcd of the job that the options mean."""
    if store is not None and job is not None:
        return job, store
    if store is not None:
        raise ConfigError("--store needs --job: an etcd may serve several jobs")
    file = jobs.choose(job)
    return file.job, file.store


def _status(job: str, urls: str) -> JobStatus:
    with open_store(urls, job, _TIMEOUT_S) as store:
        snapshot = store.get_prefix("")
    if not snapshot.entries:
        raise ConfigError(f"no job {job!r} is known at {urls}")
    return job_status(job, Mirror(snapshot))


@cli.command()
@click.option("--job", help="Name of the job.  [default: the only one that runs here]")
@click.option("--store", help="URLs of its etcd, if its launcher is on another host.")
@click.option("--timeout-s", type=float, default=30.0, show_default=True, help="How long to wait.")
def stop(job: str | None, store: str | None, timeout_s: float) -> None:
    """End a job in an orderly way."""
    if store is not None:
        name, urls = _located(job, store)
        with open_store(urls, name, _TIMEOUT_S) as connection:
            if not connection.get_prefix(Keys.MEMBERS).entries:
                raise ConfigError(f"no job {name!r} runs at {urls}")
            record = StopRecord(code=EXIT_STOPPED, reason="bamboo stop", by="")
            connection.create(Keys.STOP, record.to_json())
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
            signal.pidfd_send_signal(pidfd, signal.SIGTERM)
            if not select.select([pidfd], [], [], timeout_s)[0]:
                raise LaunchError(f"the launcher of {file.job!r} ({file.pid}) still runs")
    finally:
        os.close(pidfd)


@cli.command(context_settings={"ignore_unknown_options": True}, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def demo(arguments: tuple[str, ...]) -> None:
    """Train a small GPT, kill stages of it, and compare with an undisturbed run."""
    command: click.Command = importlib.import_module("bamboo_ds.cli.demo").demo
    command.main(args=list(arguments), prog_name="bamboo demo")


@cli.command()
def version() -> None:
    """Show the version."""
    click.echo(f"bamboo_ds {__version__} (Python {sys.version.split()[0]})")


def main() -> None:
    """Entry point of the console script."""
    try:
        cli.main(prog_name="bamboo")
    except ConfigError as error:
        click.echo(f"bamboo: {error}", err=True)
        sys.exit(2)
    except BambooError as error:
        click.echo(f"bamboo: {error}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
