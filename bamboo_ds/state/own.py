"""Checkpoints of a job's own, which it takes without its script's doing, beside those of the script.

They are in a hidden folder of the job's, in which all is as in a script's (:mod:`.checkpoints`). Nothing in the
script's folder names them, and only the job itself goes on from them, after a fatal loss.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path

from .checkpoints import OWN, CheckpointError, CheckpointInfo, Status, list_checkpoints, verify

logger = logging.getLogger("bamboo_ds")


def own_folder(place: Path | str, job: str) -> Path:
    """Where ``job`` keeps checkpoints of its own, if ``place`` is their place."""
    return Path(os.path.abspath(place), OWN, job)


def list_own(place: Path | str, checksums: bool = False) -> list[CheckpointInfo]:
    """As :func:`list_checkpoints` of the checkpoints of all jobs' own in ``place``."""
    jobs = sorted(each for each in Path(place, OWN).glob("*") if each.is_dir())
    return [info for each in jobs for info in list_checkpoints(each, checksums)]


def newest_of(
    folders: Iterable[Path], job: str, origin: str, checksums: bool = False
) -> tuple[Path, CheckpointInfo] | None:
    """The checkpoint of ``job`` that is complete and contains most, and the one of ``folders`` that it is in.

    What other runs of a job of this name have saved comes last, and of their own checkpoints none is looked at. Where
    two contain the same steps the script's contains what the script has done after them, too. Folders that cannot be
    read are passed over.

    Args:
        folders: those that the script has saved into, and those of the job's own checkpoints.
        origin: of this run of the job.
        checksums: pass over those whose content has changed; reads all files of the newest ones.
    """

    def age(each: tuple[Path, CheckpointInfo]) -> tuple[int, bool, int]:
        info = each[1]
        consumed = -1 if info.origin != origin or info.consumed is None else info.consumed
        return consumed, not info.own, info.serial

    found = [(folder, info) for folder in folders for info in _complete(folder, job)]
    for folder, info in sorted(found, key=age, reverse=True):
        if (info.origin == origin or not info.own) and not (checksums and verify(info.path)):
            return folder, info
    return None


def _complete(folder: Path, job: str) -> list[CheckpointInfo]:
    try:
        found = list_checkpoints(folder) if folder.is_dir() else []
    except CheckpointError as error:
        logger.warning("looking for a checkpoint: %s", error)
        return []
    return [info for info in found if info.status is Status.COMPLETE and info.job == job]
