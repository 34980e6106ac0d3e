"""``bamboo checkpoints``: list the checkpoints in a folder and verify them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click
from pydantic import TypeAdapter
from rich.filesize import decimal
from rich.table import Table

from ..addresses import check_storage_url, is_url
from ..errors import ConfigError
from .output import console

if TYPE_CHECKING:
    from ..state.checkpoints import CheckpointInfo


class FolderOrUrl(click.Path):
    """A folder that exists, or the URL of a store."""

    def __init__(self) -> None:
        super().__init__(exists=True, file_okay=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if is_url(value) else super().convert(value, param, ctx)


@click.command()
@click.argument("folder", type=FolderOrUrl())
@click.option("--verify", is_flag=True, help="Read every file and compare its checksum.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def checkpoints(folder: str, verify: bool, as_json: bool) -> None:
    """List the checkpoints in FOLDER (or the one that FOLDER is): complete or not, and why.

    FOLDER may be the URL of a store of objects, such as s3://bucket/prefix.

    Those that jobs have taken without their scripts' doing, if this is their place, come last.

    \b
    States:
      complete    as its manifest says (with --verify: every byte of it)
      damaged     files differ from its manifest
      unfinished  a save that is going on or was abandoned; the next save removes it
      unknown     no manifest: written by stock DeepSpeed

    Exit code 1 if a checkpoint is damaged.
    """
    # Loads torch, which other commands need not wait for.
    from ..state.checkpoints import CheckpointError, CheckpointInfo, Status, list_checkpoints
    from ..state.locations import Places
    from ..state.own import list_own
    from ..state.storage.verifying import list_stored

    try:
        if is_url(folder):
            found = list_stored(Places().store(check_storage_url(folder)), verify)
        else:
            found = list_checkpoints(folder, checksums=verify) + list_own(folder, checksums=verify)
    except (CheckpointError, OSError, ValueError) as error:
        raise ConfigError(str(error)) from error
    if as_json:
        click.echo(TypeAdapter(list[CheckpointInfo]).dump_json(found, indent=2).decode())
    elif not found:
        click.echo(f"no checkpoints in {folder}", err=True)
    else:
        console().print(checkpoints_table(folder, found))
    sys.exit(1 if any(info.status is Status.DAMAGED for info in found) else 0)


def checkpoints_table(folder: str, found: list[CheckpointInfo]) -> Table:
    """The list for people, oldest first."""
    colours = {"complete": "green", "damaged": "red", "unfinished": "yellow", "unknown": "default"}
    table = Table(title=f"checkpoints in {folder}", title_justify="left")
    for column in ("tag", "step", "time (UTC)", "job", "roles", "size", "state"):
        table.add_column(column, justify="right" if column in ("step", "size") else "left")
    table.add_column("why", overflow="fold")
    for info in found:
        state = info.status.value + (", verified" if info.verified and info.status.value == "complete" else "")
        layout = info.layout
        table.add_row(
            info.tag + (" *" if info.latest else "") + (" (own)" if info.own else ""),
            "-" if info.step is None else str(info.step),
            "-" if info.time is None else f"{info.time:%Y-%m-%d %H:%M:%S}",
            info.job or "-",
            "-" if layout is None else f"{layout.pipelines} x {layout.stages}",
            decimal(info.size),
            f"[{colours[info.status.value]}]{state}[/]",
            "\n".join(info.reasons) or "-",
        )
    table.caption = "* the one that `latest` names; (own) of the job's own; roles are pipelines x stages"
    return table
