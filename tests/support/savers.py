"""Members of a job that do nothing but save, with real files."""

from __future__ import annotations

import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from bamboo_ds.state import writer
from bamboo_ds.state.checkpoints import PARTIAL, REMOVING, REPLACED, SaveRecord, hidden
from bamboo_ds.state.hostcopy import HostCopy
from bamboo_ds.state.places import CheckpointPlace
from bamboo_ds.state.saver import CheckpointSaver
from bamboo_ds.state.shared_folder import SharedFolder
from bamboo_ds.state.writer import HostFile, Save, SaveResult
from bamboo_ds.topology import Layout

LAYOUT = Layout(pipelines=1, stages=2)
#: The thread that writes is nicer than all that computes, and waits for a disk that all tests share.
WAIT_S = 120.0
KIB = 1024


def content(rank: int, step: int, kib: int = 8) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {"weight": torch.randn(kib * KIB // 4, generator=generator), "step": step, "tag": ("t", None)}


def names(rank: int) -> list[str]:
    """What DeepSpeed calls the files of this stage."""
    return [f"layer_{rank:02d}-model_states.pt", f"mp_rank_{rank:02d}_model_states.pt"]


def files(rank: int, step: int, kib: int = 8) -> list[HostFile]:
    return [HostFile(name, HostCopy(content(rank, step, kib))) for name in names(rank)]


class Member:
    """A saver that notes what it was told."""

    def __init__(self, folder: Path, rank: int, place: CheckpointPlace | None = None, **settings: Any) -> None:
        self.folder, self.rank = folder, rank
        self.place = place or SharedFolder(folder)
        self.complete: list[SaveResult] = []
        self.failed: list[SaveResult] = []
        callbacks = {"on_complete": self.complete.append, "on_failed": self.failed.append}
        self.job = settings.pop("job", "job")
        self.saver = CheckpointSaver(self.job, f"m{rank}", **callbacks, **{"timeout_s": WAIT_S, **settings})

    def begin(
        self,
        step: int,
        *,
        attempt: str = "a",
        tag: str | None = None,
        layout: Layout = LAYOUT,
        interrupt: Callable[[], None] | None = None,
        **settings: Any,
    ) -> bool:
        name = f"step{step}" if tag is None else tag
        record = SaveRecord(job=self.job, save_id=f"{attempt}-{step}", tag=name, step=step, layout=layout)
        owners = tuple(f"m{rank}" for rank in range(layout.size))
        return self.saver.begin(Save(self.place, record, owners, **settings), interrupt)

    def save(self, step: int, kib: int = 8, **settings: Any) -> Member:
        self.begin(step, **settings)
        self.saver.add(self.rank, files(self.rank, step, kib))
        self.saver.submit()
        return self

    def wait(self) -> None:
        assert self.saver.wait(WAIT_S), f"not written in {WAIT_S:g} s\n{stacks()}"


def stacks() -> str:
    """Where every thread of this process stands."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames().items()
    return "\n".join(f"{names.get(ident)}:\n{''.join(traceback.format_stack(frame))}" for ident, frame in frames)


@pytest.fixture
def members(tmp_path: Path) -> Iterator[Callable[..., Member]]:
    made: list[Member] = []

    def make(rank: int, folder: Path = tmp_path / "checkpoints", **settings: Any) -> Member:
        made.append(Member(folder, rank, **settings))
        return made[-1]

    yield make
    for member in made:
        member.saver.abort("end of the test")
        member.saver.close()


def save_all(pair: list[Member], step: int, **settings: Any) -> None:
    for member in pair:
        member.save(step, **settings)
    for member in pair:
        member.wait()


def rest(folder: Path) -> list[Path]:
    """Hidden folders that are left, but for the empty ones of saves that were given up."""
    found = [path for kind in (PARTIAL, REPLACED) for path in hidden(folder, kind)]
    return [*found, *(path for path in hidden(folder, REMOVING) if any(path.iterdir()))]


@contextmanager
def small_file_system(folder: Path, size: int) -> Iterator[Path]:
    """A file system of ``size`` bytes at ``folder``; skips the test where none can be mounted."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"this process may not mount a small file system: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False, capture_output=True)


class Gate:
    """Holds one member's writer in the middle of a file."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        append = writer.ChecksummedFile._append

        def held(file: Any, chunk: memoryview) -> None:
            if not self.reached.is_set() and file._file.name.endswith(name):
                self.reached.set()
                assert self.open.wait(WAIT_S)
            append(file, chunk)

        monkeypatch.setattr(writer.ChecksummedFile, "_append", held)
