"""Checkpoints of stores on this host: each is fetched once, and removed when no process needs it any more.

::

    TMPDIR/bamboo-fetched-UID/
      HASH/                 of the checkpoint's URL
        in-use              locked (shared) by every process that uses it; whoever locks it alone removes all
        fetching            locked by the process that fetches
        JOB~SAVE~step20/    the files
        whole               they are all there, and as the manifest says

Locks end with their processes, so that what a killed one leaves the next one removes.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import stat
import tempfile
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from ..checkpoints import MANIFEST, CheckpointError, FileRecord, Manifest, file_record
from .client import Objects

logger = logging.getLogger("bamboo_ds")

_FOLDER = "bamboo-fetched"
_USE, _FETCH, _WHOLE = "in-use", "fetching", "whole"
#: Files that are fetched at once.
_THREADS = 4


class Cache:
    """The checkpoints that this process uses; for its main thread.

    Args:
        place: for the folder; by default the one of temporary files.
    """

    def __init__(self, place: Path | None = None) -> None:
        self._place = place
        #: Descriptors of the locks, by the folder of the checkpoint.
        self._used: dict[Path, int] = {}

    @property
    def root(self) -> Path:
        """The folder of the caches of all jobs of this user."""
        return (self._place or Path(tempfile.gettempdir())) / f"{_FOLDER}-{os.getuid()}"

    def fetch(self, objects: Objects, name: str, manifest: Manifest) -> Path:
        """The folder of a checkpoint, with all its files as ``manifest`` says, until :meth:`release`.

        Args:
            objects: the store.
            name: of the checkpoint there.

        Raises:
            CheckpointError: some file differs, or there is no room here.
            OSError: it cannot be read.
        """
        home = self._home(f"{objects.url}/{name}")
        target = home / name
        if home not in self._used:
            self._used[home] = self._use(home)
            self._remove_unused()
        with _locked(home / _FETCH):
            if not (home / _WHOLE).exists():
                logger.info("fetching %s/%s", objects.url, name)
                try:
                    fetch_files(objects, name, manifest, target)
                except OSError as error:
                    if error.filename is None or not str(error.filename).startswith(str(home)):
                        raise
                    raise CheckpointError(
                        f"{error}: make room in the folder of temporary files, or name another one by TMPDIR"
                    ) from error
                (home / _WHOLE).touch()
        return target

    @contextmanager
    def alone(self, what: str) -> Iterator[None]:
        """In the body no other process of this host does the same; raises as :meth:`fetch`."""
        home = self._home(what)
        lock = self._use(home)
        try:
            with _locked(home / _FETCH):
                yield
        finally:
            os.close(lock)
            _remove_if_unused(home)
            if not self._used:
                self.release()

    def _home(self, what: str) -> Path:
        return self.root / hashlib.sha256(what.encode()).hexdigest()[:24]

    def release(self) -> None:
        """This process needs none of them any more."""
        used, self._used = self._used, {}
        for home, lock in used.items():
            os.close(lock)
            _remove_if_unused(home)
        with suppress(OSError):  # there are others in it, or it is gone
            self.root.rmdir()

    def _use(self, home: Path) -> int:
        """Locks ``home``, which is made if need be, against its removal; returns the descriptor."""
        while True:
            self._make_root()
            try:
                home.mkdir(mode=0o700, exist_ok=True)
                lock = os.open(home / _USE, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            except FileNotFoundError:
                continue  # another process has just removed it
            fcntl.flock(lock, fcntl.LOCK_SH)
            if os.fstat(lock).st_nlink:
                return lock
            os.close(lock)  # as above

    def _make_root(self) -> None:
        with suppress(FileExistsError):
            self.root.mkdir(mode=0o700)
        try:
            status = os.lstat(self.root)
        except FileNotFoundError:
            return
        if status.st_uid != os.getuid() or status.st_mode & 0o022 or not stat.S_ISDIR(status.st_mode):
            raise CheckpointError(f"{self.root} is not this user's alone: remove it, or name another folder by TMPDIR")

    def _remove_unused(self) -> None:
        """Removes what killed processes have left."""
        for home in self.root.iterdir():
            if home not in self._used:
                _remove_if_unused(home)


def fetch_files(objects: Objects, name: str, manifest: Manifest, target: Path) -> None:
    """Fetches a checkpoint into the folder ``target``; files that are there already and right are kept.

    Raises:
        CheckpointError: some file differs from ``manifest``.
        OSError: the store cannot be read, or ``target`` not be written to.
    """
    for file in manifest.files:
        (target / file).parent.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="bamboo-fetch") as pool:
        jobs = [
            pool.submit(_fetch_file, objects, f"{name}/{file}", expected, target / file)
            for file, expected in manifest.files.items()
        ]
        for job in jobs:
            job.result()
    (target / MANIFEST).write_text(manifest.to_json())


def _fetch_file(objects: Objects, name: str, expected: FileRecord, target: Path) -> None:
    if target.is_file() and target.stat().st_size == expected.size and file_record(target) == expected:
        return
    size = crc = 0
    try:
        with open(target, "wb") as file:
            for chunk in objects.read(name):
                file.write(chunk)
                size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    except FileNotFoundError as error:
        raise CheckpointError(f"{objects.url}/{name} is missing") from error
    if size != expected.size:
        raise CheckpointError(f"{objects.url}/{name} has {size:,} bytes instead of {expected.size:,}")
    if crc != expected.crc32:
        raise CheckpointError(f"{objects.url}/{name} has CRC-32 {crc:08x} instead of {expected.crc32:08x}")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _remove_if_unused(home: Path) -> None:
    try:
        lock = os.open(home / _USE, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # gone, or about to be made
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(home)
    except BlockingIOError:
        return  # another process uses it
    except OSError as error:
        logger.warning("%s cannot be removed: %s", home, error)
    finally:
        os.close(lock)
