"""Whose writing into a shared folder is over."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bamboo_ds.generations import is_over, supersede
from bamboo_ds.observe.ledger import LedgerLine, LedgerWriter, read_ledger
from bamboo_ds.state import publish
from bamboo_ds.state.checkpoints import MANIFEST, Manifest, SaveRecord
from bamboo_ds.topology import Layout


def test_a_later_start_ends_all_before_it_and_no_other_job(tmp_path: Path) -> None:
    supersede(tmp_path, ("a", 0))
    assert not list(tmp_path.iterdir()), "a job that was never started again leaves nothing"
    supersede(tmp_path, ("a", 3))
    supersede(tmp_path, ("a", 2))
    assert [is_over(tmp_path, ("a", n)) for n in range(5)] == [True, True, True, False, False]
    assert not is_over(tmp_path, ("b", 0)) and not is_over(tmp_path, ("", 0)) and not is_over(tmp_path / "x", ("a", 0))


def test_an_old_start_accounts_for_nothing(tmp_path: Path) -> None:
    fields = {"run": "r", "global_step": 1, "pipeline": 0, "pipelines": 1, "inputs": ["0" * 8], "labels": ["1" * 8]}
    old, new = LedgerWriter(str(tmp_path), "m0-a"), LedgerWriter(str(tmp_path), "m0-b")
    for step, writer, generation in ((1, old, 0), (1, new, 1), (2, old, 0), (2, new, 1)):
        line = LedgerLine.model_validate({**fields, "step": step, "member": f"g{generation}", "epoch": 1})
        writer.append(line, ("job", generation))
    lines, problems = read_ledger([tmp_path])
    assert not problems and [(line.member, line.step) for line in lines] == [("g0", 1), ("g1", 1), ("g1", 2)]


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
