"""Atomic changes of a folder of checkpoints: neither a reader nor a successor after a crash sees half of one.

Everything appears and disappears by one rename. Folders that are to be deleted get a hidden name first, so that a
late writer finds no path to write to and half of a checkpoint is never seen under its name.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import re
import secrets
import shutil
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from urllib.parse import quote, unquote

from pydantic import ValidationError

from ..generations import Lineage, is_over, supersede
from .checkpoints import (
    LOADED,
    MANIFEST,
    MAX_DEPTH,
    PARTIAL,
    REMOVING,
    REPLACED,
    SAVE,
    SEPARATOR,
    CheckpointError,
    Manifest,
    SaveRecord,
    Status,
    hidden,
    list_checkpoints,
    read_manifest,
    tag_in,
)

logger = logging.getLogger("bamboo_ds")

#: How names of files begin that are about to replace another one.
NEW = ".bamboo-new-"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
#: How often a folder that others delete, too, is looked through.
_DELETE_TRIES = 100
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


def check_tag(tag: str) -> str:
    """``tag`` itself; raises :class:`CheckpointError` if it cannot name a checkpoint inside a folder."""
    parts = PurePosixPath(tag).parts
    usable = parts and len(parts) <= MAX_DEPTH and not any(p.startswith((".", "/")) or "\0" in p for p in parts)
    if not usable or tag in ("latest", "latest_universal"):
        raise CheckpointError(f"{tag!r} is not usable as the tag of a checkpoint: take a name without leading dots")
    return tag


def check_id(name: str) -> str:
    """``name`` itself; raises :class:`CheckpointError` if it cannot be a field of a hidden folder's name."""
    if not _NAME.fullmatch(name):
        raise CheckpointError(f"{name!r} is not usable here: take letters, digits, '.', '_' and '-', up to 100 of them")
    return name


def partial_folder(folder: Path, job: str, save_id: str, tag: str) -> Path:
    """The folder in which the save ``save_id`` is put together; equal on all members."""
    return folder / SEPARATOR.join((PARTIAL, job, save_id, quote(tag, safe="")[:80]))


def open_partial(folder: Path, record: SaveRecord) -> Path:
    """Creates the partial folder with its record, in one step; raises ``OSError``."""
    target = partial_folder(folder, record.job, record.save_id, record.tag)
    fresh = hidden_name(folder, record.job)
    fresh.mkdir()
    write_atomically(fresh / SAVE, record.to_json())
    os.rename(fresh, target)
    return target


def write_atomically(path: Path, text: str) -> None:
    """Replaces the file at ``path``; a reader sees the old text or the new one, also after a crash."""
    fresh = path.with_name(f"{NEW}{secrets.token_hex(4)}")
    try:
        with open(fresh, "x") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
    except BaseException:  # goes on up; only what was begun must not stay
        fresh.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes the names in ``folder`` survive a crash of the host."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system without it, such as some FUSE ones
            raise
    finally:
        os.close(descriptor)


def make_folders(root: Path, names: Sequence[str]) -> None:
    """Creates the folders ``names`` below ``root``, one in another.

    Never ``root`` itself: it is gone if somebody has taken it away, and must not come back. Raises ``OSError``.
    """
    for name in names:
        root /= name
        root.mkdir(exist_ok=True)


def next_serial(folder: Path) -> int:
    """One more than the highest serial of a complete checkpoint in ``folder``."""
    return 1 + max((info.serial for info in list_checkpoints(folder)), default=0)


def publish(partial: Path, folder: Path, manifest: Manifest) -> Path:
    """Renames the finished ``partial`` folder (manifest included) to its tag. A checkpoint of that name is replaced.

    Files in the replaced folder that belong to no checkpoint (a script's own) are kept.

    Returns:
        The checkpoint's folder.
    """
    target = folder / manifest.tag
    sync_folder(partial)
    make_folders(folder, PurePosixPath(manifest.tag).parts[:-1])
    if target.exists():
        _keep_foreign_files(target, partial)
        if _exchange(partial, target):
            discard(partial, folder, manifest.job)
        else:
            old = hidden_name(folder, manifest.job, REPLACED)
            old = old.with_name(f"{old.name}{SEPARATOR}{quote(manifest.tag, safe='')}")
            os.rename(target, old)
            try:
                os.rename(partial, target)
            except OSError:
                # Somebody has taken the partial folder away: what is replaced may be newer than it.
                if not target.exists():
                    os.rename(old, target)
                raise
            discard(old, folder, manifest.job)
    else:
        os.rename(partial, target)
    sync_folder(target.parent)
    return target


