"""One save, as the writer thread carries it out: the files of this member's roles, then, on the member that leads,
the completion.

::

    member that leads            other members
    opens the partial folder
    writes its files             wait for the folder, write their files
    .written-<rank>.json         .written-<rank>.json (or .failed-<rank>.json)
    waits for all roles
    manifest, rename, latest, prune

Members meet only in the place of the checkpoints (:mod:`.places`), so training goes on meanwhile. In a store of objects
nothing is renamed: the manifest itself makes the checkpoint complete.
"""

from __future__ import annotations

import json
import logging
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, Protocol

import torch
from pydantic import ValidationError

from ..errors import BambooError
from .checkpoints import (
    FAILED,
    HISTORY,
    LOSSES,
    MANIFEST,
    WRITTEN,
    CheckpointError,
    FileRecord,
    Location,
    Manifest,
    RoleFiles,
    SaveRecord,
    parse_manifest,
)
from .hostcopy import HostCopy
from .places import CheckpointPlace, KnownFolder, PartFile, SaveRefused

logger = logging.getLogger("bamboo_ds")

_CHUNK = 1 << 22
_FIRST_POLL_S = 0.01
_GIVEN_UP = "the member that leads has given it up"


class SaveAborted(BambooError, RuntimeError):
    """The job itself has given the save up; the folder is in order."""


@dataclass(frozen=True)
class SaveResult:
    """Outcome of a save on this member.

    Attributes:
        folder: what the script gave to ``save_checkpoint``, or where the job's own are.
        path: the complete checkpoint, on the member that leads.
        error: why it failed; ``None`` with ``path`` ``None``: this member does not lead, and has written its files.
        aborted: the only failure is that this member, or the one that leads, has given the save up.
        size: bytes that this member has written.
        total: bytes of the whole checkpoint, on the member that leads.
        seconds: from ``submit`` to the end.
    """

    folder: Location
    tag: str
    save_id: str
    step: int
    path: Location | None = None
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


@dataclass
class Save:
    """One save on one member.

    Attributes:
        place: for what the script gave to ``save_checkpoint``, or where the job's own are.
        record: what is saved.
        owners: member that copies each role, by rank. The first one leads.
        latest: whether DeepSpeed's file ``latest`` is to name it.
        losses: gives those of all steps up to this one, or ``None``. Called by the thread of the member
            that leads, as ``history``: the JSON of what the job has done, this save included.
        leads: whether this member completes the checkpoint; it may come to lead while the save goes on.
        own: it is one of the job's own: given up for one of the script's.
        timeout_s: for how many seconds nothing may move among its files.
        known: the place as this process has seen it before; ``None`` the first time.
        files: by rank of the role; emptied while they are written.
        gone: ranks whose members are lost: their missing files will never come.
        written: bytes that this member has written.
        total: bytes of the checkpoint, once this member has completed it.
    """

    place: CheckpointPlace
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

    @property
    def folder(self) -> Location:
        """The place's folder or URL."""
        return self.place.location

    @property
    def result(self) -> SaveResult:
        """Its outcome, as long as there is nothing to tell."""
        return SaveResult(self.folder, self.record.tag, self.record.save_id, self.record.step)


class Control(Protocol):
    """Requests of a running save to the thread that runs it."""

    def check(self, save: Save) -> None:
        """Raises :class:`SaveAborted` if the save was given up."""

    def pause(self, save: Save, seconds: float) -> None:
        """Waits until something is asked of the save or the time has passed; then as :meth:`check`."""

    def point_of_no_return(self, save: Save) -> None:
        """Does as :meth:`check`; from now on the save cannot be given up."""


