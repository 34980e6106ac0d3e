"""Checkpoints on disk: the contents of a folder, and which checkpoints are whole.

A folder after some saves of a job::

    checkpoints/
      latest                                    the tag that DeepSpeed loads
      step20/                                   complete: it has a manifest, and only complete ones are ever named so
        layer_00-model_states.pt …              DeepSpeed's own files
        mp_rank_00_model_states.pt …
        bamboo_manifest.json                    every file with size and checksum
        bamboo_losses.json
        bamboo_history.json                       what the job had done
      .bamboo-partial~job~save id~step30/       being written, or abandoned
        .save.json                              what is being saved
        layer_00-model_states.pt …
        .written-0.json                         role 0 has written all of its files
        .failed-1.json                          role 1 could not
      .bamboo-removing~job~token/               on its way to deletion
      .bamboo-removing~job~save id/             the save has failed; until the next one, or the end of the job
      .bamboo-replaced~job~token~step20/        an older checkpoint while another takes its name
      .bamboo-own/job/                          checkpoints of the job's own, in a folder like this one

Everything here only reads. A reader on another host sees the shared file system's state there.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import Annotated, Any
from urllib.parse import unquote

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from ..errors import UserError
from ..topology.roles import Layout
from .intervals import LossRate

SCHEMA = 1
MANIFEST = "bamboo_manifest.json"
LOSSES = "bamboo_losses.json"
HISTORY = "bamboo_history.json"
SAVE = ".save.json"
#: What names begin with that tell which role has written its files.
WRITTEN = ".written-"
#: The same of those that could not.
FAILED = ".failed-"
PARTIAL, REMOVING, REPLACED = ".bamboo-partial", ".bamboo-removing", ".bamboo-replaced"
#: Holds checkpoints of jobs' own, by the job's name: those that they take without their scripts' doing.
OWN = ".bamboo-own"
#: Separates the fields of a hidden folder's name; cannot occur in names of jobs and ids of saves.
SEPARATOR = "~"
#: How deep a tag may be nested (``a/b`` is two).
MAX_DEPTH = 4
#: Files that DeepSpeed finds by pattern when it loads: one too many is as bad as one too few.
LOADED = re.compile(r"_states\.pt$")
_CHUNK = 1 << 22
#: A folder or a file, or the URL of what is in a store of objects.
Location = Path | str


class CheckpointError(UserError, RuntimeError):
    """A checkpoint cannot be used, or written, or a tag or id cannot name one."""


def _relative(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError(f"{name!r} is not a path inside a checkpoint")
    return name


RelativePath = Annotated[str, AfterValidator(_relative)]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, populate_by_name=True)

    def to_json(self) -> str:
        """The record as JSON."""
        return self.model_dump_json(by_alias=True, indent=1)


class FileRecord(_Record):
    """One file: size in bytes and CRC-32 of its content."""

    size: int = Field(ge=0)
    crc32: int = Field(ge=0, lt=1 << 32)


class _SaveFacts(_Record):
    """The facts of a save that are known from its beginning on.

    Attributes:
        save_id: names this attempt; a repetition of the same save has another one.
        step: number of committed steps that the state contains.
        seed: of the job's random numbers in forward passes.
        consumed: micro-batches of each pipeline that the job has used.
        origin: names the run of the job, through all of its restarts; see :mod:`bamboo_ds.generations`.
        rate: the fatal losses that the job had seen.
        script_folder: of a checkpoint of the job's own, or in a mirror: the folder that the script saved into, if there
            is one.
    """

    schema_version: int = Field(SCHEMA, alias="schema")
    job: str
    save_id: str
    tag: str
    step: int
    layout: Layout
    seed: int | None = None
    consumed: int | None = None
    origin: str = ""
    rate: LossRate = LossRate()
    script_folder: str | None = None


class SaveRecord(_SaveFacts):
    """``.save.json``: the save that a partial folder belongs to.

    Attributes:
        generation: that saves, of the lineage that begins with ``origin``.
    """

    generation: int = 0

    @property
    def lineage(self) -> tuple[str, int]:
        """The lineage that saves, see :mod:`bamboo_ds.generations`."""
        return self.origin, self.generation

    @property
    def facts(self) -> dict[str, Any]:
        """The facts that the :class:`Manifest` repeats."""
        return {name: getattr(self, name) for name in _SaveFacts.model_fields}


class RoleFiles(_Record):
    """``.written-<rank>.json``: all files of the role with this rank are written and flushed to the disk."""

    save_id: str
    rank: int
    files: dict[RelativePath, FileRecord]


class Manifest(_SaveFacts):
    """``bamboo_manifest.json``: the contents of a complete checkpoint.

    Attributes:
        serial: one more than the highest in the folder when it was written; clocks of hosts differ, this does not.
        roles: files by the rank of the role that wrote them; roles that write nothing have an empty list.
        files: every file besides the manifest, by its path inside the checkpoint.
        time: when it was completed, UTC.
        losses: path of the JSON list of the losses of all steps, if there is one.
        history: path of the JSON of what the job had done, this save included, if there is one.
    """

    serial: int
    roles: dict[int, list[RelativePath]]
    files: dict[RelativePath, FileRecord]
    time: datetime
    losses: RelativePath | None = None
    history: RelativePath | None = None


@dataclass(frozen=True)
class Problem:
    """A difference between a checkpoint and its manifest: ``file`` (path inside it) and what is wrong with it."""

    file: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}: {self.text}"


class Status(str, Enum):
    """State of a checkpoint, as far as it is known."""

    COMPLETE = "complete"
    #: It has a manifest, and something differs from it.
    DAMAGED = "damaged"
    #: A save that is going on or was abandoned.
    UNFINISHED = "unfinished"
    #: DeepSpeed's files without a manifest: written by stock DeepSpeed; nobody can tell whether it is whole.
    UNKNOWN = "unknown"


class CheckpointInfo(BaseModel):
    """One checkpoint of a folder.

    Attributes:
        size: bytes of its files, as the manifest says, else as they are.
        reasons: why it is not complete; empty if it is.
        verified: whether all checksums have been compared.
        latest: whether the file ``latest`` names it.
        own: whether the job has taken it without the script's doing.
    """

    model_config = ConfigDict(frozen=True)

    path: Location
    tag: str
    status: Status
    size: int
    reasons: tuple[str, ...] = ()
    verified: bool = False
    latest: bool = False
    own: bool = False
    job: str | None = None
    step: int | None = None
    serial: int = 0
    layout: Layout | None = None
    time: datetime | None = None
    consumed: int | None = None
    origin: str = ""


def is_own(path: Location) -> bool:
    """Whether ``path`` is, or is in, a folder of checkpoints of a job's own."""
    return OWN in Path(path).parts


