"""``bamboo web``: where a job's page is, and the token that opens it."""

from __future__ import annotations

import contextlib
import os
import tempfile

import click

from ..control.registry.access import check_secret
from ..control.registry.keys import Keys
from ..control.registry.mirror import Mirror
from ..control.registry.records import WebRecord
from ..control.web.access import token_of
from ..errors import ConfigError
from ..launchers import jobs
from ..secret import SETTING, find
from .options import running_job, snapshot_of


@click.command("web")
@running_job
@click.option(
    "--token-file",
    type=click.Path(dir_okay=False),
    metavar="PATH",
    help="Write the token into this file, for Prometheus, rather than print it. Only its owner can read it.",
)
def web(job: str | None, store: str | None, token_file: str | None) -> None:
    """Print where the page and the metrics of a job are, and the token that opens them.

    The member that leads serves them, at the address that "bamboo.observe.http" names.
    """
    location = jobs.locate(job, store)
    secret = find(location.job)
    snapshot = snapshot_of(location, secret)
    check_secret(snapshot.entries.values(), location.job, secret)
    if not secret:
        raise ConfigError(f"job {location.job!r} has no secret, so it serves no page: start it with {SETTING}")
    record = Mirror(snapshot).get(Keys.WEB, WebRecord)
    if record is None:
        raise ConfigError(
            f"job {location.job!r} serves no page now: its configuration needs an address as bamboo.observe.http, such "
            "as 127.0.0.1:9400; where it has one, ask again when a member leads, or see the warnings of its agents"
        )
    token = token_of(secret, location.job)
    click.echo(f"page:    {record.url}/\nmetrics: {record.url}/metrics")
    if token_file is None:
        click.echo(f"token:   {token}")
    else:
        _write(token_file, token)
        click.echo(f"token:   in {token_file}")


def _write(path: str, token: str) -> None:
    """Replaces the file at ``path``, whose reader finds the old token or the new one."""
    try:
        fd, temporary = tempfile.mkstemp(dir=os.path.dirname(os.path.abspath(path)), prefix=".token-")  # 0600
        try:
            with os.fdopen(fd, "w") as file:
                file.write(token)
            os.rename(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        raise ConfigError(f"--token-file {path} cannot be written ({error}): name another one") from error
