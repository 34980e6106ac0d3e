"""C++ extensions that are compiled when they are first used: who does so, who waits, and what is left of it."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from bamboo_ds import compiling, processes
from bamboo_ds.worker import job as jobs
from tests.support.jobs import DEADLINE_S

pytestmark = pytest.mark.claim("guides/elastic.md")


def test_what_a_lock_says(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    assert compiling.state("adam", lock) == "loads the C++ extension adam"
    holding = os.open(lock, os.O_CREAT | os.O_EXCL)  # as torch does
    assert compiling.state("adam", lock).startswith("compiles the C++ extension adam")
    os.close(holding)
    os.utime(lock, (time.time() - 7200,) * 2)
    said = compiling.state("adam", lock)
    assert f"at the lock {lock}, which is 720" in said and "no process has open" in said and f"(rm {lock})" in said


def test_without_a_job_torch_loads_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_job", None)
    torch_s: Any = ModuleType("torch.utils.cpp_extension")
    torch_s.load = lambda name, sources, verbose=False: (name, sources, verbose)
    compiling.patch(torch_s)
    wrapped = torch_s.load
    compiling.patch(torch_s)
    assert torch_s.load is wrapped, "once"
    assert torch_s.load("a", sources=["b"], verbose=True) == ("a", ["b"], True)


@pytest.mark.parametrize(("holder", "told"), [("mine", True), ("another's", False), ("nobody's", True)])
def test_before_there_is_a_job_one_line_tells_it(
    holder: str, told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A script that compiles before it asks for its process groups."""
    monkeypatch.setattr(jobs, "_job", None)
    monkeypatch.setattr(compiling, "FIRST_WORD_S", 0.0)
    monkeypatch.setenv("BAMBOO_CHANNEL_FD", "5")
    monkeypatch.setattr(processes, "who_has", lambda lock: {"mine": [os.getpid()], "another's": [1]}.get(holder, []))
    (tmp_path / "lock").touch()
    asked = threading.Event()
    real = compiling.state
    monkeypatch.setattr(compiling, "state", lambda *place: (real(*place), asked.set())[0])
    torch_s: Any = ModuleType("torch.utils.cpp_extension")
    torch_s.load = lambda name, build_directory: asked.wait(DEADLINE_S)
    compiling.patch(torch_s)
    assert torch_s.load("adam", build_directory=str(tmp_path)), "it is looked at"
    assert len(caplog.messages) == told and all("C++ extension adam" in message for message in caplog.messages)
