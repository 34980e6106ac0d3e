"""Checkpoints of a job's own, which it takes without its script's doing, beside those of the script.

They are in a hidden folder of the job's, in which all is as in a script's (:mod:`.checkpoints`). Nothing in the
script's folder names them, and only the job itself goes on from them, after a fatal loss.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path

from ..addresses import is_url
from .checkpoints import OWN, CheckpointError, CheckpointInfo, Location, Status, list_checkpoints
from .places import CheckpointPlace

logger = logging.getLogger("bamboo_ds")


def own_folder(place: Path | str, job: str) -> Path:
    """The folder of ``job``'s own checkpoints, if ``place`` is their place."""
    return Path(os.path.abspath(place), OWN, job)


def own_location(place: Location, job: str) -> Location:
    """The location of ``job``'s own checkpoints in ``place``, a folder or the URL of a store."""
    return f"{str(place).rstrip('/')}/{OWN}/{job}" if is_url(place) else own_folder(place, job)


def list_own(place: Path | str, checksums: bool = False) -> list[CheckpointInfo]:
    """The checkpoints of all jobs' own in ``place``, as :func:`list_checkpoints` has them."""
    jobs = sorted(each for each in Path(place, OWN).glob("*") if each.is_dir())
    return [info for each in jobs for info in list_checkpoints(each, checksums)]


def newest_of(
    places: Iterable[CheckpointPlace], job: str, origin: str, checksums: bool = False
) -> tuple[CheckpointPlace, CheckpointInfo] | None:
    """The checkpoint of ``job`` that is complete and contains most, and the one of ``places`` that it is in.

    What other runs of a job of this name have saved comes last, and of their own checkpoints none is looked at. Where
    two contain the same steps the script's contains what the script has done after them, too. Places that cannot be
    read are passed over.

    Args:
        places: those that the script has saved into, and those of the job's own checkpoints.
        origin: of this run of the job.
        checksums: pass over those whose content has changed; reads all files of the newest ones.
    """

    def age(each: tuple[CheckpointPlace, CheckpointInfo]) -> tuple[int, bool, int]:
        info = each[1]
        consumed = -1 if info.origin != origin or info.consumed is None else info.consumed
        return consumed, not info.own, info.serial

    found = [(place, info) for place in places for info in _complete(place, job)]
    for place, info in sorted(found, key=age, reverse=True):
        if (info.origin == origin or not info.own) and (not checksums or place.whole(info)):
            return place, info
    return None


def _complete(place: CheckpointPlace, job: str) -> list[CheckpointInfo]:
    try:
        found = place.checkpoints()
    except (OSError, CheckpointError) as error:
        logger.warning("looking for a checkpoint: %s", error)
        return []
    return [info for info in found if info.status is Status.COMPLETE and info.job == job]
