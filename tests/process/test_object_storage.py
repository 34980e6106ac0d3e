"""Checkpoints in a store of objects: what is listed is whole, and what nobody goes on with is removed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFile

from bamboo_ds.state.checkpoints import MANIFEST, SAVE, CheckpointError, SaveRecord, Status, verify
from bamboo_ds.state.own import newest_of
from bamboo_ds.state.storage.cache import Cache
from bamboo_ds.state.storage.client import Objects
from bamboo_ds.state.storage.objects import ObjectStore, entry_of
from bamboo_ds.topology import Layout
from tests.support.savers import LAYOUT, WAIT_S, Member, members, names, save_all
from tests.unit.state.test_object_storage import record

__all__ = ["members"]  # a fixture

pytestmark = pytest.mark.claim("guides/checkpoints.md", "reference/limits.md")

ALONE = Layout(1, 1)


@pytest.fixture
def url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Of a prefix in this process's memory."""
    # Its own property hinders a writer of the same file for a moment.
    monkeypatch.setattr(MemoryFile, "size", property(lambda file: len(file.getvalue())))
    yield f"memory://{request.node.name.partition('[')[0]}/run"
    fsspec.filesystem("memory").store.clear()


@pytest.fixture
def store(url: str, tmp_path: Path) -> ObjectStore:
    return ObjectStore(url, Cache(tmp_path / "cache"))


@pytest.fixture
def saving(store: ObjectStore, members: Callable[..., Member], tmp_path: Path) -> Callable[..., Member]:
    """Makes members that save into the store."""
    (tmp_path / "cache").mkdir()
    return lambda rank, **settings: members(rank, place=store, **settings)


def tags(store: ObjectStore, status: Status = Status.COMPLETE) -> list[str]:
    return [info.tag for info in store.checkpoints() if info.status is status]


def abandon(store: ObjectStore, step: int, save_id: str, **more: Any) -> str:
    """A save of which one object is there; returns its name."""
    found = record(step, save_id, **more)
    store.open(found)
    store.objects.put(f"{entry_of(found)}/{names(0)[0]}", b"half")
    return entry_of(found)


# -- saving ---------------------------------------------------------------------------------------------------