def put_back(folder: Path, job: str) -> list[Path]:
    """Restores the names of checkpoints of ``job`` whose replacement a crash has interrupted.

    Needed only where the file system cannot swap two names (some network file systems). For the member that leads,
    or while no member writes.

    Returns:
        The restored checkpoints.
    """
    return [target for old in hidden(folder, REPLACED, job) if (target := _give_back(old, folder, job)) is not None]


def _give_back(old: Path, folder: Path, job: str) -> Path | None:
    """Gives the replaced checkpoint ``old`` its name back, or deletes it if that is taken; returns what is back."""
    target = folder / unquote(old.name.split(SEPARATOR, 3)[3])
    if target.exists():
        discard(old, folder, job)
        return None
    if not _give_name(old, target):
        return None
    logger.warning("checkpoint %s was being replaced when its writer ended; it is back", target)
    return target


def _give_name(kept: Path, target: Path) -> bool:
    """Renames ``kept`` to ``target``; returns whether no other member was faster. Raises ``OSError``."""
    try:
        os.rename(kept, target)
    except OSError:
        if not target.exists():
            raise
        return False
    return True


def take_over(folder: Path, job: str, lineage: Lineage) -> None:
    """Begins ``lineage`` in ``folder``, which exists: what earlier ones have not published there they never will.

    Raises:
        CheckpointError: that cannot be made sure; no checkpoint is changed by that.
    """
    try:
        supersede(folder, lineage)
        clean(folder, job, lineage=lineage)
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be written to ({error}), so that workers of an earlier start of job {job!r} cannot be "
            "kept from writing there: the job does not go on from its checkpoints. Make the folder writable, or make "
            "room in it, on all hosts, and start the job again"
        ) from error


def clean(folder: Path, job: str, keep: Collection[str] = (), lineage: Lineage = ("", 0)) -> list[Path]:
    """Cleans up after a crash: :func:`put_back`, and removes abandoned saves of ``job``.

    Nothing happens if ``lineage`` is over there.

    Args:
        keep: ids of saves that are going on.
        lineage: of the caller; saves of later ones are left alone.

    Returns:
        The abandoned partial folders.
    """
    replaced, partials, removing = (hidden(folder, kind, job) for kind in (REPLACED, PARTIAL, REMOVING))
    if is_over(folder, lineage):
        return []  # looked up after the listing: if a later lineage has made anything of that, it is over
    for old in replaced:
        _give_back(old, folder, job)
    others = [p for p in partials if p.name.split(SEPARATOR, 3)[2] not in keep]
    abandoned = [p for p in others if not _is_later(p, lineage)]
    for partial in abandoned:
        logger.warning("removing %s: its save was abandoned", partial)
        discard(partial, folder, job)
    for rest in removing:
        _delete(rest)
    return abandoned


def _is_later(partial: Path, lineage: Lineage) -> bool:
    """Whether a later lineage than ``lineage`` saves there."""
    origin, generation = lineage
    try:
        record = SaveRecord.model_validate_json((partial / SAVE).read_bytes())
    except (OSError, ValidationError):  # it is about to get its name, or is broken
        return origin != "" and is_over(partial.parent, lineage)
    return record.origin == origin and record.generation > generation


