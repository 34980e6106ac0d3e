"""``bamboo trace``: a job's life for Perfetto."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import click

from ..errors import ConfigError, ProtocolError
from ..observe.events import Event, read_events
from ..observe.spans import Timeline, read_timelines
from ..observe.trace import chrome_trace


def read_job(events: Path) -> tuple[list[Event], list[Timeline]]:
    """The events in a file and the timelines beside it; raises :class:`ConfigError` if they cannot be read."""
    try:
        return list(read_events(events)), read_timelines(events)
    except (OSError, ProtocolError) as error:
        raise ConfigError(str(error)) from error


@click.command()
@click.argument("events", metavar="EVENTS", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    help="The file to write: .json, or .json.gz.",
)
def trace(events: Path, output: Path) -> None:
    """Write a timeline of a job for https://ui.perfetto.dev, from its EVENTS (a file of JSON lines).

    Members are processes, their stages threads. Steps, pauses, recoveries, copies and plans come from the events,
    single passes from the timelines that workers have recorded beside them (observe.timeline).
    """
    if not output.name.endswith((".json", ".json.gz")):
        raise ConfigError(f"--output {output}: the trace is JSON; name it .json or .json.gz")
    told, timelines = read_job(events)
    found = chrome_trace(told, timelines)
    data = json.dumps(found, separators=(",", ":"), allow_nan=False).encode()
    try:
        output.write_bytes(gzip.compress(data, mtime=0) if output.suffix == ".gz" else data)
    except OSError as error:
        raise ConfigError(f"cannot write {output}: {error}") from error
    spans = sum(len(timeline.spans) for timeline in timelines)
    click.echo(f"{output}: {len(told)} events, {spans} spans of {len(timelines)} members; open it in ui.perfetto.dev")