class ChecksummedFile:
    """A file for ``torch.save`` that counts bytes and computes their checksum.

    It has no descriptor, so that torch cannot write around it. ``write`` raises nothing, since an exception must not
    fly through torch's C++ writer: after the first error everything is dropped, and :meth:`close` raises it.
    """

    def __init__(self, file: PartFile, check: Callable[[], None]) -> None:
        self._file, self._check = file, check
        self._error: Exception | None = None
        self._crc = self._size = 0

    def write(self, data: Any) -> int:
        """Appends; pretends to have done so after an error."""
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
        """Keeps the file for good; raises the first error of any ``write``, or that of keeping it."""
        if self._error is not None:
            self._file.discard()
            raise self._error
        self._file.commit()
        return FileRecord(size=self._size, crc32=self._crc)

    def discard(self) -> None:
        """Drops what is written."""
        self._file.discard()


def perform(save: Save, control: Control) -> Location | None:
    """Carries out a save.

    Returns:
        The complete checkpoint on the member that leads, else ``None``: its files are written.

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
        if not save.leads and save.place.exists():
            raise SaveAborted(_GIVEN_UP) from error
        raise CheckpointError(
            f"{error.filename or save.folder} has vanished while {save.record.tag!r} was saved"
        ) from error


def _enter(save: Save, control: Control) -> None:
    """Opens the save, or waits for the member that leads to do so."""
    place, record = save.place, save.record
    deadline, poll = time.monotonic() + save.timeout_s, _FIRST_POLL_S
    while not place.is_open(record):
        control.check(save)
        if not save.leads and place.is_given_up(record):
            raise SaveAborted(_GIVEN_UP)
        if save.leads:
            place.check(save.known)
            place.supersede(record.lineage)
            check_lineage(save)
            place.clean(record.job, (record.save_id,), record.lineage)
            place.open(record)
            return
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"checkpoint {record.tag!r} has not appeared in {save.folder} within {save.timeout_s:g} s: is that on "
                "a file system that all members share, and mounted here, or a store that all reach?"
            )
        control.pause(save, poll)
        poll = min(2 * poll, place.poll_s)


def check_lineage(save: Save) -> None:
    """Raises :class:`SaveRefused` if the job has been started again since, and its new workers have begun there."""
    if save.place.is_over(save.record.lineage):
        raise SaveRefused(
            f"the job has been started again since (this worker is of generation {save.record.generation}): "
            f"it may not write into {save.folder} any more"
        )


def _write_files(save: Save, control: Control) -> None:
    place, record = save.place, save.record
    for rank in list(save.files):
        try:
            records = {}
            while save.files[rank]:
                file = save.files[rank][0]
                records[file.name] = _write(save, file, lambda: control.check(save))
                save.written += records[file.name].size
                save.files[rank].pop(0).content.release()
            done = RoleFiles(save_id=record.save_id, rank=rank, files=records)
            place.note(record, f"{WRITTEN}{rank}.json", done.to_json())
        except SaveAborted:
            raise
        except Exception as error:
            _tell_failure(save, rank, error)
            raise
    save.all_written = True


def _write(save: Save, file: HostFile, check: Callable[[], None]) -> FileRecord:
    target = ChecksummedFile(save.place.create(save.record, file.name), check)
    try:
        torch.save(file.content.state(), target, _use_new_zipfile_serialization=file.zipped)  # type: ignore[arg-type]
    except BaseException:  # goes on up; a file that is cut off must not be kept
        target.discard()
        raise
    return target.close()


def _tell_failure(save: Save, rank: int, error: Exception) -> None:
    """Reports a failure to the member that leads at once, instead of at its deadline."""
    unwritten = save.files[rank][0].name if save.files[rank] else None
    text = json.dumps(f"{type(error).__name__}: {error}")
    try:
        save.place.note_failure(save.record, f"{FAILED}{rank}.json", text, unwritten)
    except (OSError, CheckpointError) as second:
        logger.info("the failure of role %d could not be noted in %s: %s", rank, save.folder, second)


def _await_manifest(save: Save, control: Control) -> Manifest:
    """The manifest, once all roles have written their files."""
    place, record, expected = save.place, save.record, set(range(save.record.layout.size))
    roles: dict[int, RoleFiles] = {}
    before: Any = None
    deadline, poll = time.monotonic() + save.timeout_s, _FIRST_POLL_S
    while True:
        control.check(save)
        gone = set(save.gone)  # before the look into the folder: what they wrote, they wrote before they were lost
        found = place.written(record)
        if MANIFEST in found:  # of a member that led before this one
            return parse_manifest(place.read(record, MANIFEST), save.folder)
        for rank in sorted(expected):
            if f"{FAILED}{rank}.json" in found:
                raise CheckpointError(f"role {rank} could not write its files: {_note(save, rank)}")
            if rank not in roles and f"{WRITTEN}{rank}.json" in found:
                roles[rank] = _read_role_files(save, rank)
        missing = expected - set(roles)
        if not missing:
            return _write_manifest(save, roles)
        if missing & gone:
            raise CheckpointError(
                f"the owners of roles {_listed(missing & gone)} were lost before they had written them"
            )
        if found != before:
            before, deadline, poll = found, time.monotonic() + save.timeout_s, _FIRST_POLL_S
        elif time.monotonic() > deadline:
            raise CheckpointError(
                f"nothing has moved in {save.folder} for {save.timeout_s:g} s; roles {_listed(missing)} are missing: "
                "is that on a file system that all members share, or a store that all reach?"
            )
        control.pause(save, poll)
        poll = min(2 * poll, place.poll_s)


def _note(save: Save, rank: int) -> str:
    text = save.place.read(save.record, f"{FAILED}{rank}.json")
    return str(json.loads(text)) if text else "its member had no space left for the reason"


def _read_role_files(save: Save, rank: int) -> RoleFiles:
    name, save_id = f"{WRITTEN}{rank}.json", save.record.save_id
    try:
        found = RoleFiles.model_validate_json(save.place.read(save.record, name))
    except ValidationError as error:
        raise CheckpointError(f"{name} in {save.folder} cannot be read: {error}") from error
    if (found.rank, found.save_id) != (rank, save_id):
        raise CheckpointError(f"{name} in {save.folder} belongs to role {found.rank} of save {found.save_id}")
    return found


def _write_manifest(save: Save, roles: Mapping[int, RoleFiles]) -> Manifest:
    """Checks what ``roles`` have written against the place and seals it with the manifest."""
    place, record = save.place, save.record
    files: dict[str, FileRecord] = {}
    for rank, written in sorted(roles.items()):
        for name, file in written.files.items():
            if name in files:
                raise CheckpointError(f"role {rank} has written {name} besides another role")
            if (size := place.size(record, name)) != file.size:
                raise CheckpointError(
                    f"{name} in {save.folder} has {size:,} bytes; role {rank} has written {file.size:,}"
                )
            files[name] = file
    notes = {LOSSES: json.dumps(list(save.losses()))} if save.losses is not None else {}
    if save.history is not None:
        notes[HISTORY] = save.history()
    for name, text in notes.items():
        place.note(record, name, text)
        files[name] = FileRecord(size=len(text.encode()), crc32=zlib.crc32(text.encode()))
    manifest = Manifest(
        **record.facts,
        serial=place.next_serial(),
        roles={rank: sorted(written.files) for rank, written in sorted(roles.items())},
        files=files,
        time=datetime.now(timezone.utc),
        losses=LOSSES if LOSSES in notes else None,
        history=HISTORY if HISTORY in notes else None,
    )
    place.seal(record, manifest)
    return manifest


def _complete(save: Save, manifest: Manifest, control: Control) -> Location:
    """Makes the finished checkpoint visible."""
    control.point_of_no_return(save)
    check_lineage(save)
    save.total = sum(file.size for file in manifest.files.values())
    return save.place.publish(save.record, manifest)


def _listed(ranks: set[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))
