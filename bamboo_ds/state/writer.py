"""One save, as the writer thread carries it out: the files of this member's roles, then, on the member that leads,
the completion.

::

    member that leads            other members
    opens the partial folder
    writes its files             wait for the folder, write their files
    .written-<rank>.json         .written-<rank>.json (or .failed-<rank>.json)
    waits for all roles
    manifest, rename, latest, prune

Members meet only in the shared folder, so training goes on meanwhile.
"""

from __future__ import annotations

import json
import logging
import os
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Protocol

import torch
from pydantic import ValidationError

from ..errors import BambooError
from ..generations import is_over, supersede
from . import publish, spares
from .checkpoints import (
    HISTORY,
    LOSSES,
    MANIFEST,
    SAVE,
    WRITTEN,
    CheckpointError,
    FileRecord,
    Manifest,
    RoleFiles,
    SaveRecord,
    read_manifest,
)
from .hostcopy import HostCopy

logger = logging.getLogger("bamboo_ds")

_CHUNK = 1 << 22
_FIRST_POLL_S, _LONGEST_POLL_S = 0.01, 0.5
_GIVEN_UP = "the member that leads has given it up"


class SaveAborted(BambooError, RuntimeError):
    """The job itself has given the save up; the folder is in order."""


class SaveRefused(CheckpointError):
    """Nothing may be written into its folder."""


@dataclass(frozen=True)
class SaveResult:
    """Outcome of a save on this member.

    Attributes:
        folder: what the script gave to ``save_checkpoint``.
        path: the complete checkpoint, on the member that leads.
        error: why it failed; ``None`` with ``path`` ``None``: this member does not lead, and has written its files.
        aborted: the only failure is that this member, or the one that leads, has given the save up.
        size: bytes that this member has written.
        total: bytes of the whole checkpoint, on the member that leads.
        seconds: from ``submit`` to the end.
    """

    folder: Path
    tag: str
    save_id: str
    step: int
    path: Path | None = None
    error: str | None = None
    aborted: bool = False
    size: int = 0
    total: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class HostFile:
    """One file of a checkpoint, ready to be written.

    Attributes:
        name: path inside the checkpoint.
        content: its future content.
        zipped: whether torch's zip format is used (the default of DeepSpeed) or the older one.
    """

    name: str
    content: HostCopy
    zipped: bool = True


@dataclass(frozen=True)
class KnownFolder:
    """Earlier observation of a folder of checkpoints: its device, and the checkpoint that was last completed there."""

    device: int
    newest: Path | None = None


@dataclass
class Save:
    """One save on one member.

    Attributes:
        folder: what the script gave to ``save_checkpoint``, as an absolute path.
        record: what is saved.
        owners: member that copies each role, by rank. The first one leads.
        latest: whether DeepSpeed's file ``latest`` is to name it.
        losses: gives those of all steps up to this one; ``None``: none are kept. Called by the thread of the member
            that leads, as ``history``: the JSON of what the job has done, this save included.
        leads: whether this member completes the checkpoint; it may come to lead while the save goes on.
        own: it is one of the job's own: no script deletes what it replaces, so that there are no spares, and it is
            given up for one of the script's.
        timeout_s: for how many seconds nothing may move in the partial folder.
        known: the folder as this process has seen it before; ``None`` the first time.
        spared: what keeps the checkpoint before this one is there, or cannot be had.
        files: by rank of the role; emptied while they are written.
        gone: ranks whose members are lost: their missing files will never come.
        written: bytes that this member has written.
        total: bytes of the checkpoint, once this member has completed it.
    """

    folder: Path
    record: SaveRecord
    owners: tuple[str, ...]
    latest: bool = True
    losses: Callable[[], Sequence[float]] | None = None
    history: Callable[[], str] | None = None
    leads: bool = False
    own: bool = False
    timeout_s: float = 600.0
    known: KnownFolder | None = None
    files: dict[int, list[HostFile]] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    written: int = 0
    total: int = 0
    all_written: bool = False
    spared: bool = False

    @property
    def partial(self) -> Path:
        """Where it is put together."""
        return publish.partial_folder(self.folder, self.record.job, self.record.save_id, self.record.tag)

    @property
    def result(self) -> SaveResult:
        """Its outcome, as long as there is nothing to tell."""
        return SaveResult(self.folder, self.record.tag, self.record.save_id, self.record.step)


class Control(Protocol):
    """Requests of a running save to the thread that runs it."""

    def check(self, save: Save) -> None:
        """Raise :class:`SaveAborted` if the save was given up."""

    def pause(self, save: Save, seconds: float) -> None:
        """Wait until something is asked of the save or the time has passed; then as :meth:`check`."""

    def point_of_no_return(self, save: Save) -> None:
        """As :meth:`check`, and from now on the save cannot be given up."""


