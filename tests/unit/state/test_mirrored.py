"""Checkpoints of scripts that are mirrored in a store of objects, by hosts that need not share a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFile

from bamboo_ds.config import parse_block
from bamboo_ds.errors import ConfigError
from bamboo_ds.state.checkpoints import Status, list_checkpoints, verify
from bamboo_ds.state.locations import Places
from bamboo_ds.state.shared_folder import SharedFolder
from bamboo_ds.state.storage.cache import Cache
from bamboo_ds.state.storage.mirrored import MirroredFolder
from bamboo_ds.state.storage.objects import ObjectStore
from bamboo_ds.topology import Layout
from tests.support.savers import Member, members, names, save_all

__all__ = ["members"]  # a fixture

pytestmark = pytest.mark.claim("guides/checkpoints.md", "reference/limits.md")

ALONE = Layout(1, 1)


class Host:
    """One host: its folder of the script, and what it makes of the mirror."""

    def __init__(self, root: Path, url: str) -> None:
        self.folder = root / "checkpoints"
        root.mkdir()
        (root / "tmp").mkdir()
        self.places = Places(url, Cache(root / "tmp"))
        # Of all hosts the folder has the same path: here the mirror has the same URL.
        self.store = ObjectStore(f"{url}/script", self.places.cache)
        self.place = MirroredFolder(SharedFolder(self.folder), self.store)
        self.places._stores[url + self.folder.as_posix()] = self.store

    def tags(self) -> list[str]:
        return [info.tag for info in list_checkpoints(self.folder)] if self.folder.exists() else []

    def mirrored(self) -> list[str]:
        return [info.tag for info in self.store.checkpoints() if info.status is Status.COMPLETE]


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Host]]:
    """Two that share the mirror alone."""
    # Its own property hinders a writer of the same file for a moment.
    monkeypatch.setattr(MemoryFile, "size", property(lambda file: len(file.getvalue())))
    yield [Host(tmp_path / name, "memory://mirror") for name in "ab"]
    fsspec.filesystem("memory").store.clear()


def test_hosts_that_share_nothing(hosts: list[Host], members: Callable[..., Member]) -> None:
    """A checkpoint is complete in the mirror, each host fetches it when it loads, and none has a part of one."""
    pair = [members(rank, place=host.place, keep=2) for rank, host in enumerate(hosts)]
    for step in (1, 2, 3):
        save_all(pair, step)
    assert [len(each.complete) for each in pair] == [3, 0] and not any(each.failed for each in pair)
    for host in hosts:
        assert host.mirrored() == ["step2", "step3"]
        assert not host.folder.exists() or [each.name for each in host.folder.iterdir()] == []
        assert host.places.bring(str(host.folder), None) == "step3"
        assert verify(host.folder / "step3") == [] and (host.folder / "latest").read_text() == "step3"
        assert host.places.bring(str(host.folder), "step2") == "step2" and host.tags() == ["step2", "step3"]
        assert host.places.bring(str(host.folder), "unknown") == "unknown"
        assert list(host.places.cache._place.iterdir()) == []  # type: ignore[union-attr]


def test_members_that_share_a_folder_have_it_there_too(hosts: list[Host], members: Callable[..., Member]) -> None:
    pair = [members(rank, place=hosts[0].place, keep=2) for rank in (0, 1)]
    for step in (1, 2, 3):
        save_all(pair, step)
    host = hosts[0]
    assert host.tags() == host.mirrored() == ["step2", "step3"]
    assert (host.folder / "latest").read_text() == "step3" and verify(host.folder / "step3") == []
    assert not any(each.name.startswith(".") for each in host.folder.iterdir())


def test_a_host_that_has_it_whole_fetches_nothing(
    hosts: list[Host], members: Callable[..., Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is damaged is replaced, and what the script has put beside stays."""
    host, fetched = hosts[0], []
    members(0, place=host.place).save(1, layout=ALONE).wait()
    fetch = "bamboo_ds.state.storage.mirrored.fetch_files"
    original = __import__("bamboo_ds.state.storage.mirrored", fromlist=["fetch_files"]).fetch_files
    monkeypatch.setattr(fetch, lambda *given: (fetched.append(given[1]), original(*given)))
    host.places.bring(str(host.folder), None)
    assert not fetched
    (host.folder / "step1" / "vocabulary.txt").write_text("a b")
    (host.folder / "step1" / names(0)[0]).write_bytes(b"damaged")
    host.places.bring(str(host.folder), None)
    assert len(fetched) == 1 and verify(host.folder / "step1") == []
    assert (host.folder / "step1" / "vocabulary.txt").read_text() == "a b"


def test_a_folder_that_cannot_be_written_to_fails_no_save(hosts: list[Host], members: Callable[..., Member]) -> None:
    host = hosts[0]
    host.folder.touch()
    alone = members(0, place=host.place)
    alone.save(1, layout=ALONE).wait()
    assert not alone.failed and host.mirrored() == ["step1"]


def test_a_new_mirror_of_an_old_folder(hosts: list[Host], members: Callable[..., Member]) -> None:
    """What is there already is older than what comes."""
    host = hosts[0]
    before = members(0, folder=host.folder)
    for step in (1, 2, 3):
        before.save(step, layout=ALONE).wait()
    assert host.places.bring(str(host.folder), None) is None, "the folder counts while nothing is in the mirror"
    members(0, place=host.place).save(4, layout=ALONE, attempt="b").wait()
    assert (host.folder / "latest").read_text() == "step4"
    assert [info.serial for info in host.store.checkpoints()] == [4]


@pytest.mark.parametrize("mirror", ["/a/folder", "s3://key:secret@bucket/run"])
def test_a_mirror_is_a_url_without_credentials(mirror: str) -> None:
    with pytest.raises(ConfigError, match=r"bamboo\.checkpoint\.mirror") as error:
        parse_block({"checkpoint": {"mirror": mirror}})
    assert "secret" not in str(error.value)
