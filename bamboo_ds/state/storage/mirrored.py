"""A folder of a script's that has a mirror in a store of objects, as a :class:`~..places.CheckpointPlace`.

Members meet in the mirror, and a checkpoint is complete when it is complete there. So the folder need not be shared.
Where it is, as among the members of one host, they write their files there as well::

    member that leads                   other members
    partial folder, save in the mirror
    files: uploaded, and written        files: uploaded, and written where the partial folder is seen
    manifest in the mirror
    rename, if all files are here;
    else the partial folder is removed

What goes wrong in the folder alone is logged, and fails no save. Checkpoints that a host lacks are brought to it when
they are loaded: :func:`bring`.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ...generations import Lineage
from .. import publish
from ..checkpoints import CheckpointError, CheckpointInfo, Location, Manifest, SaveRecord, read_manifest, verify
from ..places import KnownFolder
from ..shared_folder import FolderFile, SharedFolder
from .cache import fetch_files
from .client import Upload
from .objects import ObjectStore

logger = logging.getLogger("bamboo_ds")


class Doubled:
    """A :class:`~..places.PartFile` that is uploaded, and written on this host as long as that goes well."""

    def __init__(self, upload: Upload, local: FolderFile | None) -> None:
        self.name = upload.name
        self._upload, self._local = upload, local

    def write(self, data: memoryview) -> int:
        """Appends to both files."""
        count = self._upload.write(data)
        if self._local is not None:
            rest = data[:count]
            try:
                while rest:
                    rest = rest[self._local.write(rest) :]
            except OSError as error:
                self._drop(error)
        return count

    def _drop(self, error: OSError) -> None:
        logger.warning("%s is not written on this host: %s", self.name, error)
        if self._local is not None:
            self._local.discard()
        self._local = None

    def commit(self) -> None:
        """Keeps both files."""
        self._upload.commit()
        if self._local is not None:
            try:
                self._local.commit()
            except OSError as error:
                self._drop(error)

    def discard(self) -> None:
        """Drops both files."""
        self._upload.discard()
        if self._local is not None:
            self._local.discard()


@dataclass(frozen=True)
class MirroredFolder:
    """See :class:`~..places.CheckpointPlace`.

    Attributes:
        folder: of the script.
        store: what mirrors it.
    """

    folder: SharedFolder
    store: ObjectStore
    poll_s = ObjectStore.poll_s

    @property
    def location(self) -> Path:
        """The folder."""
        return self.folder.path

    @contextmanager
    def _here(self, what: str) -> Iterator[None]:
        """In the body something is done in the folder, which may fail."""
        try:
            yield
        except (OSError, CheckpointError) as error:
            logger.warning("%s on this host: %s; the checkpoint's mirror counts", what, error)

    # -- a save, on all members ---------------------------------------------------------------------------

    def exists(self) -> bool:
        """The mirror is always there."""
        return True

    def is_open(self, record: SaveRecord) -> bool:
        """In the mirror."""
        return self.store.is_open(record)

    def is_given_up(self, record: SaveRecord) -> bool:
        """In the mirror."""
        return self.store.is_given_up(record)

    def create(self, record: SaveRecord, name: str) -> Doubled:
        """In both."""
        upload, local = self.store.create(record, name), None
        with self._here(f"{name} of {record.tag} is not written"):
            local = self.folder.create(record, name) if self.folder.is_open(record) else None
        return Doubled(upload, local)

    def note(self, record: SaveRecord, name: str, text: str) -> None:
        """In both."""
        self.store.note(record, name, text)
        with self._here(f"{name} of {record.tag} is not written"):
            if self.folder.is_open(record):
                self.folder.note(record, name, text)

    def note_failure(self, record: SaveRecord, name: str, text: str, unwritten: str | None) -> None:
        """In the mirror."""
        self.store.note_failure(record, name, text, unwritten)

    # -- a save, on the member that leads -----------------------------------------------------------------

    def check(self, known: KnownFolder | None) -> None:
        """Makes the folder."""
        with self._here(f"{self.folder.path} cannot be made"):
            self.folder.path.mkdir(parents=True, exist_ok=True)

    def clean(self, job: str, keep: Collection[str] = (), lineage: Lineage = ("", 0)) -> None:
        """In both."""
        with self._here(f"{self.folder.path} is not cleaned up"):
            if self.folder.exists():
                self.folder.clean(job, keep, lineage)
        self.store.clean(job, keep, lineage)

    def open(self, record: SaveRecord) -> None:
        """Opens the folder first: members that see the save in the mirror look for it here."""
        with self._here(f"{record.tag} is not written"):
            self.folder.open(record)
        self.store.open(record)

    def written(self, record: SaveRecord) -> Mapping[str, object]:
        """In the mirror."""
        return self.store.written(record)

    def size(self, record: SaveRecord, name: str) -> int:
        """In the mirror."""
        return self.store.size(record, name)

    def read(self, record: SaveRecord, name: str) -> bytes:
        """In the mirror."""
        return self.store.read(record, name)

    def next_serial(self) -> int:
        """Higher than in both: the folder may have been there before its mirror."""
        here = 0
        with self._here(f"{self.folder.path} cannot be read"):
            here = self.folder.next_serial() if self.folder.exists() else 0
        return max(here, self.store.next_serial())

    def seal(self, record: SaveRecord, manifest: Manifest) -> None:
        """See :class:`ObjectStore`."""

    def publish(self, record: SaveRecord, manifest: Manifest) -> Location:
        """In the mirror; then in the folder, if all is here."""
        found = self.store.publish(record, manifest)
        with self._here(f"{record.tag} gets no name"):
            if self.folder.is_open(record):
                if self._all_here(record, manifest):
                    self.folder.seal(record, manifest)
                    self.folder.publish(record, manifest)
                else:
                    self.folder.discard(record)
        return found

    def _all_here(self, record: SaveRecord, manifest: Manifest) -> bool:
        try:
            return all(self.folder.size(record, name) == file.size for name, file in manifest.files.items())
        except FileNotFoundError:
            return False

    def completed(self, record: SaveRecord) -> Location | None:
        """In the mirror."""
        return self.store.completed(record)

    def discard(self, record: SaveRecord) -> None:
        """In both."""
        with self._here(f"what is written of {record.tag} stays"):
            self.folder.discard(record)
        self.store.discard(record)

    def give_up(self, record: SaveRecord) -> None:
        """In the mirror."""
        self.store.give_up(record)

    def forget(self, record: SaveRecord) -> None:
        """In the mirror."""
        self.store.forget(record)

    # -- checkpoints --------------------------------------------------------------------------------------

    def known(self, checkpoint: Location) -> KnownFolder | None:
        """A folder that is gone is made again."""
        return None

    def manifest(self, checkpoint: Location) -> Manifest:
        """In the mirror."""
        return self.store.manifest(checkpoint)

    def point_latest(self, record: SaveRecord) -> None:
        """In both, as far as it is here."""
        self.store.point_latest(record)
        with self._here(f"`latest` does not name {record.tag}"):
            if self.folder.completed(record) is not None:
                self.folder.point_latest(record)

    def prune(self, job: str, keep: int, newest: Location) -> None:
        """In both."""
        self.store.prune(job, keep, newest)
        with self._here(f"older checkpoints stay in {self.folder.path}"):
            if self.folder.exists():
                self.folder.prune(job, keep, self.folder.path / self.manifest(newest).tag)

    def remove(self, info: CheckpointInfo, job: str) -> None:
        """In the mirror."""
        self.store.remove(info, job)

    def checkpoints(self) -> list[CheckpointInfo]:
        """The checkpoints of the mirror."""
        return self.store.checkpoints()

    def whole(self, info: CheckpointInfo) -> bool:
        """Brings the checkpoint, which the next start needs anyway."""
        try:
            bring(self.folder.path, self.store, self.manifest(info.path), str(info.path))
        except (OSError, CheckpointError) as error:
            logger.warning("checkpoint %s is passed over: %s", info.path, error)
            return False
        return True

    # -- lineages -----------------------------------------------------------------------------------------

    def supersede(self, lineage: Lineage) -> None:
        """In the mirror."""
        self.store.supersede(lineage)

    def is_over(self, lineage: Lineage) -> bool:
        """In the mirror."""
        return self.store.is_over(lineage)

    def take_over(self, job: str, lineage: Lineage) -> None:
        """In both."""
        self.store.take_over(job, lineage)
        with self._here(f"{self.folder.path} is not cleaned up"):
            if self.folder.exists():
                self.folder.take_over(job, lineage)


def bring(folder: Path, store: ObjectStore, manifest: Manifest, checkpoint: str) -> Path:
    """The checkpoint in ``folder``, whole: fetched unless this host has it, which one of its processes looks for.

    Args:
        folder: of the script.
        store: its mirror.
        manifest: of the checkpoint.
        checkpoint: its URL.

    Raises:
        CheckpointError, OSError: it cannot be had whole.
    """
    target = folder / manifest.tag
    with store.cache.alone(str(target)):
        if _is(target, manifest):
            return target
        logger.info("fetching %s to %s", checkpoint, target)
        folder.mkdir(parents=True, exist_ok=True)
        fresh = publish.hidden_name(folder, manifest.job)
        try:
            fetch_files(store.objects, checkpoint.rpartition("/")[2], manifest, fresh)
            publish.publish(fresh, folder, manifest)
        except BaseException:  # goes on up; half of it must not stay
            shutil.rmtree(fresh, ignore_errors=True)
            raise
        publish.point_latest(folder, manifest.tag)
    return target


def _is(target: Path, manifest: Manifest) -> bool:
    try:
        return read_manifest(target).save_id == manifest.save_id and not verify(target)
    except CheckpointError:
        return False
