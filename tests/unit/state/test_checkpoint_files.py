"""Checkpoints on disk: written in the background, complete or absent, whatever happens to whoever writes them.

Members of a job are savers (each with its own thread) on one folder, as they would be on a shared file system.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from bamboo_ds.cli.checkpoints import checkpoints
from bamboo_ds.state import hostcopy
from bamboo_ds.state.checkpoints import (
    MANIFEST,
    PARTIAL,
    Status,
    hidden,
    list_checkpoints,
    newest_complete,
    read_manifest,
    verify,
)
from bamboo_ds.state.hostcopy import BufferPool, HostCopy
from bamboo_ds.state.writer import HostFile
from bamboo_ds.topology import Layout
from tests.support.accelerators import FakeAccelerator
from tests.support.compare import differences
from tests.support.leaks import no_leaks
from tests.support.savers import (
    LAYOUT,
    WAIT_S,
    Gate,
    Member,
    content,
    members,
    names,
    save_all,
)

pytestmark = pytest.mark.claim("guides/checkpoints.md", "reference/cli.md", "reference/settings.md")

__all__ = ["members"]  # a fixture


@pytest.fixture(autouse=True)
def _no_leaks() -> Iterator[None]:
    with no_leaks():
        yield


# -- a whole save ---------------------------------------------------------------------------------------------


def test_round_trip(members: Callable[..., Member], tmp_path: Path) -> None:
    pair = [members(0), members(1)]
    save_all(pair, 3, losses=lambda: [2.5, 2.25, 2.0])
    root = tmp_path / "checkpoints" / "step3"
    assert [r.path for r in pair[0].complete] == [root]
    assert pair[1].complete == [] and not pair[0].failed and not pair[1].failed
    assert (root.parent / "latest").read_text() == "step3"
    assert sorted(p.name for p in root.parent.iterdir()) == ["latest", "step3"]
    expected = [*names(0), *names(1)]
    assert sorted(p.name for p in root.iterdir()) == sorted([*expected, MANIFEST, "bamboo_losses.json"])
    for rank in (0, 1):
        for name in names(rank):
            assert differences(torch.load(root / name, weights_only=True), content(rank, 3)) == []
    manifest = read_manifest(root)
    assert (manifest.job, manifest.step, manifest.tag, manifest.layout) == ("job", 3, "step3", LAYOUT)
    assert manifest.roles == {0: sorted(names(0)), 1: sorted(names(1))}
    assert manifest.losses is not None
    assert json.loads((root / manifest.losses).read_text()) == [2.5, 2.25, 2.0]
    assert verify(root) == []
    newest = newest_complete(root.parent, checksums=True)
    assert newest is not None and newest.path == root and newest.latest


def test_the_copy_is_of_the_moment() -> None:
    storage = torch.arange(12.0)
    layer = nn.Linear(4, 4)
    state = {
        "view": storage[3:6],
        "again": storage[3:6],
        "layer": layer.state_dict(),
        "list": [1, [2]],
        "p": layer.bias,
    }
    before = {"view": storage[3:6].clone(), "weight": layer.weight.detach().clone()}
    copy = HostCopy(state)
    storage.zero_()
    nn.init.zeros_(layer.weight)
    state["list"][1].append(3)  # type: ignore[index]
    restored = copy.state()
    assert torch.equal(restored["view"], before["view"]) and restored["view"].untyped_storage().nbytes() == 12
    assert restored["again"] is restored["view"]
    assert torch.equal(restored["layer"]["weight"], before["weight"])
    assert restored["list"] == [1, [2]] and isinstance(restored["p"], nn.Parameter)
    # As torch.save would: at once, to the script.
    with pytest.raises((AttributeError, TypeError)):
        HostCopy({"lock": threading.Lock()})


def test_memory_is_used_again() -> None:
    pool = BufferPool()
    source = {
        "a": torch.arange(6.0).view(2, 3),
        "t": torch.arange(6).view(2, 3).T,
        "e": torch.zeros(0),
        "b": torch.ones(3),
    }
    first = HostCopy(source, pool)
    place = first.state()["a"].data_ptr()
    assert differences(source, first.state()) == [] and first.state()["a"].untyped_storage().nbytes() == 24
    first.release()
    second = HostCopy({"a": torch.ones(6, dtype=torch.int32)}, pool)
    assert second.state()["a"].data_ptr() == place
    pool.trim()
    second.release()
    assert HostCopy({"b": torch.ones(2)}, pool).state()["b"].tolist() == [1.0, 1.0]


def test_page_locked_memory_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of tensors on devices lie in it. What the pool drops torch's allocator would keep, for ever."""
    released: list[str] = []
    monkeypatch.setattr(torch.accelerator, "empty_host_cache", lambda: released.append("torch"), raising=False)
    monkeypatch.setattr(hostcopy, "HOST", torch.device("meta"))  # as if the tensors were elsewhere
    own = FakeAccelerator("xpu").install(monkeypatch)
    pool, source = BufferPool(), torch.arange(6.0)
    for number in range(2):
        copy = HostCopy({"far": source}, pool)
        found = copy.state()["far"]
        assert own.pinned == [24], "and the second copy has that of the first"
        assert torch.equal(found, source) and own.is_pinned(found)
        if number == 0:
            pool.trim()
            assert not released, "it is in use"
        del found
        copy.release()
    assert [own.is_pinned(each) for each in (pool.take(24, True), pool.take(24, False))] == [True, False]
    HostCopy({"far": source}, pool).release()
    pool.trim()
    pool.trim()
    assert released == ["torch"]


