"""The objects below a URL, by fsspec: the few calls that checkpoints need, and errors that name the cure.

fsspec, and the package for a kind of store, are imported when a URL is first used. Credentials and endpoints come by
their own means: environment, configuration files, roles of instances.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ...errors import ConfigError
from ..checkpoints import CheckpointError

logger = logging.getLogger("bamboo_ds")

#: Bytes that an upload keeps in memory, and sends at once. S3 takes at most 10,000 such parts of an object.
BLOCK = 32 << 20
#: What is written and removed to see whether that is possible.
PROBE = ".bamboo-probe~"
_INSTALL = 'pip install "bamboo_ds[storage]"'
#: Bytes that are read at once.
_CHUNK = 8 << 20


class StorageError(CheckpointError):
    """A store of objects does not answer, or refuses."""


@dataclass(frozen=True)
class Stored:
    """One object: its size in bytes, and something that differs between two contents of the same name."""

    size: int
    version: str


class Objects:
    """The objects below ``url``; names are paths below it. For several threads.

    Methods raise ``OSError`` (``FileNotFoundError``, ``PermissionError``) or :class:`StorageError`, whatever the
    package for this kind of store raises.

    Raises:
        StorageError: no package for such URLs is installed.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        try:
            from fsspec.core import url_to_fs

            more = {"auto_mkdir": True} if self.url.startswith(("file:", "local:")) else {}
            self._fs, root = url_to_fs(self.url, use_listings_cache=False, **more)
        except (ImportError, ValueError) as error:  # fsspec's word for a protocol that it does not know
            cure = f"{_INSTALL}, or the package for such URLs"
            raise StorageError(f"{self.url} cannot be used ({error}): {cure}") from error
        except Exception as error:  # each kind of store has exceptions of its own
            raise _translated(error, self.url) from error
        self._root = root.rstrip("/")

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    @contextmanager
    def asking(self, name: str = "") -> Iterator[None]:
        """In the body the store is asked for ``name``: its errors become those of this class."""
        try:
            yield
        except (OSError, CheckpointError):
            raise
        except Exception as error:  # as above
            raise _translated(error, f"{self.url}/{name}".rstrip("/")) from error

    # -- small objects ------------------------------------------------------------------------------------

    def put(self, name: str, data: bytes) -> None:
        """Writes an object, whole at once."""
        with self.asking(name):
            self._fs.pipe_file(self._path(name), data)

    def get(self, name: str) -> bytes:
        """Reads an object."""
        with self.asking(name):
            return bytes(self._fs.cat_file(self._path(name)))

    def size(self, name: str) -> int | None:
        """Bytes of an object; ``None``: there is none of this name."""
        with self.asking(name):
            try:
                info = self._fs.info(self._path(name))
            except FileNotFoundError:
                return None
        return int(info["size"]) if info["type"] == "file" else None

    def find(self, below: str = "") -> dict[str, Stored]:
        """All objects below a name, by their paths below that."""
        top = self._path(below)
        with self.asking(below):
            try:
                found = self._fs.find(top, detail=True)
            except FileNotFoundError:
                return {}
        return {path[len(top) + 1 :]: _stored(info) for path, info in found.items() if len(path) > len(top)}

    def delete(self, names: Iterable[str]) -> None:
        """Removes objects, those that are not there any more included."""
        paths = [self._path(name) for name in names]
        if paths:
            with self.asking():
                try:
                    self._fs.rm(paths)
                except FileNotFoundError:  # of the kinds that remove one by one: the others are still there
                    for path in paths:
                        self._remove(path)

    def _remove(self, path: str) -> None:
        try:
            self._fs.rm_file(path)
        except FileNotFoundError:
            return

    # -- large ones ---------------------------------------------------------------------------------------

    def upload(self, name: str, moved: Callable[[], None]) -> Upload:
        """Begins to write an object in parts; ``moved`` is called after each write."""
        with self.asking(name):
            file = self._fs.open(self._path(name), "wb", block_size=BLOCK)
        return Upload(self, name, file, moved)

    def read(self, name: str) -> Iterator[bytes]:
        """The content of an object, from start to end."""
        with self.asking(name):
            file = self._fs.open(self._path(name), "rb", block_size=_CHUNK)
        with file:
            while True:
                with self.asking(name):
                    chunk = file.read(_CHUNK)
                if not chunk:
                    return
                yield chunk

    def abort_uploads(self, prefix: str, abandoned: Callable[[str], bool]) -> int:
        """Aborts uploads that others have begun and not ended, where the store keeps their parts for ever (S3).

        Other stores drop them by themselves, within a week.

        Args:
            prefix: what their names begin with.
            abandoned: tells by the name whether nobody goes on with it.

        Returns:
            How many there were.
        """
        if "s3" not in self._fs.protocol or not hasattr(self._fs, "call_s3"):
            return 0
        bucket, key, _ = self._fs.split_path(self._path(prefix))
        below, marks, count = len(key) - len(prefix), dict[str, str](), 0
        with self.asking(prefix):
            while True:
                page = self._fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=key, **marks)
                for each in page.get("Uploads", ()):
                    if abandoned(each["Key"][below:]):
                        self._fs.call_s3(
                            "abort_multipart_upload", Bucket=bucket, Key=each["Key"], UploadId=each["UploadId"]
                        )
                        count += 1
                if not page.get("IsTruncated"):
                    return count
                marks = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    # -- at the start -------------------------------------------------------------------------------------

    def probe(self) -> None:
        """Writes, lists, reads and removes an object; raises :class:`StorageError` with the cure."""
        name = PROBE + secrets.token_hex(8)
        try:
            self.put(name, b"bamboo")
            there, content = self.find(), self.get(name)
            self.delete([name])
        except FileNotFoundError as error:
            cure = "create the bucket, or name another one"
            raise StorageError(f"{self.url} does not exist ({error}): {cure}") from error
        except PermissionError as error:
            raise StorageError(
                f"{self.url} refuses ({error}): give this host's credentials the permissions to list, read, write and "
                "delete objects there"
            ) from error
        except OSError as error:
            raise StorageError(f"{self.url} cannot be used: {error}. Is its endpoint right, and reached?") from error
        if name not in there or content != b"bamboo":
            raise StorageError(f"{self.url} does not give back what is written there: name another store")