class ChecksummedFile:
    """A file for ``torch.save`` that counts bytes and computes their checksum.

    It has no descriptor, so that torch cannot write around it. ``write`` raises nothing, since an exception must not
    fly through torch's C++ writer: after the first error everything is dropped, and :meth:`close` raises it.
    """

    def __init__(self, path: Path, check: Callable[[], None]) -> None:
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115
        self._check = check
        self._error: Exception | None = None
        self._crc = self._size = 0

    def write(self, data: Any) -> int:
        """Append; pretends to have done so after an error."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _CHUNK):
            if self._error is not None:
                break
            try:
                self._check()
                self._append(view[start : start + _CHUNK])
            except (OSError, BambooError) as error:
                self._error = error
        return len(view)

    def _append(self, chunk: memoryview) -> None:
        self._crc, self._size = zlib.crc32(chunk, self._crc), self._size + len(chunk)
        while chunk:  # a write may be cut short, as by a file system that fills up
            chunk = chunk[self._file.write(chunk) :]

    def flush(self) -> None:
        """Nothing is buffered."""

    def close(self) -> FileRecord:
        """Flush to the disk; raises the first error of any ``write``, or ``OSError``."""
        with self._file:
            if self._error is None:
                os.fsync(self._file.fileno())
        if self._error is not None:
            raise self._error
        return FileRecord(size=self._size, crc32=self._crc)


def perform(save: Save, control: Control) -> Path | None:
    """Carry out a save.

    Returns:
        The folder of the complete checkpoint on the member that leads, else ``None``: its files are written.

    Raises:
        SaveAborted: it was given up.
        CheckpointError, OSError: it cannot be completed.
    """
    control.check(save)
    try:
        if not save.all_written:
            _enter(save, control)
            _write_files(save, control)
        if not save.leads:
            return None
        manifest = _await_manifest(save, control)
        return _complete(save, manifest, control)
    except FileNotFoundError as error:
        if not save.leads and save.folder.exists():
            raise SaveAborted(_GIVEN_UP) from error
        raise CheckpointError(
            f"{error.filename or save.partial} has vanished while {save.record.tag!r} was saved"
        ) from error


def _enter(save: Save, control: Control) -> None:
    """Create the partial folder, or wait for the member that leads to do so."""
    deadline, poll = time.monotonic() + save.timeout_s, _FIRST_POLL_S
    given_up = publish.given_up(save.folder, save.record.job, save.record.save_id)
    while not _has_entry(save.partial):
        control.check(save)
        if not save.leads and _has_entry(given_up):
            raise SaveAborted(_GIVEN_UP)
        if save.leads:
            _check_folder(save)
            supersede(save.folder, save.record.lineage)
            check_lineage(save)
            publish.clean(save.folder, save.record.job, (save.record.save_id,), save.record.lineage)
            spares.settle(save.folder, save.record.job, (save.record.save_id,))
            publish.open_partial(save.folder, save.record)
            return
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"{save.partial} has not appeared within {save.timeout_s:g} s: is {save.folder} on a file system that "
                "all members share, and mounted here?"
            )
        control.pause(save, poll)
        poll = min(2 * poll, _LONGEST_POLL_S)


def check_lineage(save: Save) -> None:
    """Raise :class:`SaveRefused` if the job has been started again since, and its new workers have begun there."""
    if is_over(save.folder, save.record.lineage):
        raise SaveRefused(
            f"the job has been started again since (this worker is of generation {save.record.generation}): "
            f"it may not write into {save.folder} any more"
        )


def _has_entry(path: Path) -> bool:
    # Network file systems remember for a while that a name does not exist, but list a folder afresh.
    try:
        with os.scandir(path.parent) as entries:
            return any(entry.name == path.name for entry in entries)
    except FileNotFoundError:
        return False


def _check_folder(save: Save) -> None:
    """Create the folder if need be, but never below a mount point whose file system is gone."""
    known = save.known
    if known is not None:
        there = next(path for path in (save.folder, *save.folder.parents) if path.exists())
        lost = known.newest is not None and not known.newest.exists()
        if lost and os.stat(there).st_dev != known.device:
            raise SaveRefused(f"{save.folder} is on another file system than before: is it mounted?")
    save.folder.mkdir(parents=True, exist_ok=True)


def _write_files(save: Save, control: Control) -> None:
    root = save.partial
    for rank in list(save.files):
        try:
            records = {}
            while save.files[rank]:
                file = save.files[rank][0]
                records[file.name] = _write(root, file, lambda: control.check(save))
                save.written += records[file.name].size
                save.files[rank].pop(0).content.release()
            done = RoleFiles(save_id=save.record.save_id, rank=rank, files=records)
            publish.write_atomically(root / f"{WRITTEN}{rank}.json", done.to_json())
        except SaveAborted:
            raise
        except Exception as error:
            _tell_failure(root, rank, save.files[rank], error)
            raise
    save.all_written = True


def _write(root: Path, file: HostFile, check: Callable[[], None]) -> FileRecord:
    path = root / file.name
    publish.make_folders(root, path.relative_to(root).parts[:-1])
    target = ChecksummedFile(path, check)
    try:
        torch.save(file.content.state(), target, _use_new_zipfile_serialization=file.zipped)  # type: ignore[arg-type]
    finally:
        record = target.close()
    return record


def _tell_failure(root: Path, rank: int, unwritten: Sequence[HostFile], error: Exception) -> None:
    """Report a failure to the member that leads at once, instead of at its deadline."""
    note = root / f".failed-{rank}.json"
    try:
        for file in unwritten[:1]:  # on a full disk this makes room for the note
            (root / file.name).unlink(missing_ok=True)
        try:
            publish.write_atomically(note, json.dumps(f"{type(error).__name__}: {error}"))
        except OSError:
            note.touch()  # another member has taken the room; an empty file needs none
    except OSError as second:
        logger.info("the failure of role %d could not be noted in %s: %s", rank, root, second)


def _await_manifest(save: Save, control: Control) -> Manifest:
    """The manifest, once all roles have written their files."""
    root, expected = save.partial, set(range(save.record.layout.size))
    roles: dict[int, RoleFiles] = {}
    before: Any = None
    deadline, poll = time.monotonic() + save.timeout_s, _FIRST_POLL_S
    while True:
        control.check(save)
        gone = set(save.gone)  # before the look into the folder: what they wrote, they wrote before they were lost
        with os.scandir(root) as entries:
            sizes = {entry.name: entry.stat().st_size for entry in entries if not entry.name.startswith(publish.NEW)}
        if MANIFEST in sizes:  # of a member that led before this one
            return read_manifest(root)
        for rank in sorted(expected):
            if f".failed-{rank}.json" in sizes:
                raise CheckpointError(f"role {rank} could not write its files: {_note(root, rank)}")
            if rank not in roles and f"{WRITTEN}{rank}.json" in sizes:
                roles[rank] = _read_role_files(root / f"{WRITTEN}{rank}.json", rank, save.record.save_id)
        missing = expected - set(roles)
        if not missing:
            return _write_manifest(save, roles)
        if missing & gone:
            raise CheckpointError(
                f"the owners of roles {_listed(missing & gone)} were lost before they had written them"
            )
        if sizes != before:
            before, deadline, poll = sizes, time.monotonic() + save.timeout_s, _FIRST_POLL_S
        elif time.monotonic() > deadline:
            raise CheckpointError(
                f"nothing has moved in {root} for {save.timeout_s:g} s; roles {_listed(missing)} are missing: is it on "
                "a file system that all members share?"
            )
        control.pause(save, poll)
        poll = min(2 * poll, _LONGEST_POLL_S)


def _note(root: Path, rank: int) -> str:
    text = (root / f".failed-{rank}.json").read_text()
    return str(json.loads(text)) if text else "its member had no space left for the reason"


def _read_role_files(path: Path, rank: int, save_id: str) -> RoleFiles:
    try:
        found = RoleFiles.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if (found.rank, found.save_id) != (rank, save_id):
        raise CheckpointError(f"{path} belongs to role {found.rank} of save {found.save_id}")
    return found


def _write_manifest(save: Save, roles: Mapping[int, RoleFiles]) -> Manifest:
    """Check what ``roles`` have written against the folder and write the manifest."""
    root, record = save.partial, save.record
    files: dict[str, FileRecord] = {}
    for rank, written in sorted(roles.items()):
        for name, file in written.files.items():
            if name in files:
                raise CheckpointError(f"role {rank} has written {name} besides another role")
            if (size := os.stat(root / name).st_size) != file.size:
                raise CheckpointError(f"{root / name} has {size:,} bytes; role {rank} has written {file.size:,}")
            files[name] = file
    notes = {LOSSES: json.dumps(list(save.losses()))} if save.losses is not None else {}
    if save.history is not None:
        notes[HISTORY] = save.history()
    for name, text in notes.items():
        publish.write_atomically(root / name, text)
        files[name] = FileRecord(size=len(text.encode()), crc32=zlib.crc32(text.encode()))
    manifest = Manifest(
        **record.facts,
        serial=publish.next_serial(save.folder),
        roles={rank: sorted(written.files) for rank, written in sorted(roles.items())},
        files=files,
        time=datetime.now(timezone.utc),
        losses=LOSSES if LOSSES in notes else None,
        history=HISTORY if HISTORY in notes else None,
    )
    publish.write_atomically(root / MANIFEST, manifest.to_json())
    return manifest


def _complete(save: Save, manifest: Manifest, control: Control) -> Path:
    """Give the finished folder its name."""
    control.point_of_no_return(save)
    check_lineage(save)
    save.total = sum(file.size for file in manifest.files.values())
    for name in (*(f"{WRITTEN}{rank}.json" for rank in range(save.record.layout.size)), SAVE):
        (save.partial / name).unlink(missing_ok=True)
    return publish.publish(save.partial, save.folder, manifest)


def _listed(ranks: set[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))
