"""Which checkpoint a job goes on from after a restart, and what keeps it from any."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bamboo_ds.engine.context.history import Done, History
from bamboo_ds.engine.joining import replay
from bamboo_ds.engine.joining.loading import newest_whole, silence_earlier_starts
from bamboo_ds.engine.joining.replay import Replay
from bamboo_ds.errors import ProtocolError, TransferError
from bamboo_ds.generations import is_over
from bamboo_ds.state import publish
from bamboo_ds.state.checkpoints import MANIFEST, REMOVING, CheckpointError, Manifest
from bamboo_ds.state.locations import Places
from bamboo_ds.state.own import own_folder
from bamboo_ds.topology import Layout

pytestmark = pytest.mark.claim("guides/checkpoints.md", "guides/restarts.md")

NOBODY = 65534


@pytest.fixture
def folder() -> Iterator[Path]:
    """Readable for all users."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        root = Path(name, "run", "checkpoints")
        root.mkdir(parents=True)
        yield root


def save(folder: Path, tag: str = "step40", **more: Any) -> str:
    """A complete checkpoint; returns its path."""
    fields = {"job": "job", "save_id": "s", "tag": tag, "step": 40, "layout": Layout(1, 1), "roles": {}, "files": {}}
    manifest = Manifest.model_validate({**fields, "serial": 1, "time": "2026-01-01T00:00:00Z", **more})
    (folder / tag).mkdir(parents=True)
    (folder / tag / MANIFEST).write_text(manifest.to_json())
    return str(folder / tag)


def find(told: str | None, place: Path | None = None) -> list[str] | None:
    """What the leader of the first restart finds."""
    channel = SimpleNamespace(restart_from=told, job="job")
    epoch: Any = SimpleNamespace(
        job=SimpleNamespace(channel=channel), plan=SimpleNamespace(lineage=("o", 1), origin="o")
    )
    found = newest_whole(epoch, Places(), None if place is None else str(place))
    return None if found is None else list(found)


@contextmanager
def unwritable(folder: Path) -> Iterator[None]:
    """In the body this process may read ``folder`` only."""
    folder.chmod(0o555)
    user = os.geteuid()
    if user == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(user)
        folder.chmod(0o755)


def test_a_folder_that_cannot_be_written_to_is_no_new_beginning(folder: Path) -> None:
    told = save(folder)
    with (
        unwritable(folder),
        pytest.raises(CheckpointError, match=rf"{folder} cannot be written to .*Permission denied"),
    ):
        find(told)
    assert find(told) == [str(folder), "step40"] and is_over(folder, ("o", 0))
    assert find(None) is None


@pytest.mark.parametrize("gone", ["checkpoint", "folder"])
def test_nor_is_one_that_has_vanished(folder: Path, gone: str) -> None:
    told = save(folder)
    shutil.rmtree(told if gone == "checkpoint" else folder)
    with pytest.raises(CheckpointError, match="all are gone" if gone == "checkpoint" else f"{folder} has vanished"):
        find(told)


@pytest.mark.parametrize("gone", ["checkpoint", "folder"])
def test_what_another_run_has_saved_beside_does_not_take_its_place(folder: Path, gone: str) -> None:
    """It is no older state of this training, even if the job has the same name."""
    told = save(folder)
    save(folder.parent / "another")
    shutil.rmtree(told if gone == "checkpoint" else folder)
    with pytest.raises(CheckpointError, match="cannot go on from"):
        find(told)


@pytest.mark.parametrize("error", [FileNotFoundError, OSError])
def test_what_others_delete_or_hold_open_hinders_nobody(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: type[OSError], caplog: pytest.LogCaptureFixture
) -> None:
    """An earlier start may be deleting the same folder, and a file of it may be open on another host."""
    told = save(folder)
    (folder / f"{REMOVING}~job~ab").mkdir()
    real = shutil.rmtree

    def rmtree(path: Path) -> None:
        if error is FileNotFoundError:
            real(path)
        raise error(39, "Directory not empty")

    monkeypatch.setattr(publish.shutil, "rmtree", rmtree)
    assert find(told) == [str(folder), "step40"]


def test_the_folder_is_that_which_the_script_has_named(folder: Path) -> None:
    told = save(folder, "run/step40")
    assert find(told) == [str(folder), "run/step40"]
    assert is_over(folder, ("o", 0)) and not is_over(folder / "run", ("o", 0))