def test_members_send_their_parts_and_the_manifest_comes_last(
    saving: Callable[..., Member], store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = []
    put = Objects.put
    monkeypatch.setattr(Objects, "put", lambda self, name, data: (order.append(name), put(self, name, data))[1])
    pair = [saving(0), saving(1)]
    save_all(pair, 3)
    entry = "job~a-3~step3"
    assert order[0] == f"{entry}/{SAVE}" and order[-2:] == [f"{entry}/{MANIFEST}", "latest"]
    assert sorted(store.objects.find(entry)) == sorted([*names(0), *names(1), MANIFEST])
    (info,) = store.checkpoints()
    assert (info.status, info.tag, info.step, info.job) == (Status.COMPLETE, "step3", 3, "job")
    assert [result.path for result in pair[0].complete] == [f"{store.location}/{entry}"]
    local = store.fetch(str(info.path))
    assert verify(local) == []
    store.cache.release()
    assert not local.exists() and not any(store.cache._place.iterdir())


def test_what_is_kept(saving: Callable[..., Member], store: ObjectStore) -> None:
    """Of this job alone, and not what a load without a tag gets."""
    saving(0, job="other").save(9, layout=ALONE).wait()
    member = saving(0, keep=2)
    for step in (1, 2, 3, 4):
        member.save(step, layout=ALONE).wait()
    assert tags(store) == ["step9", "step3", "step4"] and not member.failed
    assert [info.tag for info in store.checkpoints() if info.latest] == ["step4"]


def test_the_one_that_leads_is_lost_with_all_sent(
    saving: Callable[..., Member], store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The heir completes the checkpoint."""
    leader, heir = saving(0), saving(1)
    reached = threading.Event()

    def never(*_: Any) -> None:
        reached.set()
        raise SystemExit  # its thread ends there, as that of a process that is killed

    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "next_serial", never)
        patch.setattr(threading, "excepthook", lambda _: None)
        leader.save(1)
        heir.save(1).wait()
        assert reached.wait(WAIT_S) and leader.saver._thread is not None
        leader.saver._thread.join(WAIT_S)
        leader.saver._running = None
    assert tags(store) == []
    heir.saver.follow({"m1"})
    heir.wait()
    assert [result.tag for result in heir.complete] == ["step1"] and tags(store) == ["step1"]


def test_the_one_that_leads_is_lost_before_all_is_sent(saving: Callable[..., Member], store: ObjectStore) -> None:
    heir = saving(1)
    store.open(record(1, "a-1"))
    heir.save(1).wait()
    heir.saver.follow({"m1"})
    heir.wait()
    assert "roles 0 were lost before" in str(heir.failed[0].error)
    assert list(store.objects.find()) == [".bamboo-removing~job~a-1"], "what it had sent is removed"
    heir.saver.close()
    assert store.objects.find() == {}


def test_a_failure_is_told_to_the_one_that_leads(
    saving: Callable[..., Member], store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, and not at its deadline; the next save is complete."""
    leader, other = saving(0), saving(1)
    write, struck = MemoryFile.write, []

    def refused(file: MemoryFile, data: Any) -> int:
        if file.path.endswith(names(1)[0]) and not struck:
            struck.append(file.path)
            raise RuntimeError("the connection is gone")
        return write(file, data)

    monkeypatch.setattr(MemoryFile, "write", refused, raising=False)
    save_all([leader, other], 1)
    assert len(struck) == 1
    assert "role 1 could not write its files" in str(leader.failed[0].error)
    assert "the connection is gone" in str(leader.failed[0].error)
    save_all([leader, other], 2)
    assert tags(store) == ["step2"] and tags(store, Status.UNFINISHED) == []


def test_a_slow_upload_is_no_silence(
    saving: Callable[..., Member], store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is sent is no object before all of it is there, so that members say that they go on."""
    monkeypatch.setattr("bamboo_ds.state.storage.objects._MOVING_S", 0.0)
    seen = []
    put = Objects.put

    def noted(self: Objects, name: str, data: bytes) -> None:
        seen.append(name)
        put(self, name, data)

    monkeypatch.setattr(Objects, "put", noted)
    saving(0).save(1, layout=ALONE).wait()
    assert any("/.moving-" in name for name in seen)
    assert not any(".moving-" in name for name in store.objects.find())


# -- abandoned saves ------------------------------------------------------------------------------------------


def test_the_next_save_removes_what_was_abandoned(saving: Callable[..., Member], store: ObjectStore) -> None:
    """But nothing of other jobs, nor of a later start of this one."""
    abandon(store, 1, "x")
    late = abandon(store, 2, "y", origin="o", generation=2)
    others = SaveRecord(job="other", save_id="z", tag="step3", step=3, layout=LAYOUT)
    store.open(others)
    store.give_up(record(1, "w"))
    store.clean("job", ("keep",), ("o", 1))
    left = {name.partition("/")[0] for name in store.objects.find()}
    assert left == {late, entry_of(others)}
    saving(0).save(4, layout=ALONE).wait()
    assert {name.partition("/")[0] for name in store.objects.find()} == {entry_of(others), "job~a-4~step4", "latest"}


def test_a_late_member_of_a_save_that_was_removed_writes_nothing_more(store: ObjectStore) -> None:
    abandon(store, 1, "x")
    store.clean("job")
    with pytest.raises(FileNotFoundError):
        store.create(record(1, "x"), "late")
    with pytest.raises(FileNotFoundError):
        store.note(record(1, "x"), ".written-1.json", "{}")
    assert store.objects.find() == {}


def test_a_manifest_that_comes_too_late_completes_nothing(
    saving: Callable[..., Member], store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member is held between its last look and the manifest, while a later start of the job begins there."""
    note, overtaken = ObjectStore.note, []

    def late(self: ObjectStore, save: SaveRecord, name: str, text: str) -> None:
        if name == MANIFEST and not overtaken:
            overtaken.append(name)
            self.take_over("job", ("o", 1))
            self.objects.put(f"{entry_of(save)}/{name}", text.encode())  # as if it had looked before
        else:
            note(self, save, name, text)

    monkeypatch.setattr(ObjectStore, "note", late)
    member = saving(0)
    member.save(1, layout=ALONE).wait()
    assert len(overtaken) == 1 and tags(store) == [] and tags(store, Status.DAMAGED) == ["step1"]
    assert newest_of([store], "job", "o") is None
    store.clean("job")
    assert not [name for name in store.objects.find() if name.startswith("job~")]


def test_earlier_starts_of_the_job_are_refused(saving: Callable[..., Member], store: ObjectStore) -> None:
    store.supersede(("o", 2))
    assert [store.is_over(("o", number)) for number in range(4)] == [True, True, False, False]
    assert not store.is_over(("other", 0)) and not store.is_over(("", 0))


# -- verification ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["cut", "changed", "gone"])
def test_what_is_damaged_is_passed_over(saving: Callable[..., Member], store: ObjectStore, damage: str) -> None:
    """By sizes in a list, by checksums where it would be gone on from."""
    member = saving(0)
    for step in (1, 2):
        member.save(step, layout=ALONE).wait()
    name = f"job~a-2~step2/{names(0)[0]}"
    content = store.objects.get(name)
    if damage == "gone":
        store.objects.delete([name])
    else:
        changed = bytes([content[0] ^ 1]) + content[1:]
        store.objects.put(name, content[:-1] if damage == "cut" else changed)
    assert tags(store, Status.DAMAGED) == ([] if damage == "changed" else ["step2"])
    found = newest_of([store], "job", "", checksums=True)
    assert found is not None and found[1].tag == "step1"
    with pytest.raises(
        CheckpointError, match={"cut": "bytes instead of", "changed": "CRC-32", "gone": "missing"}[damage]
    ):
        store.fetch(f"{store.location}/job~a-2~step2")
    store.cache.release()
    assert not store.cache.root.exists()


def test_a_host_fetches_once(
    saving: Callable[..., Member], store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one that uses it removes it."""
    saving(0).save(1, layout=ALONE).wait()
    read, asked = Objects.read, []
    monkeypatch.setattr(Objects, "read", lambda self, name: (asked.append(name), read(self, name))[1])
    caches = [store.cache, Cache(store.cache._place)]
    checkpoint = f"{store.location}/job~a-1~step1"
    folders = [ObjectStore(store.location, cache).fetch(checkpoint) for cache in caches]
    assert folders[0] == folders[1] and len(asked) == len(set(asked)) == len(names(0))
    caches[0].release()
    assert verify(folders[1]) == []
    caches[1].release()
    assert not store.cache.root.exists()


def test_what_a_killed_process_has_left_on_a_host_is_removed(saving: Callable[..., Member], store: ObjectStore) -> None:
    saving(0).save(1, layout=ALONE).wait()
    rest = store.cache.root / "abc"
    rest.mkdir(parents=True, mode=0o700)
    store.cache.root.chmod(0o700)
    for name in ("in-use", "whole", "big.pt"):
        (rest / name).touch()
    store.fetch(f"{store.location}/job~a-1~step1")
    assert not rest.exists()
    store.cache.release()


def test_the_probe_leaves_nothing(store: ObjectStore) -> None:
    store.objects.probe()
    assert store.objects.find() == {}
