"""A script under a worker's eyes runs as under the interpreter alone, and each of its ends is seen."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.jobs import SUPPORT, environment, run_text
from tests.unit.worker.test_script import STUB

pytestmark = pytest.mark.claim("reference/settings.md")


SEEN = """
import json, multiprocessing, os, sys, __main__
def work(): pass
if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=work)
    child.start()
    child.join()
    assert __main__.work is work and __main__.__dict__ is globals()
    spec = __spec__ and __spec__.name
    print(json.dumps([__file__, __name__, spec, __package__, sys.argv, sys.path, child.exitcode]), flush=True)
    import atexit
    atexit.register(lambda: print("at exit", __main__.work is work))
"""
ENDINGS = {
    "pass": 0,
    "raise SystemExit(3)": 3,
    "raise SystemExit('why')": 1,
    "sys.exit()": 0,
    "raise KeyboardInterrupt": -2,
    "None.x": 1,
    "1 +": 1,
}


@pytest.mark.integration
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_script_runs_as_by_itself(tmp_path: Path, ending: str) -> None:
    (tmp_path / "folder").mkdir()
    for file in ("train.py", "folder/__main__.py"):
        (tmp_path / file).write_text(f"{SEEN}    {ending}\n")
    targets = (["folder/../train.py"], ["-m", "train"], ["folder"]) if ending == "None.x" else (["train.py"],)
    for target in targets:
        alone, watched = (
            subprocess.run(
                [sys.executable, "-u", *stub, *target, "a b", "--c"],
                env={**environment(), "PYTHONPATH": str(SUPPORT.parents[1])},
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=120,
                preexec_fn=lambda: signals(),
            )
            for stub in ((), STUB)
        )
        assert watched.returncode == alone.returncode == ENDINGS[ending], watched.stderr
        assert watched.stdout == alone.stdout
        # The interpreter shows its own frames of a module.
        last = 0 if target[0].endswith(".py") else -1
        assert watched.stderr.splitlines()[last:] == alone.stderr.splitlines()[last:]


REFUSED = """
from bamboo_ds.config import parse_block
def begin(block):
    parse_block(block)
begin({"nonsense": 1})
"""


@pytest.mark.integration
def test_an_error_that_says_what_to_do_is_shown_with_the_scripts_lines_alone(tmp_path: Path) -> None:
    """Not with those of the package, nor with what it was made of."""
    (tmp_path / "train.py").write_text(REFUSED)
    env = {**environment(), "PYTHONPATH": str(SUPPORT.parents[1])}
    command = [sys.executable, *STUB, "train.py"]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert 'train.py", line 5, in <module>' in done.stderr and 'train.py", line 4, in begin' in done.stderr
    assert "bamboo_ds/" not in done.stderr and "direct cause" not in done.stderr
    assert done.stderr.count("bamboo.nonsense") == 1 and "ConfigError: " in done.stderr


def signals() -> None:
    """As a shell in the foreground starts a program."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_DFL)


FAILS = """
import os, threading
from sys import exit
from small_job import begin

engine, data = begin(7)
engine.train_batch(data)
if os.environ["RANK"] == "1":
    threading.Thread(target=threading.Event().wait).start()
    print("it fails", flush=True)
    END
for _ in range(2):
    engine.train_batch(data)
"""


@pytest.mark.integration
@pytest.mark.parametrize("end", ["raise SystemExit(3)", "exit(3)"])
def test_a_worker_that_exits_in_whatever_way_ends_the_job(tmp_path: Path, end: str) -> None:
    result = run_text(tmp_path, FAILS.replace("END", end), exit_code=3)
    assert "it fails" in result.output
    (failed,) = result.events("member_failed")
    assert (failed["rank"], failed["exit_code"], failed["reason"]) == (1, 3, "exit")
    assert "[bamboo] first failure: worker m1" in result.output
