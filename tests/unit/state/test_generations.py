"""Whose writing into a shared folder is over."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bamboo_ds.generations import is_over, supersede
from bamboo_ds.state import publish
from bamboo_ds.state.checkpoints import MANIFEST, Manifest, SaveRecord, newest_complete, read_manifest
from bamboo_ds.topology import Layout

pytestmark = pytest.mark.claim("guides/elastic.md")


def test_a_later_start_ends_all_before_it_and_no_other_job(tmp_path: Path) -> None:
    supersede(tmp_path, ("a", 0))
    assert not list(tmp_path.iterdir()), "a job that was never started again leaves nothing"
    supersede(tmp_path, ("a", 3))
    supersede(tmp_path, ("a", 2))
    assert [is_over(tmp_path, ("a", n)) for n in range(5)] == [True, True, True, False, False]
    assert not is_over(tmp_path, ("b", 0)) and not is_over(tmp_path, ("", 0)) and not is_over(tmp_path / "x", ("a", 0))


def record(generation: int) -> SaveRecord:
    fields = {"job": "job", "save_id": f"s{generation}", "tag": f"step{generation}", "step": 1}
    return SaveRecord.model_validate({**fields, "layout": Layout(1, 2), "origin": "o", "generation": generation})


@pytest.mark.parametrize("cleaner", [0, 1, 2])
def test_cleaning_takes_what_earlier_starts_left_and_spares_later_ones(tmp_path: Path, cleaner: int) -> None:
    """A writer that was stopped just before the rename then finds nothing to rename."""
    partials = [publish.open_partial(tmp_path, record(generation)) for generation in range(3)]
    publish.clean(tmp_path, "job", lineage=("o", cleaner))
    assert [partial.exists() for partial in partials] == [generation > cleaner for generation in range(3)]


def test_pruning_spares_a_checkpoint_that_has_taken_the_name(tmp_path: Path) -> None:
    """The list of checkpoints was read before the process was stopped."""
    folder = tmp_path / "step1"
    folder.mkdir()
    fields = {"job": "job", "save_id": "s", "tag": "step1", "step": 1, "layout": Layout(1, 2), "roles": {}, "files": {}}
    manifest = Manifest.model_validate({**fields, "serial": 7, "time": "2026-01-01T00:00:00Z"})
    (folder / MANIFEST).write_text(manifest.to_json())
    assert not publish.discard(folder, tmp_path, "job", serial=3)
    assert os.listdir(tmp_path) == ["step1"]
    assert publish.discard(folder, tmp_path, "job", serial=7) and not os.listdir(tmp_path)


def finished(root: Path, save_id: str, generation: int, serial: int) -> tuple[Path, Manifest]:
    """A partial folder that is about to become the checkpoint ``best``, with one file."""
    fields = {"job": "job", "save_id": save_id, "tag": "best", "step": serial, "layout": Layout(1, 1)}
    partial = publish.open_partial(root, SaveRecord.model_validate({**fields, "origin": "o", "generation": generation}))
    written = {"serial": serial, "roles": {}, "files": {"f": {"size": 1, "crc32": 0}}, "time": "2026-01-01T00:00:00Z"}
    manifest = Manifest.model_validate({**fields, **written})
    (partial / "f").write_text("x")
    (partial / MANIFEST).write_text(manifest.to_json())
    return partial, manifest


class Held:
    """Has ``other`` act once, just before the operation on files with the given number.

    Attributes:
        operations: names of those so far.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int, other: Callable[[], None]) -> None:
        self.operations: list[str] = []
        self.on = False
        self._number, self._other = number, other
        for name in ("rename", "replace", "link", "mkdir", "open", "fsync", "scandir", "unlink", "listdir"):
            self._wrap(monkeypatch, os, name)
        for name in ("rmtree", "copy2"):
            self._wrap(monkeypatch, shutil, name)
        for name in ("mkdir", "exists", "read_bytes"):
            self._wrap(monkeypatch, Path, name)
        self._wrap(monkeypatch, publish, "_exchange")

    def _wrap(self, monkeypatch: pytest.MonkeyPatch, where: Any, name: str) -> None:
        real = getattr(where, name)

        def operation(*args: Any, **kwargs: Any) -> Any:
            if self.on:
                self.operations.append(name)
                if len(self.operations) == self._number:
                    self.on = False
                    self._other()
                    self.on = True
            return real(*args, **kwargs)

        monkeypatch.setattr(where, name, operation)


@pytest.mark.parametrize("saves", [False, True], ids=["begins", "saves"])
@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "two-renames"])
def test_an_old_writer_that_is_held_anywhere_takes_nothing_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool, saves: bool
) -> None:
    """A new start of the job begins meanwhile, and may save under the same name."""
    if not exchange:
        monkeypatch.setattr(publish, "_exchange", lambda one, other: False)
    for number in range(1, 100):
        root = tmp_path / str(number)
        root.mkdir()
        publish.publish(*with_root(finished(root, "first", 0, 1), root))
        (root / "best" / "own" / "deep").mkdir(parents=True)
        (root / "best" / "own" / "deep" / "notes").write_text("a script's")
        found: list[str] = []

        def begin(root: Path = root, found: list[str] = found) -> None:
            publish.take_over(root, "job", ("o", 1))
            newest = newest_complete(root)
            assert newest is not None
            found.append(read_manifest(newest.path).save_id)
            if saves:
                publish.publish(*with_root(finished(root, "new", 1, 3), root))

        partial, manifest = finished(root, "old", 0, 2)
        with monkeypatch.context() as patched:
            held = Held(patched, number, begin)
            held.on = True
            try:
                publish.publish(partial, root, manifest)
            except OSError:
                assert found, "it was not held"
            held.on = False
        if not found:
            break
        where = f"held before operation {number}: {held.operations[number - 1]}"
        newest = newest_complete(root)
        assert newest is not None, where
        assert read_manifest(newest.path).save_id == ("new" if saves else found[0]), where
        assert (root / "best" / "own" / "deep" / "notes").read_text() == "a script's", where
        publish.clean(root, "job", lineage=("o", 1))
        assert {path.name for path in root.iterdir()} == {"best", ".bamboo-over~o~0"}, where
    assert number > 10


def with_root(of: tuple[Path, Manifest], root: Path) -> tuple[Path, Path, Manifest]:
    return of[0], root, of[1]


def test_an_old_start_that_cleans_spares_what_a_later_one_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was held between its look at the mark and cleaning."""
    supersede(tmp_path, ("o", 1))
    real = publish.write_atomically

    def clean_first(path: Path, text: str) -> None:
        publish.clean(tmp_path, "job", lineage=("o", 0))
        real(path, text)

    monkeypatch.setattr(publish, "write_atomically", clean_first)
    assert publish.open_partial(tmp_path, record(1)).exists()