@pytest.mark.parametrize("apart", [False, True], ids=["beside the script's", "apart"])
@pytest.mark.parametrize(
    ("script", "own", "expected"),
    [
        ({"consumed": 8}, {"consumed": 12}, "own"),
        ({"consumed": 12}, {"consumed": 8}, "script"),
        ({"consumed": 12}, {"consumed": 12}, "script"),  # it has what the script has done after the step
        ({"consumed": 8}, {"consumed": 12, "origin": "earlier"}, "script"),
        ({"consumed": 12, "origin": "earlier"}, {"consumed": 8}, "own"),
        ({"consumed": 8}, {"consumed": 12, "files": {"lost.pt": {"size": 1, "crc32": 0}}}, "script"),
    ],
)
@pytest.mark.parametrize("told", ["script", "own"])
def test_a_job_goes_on_from_what_contains_most(
    folder: Path, told: str, script: dict[str, Any], own: dict[str, Any], expected: str, apart: bool
) -> None:
    place = folder.parent / "own" if apart else folder
    known = {"script_folder": str(folder)}
    folders = {"script": folder, "own": own_folder(place, "job")}
    paths = {
        "script": save(folder, "step2", **{"origin": "o", **script}),
        "own": save(folders["own"], "step3", **{"origin": "o", **known, **own}),
    }
    found = find(paths[told], place if apart else None)
    assert found == [str(folders[expected]), Path(paths[expected]).name]
    assert all(is_over(each, ("o", 0)) for each in folders.values())


def test_what_a_later_start_loads_from_earlier_ones_change_no_more(folder: Path) -> None:
    """Else its members, of which each reads for itself, could find different checkpoints."""
    save(folder)

    def load(generation: int, leads: bool = True) -> bool:
        plan = SimpleNamespace(generation=generation, lineage=("o", generation))
        epoch = SimpleNamespace(job=SimpleNamespace(channel=SimpleNamespace(job="job")), plan=plan, leads=leads)
        silence_earlier_starts(epoch, Places(), str(folder))
        return is_over(folder, ("o", 0))

    assert not load(0) and not load(1, leads=False)
    with unwritable(folder):
        assert not load(1)  # nor can anybody else write there
    assert load(1)


SAVED = Done("save", {"folder": "/c", "tag": "one", "save_id": None})


def history_of(slices: int = 1) -> History:
    """Of operations of several kinds, in which an iteration has another number of losses than the others."""
    history = History(slices)
    history.add_iteration([[0.1, 2.0], [float("inf"), 1e-9]], skipped=True)
    history.add("evaluate", [0.5, 0.25], alike=True)
    history.add_iteration([[0.3, 2.0], [0.7, 1e-300]], skipped=False, alike=False)
    history.add_iteration([[0.5], [0.25]], skipped=False, alike=True)
    history.add_iteration([[-0.0, 1.0], [1 / 3, 5.0]], skipped=False, alike=True)
    return history


@pytest.mark.parametrize("first", range(6))
def test_a_history_travels_and_is_saved(first: int) -> None:
    history, other = history_of(), history_of()
    saved, late = History(), History()
    assert saved.extend(history.first(first, SAVED)) == first + 1 and saved[first] == SAVED
    assert [saved[number] for number in range(first)] == [history[number] for number in range(first)]
    assert late.extend(history.answer(History.key(first))) == 5 - first
    assert [late[number] for number in range(5 - first)] == [history[number] for number in range(first, 5)]
    assert other.extend(history.answer(History.key(0))) == 5 and other[9] == history[4] and other.steps == 8
    assert other.losses(6) == [*other.losses(5), float("inf")] and other.losses(5)[1:3] == [0.5, 0.375]
    assert (other.alike("train"), other.alike("evaluate"), other.differs) == (False, True, True)
    assert other.extend(history.answer(History.key(7))) == 0, "one that knows less has nothing to tell"


def test_a_long_history_is_short_and_holds_no_heartbeat_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single call of json's holds the interpreter's lock."""
    history = History()
    for step in range(1000):
        history.add_iteration([[step / 7], [step / 3]], skipped=False, alike=True)
    assert len(history.first(1000, SAVED)) < 1000 * 2 * 16
    history.add("save", SAVED.data)
    written, dumps = [], json.dumps
    monkeypatch.setattr(json, "dumps", lambda value: written.append(value) or dumps(value))
    history.first(1001, SAVED)
    assert written[:-1] == [[at, "save", SAVED.data, None] for at in (1000, 1001)]


@pytest.mark.parametrize("refusals", [5, 1000])
def test_a_joiner_asks_on_where_members_refuse_at_once(monkeypatch: pytest.MonkeyPatch, refusals: int) -> None:
    """Such as in a short break of the network."""
    clock, asked = [0.0], [0]

    def result() -> tuple[str, list[Any]]:
        asked[0] += 1
        if asked[0] <= refusals:
            raise TransferError("refused")
        return "told", []

    def fetch(*_: Any) -> Any:
        return SimpleNamespace(result=result)

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(replay, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    context: Any = SimpleNamespace(job=SimpleNamespace(session=SimpleNamespace(fetch=fetch)))
    nothing: Any = None
    joiner, peer = Replay(context, nothing, nothing, nothing), ("a", "host 1 token")
    if refusals < 10:
        assert joiner._told("key", [peer]) == "told" and asked == [6]
    else:
        with pytest.raises(ProtocolError, match=r"no worker of the job tells what it has done: refused$"):
            joiner._told("key", [peer])
        assert 10.0 <= clock[0] < 15.0 and asked[0] > 20
