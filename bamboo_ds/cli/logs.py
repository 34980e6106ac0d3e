"""``bamboo logs``: what the workers and agents of a job on this host have written, from its folder of logs."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click

from ..errors import ConfigError
from ..launchers import jobs
from ..launchers.folders import LOGS
from ..observe.logfiles import Entry, Following, LogSource, files, merged
from .options import variable_option

_POLL_S = 0.2
_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green", "bright_yellow")
_MEMBER = re.compile(r"m?(\d+)(-[0-9a-f]+)?")


@click.command("logs")
@click.option("-f", "--follow", is_flag=True, help="Go on until the job has ended, or Ctrl-C.")
@variable_option("--job", help="Name of the job.  [default: the only one that runs here]")
@variable_option("--logs", help="Folder with the logs of jobs that have ended.  [default: bamboo-logs]")
@click.option("--member", "members", multiple=True, help="Only of this member, or slot; may be repeated.")
@click.option("--agents", is_flag=True, help="Of agents, too.")
@click.option("--color/--no-color", default=None, help="Colour the slots.  [default: on a terminal]")
def logs_command(
    follow: bool, job: str | None, logs: str | None, members: tuple[str, ...], agents: bool, color: bool | None
) -> None:
    """Print what workers have written, in the order of time, each line with its slot.

    Of members on other hosts there is nothing here, unless the folder of --logs is shared.
    """
    slots = {_slot(member) for member in members}
    running = jobs.find_or_only(job)
    folder = _folder(running, job, logs)
    follows: dict[LogSource, Following] = {}
    coloured = sys.stdout.isatty() if color is None else color
    try:
        while True:
            # First: what is written until then is read below.
            goes_on = follow and running is not None and running.launcher() is not None
            for source, path in _files(folder).items():
                if (not slots or source.slot in slots) and (agents or not source.agent) and source not in follows:
                    follows[source] = Following(source, path)
            if slots and not follows and not goes_on:
                raise ConfigError(f"no member of --member {', '.join(members)} has written to {folder}")
            for entry in _entries(folder, list(follows.values())):
                click.echo(_line(entry, coloured), nl=False, color=coloured)
            if not goes_on:
                break
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        click.echo()
    finally:
        for each in follows.values():
            each.close()


def _files(folder: Path) -> dict[LogSource, Path]:
    try:
        return files(folder)
    except OSError as error:
        raise _unreadable(folder, error) from error


def _entries(folder: Path, followed: list[Following]) -> Iterator[Entry]:
    try:
        yield from merged(followed)
    except OSError as error:
        raise _unreadable(folder, error) from error


def _unreadable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(f"cannot read the logs in {folder}: {error}")


def _line(entry: Entry, coloured: bool) -> str:
    _, source, line = entry
    prefix = f"[{source.name}]"
    if coloured:
        prefix = click.style(prefix, fg=_COLOURS[source.slot % len(_COLOURS)])
    return f"{prefix} {line.decode(errors='replace')}"


def _slot(member: str) -> int:
    match = _MEMBER.fullmatch(member)
    if match is None:
        raise ConfigError(f"--member {member!r}: write a member as m2-e373aeb4 or m2, or the number of its slot")
    return int(match[1])


def _folder(running: jobs.JobFile | None, job: str | None, logs: str | None) -> Path:
    """The folder of a job that runs here, or of one that has written to the folder of logs."""
    if running is not None:
        if running.logs is None:
            raise ConfigError(f"job {running.job!r} has no logs on this host: start it with --logs FOLDER")
        return Path(running.logs)
    assert job is not None
    path = Path(logs or LOGS, jobs.check_name(job))
    if not path.is_dir():
        raise ConfigError(f"no job {job!r} runs here, and there is no {os.path.abspath(path)}: name it with --logs")
    return path