@pytest.mark.parametrize("zipped", [True, False])
def test_formats(members: Callable[..., Member], tmp_path: Path, zipped: bool) -> None:
    alone = members(0)
    alone.begin(1, layout=Layout(1, 1), tag="a/b")
    alone.saver.add(0, [HostFile("sub/x_states.pt", HostCopy(content(0, 1, 9000)), zipped)])
    alone.saver.submit()
    alone.wait()
    assert not alone.failed
    path = tmp_path / "checkpoints" / "a" / "b"
    assert [i.tag for i in list_checkpoints(path.parent.parent)] == ["a/b"] and verify(path) == []
    assert differences(torch.load(path / "sub" / "x_states.pt", weights_only=True), content(0, 1, 9000)) == []


def test_a_second_save_waits(members: Callable[..., Member], monkeypatch: pytest.MonkeyPatch) -> None:
    class NeededElsewhere(Exception):
        pass

    def interrupt() -> None:
        gate.reached.wait(WAIT_S)
        raise NeededElsewhere

    alone = members(0)
    gate = Gate(monkeypatch, names(0)[0])
    alone.save(1, layout=Layout(1, 1))
    with pytest.raises(NeededElsewhere):
        alone.begin(2, layout=Layout(1, 1), interrupt=interrupt)
    assert alone.saver.busy
    gate.open.set()
    alone.save(2, layout=Layout(1, 1)).wait()
    assert [r.step for r in alone.complete] == [1, 2]


def test_a_writer_that_hangs(members: Callable[..., Member], monkeypatch: pytest.MonkeyPatch) -> None:
    alone = members(0, timeout_s=0.2)
    gate = Gate(monkeypatch, names(0)[0])
    alone.save(1, layout=Layout(1, 1))
    assert gate.reached.wait(WAIT_S)
    assert not alone.begin(2, layout=Layout(1, 1)) and "left out" in str(alone.failed[0].error)
    gate.open.set()
    alone.saver._timeout_s = WAIT_S
    alone.save(3, layout=Layout(1, 1)).wait()
    assert [r.step for r in alone.complete] == [1, 3]


# -- keep -----------------------------------------------------------------------------------------------------


def test_keep(members: Callable[..., Member], tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    other = members(0, job="other")
    other.save(1, layout=Layout(1, 1), tag="others").wait()
    (folder / "stock").mkdir()
    torch.save({}, folder / "stock" / "mp_rank_00_model_states.pt")
    alone = members(0, keep=2)
    for step in (5, 4, 3, 2):  # an older step may be newer: the job has been set back
        alone.save(step, layout=Layout(1, 1), latest=step == 5).wait()
    assert not alone.failed
    # The one that `latest` names stays though it is the oldest.
    assert sorted(p.name for p in folder.iterdir()) == ["latest", "others", "step2", "step3", "step5", "stock"]
    newest = newest_complete(folder, job="job")
    assert newest is not None and newest.tag == "step2"
    assert {i.tag: i.status for i in list_checkpoints(folder)}["stock"] is Status.UNKNOWN


@pytest.mark.parametrize("what", ["partial", "folder"])
def test_vanished_folder(members: Callable[..., Member], tmp_path: Path, what: str) -> None:
    leader, follower = members(0), members(1)
    save_all([leader, follower], 1)
    leader.save(2)
    follower.begin(2)
    while not list(leader.folder.glob(f"{PARTIAL}*/.written-0.json")):
        assert leader.saver.busy
    if what == "partial":
        os.rename(hidden(leader.folder, PARTIAL)[0], tmp_path / "gone")
    else:
        os.rename(leader.folder, tmp_path / "gone")
    follower.saver.submit()
    leader.wait()
    assert "has vanished" in str(leader.failed[0].error)
    follower.saver.abort("the others have failed")
    follower.wait()
    kept = newest_complete(leader.folder if what == "partial" else tmp_path / "gone", checksums=True)
    assert kept is not None and kept.tag == "step1"
    save_all([leader, follower], 3)
    assert [r.step for r in leader.complete] == [1, 3]


def test_bit_flip(members: Callable[..., Member]) -> None:
    alone = members(0)
    for step in (1, 2):
        alone.save(step, layout=Layout(1, 1)).wait()
    target = alone.folder / "step2" / names(0)[0]
    data = bytearray(target.read_bytes())
    data[len(data) // 2] ^= 4
    target.write_bytes(data)
    assert verify(target.parent, checksums=False) == []
    (problem,) = verify(target.parent)
    assert problem.file == names(0)[0] and "CRC-32" in problem.text
    newest = newest_complete(alone.folder, checksums=True)
    assert newest is not None and newest.tag == "step1"
    run = CliRunner().invoke
    assert run(checkpoints, [str(alone.folder)]).exit_code == 0
    result = run(checkpoints, [str(alone.folder), "--verify", "--json"])
    states = {entry["tag"]: entry["status"] for entry in json.loads(result.output)}
    assert result.exit_code == 1 and states == {"step1": "complete", "step2": "damaged"}
    target.unlink()
    (target.parent / "layer_09-model_states.pt").touch()
    assert sorted(p.file for p in verify(target.parent, False)) == [target.name, "layer_09-model_states.pt"]
    table = run(checkpoints, [str(alone.folder)], env={"COLUMNS": "200"})
    assert table.exit_code == 1 and "damaged" in table.output and "is missing" in table.output
    (target.parent / MANIFEST).write_text("{")
    assert [i.status for i in list_checkpoints(alone.folder)] == [Status.DAMAGED, Status.COMPLETE]
