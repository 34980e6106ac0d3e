"""Jobs whose own checkpoints are in a store of objects: a server of S3 on this host."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from bamboo_ds.cli.main import cli
from bamboo_ds.state.checkpoints import MANIFEST, OWN, Status
from bamboo_ds.state.storage.cache import Cache
from bamboo_ds.state.storage.client import Objects
from bamboo_ds.state.storage.objects import ObjectStore
from bamboo_ds.topology import Layout
from tests.job.test_own_checkpoints import lose_a_stage, saved
from tests.support.compare import assert_computed
from tests.support.etcd import EtcdServer
from tests.support.faults import mark
from tests.support.jobs import TRAIN, Reference, RunningJob, run_bamboo, slow_until, write_config
from tests.support.members import MembersJob
from tests.support.s3 import BUCKET, SECRET, S3Server
from tests.support.savers import Member, members
from tests.support.surviving import fault, survive_in_turn

__all__ = ["members"]  # a fixture

pytestmark = [
    pytest.mark.integration,
    pytest.mark.claim("guides/checkpoints.md", "guides/restarts.md", "reference/limits.md", "reference/cli.md"),
]

PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("s3")) as found:
        yield found


@pytest.fixture
def url(server: S3Server, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A prefix of this test's alone, which its processes may use."""
    use(server, monkeypatch)
    return f"s3://{BUCKET}/{request.node.name.partition('[')[0]}"


