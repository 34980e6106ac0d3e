"""Checkpoints while members are lost, come late, or come to lead in the middle of a save.

Members of a job are savers (each with its own thread) on one folder, as they would be on a shared file system.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bamboo_ds.state import publish, saver
from bamboo_ds.state.checkpoints import CheckpointError, list_checkpoints, read_manifest, verify
from bamboo_ds.topology import Layout
from tests.support.leaks import no_leaks
from tests.support.savers import WAIT_S, Gate, Member, files, members, names, rest

pytestmark = pytest.mark.claim("guides/checkpoints.md", "reference/settings.md")

__all__ = ["members"]  # a fixture


@pytest.fixture(autouse=True)
def _no_leaks() -> Iterator[None]:
    with no_leaks():
        yield


def test_late_writer_of_an_abandoned_save(members: Callable[..., Member], monkeypatch: pytest.MonkeyPatch) -> None:
    leader, late, follower = members(0), members(1), members(1)
    gate = Gate(monkeypatch, names(1)[0])
    for member in (leader, late):
        member.save(1, attempt="first")
    assert gate.reached.wait(WAIT_S)
    leader.saver.abort("member m1 was lost")
    for member in (leader, follower):
        member.save(1, attempt="second")
    for member in (leader, follower):
        member.wait()
    assert [r.save_id for r in leader.complete] == ["second-1"]
    assert "member m1 was lost" in str(leader.failed[0].error)
    before = sorted(leader.folder.rglob("*"))
    gate.open.set()
    late.wait()
    assert "given it up" in str(late.failed[0].error)
    assert sorted(leader.folder.rglob("*")) == before and verify(leader.folder / "step1") == []


def test_repetition_supersedes(members: Callable[..., Member]) -> None:
    leader = members(0)
    leader.save(1, attempt="first")  # role 1 never writes
    leader.begin(1, attempt="second")  # does not wait for it
    leader.saver.add(0, files(0, 1))
    leader.saver.submit()
    members(1).save(1, attempt="second")
    leader.wait()
    assert [r.save_id for r in leader.failed] == ["first-1"] and [r.save_id for r in leader.complete] == ["second-1"]
    with pytest.raises(CheckpointError, match="needs another one"):
        members(0).save(1, attempt="x").begin(1, attempt="x")


@pytest.mark.parametrize("written", [True, False])
def test_member_lost(members: Callable[..., Member], written: bool) -> None:
    leader, victim = members(0), members(1)
    if written:
        victim.save(1)
    leader.save(1)
    if written:
        victim.wait()
    leader.saver.follow({"m0"})
    leader.wait()
    if written:
        assert [r.step for r in leader.complete] == [1]
    else:
        assert "roles 1 were lost" in str(leader.failed[0].error)
        assert list_checkpoints(leader.folder) == []


def test_a_member_that_comes_late_to_a_failed_save_does_not_wait_for_it(members: Callable[..., Member]) -> None:
    """The partial folder has gone before it has ever seen it; the next save would wait for this one."""
    leader, late, layout = members(0), members(1), Layout(pipelines=1, stages=3)
    leader.save(1, layout=layout)
    leader.saver.follow({"m0", "m1"})
    leader.wait()
    assert "roles 2 were lost" in str(leader.failed[0].error)
    late.save(1, layout=layout)
    late.wait()
    assert late.failed[0].aborted and "given it up" in str(late.failed[0].error)
    assert [path.name for path in leader.folder.iterdir()] == [".bamboo-removing~job~a-1"]
    assert list_checkpoints(leader.folder) == []
    leader.saver.close()
    assert not list(leader.folder.iterdir())


@pytest.mark.parametrize("point", ["never", "manifest", "complete"])
def test_leader_lost(members: Callable[..., Member], monkeypatch: pytest.MonkeyPatch, point: str) -> None:
    """Another member comes to lead: it completes what has been written, whatever the old one had got to."""
    old, heir = members(0), members(1)
    real = publish.publish

    def stop(*_: Any) -> Path:
        raise KeyboardInterrupt  # not handled anywhere: the thread ends as if killed

    with monkeypatch.context() as patch:
        if point == "manifest":
            patch.setattr(publish, "publish", stop)
            patch.setattr(threading, "excepthook", lambda _: None)
        if point != "never":
            old.save(1)
        heir.save(1)
        if point == "manifest":
            assert old.saver._thread is not None
            old.saver._thread.join(WAIT_S)
            assert not old.saver._thread.is_alive()
            old.saver._running = None
        elif point == "complete":
            old.wait()
        if point != "never":
            heir.wait()
    assert publish.publish is real
    heir.saver.follow({"m1"})
    heir.wait()
    if point == "never":  # what role 0 had is lost with its owner
        assert "roles 0 were lost" in str(heir.failed[0].error) and rest(heir.folder) == []
    else:
        assert [r.path for r in heir.complete] == [heir.folder / "step1"]
        assert verify(heir.folder / "step1") == []


@pytest.mark.parametrize("submitted", [False, True])
def test_leader_lost_when_the_next_save_has_begun(members: Callable[..., Member], submitted: bool) -> None:
    """Until that is agreed on, the last one is seen through; then it had ended where it was led."""
    old, heir = members(0), members(1)
    old.save(1)
    heir.save(1)
    for member in (old, heir):
        member.wait()
    (heir.folder / "latest").unlink()  # as if the old one had not got there
    heir.begin(2)
    if submitted:
        heir.saver.skip()
    heir.saver.follow({"m1"})
    heir.wait()
    assert [r.step for r in heir.complete] == ([] if submitted else [1]) and not heir.failed
    assert (heir.folder / "latest").exists() != submitted


def test_latest_never_goes_back(members: Callable[..., Member]) -> None:
    """A member that has published a checkpoint late must not hide the newer one of its successor."""
    alone = members(0)
    for step in (1, 2):
        alone.save(step, layout=Layout(1, 1)).wait()
    assert not publish.point_latest(alone.folder, "step1")
    assert (alone.folder / "latest").read_text() == "step2"


def test_latest_does_not_go_back_while_a_slow_member_writes_it(
    members: Callable[..., Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its successor writes when it has looked, and before it writes."""
    alone = members(0)
    for step in (1, 2):
        alone.save(step, layout=Layout(1, 1)).wait()
    latest, write = alone.folder / "latest", publish.write_atomically
    latest.write_text("step1")

    def overtaken(path: Path, text: str) -> None:
        monkeypatch.undo()
        assert publish.point_latest(alone.folder, "step2")
        write(path, text)

    monkeypatch.setattr(publish, "write_atomically", overtaken)
    assert not publish.point_latest(alone.folder, "step1")
    assert publish.write_atomically is write, "nobody has overtaken it"
    assert latest.read_text() == "step2" and rest(alone.folder) == []


