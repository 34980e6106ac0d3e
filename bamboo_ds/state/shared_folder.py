"""A folder on a file system that all members share, as a :class:`~.places.CheckpointPlace`.

What is in it: :mod:`.checkpoints`; how it changes: :mod:`.publish`.
"""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..generations import Lineage, is_over, supersede
from . import publish
from .checkpoints import (
    MANIFEST,
    SAVE,
    WRITTEN,
    CheckpointError,
    CheckpointInfo,
    Location,
    Manifest,
    SaveRecord,
    list_checkpoints,
    read_manifest,
    verify,
)
from .places import KnownFolder, SaveRefused

logger = logging.getLogger("bamboo_ds")


class FolderFile(io.FileIO):
    """A :class:`~.places.PartFile` on the file system."""

    def __init__(self, path: Path) -> None:
        super().__init__(os.fspath(path), "xb")

    def commit(self) -> None:
        """Flushes to the disk."""
        with self:
            os.fsync(self.fileno())

    def discard(self) -> None:
        """Leaves what is written; its folder is removed as a whole."""
        with suppress(OSError):  # the error that it is discarded for counts
            self.close()


@dataclass(frozen=True)
class SharedFolder:
    """See :class:`~.places.CheckpointPlace`.

    Attributes:
        path: absolute.
    """

    path: Path
    poll_s = 0.5

    @property
    def location(self) -> Path:
        """The folder."""
        return self.path

    # -- a save, on all members ---------------------------------------------------------------------------

    def _partial(self, record: SaveRecord) -> Path:
        return publish.partial_folder(self.path, record.job, record.save_id, record.tag)

    def exists(self) -> bool:
        """Whether the folder is there."""
        return self.path.exists()

    def is_open(self, record: SaveRecord) -> bool:
        """Whether the partial folder is there."""
        return _has_entry(self._partial(record))

    def is_given_up(self, record: SaveRecord) -> bool:
        """Whether the empty folder that tells it is there."""
        return _has_entry(publish.given_up(self.path, record.job, record.save_id))

    def create(self, record: SaveRecord, name: str) -> FolderFile:
        """A file in the partial folder."""
        root = self._partial(record)
        path = root / name
        publish.make_folders(root, path.relative_to(root).parts[:-1])
        return FolderFile(path)

    def note(self, record: SaveRecord, name: str, text: str) -> None:
        """A file that gets its name by a rename."""
        publish.write_atomically(self._partial(record) / name, text)

    def note_failure(self, record: SaveRecord, name: str, text: str, unwritten: str | None) -> None:
        """On a full disk an empty file, which needs no room."""
        root = self._partial(record)
        if unwritten is not None:
            (root / unwritten).unlink(missing_ok=True)
        try:
            publish.write_atomically(root / name, text)
        except OSError:
            (root / name).touch()  # another member has taken the room

    # -- a save, on the member that leads -----------------------------------------------------------------

    def check(self, known: KnownFolder | None) -> None:
        """Creates the folder if need be, but never below a mount point whose file system is gone."""
        if known is not None:
            there = next(path for path in (self.path, *self.path.parents) if path.exists())
            lost = known.newest is not None and not known.newest.exists()
            if lost and os.stat(there).st_dev != known.device:
                raise SaveRefused(f"{self.path} is on another file system than before: is it mounted?")
        self.path.mkdir(parents=True, exist_ok=True)

    def clean(self, job: str, keep: Collection[str] = (), lineage: Lineage = ("", 0)) -> None:
        """See :func:`.publish.clean`."""
        publish.clean(self.path, job, keep, lineage)

    def open(self, record: SaveRecord) -> None:
        """Makes the partial folder."""
        publish.open_partial(self.path, record)

    def written(self, record: SaveRecord) -> Mapping[str, object]:
        """Names and sizes of what is in the partial folder."""
        with os.scandir(self._partial(record)) as entries:
            return {entry.name: entry.stat().st_size for entry in entries if not entry.name.startswith(publish.NEW)}

    def size(self, record: SaveRecord, name: str) -> int:
        """Bytes of the file."""
        return os.stat(self._partial(record) / name).st_size

    def read(self, record: SaveRecord, name: str) -> bytes:
        """Its content."""
        return (self._partial(record) / name).read_bytes()

    def next_serial(self) -> int:
        """See :func:`.publish.next_serial`."""
        return publish.next_serial(self.path)

    def seal(self, record: SaveRecord, manifest: Manifest) -> None:
        """The manifest, which counts once its folder has its name."""
        self.note(record, MANIFEST, manifest.to_json())

    def publish(self, record: SaveRecord, manifest: Manifest) -> Path:
        """Gives the partial folder its name."""
        partial = self._partial(record)
        for name in (*(f"{WRITTEN}{rank}.json" for rank in range(record.layout.size)), SAVE):
            (partial / name).unlink(missing_ok=True)
        return publish.publish(partial, self.path, manifest)

    def completed(self, record: SaveRecord) -> Path | None:
        """The folder of the tag, if it is of this save."""
        path = self.path / record.tag
        try:
            manifest = read_manifest(path)
        except CheckpointError:
            return None
        return path if manifest.save_id == record.save_id else None

    def discard(self, record: SaveRecord) -> None:
        """Deletes the partial folder."""
        publish.discard(self._partial(record), self.path, record.job)

    def give_up(self, record: SaveRecord) -> None:
        """Makes an empty folder that marks the save as given up."""
        publish.given_up(self.path, record.job, record.save_id).mkdir()

    def forget(self, record: SaveRecord) -> None:
        """Removes the mark of a save that was given up."""
        publish.given_up(self.path, record.job, record.save_id).rmdir()

    # -- checkpoints --------------------------------------------------------------------------------------

    def known(self, checkpoint: Location) -> KnownFolder | None:
        """Its device, by which a mount point without its file system is told."""
        return KnownFolder(os.stat(checkpoint).st_dev, Path(checkpoint))

    def manifest(self, checkpoint: Location) -> Manifest:
        """See :func:`.checkpoints.read_manifest`."""
        return read_manifest(checkpoint)

    def point_latest(self, record: SaveRecord) -> None:
        """See :func:`.publish.point_latest`."""
        publish.point_latest(self.path, record.tag)

    def prune(self, job: str, keep: int, newest: Location) -> None:
        """See :func:`.publish.prune`."""
        publish.prune(self.path, job, keep, Path(newest))

    def remove(self, info: CheckpointInfo, job: str) -> None:
        """See :func:`.publish.discard`."""
        publish.discard(Path(info.path), self.path, job, info.serial)

    def checkpoints(self) -> list[CheckpointInfo]:
        """See :func:`.checkpoints.list_checkpoints`; nothing if there is no such folder."""
        return list_checkpoints(self.path) if self.path.is_dir() else []

    def whole(self, info: CheckpointInfo) -> bool:
        """See :func:`.checkpoints.verify`."""
        return not verify(info.path)

    # -- lineages -----------------------------------------------------------------------------------------

    def supersede(self, lineage: Lineage) -> None:
        """See :func:`bamboo_ds.generations.supersede`."""
        supersede(self.path, lineage)

    def is_over(self, lineage: Lineage) -> bool:
        """See :func:`bamboo_ds.generations.is_over`."""
        return is_over(self.path, lineage)

    def take_over(self, job: str, lineage: Lineage) -> None:
        """See :func:`.publish.take_over`."""
        publish.take_over(self.path, job, lineage)


def _has_entry(path: Path) -> bool:
    # Network file systems remember for a while that a name does not exist, but list a folder afresh.
    try:
        with os.scandir(path.parent) as entries:
            return any(entry.name == path.name for entry in entries)
    except FileNotFoundError:
        return False