def inside(folder: Location, name: str) -> Location:
    """The location of ``name`` in ``folder``."""
    return folder / name if isinstance(folder, Path) else f"{folder}/{name}"


def read_manifest(checkpoint: Path | str) -> Manifest:
    """The manifest of one checkpoint.

    Raises:
        CheckpointError: there is none, it cannot be read, or it has another schema.
    """
    path = Path(checkpoint) / MANIFEST
    try:
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(f"{checkpoint} has no {MANIFEST}: it is not complete, or not of bamboo_ds") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return parse_manifest(text, path)


def parse_manifest(text: bytes, where: Location) -> Manifest:
    """The manifest that ``text`` is, as found at ``where``.

    Raises:
        CheckpointError: it is none, or it has another schema.
    """
    try:
        manifest = Manifest.model_validate_json(text)
    except ValidationError as error:
        raise CheckpointError(f"{where} cannot be read: {error}") from error
    if manifest.schema_version != SCHEMA:
        raise CheckpointError(f"{where} has schema {manifest.schema_version}; this version of bamboo_ds reads {SCHEMA}")
    return manifest


def folder_of(checkpoint: Path) -> Path:
    """The folder given to ``save_checkpoint``: levels up where the tag is nested. Raises as :func:`read_manifest`."""
    return checkpoint.parents[len(PurePosixPath(read_manifest(checkpoint).tag).parts) - 1]


