"""``bamboo checkpoints``: list the checkpoints in a folder, verify them, and convert them for other stages."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from pydantic import TypeAdapter
from rich.filesize import decimal
from rich.table import Table

from ..addresses import check_storage_url, is_url
from ..errors import ConfigError
from .output import Commands, console

if TYPE_CHECKING:
    from ..state.checkpoints import CheckpointInfo


class FolderOrUrl(click.Path):
    """A folder that exists, or the URL of a store."""

    def __init__(self) -> None:
        super().__init__(exists=True, file_okay=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if is_url(value) else super().convert(value, param, ctx)


class _Checkpoints(Commands):
    """Lists, unless its first argument is the name of another command."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        listing = args and args[0] not in {*self.commands, *ctx.help_option_names}
        return super().parse_args(ctx, ["list", *args] if listing else args)


@click.group(cls=_Checkpoints, subcommand_metavar="FOLDER | convert FOLDER --into FOLDER")
def checkpoints() -> None:
    """List the checkpoints in a folder and verify them, or convert one for other numbers of stages and pipelines.

    `bamboo checkpoints FOLDER` is short for `bamboo checkpoints list FOLDER`.
    """


@checkpoints.command("list")
@click.argument("folder", type=FolderOrUrl())
@click.option("--verify", is_flag=True, help="Read every file and compare its checksum.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_command(folder: str, verify: bool, as_json: bool) -> None:
    """List the checkpoints in FOLDER (or the one that FOLDER is): complete or not, and why.

    FOLDER may be the URL of a store of objects, such as s3://bucket/prefix.

    Those that jobs have taken without their scripts' doing, if this is their place, come last.

    \b
    States:
      complete    as its manifest says (with --verify: every byte of it)
      damaged     files differ from its manifest
      unfinished  a save that is going on or was abandoned; the next save removes it
      unknown     no manifest: written by stock DeepSpeed, or converted

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


@checkpoints.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False))
@click.option("--tag", help="The checkpoint in FOLDER.  [default: the one that `latest` names, else the newest]")
@click.option("--into", type=click.Path(file_okay=False), required=True, help="Folder for the universal checkpoint.")
@click.option("--allow-missing", is_flag=True, help="Convert also if frozen parameters or buffers would not be loaded.")
def convert(folder: str, tag: str | None, into: str, allow_missing: bool) -> None:
    """Convert a checkpoint for other numbers of stages and pipelines, by DeepSpeed's universal checkpoints.

    FOLDER is what the script gives to save_checkpoint, or one checkpoint, or the folder of a job's own checkpoints. It
    stays as it is. The optimizer must be sharded by ZeRO, and be Adam or keep the same state.
    """
    from ..state import converting
    from ..state.checkpoints import CheckpointError
    from ..state.universal import SETTING

    begin = time.monotonic()
    try:
        source = converting.choose(Path(folder), tag)
        click.echo(f"converting {source.path}", err=True)
        made = converting.convert(source, Path(into), allow_missing)
    except (CheckpointError, OSError) as error:
        raise ConfigError(str(error)) from error
    if source.status.value == "unknown":
        click.echo("it has no manifest: whether all of it was written is not known", err=True)
    if source.own:
        click.echo("it is one of the job's own: load_checkpoint gives the script no client_state from it", err=True)
    click.echo(f"{made.path}: from {made.files}, in {time.monotonic() - begin:.1f} s. Load it with this line of the")
    click.echo(f'DeepSpeed configuration and engine.load_checkpoint("{Path(into)}"):\n')
    click.echo(f"  {SETTING}\n")
    click.echo("Start with any numbers of stages and pipelines, and with gradient_accumulation_steps for the same")
    click.echo("train_batch_size. What the job saves then is loaded without that line.")


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