def test_deadline(members: Callable[..., Member]) -> None:
    # So long that no single write takes it: then the writer would count as hanging.
    leader, follower = members(0, timeout_s=2.0), members(1, timeout_s=2.0)
    follower.save(1).wait()
    assert "has not appeared" in str(follower.failed[0].error)
    leader.save(2).wait()
    assert "nothing has moved" in str(leader.failed[0].error) and "roles 1 are missing" in str(leader.failed[0].error)


def test_replacing_keeps_a_scripts_own_files(members: Callable[..., Member]) -> None:
    alone = members(0)
    alone.save(1, layout=Layout(1, 1), tag="last").wait()
    (alone.folder / "last" / "tokenizer").mkdir()
    (alone.folder / "last" / "tokenizer" / "vocabulary.txt").write_text("a b")
    (alone.folder / "last" / "layer_07-model_states.pt").touch()  # of another topology
    alone.save(2, layout=Layout(1, 1), tag="last").wait()
    assert read_manifest(alone.folder / "last").step == 2 and verify(alone.folder / "last") == []
    assert (alone.folder / "last" / "tokenizer" / "vocabulary.txt").read_text() == "a b"
    assert rest(alone.folder) == []


def test_close_and_exit(members: Callable[..., Member]) -> None:
    alone, stuck = members(0), members(0)
    alone.save(1, layout=Layout(1, 1))
    alone.saver.close()
    assert [r.step for r in alone.complete] == [1]
    with pytest.raises(CheckpointError, match="closed"):
        alone.begin(2)
    stuck.save(2)
    stuck.saver.close(timeout_s=0.0)
    assert "when the job ended" in str(stuck.failed[0].error)
    assert not [t for t in threading.enumerate() if t.name == saver.THREAD]


@pytest.mark.parametrize("tag", ["", "..", "../up", "/absolute", ".hidden", "latest", "a/../b", "a/b/c/d/e"])
def test_unusable_tags(members: Callable[..., Member], tag: str) -> None:
    with pytest.raises(CheckpointError, match="not usable"):
        members(0).begin(1, tag=tag)