def file_record(path: Path) -> FileRecord:
    """Size and checksum of a file, read once from start to end; raises ``OSError``."""
    crc = size = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            crc, size = zlib.crc32(chunk, crc), size + len(chunk)
    return FileRecord(size=size, crc32=crc)


def verify(checkpoint: Path | str, checksums: bool = True) -> list[Problem]:
    """Compares one checkpoint with its manifest; an empty list means that it is whole.

    Args:
        checkpoint: the folder that holds the manifest.
        checksums: ``False`` compares only which files there are and their sizes.
    """
    root = Path(checkpoint)
    try:
        manifest = read_manifest(root)
    except CheckpointError as error:
        return [Problem(MANIFEST, str(error))]
    problems = []
    for name, expected in sorted(manifest.files.items()):
        try:
            size = os.stat(root / name).st_size
            if size != expected.size:
                problems.append(Problem(name, f"has {size:,} bytes instead of {expected.size:,}"))
            elif checksums and (found := file_record(root / name)) != expected:
                problems.append(Problem(name, f"has CRC-32 {found.crc32:08x} instead of {expected.crc32:08x}"))
        except FileNotFoundError:
            problems.append(Problem(name, "is missing"))
        except OSError as error:
            problems.append(Problem(name, f"cannot be read: {error.strerror}"))
    for name in sorted(set(_files(root)) - set(manifest.files)):
        if LOADED.search(name):
            problems.append(Problem(name, "is not in the manifest, but DeepSpeed would load it"))
    return problems


