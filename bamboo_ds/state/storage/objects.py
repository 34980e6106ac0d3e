"""Checkpoints below a URL, as a :class:`~..places.CheckpointPlace`.

::

    s3://bucket/prefix/.bamboo-own/job/
      job~save id~step20/               complete: it has a manifest, the last object that is written
        layer_00-model_states.pt …        DeepSpeed's own files, as in a folder
        bamboo_manifest.json
      job~save id~step30/               being written, or abandoned
        .save.json                        what is being saved; gone: members write no more
        layer_00-model_states.pt …
        .moving-0                         how much role 0 has sent of what is no object yet
        .written-0.json                   as in a folder
      .bamboo-removing~job~save id      the save has failed
      .bamboo-over~origin~0             as in a folder, see :mod:`bamboo_ds.generations`
      latest                            names the checkpoint for loads that name no tag

Nothing is renamed: names have the id of the save in them, so that two attempts never meet, and the manifest tells the
tag. A manifest counts only while all its objects are there. So a slow member that writes one after a later lineage has
removed the other objects completes nothing.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from ...generations import Lineage, mark_of
from ..checkpoints import (
    MANIFEST,
    OWN,
    REMOVING,
    SAVE,
    SEPARATOR,
    WRITTEN,
    CheckpointError,
    CheckpointInfo,
    Manifest,
    Problem,
    SaveRecord,
    Status,
    is_own,
    parse_manifest,
)
from ..places import KnownFolder
from .cache import Cache
from .client import Objects, Stored, Upload

logger = logging.getLogger("bamboo_ds")

LATEST = "latest"
#: Begins the name of an object that changes while parts are sent.
MOVING = ".moving-"
#: Seconds between two of its contents.
_MOVING_S = 5.0
_ENTRY = re.compile(r"(?P<job>[^~/]+)~(?P<save>[^~/]+)~(?P<tag>[^~/]+)")
_UNUSUAL = re.compile(r"[^A-Za-z0-9._-]")

Found = dict[str, Stored]


class ObjectStore:
    """See :class:`~..places.CheckpointPlace`.

    Args:
        url: of the prefix.
        cache: for what is fetched to this host.

    Raises:
        StorageError: no package for such URLs is installed.
    """

    poll_s = 2.0

    def __init__(self, url: str, cache: Cache) -> None:
        self.objects, self.cache = Objects(url), cache
        self._lock = threading.Lock()
        self._manifests: dict[str, tuple[str, Manifest]] = {}

    @property
    def location(self) -> str:
        """The URL."""
        return self.objects.url

    # -- a save, on all members ---------------------------------------------------------------------------

    def exists(self) -> bool:
        """A prefix is always there."""
        return True

    def is_open(self, record: SaveRecord) -> bool:
        """Whether the object that says so is there."""
        return self.objects.size(f"{entry_of(record)}/{SAVE}") is not None

    def is_given_up(self, record: SaveRecord) -> bool:
        """Whether the save was given up."""
        return self.objects.size(_given_up(record)) is not None

    def create(self, record: SaveRecord, name: str) -> Upload:
        """Begins an upload."""
        self._check_open(record)
        sent, told, entry = 0, time.monotonic(), entry_of(record)

        def moved() -> None:
            nonlocal sent, told
            sent += 1
            if time.monotonic() >= told + _MOVING_S:
                told = time.monotonic()
                self.objects.put(f"{entry}/{MOVING}{_UNUSUAL.sub('_', name)}", str(sent).encode())

        return self.objects.upload(f"{entry}/{name}", moved)

    def _check_open(self, record: SaveRecord) -> None:
        if not self.is_open(record):
            raise FileNotFoundError(f"{self.location}/{entry_of(record)} is not open any more")

    def note(self, record: SaveRecord, name: str, text: str) -> None:
        """An object."""
        self._check_open(record)
        self.objects.put(f"{entry_of(record)}/{name}", text.encode())

    def note_failure(self, record: SaveRecord, name: str, text: str, unwritten: str | None) -> None:
        """An object; a store has room."""
        self.note(record, name, text)

    # -- a save, on the member that leads -----------------------------------------------------------------

    def check(self, known: KnownFolder | None) -> None:
        """A prefix need not be made."""

    def clean(self, job: str, keep: Collection[str] = (), lineage: Lineage = ("", 0)) -> None:
        """See :meth:`~..places.CheckpointPlace.clean`; also aborts uploads that nobody goes on with."""
        found, entries = self._look()
        if self.is_over(lineage):
            return  # looked up after the listing: if a later lineage has made anything of that, it is over
        spared = {name for name, files in entries.items() if self._spares(name, files, job, keep, lineage)}
        for name, files in entries.items():
            if name not in spared:
                logger.warning("removing %s/%s: its save was abandoned", self.location, name)
                self._delete(name, files)
        marks = [name for name in found if name.startswith(f"{REMOVING}{SEPARATOR}{job}{SEPARATOR}")]
        self.objects.delete(name for name in marks if name.rpartition(SEPARATOR)[2] not in keep)

        def abandoned(name: str) -> bool:
            match = _ENTRY.fullmatch(name.partition("/")[0])
            return match is not None and match["save"] not in keep and match[0] not in spared

        try:
            self.objects.abort_uploads(f"{job}{SEPARATOR}", abandoned)
        except (OSError, CheckpointError) as error:  # a permission of its own
            logger.info("uploads that were interrupted stay in %s: %s", self.location, error)

    def _spares(self, name: str, files: Found, job: str, keep: Collection[str], lineage: Lineage) -> bool:
        match = _ENTRY.fullmatch(name)
        assert match is not None
        if match["job"] != job or match["save"] in keep:
            return True
        if MANIFEST in files:
            return len(files) > 1  # else a slow member has written it after all else was removed
        return SAVE in files and self._is_later(name, lineage)

    def _is_later(self, name: str, lineage: Lineage) -> bool:
        try:
            record = SaveRecord.model_validate_json(self.objects.get(f"{name}/{SAVE}"))
        except (FileNotFoundError, ValidationError):  # it has just been removed, or is broken
            return False
        origin, generation = lineage
        return record.origin == origin and record.generation > generation

    def open(self, record: SaveRecord) -> None:
        """Writes the object that says so."""
        self.objects.put(f"{entry_of(record)}/{SAVE}", record.to_json().encode())

    def written(self, record: SaveRecord) -> Mapping[str, object]:
        """The objects."""
        return self.objects.find(entry_of(record))

    def size(self, record: SaveRecord, name: str) -> int:
        """Bytes of an object."""
        size = self.objects.size(f"{entry_of(record)}/{name}")
        if size is None:
            raise FileNotFoundError(f"{self.location}/{entry_of(record)}/{name} is missing")
        return size

    def read(self, record: SaveRecord, name: str) -> bytes:
        """The content of an object."""
        return self.objects.get(f"{entry_of(record)}/{name}")

    def next_serial(self) -> int:
        """One more than the highest."""
        return 1 + max((info.serial for info in self.checkpoints()), default=0)

    def seal(self, record: SaveRecord, manifest: Manifest) -> None:
        """Nothing: here the manifest makes the checkpoint complete."""

    def publish(self, record: SaveRecord, manifest: Manifest) -> str:
        """Writes the manifest, unless a member that led before has."""
        entry = entry_of(record)
        if self.objects.size(f"{entry}/{MANIFEST}") is None:
            self.note(record, MANIFEST, manifest.to_json())
        rest = [name for name in self.objects.find(entry) if name.startswith((WRITTEN, MOVING))]
        try:
            self.objects.delete(f"{entry}/{name}" for name in (*rest, SAVE))
        except (OSError, CheckpointError) as error:  # it is complete; they go with it
            logger.info("marks of members stay in %s/%s: %s", self.location, entry, error)
        return f"{self.location}/{entry}"

    def completed(self, record: SaveRecord) -> str | None:
        """Whether it has its manifest."""
        entry = entry_of(record)
        return None if self.objects.size(f"{entry}/{MANIFEST}") is None else f"{self.location}/{entry}"

    def discard(self, record: SaveRecord) -> None:
        """Removes its objects, unless another member has completed it."""
        entry = entry_of(record)
        files = self.objects.find(entry)
        if MANIFEST not in files:
            self._delete(entry, files)

    def _delete(self, entry: str, files: Collection[str]) -> None:
        """First what makes it count: the manifest, or the word that it is open."""
        self.objects.delete(f"{entry}/{name}" for name in (MANIFEST, SAVE) if name in files)
        self.objects.delete(f"{entry}/{name}" for name in files if name not in (MANIFEST, SAVE))

    def give_up(self, record: SaveRecord) -> None:
        """Writes the object that says so."""
        self.objects.put(_given_up(record), b"")

    def forget(self, record: SaveRecord) -> None:
        """Removes the mark of a save that was given up."""
        self.objects.delete([_given_up(record)])

    # -- checkpoints --------------------------------------------------------------------------------------

    def known(self, checkpoint: Path | str) -> KnownFolder | None:
        """Nothing is to be known of a prefix."""
        return None

    def manifest(self, checkpoint: Path | str) -> Manifest:
        """Reads the manifest of a checkpoint."""
        where = str(checkpoint)
        try:
            return parse_manifest(self.objects.get(f"{where.rpartition('/')[2]}/{MANIFEST}"), where)
        except OSError as error:
            raise CheckpointError(f"{where} has no {MANIFEST} that can be read: {error}") from error

    def point_latest(self, record: SaveRecord) -> None:
        """Lets ``latest`` name the checkpoint, unless it names a newer one of its job."""
        entry, named = entry_of(record), self.latest()
        if named is not None:
            with suppress(CheckpointError):  # what it names is gone
                before = self.manifest(named)
                if before.job == record.job and before.serial > self.manifest(entry).serial:
                    return  # this member was slow, and is no longer the one that leads
        self.objects.put(LATEST, entry.encode())

    def latest(self) -> str | None:
        """The name of the checkpoint that ``latest`` names."""
        try:
            return self.objects.get(LATEST).decode().strip()
        except FileNotFoundError:
            return None

    def prune(self, job: str, keep: int, newest: Path | str) -> None:
        """Does as :func:`..publish.prune`."""
        own = [i for i in self.checkpoints() if i.status is Status.COMPLETE and i.job == job]
        for info in own[: max(0, len(own) - max(1, keep))]:
            if info.path != newest and not info.latest:
                self.remove(info, job)

    def remove(self, info: CheckpointInfo, job: str) -> None:
        """Deletes the objects; no other checkpoint ever has its name."""
        entry = str(info.path).rpartition("/")[2]
        self._delete(entry, self.objects.find(entry))

    def checkpoints(self) -> list[CheckpointInfo]:
        """All checkpoints, as their names and sizes tell."""
        found, entries = self._look()
        latest = self.latest() if LATEST in found else None
        infos = [info for name, files in entries.items() for info in self._infos(name, files, latest)]
        return sorted(infos, key=lambda i: (i.status is Status.UNFINISHED, i.serial, i.step or 0, i.tag))

    def below(self, name: str) -> ObjectStore:
        """The store of the objects below a name."""
        return ObjectStore(f"{self.location}/{name}", self.cache)

    def own_jobs(self) -> list[str]:
        """Names of what has checkpoints of jobs' own."""
        found = (path.split("/") for path in self.objects.find(OWN))
        return sorted({f"{OWN}/{parts[0]}" for parts in found if len(parts) > 1})

    def whole(self, info: CheckpointInfo) -> bool:
        """Fetches the checkpoint, which the next start needs anyway."""
        try:
            self.fetch(str(info.path))
        except (OSError, CheckpointError) as error:
            logger.warning("checkpoint %s is passed over: %s", info.path, error)
            return False
        return True

    def fetch(self, checkpoint: str) -> Path:
        """The folder on this host that has the checkpoint, whole; raises ``OSError`` or :class:`CheckpointError`."""
        name = checkpoint.rpartition("/")[2]
        return self.cache.fetch(self.objects, name, self.manifest(checkpoint))

    def _look(self) -> tuple[Found, dict[str, Found]]:
        """All objects, and those of each checkpoint by their names in it."""
        found, entries = self.objects.find(), defaultdict[str, Found](dict)
        for path, stored in found.items():
            name, _, file = path.partition("/")
            if file and _ENTRY.fullmatch(name):
                entries[name][file] = stored
        return found, entries

    def _infos(self, name: str, files: Found, latest: str | None) -> list[CheckpointInfo]:
        """Information about one checkpoint; nothing if it was removed while it was read."""
        url, size = f"{self.location}/{name}", sum(stored.size for stored in files.values())
        place = {"path": url, "latest": name == latest, "own": is_own(url), "size": size}
        try:
            if MANIFEST not in files:
                return [self._unfinished(name, files, place)]
            manifest = self._known_manifest(name, files[MANIFEST])
        except FileNotFoundError:
            return []
        except (CheckpointError, ValidationError) as error:
            return [CheckpointInfo(**place, tag=_tag(name), status=Status.DAMAGED, reasons=(str(error),))]
        reasons = tuple(str(problem) for problem in _problems(manifest, files))
        place |= {each: getattr(manifest, each) for each in _TOLD}
        return [CheckpointInfo(**place, status=Status.DAMAGED if reasons else Status.COMPLETE, reasons=reasons)]

    def _unfinished(self, name: str, files: Found, place: dict[str, object]) -> CheckpointInfo:
        reason = "not complete: the save goes on, or was abandoned"
        if SAVE not in files:
            return CheckpointInfo(**place, tag=_tag(name), status=Status.UNFINISHED, reasons=(reason,))
        record = SaveRecord.model_validate_json(self.objects.get(f"{name}/{SAVE}"))
        told = {each: getattr(record, each) for each in ("tag", "job", "step", "layout")}
        return CheckpointInfo(**place, **told, status=Status.UNFINISHED, reasons=(reason,))

    def _known_manifest(self, name: str, stored: Stored) -> Manifest:
        """The manifest, read once: objects of a save are never written again."""
        with self._lock:
            known = self._manifests.get(name)
        if known is not None and known[0] == stored.version:
            return known[1]
        manifest = parse_manifest(self.objects.get(f"{name}/{MANIFEST}"), f"{self.location}/{name}")
        with self._lock:
            self._manifests[name] = stored.version, manifest
        return manifest

    # -- lineages -----------------------------------------------------------------------------------------

    def supersede(self, lineage: Lineage) -> None:
        """Writes the marks that are not there yet."""
        origin, generation = lineage
        for number in range(generation if origin else 0):
            mark = mark_of(origin, number)
            if self.objects.size(mark) is None:
                self.objects.put(mark, b"")

    def is_over(self, lineage: Lineage) -> bool:
        """Whether the mark is there."""
        origin, generation = lineage
        return bool(origin) and self.objects.size(mark_of(origin, generation)) is not None

    def take_over(self, job: str, lineage: Lineage) -> None:
        """See :meth:`~..places.CheckpointPlace.take_over`; raises :class:`CheckpointError` alone."""
        try:
            self.supersede(lineage)
            self.clean(job, lineage=lineage)
        except OSError as error:
            raise CheckpointError(
                f"{self.location} cannot be written to ({error}), so that workers of an earlier start of job {job!r} "
                "cannot be kept from writing there: the job does not go on from its checkpoints. See to the "
                "permissions of all hosts there, and start the job again"
            ) from error


_TOLD = ("tag", "job", "step", "serial", "layout", "time", "consumed", "origin")


def entry_of(record: SaveRecord) -> str:
    """The name of a save, and of its checkpoint, in a store."""
    return SEPARATOR.join((record.job, record.save_id, _UNUSUAL.sub("_", record.tag)[:80]))


def _tag(name: str) -> str:
    return name.rpartition(SEPARATOR)[2]


def _given_up(record: SaveRecord) -> str:
    return SEPARATOR.join((REMOVING, record.job, record.save_id))


def _problems(manifest: Manifest, files: Found) -> list[Problem]:
    """The differences from the manifest, by names and sizes."""
    problems = []
    for name, expected in sorted(manifest.files.items()):
        if name not in files:
            problems.append(Problem(name, "is missing"))
        elif files[name].size != expected.size:
            problems.append(Problem(name, f"has {files[name].size:,} bytes instead of {expected.size:,}"))
    return problems
