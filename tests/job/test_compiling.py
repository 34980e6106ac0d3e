"""C++ extensions that are compiled when they are first used: who does so, who waits, and what is left of it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import psutil
import pytest

from bamboo_ds import compiling
from tests.support.jobs import RunningJob, write_config

pytestmark = pytest.mark.claim("guides/elastic.md")


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