def use(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in server.variables.items():
        monkeypatch.setenv(name, value)


def store_of(url: str, job: str) -> ObjectStore:
    return ObjectStore(f"{url}/{OWN}/{job}", Cache())


def own_stores(url: str) -> list[ObjectStore]:
    top = ObjectStore(url, Cache())
    return [top.below(name) for name in top.own_jobs()]


def assert_no_secret(folder: Path) -> None:
    """In logs, events and what else a job leaves."""
    for path in folder.rglob("*"):
        if path.is_file() and SECRET.encode() in path.read_bytes():
            raise AssertionError(f"the secret is in {path}")


def assert_secret_is_not_told(job: RunningJob) -> None:
    """Neither on a command line of the job's processes, nor in etcd."""
    commands = [process.cmdline() for process in psutil.Process(job.process.pid).children(recursive=True)]
    assert not [words for words in commands if SECRET in " ".join(words)]
    (data,) = {Path(words[words.index("--data-dir") + 1]) for words in commands if "--data-dir" in words}
    content = b"".join(path.read_bytes() for path in data.rglob("*") if path.is_file())
    assert f"/bamboo/{job.name}/".encode() in content and SECRET.encode() not in content


@pytest.mark.exhaustive
def test_a_fatal_loss_takes_the_job_back_to_the_store(tmp_path: Path, reference: Reference, url: str) -> None:
    """Nothing of the job's own is in a folder; two are kept, and are whole."""
    result = lose_a_stage(tmp_path, (1, 2), ("--dropout", "0.1", "--count-samples"), checkpoint={"dir": url})
    assert_computed(result, reference(4, 1, 4, "--dropout", "0.1", "--count-samples", *result.length, own=True))
    (restart,) = result.events("restart")
    assert restart["checkpoint"].startswith(f"{url}/{OWN}/")
    assert not list(tmp_path.rglob(f"{OWN}*")) and not list(tmp_path.rglob("bamboo-fetched*"))
    (store,) = own_stores(url)
    complete = [info for info in store.checkpoints() if info.status is Status.COMPLETE]
    assert 1 <= len(complete) <= 2
    assert_no_secret(tmp_path)


@pytest.mark.exhaustive
def test_members_are_killed_while_they_upload(tmp_path: Path, reference: Reference, url: str) -> None:
    """In a file, before their word that all is sent, and before the manifest; each time the next ones are complete."""
    faults = [fault(1, 2, "@file"), fault(3, 2, "@stored-part"), fault(0, 2, "@stored-manifest")]
    place = {"checkpoint": {"every_s": 0.3, "dir": url}}
    result = survive_in_turn(tmp_path, reference, faults, stages=4, micro_batches=4, bamboo=place)
    assert result.faults() == sorted(mark(each) for each in faults)
    failed = {event["step"]: event for event in result.events("checkpoint_failed")}
    assert all(event["own"] and "were lost before" in event["reason"] for event in failed.values()), failed
    hit = [int((tmp_path / mark(each)).read_text()[4:]) for each in faults]
    assert set(hit[:2]) <= set(failed) and not set(hit[:2]) & set(saved(result))
    assert saved(result)[-1] > max(failed), "the next ones get complete"
    (store,) = own_stores(url)
    assert {info.status for info in store.checkpoints()} <= {Status.COMPLETE, Status.UNFINISHED}


@pytest.mark.exhaustive
def test_training_goes_on_without_the_store(
    tmp_path: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its server is killed, with all that it has, and comes back."""
    with S3Server(tmp_path) as server:
        use(server, monkeypatch)
        go = tmp_path / "go"
        file = write_config(tmp_path, {"checkpoint": {"every_s": 0.3, "dir": f"s3://{BUCKET}/run"}}, 4)
        with RunningJob(tmp_path, 2, ["--stages", "2", *slow_until(go, 0.2)], file) as job:
            job.wait_for("a checkpoint", lambda: bool(saved(job)))
            assert_secret_is_not_told(job)
            server.kill()
            before = len(saved(job))
            job.wait_for("a failure that is told", lambda: bool(job.events("checkpoint_failed")))
            known = job.events("step")[-1]["step"]
            job.wait_for("steps", lambda: job.events("step")[-1]["step"] > known + 1)
            assert len(saved(job)) <= before + 1
            server.start()
            again = job.events("step")[-1]["step"]
            job.wait_for("the next checkpoint", lambda: max(saved(job)) > again)
            go.touch()
            result = job.finish()
    assert result.exit_code == 0, result.output[-5000:]
    assert not result.events("member_lost") and not result.events("restart")
    assert_computed(result, reference(2, 1, 4, *result.length))
    assert_no_secret(tmp_path)


@pytest.mark.exhaustive
def test_all_members_vanish_and_others_start_on_fresh_hosts(tmp_path: Path, reference: Reference, url: str) -> None:
    """Nothing but the store, and etcd, has anything of the job."""
    go = tmp_path / "go"
    told = {"recovery": {"min_members": 2}, "membership": {"lease_ttl_s": 4, "fence_s": 8}}
    told |= {"checkpoint": {"every_s": 0.3, "dir": url}}
    script = [str(TRAIN), "--deepspeed_config", str(write_config(tmp_path, told, 4)), "--out", str(tmp_path)]
    script += ["--stages", "2", *slow_until(go)]
    with EtcdServer(tmp_path) as etcd, MembersJob(tmp_path, "gpt", {}) as job:
        arguments = ["join", "--start", "2", "--store", etcd.url, "--job", "gpt", *script]
        first = [job.member(arguments), job.member(arguments)]
        job.wait_for("a checkpoint", lambda: max(saved(job), default=0) > 1, PATIENCE_S)
        for member in first:
            os.killpg(member.pid, signal.SIGKILL)
        assert [member.wait(30) for member in first] == [-signal.SIGKILL] * 2
        del job.joiners[:]
        for path in (tmp_path / "tmp").iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        steps = len(job.events("step"))
        second = [job.member(arguments), job.member(arguments)]
        job.wait_for("it has started again", lambda: len(job.events("step")) > steps + 1, PATIENCE_S)
        go.touch()
        result = job.finish()
        assert [member.returncode for member in second] == [0, 0], result.output[-4000:]
    (restart,) = result.events("restart")
    assert restart["checkpoint"].startswith(f"{url}/{OWN}/gpt/")
    assert result.events("step")[steps]["step"] > 1, "not from the beginning"
    assert_computed(result, reference(2, 1, 4, *result.length))


@pytest.mark.parametrize(
    ("place", "cure"),
    [
        ("s3://no-such-bucket/run", "create the bucket"),
        pytest.param("nosuch://bucket/run", "pip install", marks=pytest.mark.exhaustive),
    ],
)
def test_a_wrong_place_ends_the_job_before_its_first_step(
    tmp_path: Path, server: S3Server, monkeypatch: pytest.MonkeyPatch, place: str, cure: str
) -> None:
    use(server, monkeypatch)
    result = run_bamboo(
        tmp_path, 2, ["--stages", "2", "--steps", "3"], write_config(tmp_path, {"checkpoint": {"dir": place}})
    )
    assert result.exit_code not in (0, None)
    assert '"bamboo.checkpoint.dir"' in result.output and cure in result.output and not result.events("step")


UPLOADS = """
import os, signal, sys
from bamboo_ds.state.storage import client
client.BLOCK = 5 << 20
upload = client.Objects(sys.argv[1]).upload(sys.argv[2], lambda: None)
upload.write(memoryview(bytes(11 << 20)))
print("sent", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.exhaustive
def test_parts_that_a_killed_member_has_sent_do_not_stay(
    url: str, members: Callable[..., Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next save of the job aborts the upload, and those of no other job."""
    store = store_of(url, "job")
    for name in ("job~old~step1/big.pt", "other~old~step1/big.pt"):
        command = [sys.executable, "-c", UPLOADS, store.location, name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stdout) == (-signal.SIGKILL, "sent\n"), done.stderr
    bucket, prefix = store.location.removeprefix("s3://").split("/", 1)

    def open_uploads() -> list[str]:
        page = store.objects._fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix)
        return [each["Key"].removeprefix(f"{prefix}/").partition("~")[0] for each in page.get("Uploads", ())]

    assert sorted(open_uploads()) == ["job", "other"]
    monkeypatch.setattr("bamboo_ds.state.storage.client.BLOCK", 5 << 20)
    member = members(0, place=store)
    member.save(2, kib=12 * 1024, layout=Layout(1, 1)).wait()
    assert not member.failed and open_uploads() == ["other"]
    (info,) = store.checkpoints()
    assert info.status is Status.COMPLETE and info.size > 2 * (12 << 20)
    assert store.whole(info)
    store.cache.release()
    runner = CliRunner()
    listed = runner.invoke(cli, ["checkpoints", url, "--verify", "--json"])
    assert listed.exit_code == 0, listed.output
    assert [(each["status"], each["verified"], each["own"]) for each in json.loads(listed.stdout)] == [
        ("complete", True, True)
    ]
    name = next(name for name in store.objects.find() if name.endswith(".pt"))
    content = store.objects.get(name)
    store.objects.put(name, bytes([content[0] ^ 1]) + content[1:])
    assert runner.invoke(cli, ["checkpoints", url]).exit_code == 0
    assert runner.invoke(cli, ["checkpoints", url, "--verify"]).exit_code == 1
    store.objects.delete(f"{info.path}/{MANIFEST}".removeprefix(f"{store.location}/").splitlines())
    assert [each.status for each in store.checkpoints()] == [Status.UNFINISHED]


def test_doctor_writes_to_the_store_and_removes_it(tmp_path: Path, url: str) -> None:
    for place, code, text in (
        (url, 0, "written, listed, read and removed"),
        ("s3://no-such-bucket/x", 1, "create the"),
    ):
        file = write_config(tmp_path, {"checkpoint": {"dir": place}})
        done = CliRunner().invoke(cli, ["doctor", "--config", str(file), "--json"])
        (finding,) = [each for each in json.loads(done.stdout) if each["check"] == "stores of checkpoints"]
        assert (finding["state"] == "problem") == bool(code) and text in finding["found"]
        assert not code or "bamboo.checkpoint.dir" in finding["found"]
    assert Objects(url).find() == {}
