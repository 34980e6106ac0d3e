"""Whether checkpoints in a store are what their manifests say, without a copy of them on this host."""

from __future__ import annotations

import zlib

from ..checkpoints import CheckpointInfo, FileRecord, Problem, Status
from .objects import ObjectStore


def list_stored(store: ObjectStore, checksums: bool) -> list[CheckpointInfo]:
    """All checkpoints below a URL, and then those of jobs' own there, oldest first.

    Args:
        checksums: read all objects and compare their checksums.

    Raises:
        OSError, CheckpointError: the store cannot be read.
    """
    stores = [store, *(store.below(name) for name in store.own_jobs())]
    infos = [(each, info) for each in stores for info in each.checkpoints()]
    return [_verified(each, info) if checksums else info for each, info in infos]


def _verified(store: ObjectStore, info: CheckpointInfo) -> CheckpointInfo:
    if info.status is not Status.COMPLETE:
        return info
    name = str(info.path).rpartition("/")[2]
    problems = []
    for file, expected in sorted(store.manifest(info.path).files.items()):
        found = FileRecord(size=0, crc32=0)
        for chunk in store.objects.read(f"{name}/{file}"):
            found = FileRecord(size=found.size + len(chunk), crc32=zlib.crc32(chunk, found.crc32))
        if found != expected:
            text = f"has CRC-32 {found.crc32:08x} instead of {expected.crc32:08x}"
            problems.append(str(Problem(file, text)))
    status = Status.DAMAGED if problems else Status.COMPLETE
    return info.model_copy(update={"verified": True, "status": status, "reasons": tuple(problems)})