def list_checkpoints(folder: Path | str, checksums: bool = False) -> list[CheckpointInfo]:
    """Everything in ``folder`` that is or may become a checkpoint, oldest first.

    Args:
        folder: what scripts give to ``save_checkpoint``, or one checkpoint.
        checksums: read all files and compare their checksums.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    root = Path(folder)
    try:
        latest = tag_in(root / "latest")
        if (root / MANIFEST).is_file():
            return _infos(root.parent, root, tag_in(root.parent / "latest"), checksums)
        infos = [i for path in _candidates(root, MAX_DEPTH) for i in _infos(root, path, latest, checksums)]
        infos += [_unfinished(path) for path in hidden(root, PARTIAL)]
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror or error}") from error
    return sorted(infos, key=lambda i: (i.status is Status.UNFINISHED, i.serial, i.step or 0, i.tag))


def newest_complete(folder: Path | str, job: str | None = None, checksums: bool = False) -> CheckpointInfo | None:
    """The newest complete checkpoint in ``folder``, or ``None`` (also if there is no such folder).

    Args:
        job: only those of this job.
        checksums: pass over those whose content has changed; reads all files of the newest ones.
    """
    if not os.path.isdir(folder):
        return None
    for info in reversed(list_checkpoints(folder)):
        if info.status is not Status.COMPLETE or (job is not None and info.job != job):
            continue
        if not checksums or not verify(info.path):
            return info
    return None


def hidden(folder: Path, kind: str, job: str | None = None) -> list[Path]:
    """Folders of ``kind`` (:data:`PARTIAL`, …) in ``folder``, of all jobs or of one; raises ``OSError``."""
    prefix = SEPARATOR.join((kind, job, "")) if job is not None else kind + SEPARATOR
    with os.scandir(folder) as entries:
        return sorted(Path(entry.path) for entry in entries if entry.name.startswith(prefix))


def _infos(folder: Path, path: Path, latest: str, checksums: bool) -> list[CheckpointInfo]:
    """Information about one checkpoint; nothing if it was removed while it was read."""
    try:
        info = _info(folder, path, latest, checksums)
    except FileNotFoundError:
        if path.exists():
            raise
        return []
    return [info] if path.exists() else []


def _info(folder: Path, path: Path, latest: str, checksums: bool) -> CheckpointInfo:
    tag = path.relative_to(folder).as_posix()
    place: dict[str, Any] = {"path": path, "tag": tag, "latest": tag == latest, "own": is_own(path)}
    if not (path / MANIFEST).exists():
        size = sum(os.stat(path / name).st_size for name in _files(path))
        reasons = ("has no manifest: not written by bamboo_ds",)
        return CheckpointInfo(**place, status=Status.UNKNOWN, size=size, reasons=reasons)
    problems = tuple(str(problem) for problem in verify(path, checksums))
    place |= {"reasons": problems, "verified": checksums}
    try:
        manifest = read_manifest(path)
    except CheckpointError:
        return CheckpointInfo(**place, status=Status.DAMAGED, size=0)
    status = Status.DAMAGED if problems else Status.COMPLETE
    size = sum(record.size for record in manifest.files.values())
    names = ("job", "step", "serial", "layout", "time", "consumed", "origin")
    named = {name: getattr(manifest, name) for name in names}
    return CheckpointInfo(**place, **named, status=status, size=size)


def _unfinished(path: Path) -> CheckpointInfo:
    """Information about a partial folder, which may change or vanish while it is read."""
    names = list(_files(path))
    size = 0
    for name in names:
        with suppress(FileNotFoundError):  # just renamed or removed by the save itself
            size += os.stat(path / name).st_size
    place: dict[str, Any] = {"path": path, "status": Status.UNFINISHED, "size": size, "own": is_own(path)}
    record: SaveRecord | Manifest
    written = sum(name.startswith(WRITTEN) for name in names)
    try:
        if MANIFEST in names:
            record, reason = read_manifest(path), "all is written, but it has not got its name"
        else:
            record = SaveRecord.model_validate_json((path / SAVE).read_bytes())
            reason = f"{written} of {record.layout.size} roles have written their files"
    except (OSError, ValidationError, CheckpointError) as error:
        tag, reason = unquote(path.name.split(SEPARATOR, 3)[-1]), f"its record cannot be read: {error}"
        return CheckpointInfo(**place, tag=tag, reasons=(reason,))
    reasons = (f"not complete: {reason} (the save goes on, or was abandoned)",)
    named = {name: getattr(record, name) for name in ("tag", "job", "step", "layout")}
    return CheckpointInfo(**place, **named, reasons=reasons)


def _candidates(folder: Path, depth: int) -> Iterator[Path]:
    """Folders that hold a manifest or files that DeepSpeed loads."""
    with os.scandir(folder) as found:
        entries = sorted((entry for entry in found if entry.is_dir() and not entry.name.startswith(".")), key=_name)
    for entry in entries:
        path = Path(entry.path)
        try:
            with os.scandir(path) as found:
                checkpoint = any(e.name == MANIFEST or LOADED.search(e.name) for e in found)
        except FileNotFoundError:
            continue  # just removed
        if checkpoint:
            yield path
        elif depth > 1:
            yield from _candidates(path, depth - 1)


def _name(entry: os.DirEntry[str]) -> str:
    return entry.name


def _files(root: Path) -> Iterator[str]:
    """Paths of all files below ``root``, relative to it."""
    for folder, _, names in os.walk(root):
        for name in names:
            yield Path(folder, name).relative_to(root).as_posix()


def tag_in(file: Path) -> str:
    """The tag in ``file``, which DeepSpeed calls ``latest``; empty if there is no such file."""
    try:
        return file.read_text().strip()
    except (FileNotFoundError, NotADirectoryError):
        return ""