class Upload:
    """A :class:`~..places.PartFile` in a store: sent part by part, and an object once it is committed."""

    def __init__(self, objects: Objects, name: str, file: Any, moved: Callable[[], None]) -> None:
        self.name = name
        self._objects, self._file, self._moved = objects, file, moved

    def write(self, data: memoryview) -> int:
        """Appends; sends what is enough for a part."""
        with self._objects.asking(self.name):
            self._file.write(data)
        self._moved()
        return len(data)

    def commit(self) -> None:
        """Sends the rest."""
        try:
            with self._objects.asking(self.name):
                self._file.close()
        except BaseException:  # goes on up; the parts in the store must not stay
            self.discard()
            raise

    def discard(self) -> None:
        """Aborts the upload, or removes what a store without uploads has got."""
        from fsspec.spec import AbstractBufferedFile

        try:
            with self._objects.asking(self.name):
                if isinstance(self._file, AbstractBufferedFile):
                    self._file.closed = True  # its finalizer would send the rest
                    self._file.discard()
                else:
                    self._file.close()
                    self._objects.delete([self.name])
        except (OSError, CheckpointError) as error:
            logger.info("what was uploaded of %s stays until the next save: %s", self.name, error)


def check_stores(stores: Mapping[str, str], start: bool) -> None:
    """:func:`check_storage` of all URLs, by the settings that name them."""
    for setting, url in stores.items():
        check_storage(url, setting, start)


def check_storage(url: str, setting: str, start: bool) -> None:
    """Looks whether checkpoints can be kept at ``url``.

    Args:
        setting: that names it.
        start: the job begins. Later, for a member that joins or after a restart, a store that refuses or does not
            answer is a warning: it need not end a job whose next saves tell what is wrong, or succeed.

    Raises:
        ConfigError: they cannot, with the cure.
    """
    try:
        objects = Objects(url)
    except StorageError as error:
        raise ConfigError(f'"{setting}": {error}') from error
    try:
        objects.probe()
    except StorageError as error:
        if start:
            raise ConfigError(f'"{setting}": {error}') from error
        logger.warning('"%s": %s', setting, error)


def _stored(info: dict[str, Any]) -> Stored:
    known = (info.get(key) for key in ("ETag", "etag", "md5Hash", "mtime", "created", "last_modified"))
    return Stored(int(info["size"]), next((str(each) for each in known if each is not None), ""))


def _translated(error: Exception, where: str) -> StorageError:
    """An error of a package for some kind of store."""
    text, kind = f"{type(error).__name__}: {error}", type(error).__name__
    if "Credential" in kind:
        return StorageError(
            f"{where}: {text}. Give this host credentials by the store's own means: environment variables, a "
            "configuration file, or a role of the instance"
        )
    return StorageError(f"{where} does not answer: {text}. Is its endpoint right, and reached from this host?")
