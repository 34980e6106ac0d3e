"""Checkpoints on disk: written in the background, complete or absent, whatever happens to whoever writes them.

Members of a job are savers (each with its own thread) on one folder, as they would be on a shared file system.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bamboo_ds.state import publish, writer
from bamboo_ds.state.checkpoints import (
    MANIFEST,
    PARTIAL,
    REPLACED,
    WRITTEN,
    Status,
    hidden,
    list_checkpoints,
    newest_complete,
)
from bamboo_ds.topology import Layout
from tests.support.etcd import wait_until
from tests.support.leaks import no_leaks
from tests.support.savers import (
    WAIT_S,
    Member,
    members,
    rest,
    save_all,
    small_file_system,
)

pytestmark = pytest.mark.claim("guides/checkpoints.md", "reference/cli.md", "reference/settings.md")

__all__ = ["members"]  # a fixture


@pytest.fixture(autouse=True)
def _no_leaks() -> Iterator[None]:
    with no_leaks():
        yield


# -- failures -------------------------------------------------------------------------------------------------


def _die_at(folder: Path, mark: Path, point: str, tag: str) -> None:
    """In a process of its own: save step 2 alone and be killed at ``point``."""

    def strike() -> None:
        mark.write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL)

    def killing(function: Callable[..., Any], when: Callable[..., bool] = lambda *_: True) -> Callable[..., Any]:
        def call(*arguments: Any, **settings: Any) -> Any:
            if when(*arguments):
                strike()
            return function(*arguments, **settings)

        return call

    append, write, rename = writer.ChecksummedFile._append, publish.write_atomically, os.rename
    if point == "file":
        big = writer._CHUNK
        writer.ChecksummedFile._append = killing(append, lambda f, _: f._size > big)  # type: ignore[method-assign]
    elif point == "rename":
        publish.publish = killing(publish.publish)
    elif point == "between":
        publish._exchange = lambda *_: False
        publish.os.rename = killing(rename, lambda a, _: PARTIAL in str(a))  # type: ignore[attr-defined]
    else:
        publish.write_atomically = killing(write, lambda path, _: path.name.endswith(point))
    Member(folder, 0).save(2, 9000, layout=Layout(1, 1), tag=tag).wait()


POINTS = {  # where, and whether the new checkpoint is complete then
    "file": False,
    ".written-0.json": False,
    MANIFEST: False,
    "rename": False,
    "latest": True,
}


@pytest.mark.integration
@pytest.mark.parametrize("point", [*POINTS, "between"])
def test_killed_while_writing(members: Callable[..., Member], tmp_path: Path, point: str) -> None:
    folder, mark = tmp_path / "checkpoints", tmp_path / "struck"
    alone = members(0)
    tag = "step1" if point == "between" else "step2"
    alone.save(1, layout=Layout(1, 1)).wait()
    victim = multiprocessing.get_context("fork").Process(target=_die_at, args=(folder, mark, point, tag))
    victim.start()
    victim.join(WAIT_S)
    assert victim.exitcode == -signal.SIGKILL and mark.read_text() == str(victim.pid)
    listed = {info.tag: info for info in list_checkpoints(folder, checksums=True)}
    if point == "between":  # the old one had given its name away; who comes next puts it back
        assert len(hidden(folder, REPLACED)) == len(hidden(folder, PARTIAL)) == 1
        publish.clean(folder, "job")
        listed = {info.tag: info for info in list_checkpoints(folder, checksums=True)}
        assert listed["step1"].step == 1
    elif POINTS[point]:
        assert listed["step2"].status is Status.COMPLETE
    else:
        assert listed["step2"].status is Status.UNFINISHED and "not complete" in listed["step2"].reasons[0]
        newest = newest_complete(folder)
        assert newest is not None and newest.tag == "step1"
    assert listed["step1"].status is Status.COMPLETE and (folder / "latest").read_text() == "step1"
    alone.save(3, layout=Layout(1, 1)).wait()
    assert [r.step for r in alone.complete] == [1, 3] and rest(folder) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    with small_file_system(tmp_path / "disk", 1 << 20) as folder:
        yield folder


@pytest.mark.integration
def test_full_disk(members: Callable[..., Member], small_disk: Path) -> None:
    pair = [members(0, small_disk), members(1, small_disk)]
    save_all(pair, 1)
    pair[0].save(2)
    wait_until(lambda: list(small_disk.glob(f"*/{WRITTEN}0.json")), "what the leading member writes")
    pair[1].save(2, 2000)  # the disk is full for the other one
    for member in pair:
        member.wait()
    assert os.strerror(errno.ENOSPC) in str(pair[1].failed[0].error)
    assert "role 1 could not write" in str(pair[0].failed[0].error)
    assert rest(small_disk) == []  # its space is free again
    newest = newest_complete(small_disk, checksums=True)
    assert newest is not None and newest.tag == "step1"
    save_all(pair, 3)
    assert [r.step for r in pair[0].complete] == [1, 3]


@pytest.mark.integration
def test_lost_mount(members: Callable[..., Member], small_disk: Path) -> None:
    alone = members(0, small_disk / "run" / "checkpoints")
    alone.save(1, layout=Layout(1, 1)).wait()
    subprocess.run(["umount", str(small_disk)], check=True)
    alone.save(2, layout=Layout(1, 1)).wait()
    assert "is it mounted?" in str(alone.failed[0].error)
    assert list(small_disk.iterdir()) == []
