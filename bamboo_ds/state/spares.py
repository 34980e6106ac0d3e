"""The newest checkpoint stays until the next one is complete, although a script may delete it before.

A script that deletes older checkpoints when ``save_checkpoint`` has returned takes the new one for complete, while it
is being written. So a save begins with a *spare*: a hidden folder of hard links to the files of the checkpoint that
training would go on from. When the save ends the spare is deleted; it gets the checkpoint's name back if there is
nothing newer and the checkpoint is gone, or damaged. After a crash the next save, restart or ``load_checkpoint`` in the
folder does so.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Collection
from pathlib import Path
from urllib.parse import quote, unquote

from . import publish
from .checkpoints import (
    MANIFEST,
    SEPARATOR,
    SPARE,
    CheckpointError,
    hidden,
    newest_complete,
    read_manifest,
    tag_in,
    verify,
)

logger = logging.getLogger("bamboo_ds")


def make(folder: Path, job: str, save_id: str) -> None:
    """Make a spare of the checkpoint that ``latest`` names, else of the newest complete one of ``job``, if any.

    Where that fails, as on a file system without hard links, there is none.
    """
    fresh = publish.hidden_name(folder, job)
    try:
        tag = tag_in(folder / "latest")
        if not (tag and (folder / tag).is_dir()):
            newest = newest_complete(folder, job)
            if newest is None:
                return
            tag = newest.tag
        shutil.copytree(folder / tag, fresh, copy_function=os.link, symlinks=True)
        publish.sync_folder(fresh)
        os.rename(fresh, folder / SEPARATOR.join((SPARE, job, save_id, quote(tag, safe=""))))
    except (OSError, CheckpointError) as error:
        logger.info("no spare before save %s: %s", save_id, error)
        shutil.rmtree(fresh, ignore_errors=True)


def end(folder: Path, job: str) -> None:
    """The save has ended that ``job`` has made spares for; where that fails they are left to the next one."""
    try:
        settle(folder, job)
    except (OSError, CheckpointError) as error:
        logger.info("spares in %s are left to the next save: %s", folder, error)


def settle(folder: Path, job: str | None = None, keep: Collection[str] = ()) -> list[Path]:
    """Give spares their checkpoint's name back where that is needed, and delete them elsewhere.

    Args:
        job: only those that it has made.
        keep: ids of saves that are going on.

    Returns:
        The checkpoints that are back.

    Raises:
        CheckpointError, OSError: the folder cannot be read, or written to.
    """
    back = []
    for spare in hidden(folder, SPARE, job) if folder.is_dir() else ():
        _, maker, save_id, name = spare.name.split(SEPARATOR, 3)
        target = folder / unquote(name)
        if save_id in keep:
            continue
        if not _needed(spare, target, folder):
            publish.discard(spare, folder, maker)
            continue
        _clear(target, folder, maker)
        publish.make_folders(folder, target.relative_to(folder).parts[:-1])
        if not publish.give_name(spare, target):
            continue
        logger.warning("checkpoint %s is back: it was deleted before a newer one was complete", target)
        back.append(target)
    return back


def _clear(target: Path, folder: Path, job: str) -> None:
    """Remove what is left of ``target``, unless another member has put it back meanwhile."""
    doomed = publish.hidden_name(folder, job)
    try:
        os.rename(target, doomed)
    except FileNotFoundError:
        return
    if verify(doomed, checksums=False):
        shutil.rmtree(doomed)
    else:
        os.rename(doomed, target)


def settle_for_loading(folder: Path, tag: str | None) -> None:
    """As :func:`settle` of all jobs, where the checkpoint ``tag`` (``None``: the one of ``latest``) is gone."""
    name = tag or tag_in(folder / "latest")
    if name and not (folder / name).exists():
        settle(folder)


def _needed(spare: Path, target: Path, folder: Path) -> bool:
    """Whether training would have nothing as new as ``spare`` to go on from."""
    try:
        serial = read_manifest(spare).serial
    except CheckpointError:  # stock DeepSpeed's
        serial = 0
    newest = newest_complete(folder)
    if newest is not None and newest.serial >= serial:
        return False
    return not target.is_dir() or ((spare / MANIFEST).exists() and bool(verify(target, checksums=False)))