def point_latest(folder: Path, tag: str) -> bool:
    """Lets ``latest`` name the complete checkpoint ``tag``, unless it names a newer one of the same job.

    Returns:
        Whether it names ``tag`` now.
    """
    file, named = folder / "latest", tag
    read_manifest(folder / tag)
    if _is_newer(folder, tag_in(file), tag):
        return False  # this member was slow, and is no longer the one that leads
    fresh = folder / f"{NEW}{secrets.token_hex(4)}-latest"
    write_atomically(fresh, tag)
    try:
        with suppress(OSError):  # there is one, or it is a file system without links
            os.link(fresh, file)
        while file.exists() and _exchange(fresh, file):
            # The one that leads may have written since this member looked: then its tag is put back.
            before = tag_in(fresh)
            if not _is_newer(folder, before, named):
                break
            named = before
        else:
            os.replace(fresh, file)
    finally:
        fresh.unlink(missing_ok=True)
    sync_folder(folder)
    return named == tag


def _is_newer(folder: Path, one: str, other: str) -> bool:
    """Whether ``one`` is a complete checkpoint of the same job as ``other``, and newer."""
    try:
        first, second = read_manifest(folder / one), read_manifest(folder / other)
    except CheckpointError:
        return False
    return first.job == second.job and first.serial > second.serial


def prune(folder: Path, job: str, keep: int, newest: Path) -> list[Path]:
    """Removes all but the ``keep`` newest complete checkpoints that ``job`` wrote.

    Never removed: ``newest``, the one that ``latest`` names, checkpoints without a manifest or of other jobs, and
    damaged ones (they do not count as kept either, and a person may want to inspect them).

    Returns:
        The removed checkpoints.
    """
    own = [i for i in list_checkpoints(folder) if i.status is Status.COMPLETE and i.job == job]
    removed = []
    for info in own[: max(0, len(own) - max(1, keep))]:
        path = Path(info.path)
        if path != newest and not info.latest and discard(path, folder, job, info.serial):
            removed.append(path)
    return removed


def discard(path: Path, folder: Path, job: str, serial: int | None = None) -> bool:
    """Deletes the folder ``path``: renames it at once, then removes its files. Does nothing if it does not exist.

    Args:
        serial: of the checkpoint to delete. Another one that has got the name meanwhile keeps it.

    Returns:
        Whether its name is free because of this call.
    """
    doomed = hidden_name(folder, job)
    try:
        os.rename(path, doomed)
    except FileNotFoundError:
        return False
    if serial is not None and read_manifest(doomed).serial != serial:
        os.rename(doomed, path)
        return False
    _delete(doomed)
    return True


def _delete(doomed: Path) -> None:
    """Deletes a folder that has its hidden name already. Others may delete it, too; the next clean removes the rest."""
    problem: OSError | None = None
    for _ in range(_DELETE_TRIES):
        try:
            shutil.rmtree(doomed)
        except FileNotFoundError as error:  # somebody else was faster
            problem = error
        except OSError as error:  # such as a file that an NFS client holds open
            problem = error
            break
        if not doomed.exists():
            return
    logger.warning("%s cannot be deleted yet: %s", doomed, problem)


def given_up(folder: Path, job: str, save_id: str) -> Path:
    """An empty folder: it tells members that have yet to enter a save's partial folder that there will be none."""
    return folder / SEPARATOR.join((REMOVING, job, save_id))


def hidden_name(folder: Path, job: str, kind: str = REMOVING) -> Path:
    """Name of a folder that the next :func:`clean` removes, unless it is of another ``kind``, or renamed by then."""
    return folder / SEPARATOR.join((kind, job, secrets.token_hex(4)))


def _keep_foreign_files(old: Path, new: Path) -> None:
    """Links (or copies) the files of ``old`` that no checkpoint has written to ``new``."""
    try:
        known = {MANIFEST, *read_manifest(old).files}
    except CheckpointError:
        known = {MANIFEST}
    for parent, _, names in os.walk(old):
        for name in names:
            source = Path(parent, name)
            relative = source.relative_to(old)
            target = new / relative
            if relative.as_posix() in known or LOADED.search(name) or target.exists():
                continue
            make_folders(new, relative.parts[:-1])
            try:
                os.link(source, target, follow_symlinks=False)
            except OSError:  # a file system without links
                shutil.copy2(source, target, follow_symlinks=False)


def _exchange(one: Path, other: Path) -> bool:
    """Swaps two names in one step (Linux, ``renameat2``); ``False`` where the file system cannot do that."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(other))
