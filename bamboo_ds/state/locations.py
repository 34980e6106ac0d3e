"""The places of checkpoints that one process uses, by their locations."""

from __future__ import annotations

import os
from pathlib import Path

from ..addresses import is_url
from .checkpoints import Location, Status, is_own
from .places import CheckpointPlace
from .shared_folder import SharedFolder
from .storage.cache import Cache
from .storage.mirrored import MirroredFolder, bring
from .storage.objects import ObjectStore


class Places:
    """Makes places.

    Args:
        mirror: ``bamboo.checkpoint.mirror``.
        cache: for what is fetched from stores.
    """

    def __init__(self, mirror: str | None = None, cache: Cache | None = None) -> None:
        self.mirror, self.cache = mirror, cache or Cache()
        self._stores: dict[str, ObjectStore] = {}

    def of(self, location: Location) -> CheckpointPlace:
        """The place at ``location``: a folder, or what is below a URL; raises :class:`CheckpointError`."""
        if is_url(location):
            return self.store(str(location))
        folder = SharedFolder(Path(os.path.abspath(location)))
        mirror = self._mirror_of(folder.path)
        return folder if mirror is None else MirroredFolder(folder, mirror)

    def store(self, url: str) -> ObjectStore:
        """The place below ``url``; raises :class:`CheckpointError`."""
        known = self._stores.get(url)
        if known is None:
            known = self._stores[url] = ObjectStore(url, self.cache)
        return known

    def _mirror_of(self, folder: Path) -> ObjectStore | None:
        """The mirror of a folder of the script's."""
        return None if self.mirror is None or is_own(folder) else self.store(self.mirror + folder.as_posix())

    # -- on this host -------------------------------------------------------------------------------------

    def fetched(self, location: Location, name: str) -> tuple[str, str]:
        """A folder of this host and the name in it of the checkpoint that is ``name`` at ``location``.

        One of a mirror is brought to the script's folder, one of the job's own to a folder of temporary files.

        Raises:
            CheckpointError, OSError: it cannot be had whole.
        """
        if not is_url(location):
            return str(location), name
        store, url = self.store(str(location)), f"{location}/{name}"
        manifest = store.manifest(url)
        if not is_own(location) and manifest.script_folder is not None:
            bring(Path(manifest.script_folder), store, manifest, url)
            return manifest.script_folder, manifest.tag
        path = store.fetch(url)
        return str(path.parent), path.name

    def bring(self, folder: str, tag: str | None, save_id: str | None = None) -> str | None:
        """Brings a checkpoint from the mirror of ``folder`` to this host, if it is there.

        Args:
            folder: of the script.
            tag: of the checkpoint; ``None``: the one that ``latest`` names.
            save_id: of its save, if that is known.

        Returns:
            Its tag, or ``tag`` if there is no mirror, or no such checkpoint in it.

        Raises:
            CheckpointError, OSError: the mirror cannot be read, or the checkpoint not be had whole.
        """
        path = Path(os.path.abspath(folder))
        store = self._mirror_of(path)
        if store is None:
            return tag
        found = [
            info
            for info in store.checkpoints()
            if info.status is Status.COMPLETE
            and (info.latest if tag is None else info.tag == tag)
            and (save_id is None or store.manifest(info.path).save_id == save_id)
        ]
        if not found:
            return tag
        url = str(found[-1].path)
        bring(path, store, store.manifest(url), url)
        return found[-1].tag
