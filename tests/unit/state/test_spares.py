"""A script that deletes older checkpoints before the new one is complete loses none that it would need."""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bamboo_ds.state import spares, writer
from bamboo_ds.state.checkpoints import SPARE, Status, hidden, list_checkpoints, newest_complete, verify
from bamboo_ds.topology import Layout
from tests.support.savers import WAIT_S, Member, members, rest, save_all

pytestmark = pytest.mark.claim("guides/checkpoints.md")

__all__ = ["members"]  # a fixture

ALONE = Layout(1, 1)


def keep_one(folder: Path) -> None:
    """As GPT-NeoX: put a file into the new checkpoint, then delete all folders of checkpoints but the last."""
    (folder / "step2" / "configs").mkdir(parents=True)
    (folder / "step2" / "configs" / "model.yml").write_text("layers: 2")
    found = sorted(path for path in folder.iterdir() if path.is_dir() and re.fullmatch(r"step\d+", path.name))
    for path in found[:-1]:
        shutil.rmtree(path)


def delete_the_one_before(folder: Path) -> None:
    """By what the script remembers that it has saved."""
    shutil.rmtree(folder / "step1")


def begin_to_delete(folder: Path) -> None:
    """It does not get far."""
    for path in sorted((folder / "step1").iterdir())[:2]:
        path.unlink()


RULES = [keep_one, delete_the_one_before, begin_to_delete]


def held(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Files are written once the event is set."""
    go, append = threading.Event(), writer.ChecksummedFile._append

    def wait(file: Any, chunk: memoryview) -> None:
        assert go.wait(WAIT_S)
        append(file, chunk)

    monkeypatch.setattr(writer.ChecksummedFile, "_append", wait)
    return go


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("fails", [False, True])
def test_when_the_save_ends_there_is_one_to_go_on_from(
    members: Callable[..., Member], monkeypatch: pytest.MonkeyPatch, rule: Callable[[Path], None], fails: bool
) -> None:
    """A failure gives the deleted one back; else it stays deleted."""
    alone = members(0)
    folder = alone.folder
    alone.save(1, layout=ALONE).wait()
    go = held(monkeypatch)
    alone.save(2, layout=ALONE)
    rule(folder)
    assert len(hidden(folder, SPARE)) == 1
    if fails:
        alone.saver.abort("a test says so")
    go.set()
    alone.wait()
    assert [result.step for result in alone.failed] == [2] * fails and rest(folder) == []
    found = {info.tag: info.status for info in list_checkpoints(folder, checksums=True)}
    if fails:
        assert found == {"step1": Status.COMPLETE}
    else:
        assert found.pop("step2") is Status.COMPLETE and not verify(folder / "step2")
        assert found == ({"step1": Status.UNKNOWN} if rule is begin_to_delete else {})
        assert (folder / "latest").read_text() == "step2"


def test_what_no_rule_deletes_stays_as_it_is(
    members: Callable[..., Member], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also where the file system has no hard links, where the main thread does not wait for long."""
    alone = members(0)
    for step in (1, 2):
        alone.save(step, layout=ALONE).wait()
    monkeypatch.setattr(os, "link", lambda *_, **__: (_ for _ in ()).throw(OSError("no links here")))
    alone.save(3, layout=ALONE).wait()
    assert not alone.failed and rest(alone.folder) == []
    assert [info.status for info in list_checkpoints(alone.folder, checksums=True)] == [Status.COMPLETE] * 3


def test_a_member_that_comes_to_lead_gives_it_back(
    members: Callable[..., Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that led is lost with its part; so is the save."""
    pair = [members(0), members(1)]
    folder = pair[0].folder
    save_all(pair, 1)
    go = held(monkeypatch)
    pair[0].save(2)
    delete_the_one_before(folder)
    pair[1].save(2)
    monkeypatch.setattr(spares, "end", lambda *_: None)  # it does nothing more
    pair[0].saver.abort("its process is killed")
    pair[0].wait()
    assert not (folder / "step1").exists()
    monkeypatch.undo()
    pair[1].saver.follow({"m1"})
    go.set()
    pair[1].wait()
    assert len(pair[1].failed) == 1 and rest(folder) == []
    newest = newest_complete(folder, checksums=True)
    assert newest is not None and newest.tag == "step1"


def test_the_order_of_checkpoints_survives_that_older_ones_are_deleted(
    members: Callable[..., Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPT-NeoX with one checkpoint kept: each is the newest when it is complete, and stays."""
    alone = members(0)
    for step in (1, 2, 3, 4):
        go = held(monkeypatch)
        alone.save(step, layout=ALONE)
        for path in alone.folder.glob("step*"):
            shutil.rmtree(path)  # all that are there are older
        go.set()
        alone.wait()
        monkeypatch.undo()
        (info,) = list_checkpoints(alone.folder, checksums=True)
        assert (info.tag, info.serial, info.status) == (f"step{step}", step, Status.COMPLETE)
    assert rest(alone.folder) == [] and not alone.failed
