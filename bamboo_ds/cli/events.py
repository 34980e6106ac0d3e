"""``bamboo events``: what happens in a job, from its file of events."""

from __future__ import annotations

import os
import time
from datetime import datetime, timezone
from pathlib import Path

import click

from ..errors import ConfigError
from ..launchers import jobs
from ..launchers.folders import EVENTS, LOGS
from ..observe.events import RunFinished, RunStarted
from ..observe.story import Story, printed
from ..observe.summary import ending
from ..observe.tail import EventTail
from .options import variable_option

_POLL_S = 0.3


@click.command("events")
@click.option("-f", "--follow", is_flag=True, help="Go on until the job has ended, or Ctrl-C.")
@variable_option("--job", help="Name of the job.  [default: the only one that runs here; with FILE: all in it]")
@variable_option("--logs", help="Folder with the events of jobs that have ended.  [default: bamboo-logs]")
@click.option("--json", "as_json", is_flag=True, help="Print the lines of the file.")
@click.argument("file", type=click.Path(exists=True, dir_okay=False), required=False)
def events(follow: bool, job: str | None, logs: str | None, as_json: bool, file: str | None) -> None:
    """Print what happens in a job: losses, takeovers, members that come and go, checkpoints, and a summary.

    The events come from FILE, else from where the launcher on this host writes them.
    """
    path = file or _file_of(job, logs)
    tail, story, going = EventTail(path), Story(), True
    try:
        while True:
            try:
                found = tail.read()
            except OSError as error:
                raise ConfigError(f"cannot read the events in {path}: {error}") from error
            for line, event in found:
                if job not in (None, event.job):
                    continue
                going = isinstance(event, RunStarted) or (going and not isinstance(event, RunFinished))
                told = [line.decode().rstrip("\n")] if as_json else [*map(printed, story.tell(event))]
                for text in told:
                    click.echo(text)
            # A file may hold several runs: the last one counts.
            if not found and not (follow and going):
                break
            for text in () if found or as_json else map(printed, story.late(datetime.now(timezone.utc))):
                click.echo(text)
            if not found:
                time.sleep(_POLL_S)
    except KeyboardInterrupt:
        click.echo()
    if not as_json:
        for text in [*map(printed, story.end()), *ending(story.job)]:
            click.echo(text)


def _file_of(job: str | None, logs: str | None) -> str:
    """The file of a job that runs here, or of one that has written to the folder of logs."""
    running = jobs.find_or_only(job)
    if running is not None:
        if running.events is None:
            raise ConfigError(f"job {running.job!r} writes no events on this host: start it with --events FILE")
        return running.events
    assert job is not None
    path = Path(logs or LOGS, jobs.check_name(job), EVENTS)
    if not path.is_file():
        raise ConfigError(f"no job {job!r} runs here, and there is no {os.path.abspath(path)}: name the file")
    return str(path)
