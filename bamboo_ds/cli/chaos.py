"""``bamboo chaos``: seeded faults against a running job, and how it bore them."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from ..errors import ConfigError
from ..launchers import jobs
from .options import running_job

_KINDS = """
\b
Kinds of faults:
  kill        SIGKILL of a worker
  kill_agent  SIGKILL of an agent, and so of its worker
  stop        SIGSTOP of a worker for some seconds
  freeze      SIGSTOP of a worker and its agent for some seconds
  hold_gil    a worker's interpreter does nothing for some seconds (*)
  exception   an exception in the main thread of a worker (*) (**)
  exit        a worker exits with code 13 (*) (**)
  host        SIGKILL of everything on a host
  notice      the file of "bamboo.notices.file" is written for a member
  join        a member more
  etcd_stop   SIGSTOP of the embedded etcd for some seconds
(*) only if the script runs as `-m bamboo_ds.chaos.victim SCRIPT`, or calls its install() and BAMBOO_CHAOS=1 is set
(**) only if asked for by --weight or --script, as it ends the job unless "bamboo.recovery.on_exception" is "takeover"

\b
Lines of a script: {"at_s": 10, "kind": "kill", "target": "owner:0,2", "seconds": null, "healed": true}
Targets: slot:3, member:ID, host:NAME, owner:D,S, shadow:D,S, leader, standby, joiner; none: drawn.

\b
Exit codes:
  0    verified
  1    not verified: the problems are listed
  2    wrong usage
  130  Ctrl-C
"""


@click.command("chaos", epilog=_KINDS)
@running_job
@click.option("--rate", type=click.FloatRange(min=0, min_open=True), help="Faults per minute, at random times.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of everything that is drawn.")
@click.option("--count", type=click.IntRange(min=1), help="How many faults, with --rate.")
@click.option("--duration-s", type=click.FloatRange(min=0, min_open=True), help="Up to when, with --rate.")
@click.option("--weight", "weights", multiple=True, metavar="KIND=W", help="Only these kinds, that often.")
@click.option("--trace", type=click.Path(exists=True, dir_okay=False), help="File of lines ms,add|remove,node.")
@click.option("--compress", type=float, default=1.0, show_default=True, help="How many times faster than the trace.")
@click.option("--limit", type=click.IntRange(min=1), help="Most nodes of the trace.  [default: the job's roles]")
@click.option("--script", type=click.Path(exists=True, dir_okay=False), help="File of JSON lines.")
@click.option("--spare-holders/--no-spare-holders", default=True, show_default=True, help="Keep a holder per stage.")
@click.option("--min-members", type=click.IntRange(min=1), default=1, show_default=True, help="Spare the last ones.")
@click.option("--timeout-s", type=click.FloatRange(min=0), default=60.0, show_default=True, help="A fault waits so"
              " long until the job can bear it.")  # fmt: skip
@click.option("--one-at-a-time", is_flag=True, help="Every fault waits until the job has healed.")
@click.option("--keep", type=click.IntRange(min=0), default=0, help="Start joiners to keep up so many members.")
@click.option("--slots-per-host", type=click.IntRange(min=1), help="Simulate hosts of so many slots.")
@click.option("--events", type=click.Path(dir_okay=False), help="The job's events.  [default: asked of its agents]")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("out/chaos"), show_default=True,
              help="Folder for journal, report and output of joiners.")  # fmt: skip
@click.option("--wait/--no-wait", default=True, show_default=True, help="For the end of the job, before verifying.")
@click.option("--ready-s", type=click.FloatRange(min=0), default=120.0, show_default=True, help="For its first step.")
@click.option("--dry-run", is_flag=True, help="Only print the faults, as a script.")
def chaos(
    job: str | None,
    store: str | None,
    rate: float | None,
    seed: int,
    count: int | None,
    duration_s: float | None,
    weights: tuple[str, ...],
    trace: str | None,
    compress: float,
    script: str | None,
    out: Path,
    dry_run: bool,
    **others: Any,
) -> None:
    """Do seeded harm to a running job on this host, and check that it bears it.

    Give one of --rate, --trace and --script.
    """
    if sum(source is not None for source in (rate, trace, script)) != 1:
        raise ConfigError("give one of --rate, --trace and --script")
    # Only now: gRPC and the rest take their time to load.
    from ..chaos import campaign
    from ..chaos.runner import Conduct
    from ..chaos.schedule import by_rate, parse_script, parse_trace
    from ..chaos.sparing import Choice

    if dry_run and trace is not None:
        raise ConfigError("--dry-run needs --rate or --script: what a trace does depends on the job")
    faults, changes = [], []
    if trace is not None:
        changes = parse_trace(Path(trace).read_text(), trace)
    elif script is not None:
        faults = parse_script(Path(script).read_text(), script, seed)
    elif rate is not None:
        faults = by_rate(rate, seed, count=count, duration_s=duration_s, weights=campaign.parse_weights(weights))
    if dry_run:
        for fault in faults:
            click.echo(campaign.script_line(fault))
        return
    spared = {name: others.pop(name) for name in ("spare_holders", "min_members", "slots_per_host")}
    paced = {name: others.pop(name) for name in ("timeout_s", "one_at_a_time", "keep", "ready_s")}
    options = campaign.CampaignOptions(
        location=_location(job, store),
        out=out.resolve(),
        conduct=Conduct(Choice(**spared), **paced),
        compress=compress,
        complete=duration_s is None,
        title=_title(rate, trace, script, seed, compress),
        **others,
    )
    sys.exit(campaign.run(options, faults, changes))


def _location(job: str | None, store: str | None) -> jobs.JobLocation:
    """The job that the options mean, with its launcher if that is on this host."""
    found = jobs.locate(job, store)
    file = jobs.find(found.job) if found.launcher is None else None
    return found if file is None else replace(found, launcher=file.pid)


def _title(rate: float | None, trace: str | None, script: str | None, seed: int, compress: float) -> str:
    if rate is not None:
        return f"{rate:g} faults per minute, seed {seed}"
    return f"trace {Path(trace).name}, {compress:g} times faster" if trace else f"script {Path(script or '').name}"
