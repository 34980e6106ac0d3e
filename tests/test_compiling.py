"""C++ extensions that are compiled when they are first used: who does so, who waits, and what is left of it."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from bamboo_ds import compiling, processes
from bamboo_ds.worker import job as jobs

from .support.jobs import DEADLINE_S, RunningJob, write_config

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


@pytest.mark.integration
def test_another_process_has_the_lock(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    holding = os.open(lock, os.O_CREAT | os.O_EXCL)
    other = subprocess.Popen(["sleep", "60"], pass_fds=[holding])
    os.close(holding)
    try:
        assert f"waits for process {other.pid}, which compiles" in compiling.state("adam", lock)
    finally:
        other.kill()
        other.wait()
    assert "no process has open" in compiling.state("adam", lock)


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


#: Ranks 0 and 1 load one extension, rank 2 another one, whose lock is left of a build that was stopped.
LOADS = """
import os, sys
from pathlib import Path
import deepspeed
from torch.utils import cpp_extension

out = Path(sys.argv[sys.argv.index("--out") + 1])
deepspeed.init_distributed()
name = "left" if os.environ["RANK"] == "2" else "slow"
cpp_extension.load(name, [str(out / "slow.cpp")], build_directory=str(out / name))
"""
COMPILER = """#!/bin/sh
echo $$ > "$OUT/compiler"
sleep 600 &
wait
"""


@pytest.mark.integration
def test_a_job_says_what_it_waits_for_and_ends_compilers(tmp_path: Path) -> None:
    script, compiler = tmp_path / "loads.py", tmp_path / "c++"
    script.write_text(LOADS)
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    (tmp_path / "slow.cpp").touch()
    for folder in ("slow", "left"):
        (tmp_path / folder).mkdir()
    (tmp_path / "left" / "lock").touch()
    variables = {"CXX": str(compiler), "TORCH_DONT_CHECK_COMPILER_ABI": "1", "OUT": str(tmp_path)}
    stale = f"waits for the C++ extension left at the lock {tmp_path / 'left' / 'lock'}"
    words = "compiles the C++ extension slow", "waits for process", stale
    with RunningJob(tmp_path, 3, [], write_config(tmp_path, {}), script, variables=variables) as job:
        job.wait_for("a word of each worker", lambda: all(f"the worker {word}" in job.output() for word in words))
        compilers = psutil.Process(int((tmp_path / "compiler").read_text()))

        def all_told() -> bool:
            status = job.status()
            told = [member["doing"] or "" for member in status["members"]]
            return status["step"] is None and all(sum(t.startswith(word) for t in told) == 1 for word in words)

        job.wait_for("the same in the status", all_told)
        job.process.terminate()
        result = job.finish()
    assert result.exit_code == 143
    assert not compilers.is_running()
    assert not (tmp_path / "slow" / "lock").exists(), "the next start would hang at it"
    assert (tmp_path / "left" / "lock").exists(), "another host may have it open"
