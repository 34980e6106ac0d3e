"""``bamboo top`` and ``bamboo status``: a job in the terminal while it runs."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import datetime, timezone

import click
from rich.live import Live

from ..control.registry.access import open_store
from ..control.registry.mirror import Mirror
from ..control.registry.overview import overview
from ..errors import ConfigError, StoreUnavailable
from ..launchers import jobs
from ..observe.live import LiveJob
from ..observe.tail import EventTail
from ..observe.view import LiveView
from .options import read_job, running_job, variable_option
from .output import console
from .top_view import frame

#: Bytes of the events that are held at once.
_CHUNK = 1 << 20
#: Seconds for an answer of etcd, and between two of them.
_TIMEOUT_S, _WATCH_S = 5.0, 1.0


class LiveSource:
    """The sources of a job's view: its keys in etcd, and its events if this host has them.

    Args:
        events: the file of its events, or ``None``.
    """

    def __init__(self, job: str, events: str | None) -> None:
        self._live = LiveJob(job)
        self._tail = None if events is None else EventTail(events)

    def view(self, mirror: Mirror | None) -> LiveView:
        """The job now; ``None``: etcd has nothing of it any more.

        Raises:
            ConfigError: the file of events cannot be read.
            ProtocolError: a line of it is no event.
        """
        if self._tail is not None:
            try:
                while found := self._tail.read(_CHUNK):
                    for _, event in found:
                        self._live.add(event)
            except OSError as error:
                raise ConfigError(f"cannot read the events in {self._tail.path}: {error}; see --events") from error
        self._live.late(datetime.now(timezone.utc))
        return self._live.view(None if mirror is None else overview(mirror))


@click.command("top")
@running_job
@variable_option(
    "--events",
    type=click.Path(exists=True, dir_okay=False),
    help="File of its events.  [default: where the launcher on this host writes them]",
)
@click.option("--once", is_flag=True, help="Print it once. So it is where there is no terminal.")
@click.option("--json", "as_json", is_flag=True, help="Print it once, as JSON.")
def top(job: str | None, store: str | None, events: str | None, once: bool, as_json: bool) -> None:
    """Show a job live: stages with owners, shadows and loads, speed, goodput, losses, and what the next loss would do.

    It ends with the job, or by Ctrl-C. Without the job's events on this host it shows what etcd tells.
    """
    _show(jobs.locate(job, store), events, once or not console().is_terminal, as_json)


@click.command("status")
@running_job
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("-w", "--watch", is_flag=True, help="Show it every second until the job has ended, or Ctrl-C.")
def status(job: str | None, store: str | None, as_json: bool, watch: bool) -> None:
    """Show a job once, as bamboo top does, with its members' processes and its newest checkpoint."""
    if as_json and watch:
        raise ConfigError("--watch prints no JSON: leave out --json, or --watch")
    _show(jobs.locate(job, store), None, not watch, as_json, processes=True)


def _show(location: jobs.JobLocation, events: str | None, once: bool, as_json: bool, processes: bool = False) -> None:
    source, out = LiveSource(location.job, events or _events_here(location)), console()
    if once or as_json:
        view = source.view(read_job(location))
        if as_json:
            click.echo(view.model_dump_json(indent=2))
        else:
            out.print(frame(view, time.time(), min(out.width, _WIDEST), None, processes))
        return
    try:
        with Live(console=out, auto_refresh=False, screen=out.is_terminal) as live:
            for mirror in _snapshots(location):
                picture = frame(source.view(mirror), time.time(), out.width, out.height, processes)
                live.update(picture, refresh=True)
    except KeyboardInterrupt:
        return
    out.print(frame(source.view(None), time.time(), out.width, None, processes))
    out.print(f"job {location.job} has ended")


#: Columns of what is no terminal.
_WIDEST = 160


def _events_here(location: jobs.JobLocation) -> str | None:
    """The file that the job's launcher on this host writes to, if it is that of the job in question."""
    file = jobs.find(location.job)
    if file is None or file.events is None or file.store != location.store:
        return None
    return file.events if os.path.isfile(file.events) else None


def _snapshots(location: jobs.JobLocation) -> Iterator[Mirror]:
    """The keys of a job every second until it has ended.

    Raises:
        ConfigError: there is no such job.
        StoreError: etcd cannot be used, and the job has not ended as far as this host knows.
    """
    seen = False
    with open_store(location.store, location.job, _TIMEOUT_S) as store:
        while True:
            try:
                snapshot = store.get_prefix("")
            except StoreUnavailable:  # that of the job ends with it
                if not seen or location.launcher is None or jobs.find(location.job) is not None:
                    raise
                return
            if not snapshot.entries and not seen:
                raise ConfigError(f"no job {location.job!r} is known at {location.store}")
            if not snapshot.entries:
                return
            seen = True
            yield Mirror(snapshot)
            time.sleep(_WATCH_S)
