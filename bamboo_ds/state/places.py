"""Places of checkpoints: the interface of folders and stores of objects to saves, restarts and ``keep``.

:class:`CheckpointPlace` is all that they ask. There are two: a folder on a file system that all members share
(:mod:`.shared_folder`), in which a checkpoint appears by a rename, and a prefix in a store of objects
(:mod:`.storage.objects`), in which it appears with its manifest, the last object that is written.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ..generations import Lineage
from .checkpoints import CheckpointError, CheckpointInfo, Location, Manifest, SaveRecord


class SaveRefused(CheckpointError):
    """Nothing may be written into its folder."""


@dataclass(frozen=True)
class KnownFolder:
    """Earlier observation of a folder of checkpoints: its device, and the checkpoint that was last completed there."""

    device: int
    newest: Path | None = None


class PartFile(Protocol):
    """A file of a checkpoint that is being written.

    Attributes:
        name: where it is, for people.
    """

    @property
    def name(self) -> str:
        """See above."""

    def write(self, data: memoryview) -> int:
        """Appends; returns how many bytes were taken. Raises ``OSError`` or :class:`CheckpointError`."""

    def commit(self) -> None:
        """The file is whole, and survives a crash of the host from now on; raises as :meth:`write`."""

    def discard(self) -> None:
        """The file never gets whole. Does not raise: :meth:`CheckpointPlace.clean` removes what is left."""


class CheckpointPlace(Protocol):
    """A folder of checkpoints as saves use it; for several threads. All methods raise ``OSError`` or
    :class:`CheckpointError` if the place cannot be read or written to.

    Members of a job that save together name their save by its record, and meet in the place alone.

    Attributes:
        poll_s: seconds between two looks for what others have written, at most.
    """

    poll_s: float

    @property
    def location(self) -> Location:
        """The folder, or the URL."""

    # -- a save, on all members ---------------------------------------------------------------------------

    def exists(self) -> bool:
        """Whether the place itself is there."""

    def is_open(self, record: SaveRecord) -> bool:
        """Whether the member that leads has opened the save, and it is neither complete nor given up."""

    def is_given_up(self, record: SaveRecord) -> bool:
        """Whether members are told that the save will never be opened (again)."""

    def create(self, record: SaveRecord, name: str) -> PartFile:
        """A new file of the save; ``FileNotFoundError``: it is not open any more."""

    def note(self, record: SaveRecord, name: str, text: str) -> None:
        """Writes a small file of the save, which readers see whole or not at all. ``FileNotFoundError``: as above."""

    def note_failure(self, record: SaveRecord, name: str, text: str, unwritten: str | None) -> None:
        """Does as :meth:`note`, also where there is no room: ``unwritten`` names a file to be deleted for it."""

    # -- a save, on the member that leads -----------------------------------------------------------------

    def check(self, known: KnownFolder | None) -> None:
        """Creates the place if need be; raises :class:`SaveRefused` if it is not the one that is ``known``."""

    def clean(self, job: str, keep: Collection[str] = (), lineage: Lineage = ("", 0)) -> None:
        """Removes what abandoned saves of ``job`` have left, but not those of the ids ``keep``, nor of later lineages.

        Nothing happens if ``lineage`` is over there.
        """

    def open(self, record: SaveRecord) -> None:
        """Begins the save: its files can be written from now on."""

    def written(self, record: SaveRecord) -> Mapping[str, object]:
        """Names of the files of the save, each with something that changes while others write."""

    def size(self, record: SaveRecord, name: str) -> int:
        """Bytes of a file of the save."""

    def read(self, record: SaveRecord, name: str) -> bytes:
        """A file of the save."""

    def next_serial(self) -> int:
        """One more than the highest serial of a complete checkpoint."""

    def seal(self, record: SaveRecord, manifest: Manifest) -> None:
        """All files are written, says ``manifest``; it is written here unless that would complete the checkpoint."""

    def publish(self, record: SaveRecord, manifest: Manifest) -> Location:
        """Completes the save after :meth:`seal`; returns the checkpoint."""

    def completed(self, record: SaveRecord) -> Location | None:
        """The checkpoint if some member has completed the save."""

    def discard(self, record: SaveRecord) -> None:
        """Removes all files of a save that is not complete."""

    def give_up(self, record: SaveRecord) -> None:
        """Marks the save, so that :meth:`is_given_up` is true from now on."""

    def forget(self, record: SaveRecord) -> None:
        """All members know that the save was given up."""

    # -- checkpoints --------------------------------------------------------------------------------------

    def known(self, checkpoint: Location) -> KnownFolder | None:
        """The folder that the next :meth:`check` compares with, once ``checkpoint`` is complete."""

    def manifest(self, checkpoint: Location) -> Manifest:
        """The manifest of a checkpoint in this place; raises :class:`CheckpointError`."""

    def point_latest(self, record: SaveRecord) -> None:
        """A load that names no tag gets the checkpoint of ``record``, unless there is a newer one of its job."""

    def prune(self, job: str, keep: int, newest: Location) -> None:
        """Removes all but the ``keep`` newest complete checkpoints of ``job``, never ``newest``."""

    def remove(self, info: CheckpointInfo, job: str) -> None:
        """Deletes a complete checkpoint, unless another one has taken its place."""

    def checkpoints(self) -> list[CheckpointInfo]:
        """All checkpoints, oldest first; those that are complete by names and sizes are."""

    def whole(self, info: CheckpointInfo) -> bool:
        """Whether all its bytes are as its manifest says; reads all of them."""

    # -- lineages -----------------------------------------------------------------------------------------

    def supersede(self, lineage: Lineage) -> None:
        """Stops earlier lineages from writing here, see :mod:`bamboo_ds.generations`."""

    def is_over(self, lineage: Lineage) -> bool:
        """Whether a later lineage has begun here."""

    def take_over(self, job: str, lineage: Lineage) -> None:
        """Begins ``lineage``: what earlier ones have not published they never will."""
