"""Checkpoints of scripts that are mirrored in a store of objects, by hosts that need not share a folder."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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

from .support.compare import assert_computed
from .support.etcd import EtcdServer
from .support.jobs import TRAIN, Reference, RunningJob, slow_until, write_config
from .support.members import MembersJob
from .support.s3 import BUCKET, S3Server
from .support.savers import Member, members, names, save_all
from .test_own_checkpoints import saved
from .test_restart import steps_of
from .test_stored_jobs import PATIENCE_S, use

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


@pytest.mark.exhaustive
@pytest.mark.integration
def test_a_job_on_hosts_that_share_nothing_goes_on_on_others(
    tmp_path: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First its members are lost for good, with their folders and with etcd; the script loads from fresh folders."""
    go = tmp_path / "go"
    told = {"checkpoint": {"mirror": f"s3://{BUCKET}/mirror", "every_s": 0}, "membership": {"lease_ttl_s": 4}}
    script = [str(TRAIN), "--deepspeed_config", str(write_config(tmp_path, told, 4)), "--out", str(tmp_path)]
    # The same path on each host, and another folder.
    script += ["--checkpoints", "/proc/self/cwd/checkpoints", "--stages", "2", "--save-every", "2", "--resume"]
    with S3Server(tmp_path) as server:
        use(server, monkeypatch)

        def start(job: MembersJob, etcd: EtcdServer, host: str) -> Any:
            (tmp_path / host).mkdir()
            with monkeypatch.context() as patch:
                patch.chdir(tmp_path / host)
                arguments = ["join", "--start", "2", "--store", etcd.url, "--job", "gpt", *script, *slow_until(go)]
                return job.member(arguments)

        (tmp_path / "one").mkdir()
        with EtcdServer(tmp_path / "one") as etcd, MembersJob(tmp_path, "gpt", {}) as job:
            first = [start(job, etcd, host) for host in "ab"]
            job.wait_for("a checkpoint", lambda: max(saved(job, own=False), default=0) >= 4, PATIENCE_S)
            for member in first:
                os.killpg(member.pid, signal.SIGKILL)
            assert [member.wait(30) for member in first] == [-signal.SIGKILL] * 2
            known = max(saved(job, own=False))
            assert not [host for host in "ab" if list((tmp_path / host).glob("checkpoints/step*"))], "no host has all"
        (tmp_path / "tmp").rename(tmp_path / "tmp-one")
        (tmp_path / "two").mkdir()
        with EtcdServer(tmp_path / "two") as etcd, MembersJob(tmp_path, "gpt", {}) as job:
            steps = len(job.events("step"))
            second = [start(job, etcd, host) for host in "cd"]
            job.wait_for("some steps", lambda: len(job.events("step")) > steps + 2, PATIENCE_S)
            go.touch()
            result = job.finish()
            assert [member.returncode for member in second] == [0, 0], result.output[-4000:]
    assert [bool(list((tmp_path / host).glob("checkpoints/step*"))) for host in "cd"] == [True, True]
    (begun,) = {int(result.length[1]) - len(dump["losses"]) for dump in result.ranks().values()}
    assert begun >= known, "from the newest one"
    assert_computed(result, reference(2, 1, 4, *result.length))


@pytest.mark.exhaustive
@pytest.mark.integration
def test_a_fatal_loss_takes_the_job_back_to_the_mirror(
    tmp_path: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is lost with the workers, and is there again afterwards."""
    go, arguments = tmp_path / "go", ("--save-every", "2", "--dropout", "0.1")
    told = {"checkpoint": {"mirror": f"s3://{BUCKET}/mirror", "every_s": 0}}
    with S3Server(tmp_path) as server:
        use(server, monkeypatch)
        command = ["--stages", "3", *arguments, *slow_until(go)]
        with RunningJob(tmp_path, 3, command, write_config(tmp_path, told, 4)) as job:
            job.wait_for("a checkpoint", lambda: max(saved(job, own=False), default=0) >= 4)
            workers = {member["slot"]: member["pid"] for member in job.status()["members"]}
            for pid in workers.values():
                os.kill(pid, signal.SIGSTOP)
            shutil.rmtree(tmp_path / "checkpoints")
            for slot in (1, 2):  # who owns the last stage, and its shadow
                os.kill(workers[slot], signal.SIGKILL)
            os.kill(workers[0], signal.SIGCONT)
            job.wait_for("the restart", lambda: bool(job.events("restart")))
            go.touch()
            result = job.finish()
    assert result.exit_code == 0, result.output[-5000:]
    (restart,) = result.events("restart")
    assert restart["checkpoint"].startswith(f"s3://{BUCKET}/mirror{tmp_path}/checkpoints/")
    first, second = steps_of(result.events())
    assert 4 < second[0] <= first[-1] + 1, (first, second)
    tags = [info.tag for info in list_checkpoints(tmp_path / "checkpoints", checksums=True) if not info.reasons]
    assert f"step{second[0] - 1}" in tags
    assert_computed(result, reference(3, 1, 4, *arguments, *result.length, own=True))
