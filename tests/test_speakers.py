"""What a rank prints and writes for the whole job goes on when the rank is lost, once."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from bamboo_ds import hooks, megatron, speaks_for
from bamboo_ds.worker import job as jobs

from .support.faults import in_turn, mark
from .support.jobs import SUPPORT, RunningJob, run_stock, slow_until, write_config

pytestmark = pytest.mark.claim("guides/scripts.md")

SCRIPT = SUPPORT / "train_like_megatron.py"
LINE = re.compile(r"(?:iteration \d+ \|.*|validation at .*|rank 0 has seen .*|timers: .*)$", re.MULTILINE)
LAST = 3


def lines(*files: Path) -> list[str]:
    """What the script has printed on ranks 0 and last."""
    return [line for file in files for line in LINE.findall(file.read_text())]


def values(folder: Path) -> dict[str, list[list[Any]]]:
    """What each process has written to TensorBoard, by its id."""
    files = (folder / "tensorboard").glob("events.*")
    return {file.suffix: [json.loads(line) for line in file.read_text().splitlines()] for file in files}


@pytest.mark.integration
def test_megatron_s_output_goes_on(tmp_path: Path) -> None:
    """The last rank is lost, then rank 0; then somebody joins as one of them. Nothing is missing, nothing is twice."""
    # The speaker needs what the lost rank does in that step: it has told of the step before, as the lost rank has.
    faults = in_turn(
        {"rank": LAST, "step": 3, "at": "BackwardPass", "micro_batch": 2},
        {"rank": 0, "step": 5, "at": "BackwardPass", "micro_batch": 2},
    )
    go = tmp_path / "go"
    command = ["--stages", "2", *slow_until(go, 0.1), "--faults", json.dumps(faults)]
    with RunningJob(tmp_path, 4, command, write_config(tmp_path, {}, 4), SCRIPT) as job:
        job.wait_for("two losses", lambda: len(job.events("member_lost")) == 2)
        job.join()
        joined = tmp_path / "join-0.log"
        job.wait_for("output of the member that joined", lambda: joined.exists() and len(lines(joined)) > 2, 120)
        go.touch()
        result = job.finish()
    assert result.exit_code == 0, result.output[-6000:]
    assert result.faults() == sorted(mark(fault) for fault in faults)
    stock = tmp_path / "stock"
    stock.mkdir()
    undisturbed = run_stock(stock, 4, ["--stages", "2", *result.length], write_config(stock, None, 4), SCRIPT)
    assert undisturbed.exit_code == 0, undisturbed.output[-4000:]
    expected = lines(*stock.glob("log-*.txt"))
    assert len(set(expected)) > 40 and any("validation" in line for line in expected)
    assert Counter(lines(*tmp_path.glob("*.log"))) == Counter(expected)
    # One of the two ranks is back, and the other one is still spoken for by a survivor.
    assert len({line.startswith("rank 0") for line in lines(joined)}) == 1
    check_values(tmp_path, stock)
    # The norm over all stages lacks a stage from the first loss on, which is said.
    told = [event for event in result.events("collective_incomplete") if "calc_params_l2_norm" in event["place"]]
    assert [event["lost_ranks"] for event in told][:1] == [[LAST]]
    assert all(event["operation"] == "allreduce" and LAST - 2 in event["ranks"] for event in told[:1])
    warned = (
        r"allreduce over ranks 1, 3, called at \S+/utils.py:\d+ in calc_params_l2_norm: no process runs as ranks \(3\)"
    )
    assert len(re.findall(warned, result.output)) == 1


def check_values(folder: Path, stock: Path) -> None:
    """Those of TensorBoard: each once, by two processes or three; equal but for norms after a loss."""
    (expected,) = values(stock).values()
    found = values(folder)
    assert len(found) in (2, 3) and all(found.values())
    written = [value for each in found.values() for value in each]
    assert sorted((name, step) for name, _, step in written) == sorted((name, step) for name, _, step in expected)
    exact = [value for value in expected if value[0] != "params-norm"]
    assert sorted(value for value in written if value[0] != "params-norm") == sorted(exact)


def module(name: str, text: str) -> Any:
    """A module that is patched as if it had just been imported."""
    made: Any = ModuleType(name)
    exec(text, made.__dict__)
    megatron.patch(made)
    return made


class Speaker:
    """In the place of a job of three ranks, in which rank 1 speaks for ``ranks``."""

    def __init__(self, *ranks: int) -> None:
        self.ranks = ranks
        self.channel = SimpleNamespace(rank=1)
        self.session = SimpleNamespace(script=None)

    def rank_of(self, rank: int) -> int:
        return rank % 3

    def speaks_for(self, rank: int) -> bool:
        return rank % 3 in self.ranks


WRITER = """
from types import SimpleNamespace
WRITER, FAILS, OPENED, FOLDER = None, True, [], "tensorboard"

def get_args():
    return SimpleNamespace(rank=1, tensorboard_dir=FOLDER)

def get_tensorboard_writer():
    return WRITER

def _set_tensorboard_writer(args):
    global WRITER
    OPENED.append(args.rank)
    if FAILS:
        raise PermissionError("the folder is on another host")
    WRITER = "writer"
"""


def test_other_versions_of_megatron(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Those without some function, with others' arguments, or where a writer cannot be opened."""
    job = Speaker(1, 2)
    monkeypatch.setattr(jobs, "job_of_main_thread", lambda: job)
    old = "class Timers:\n    def log(self, names, normalizer=1.0): return names, normalizer"
    assert module("megatron.timers", old).Timers().log(["a"], 2.0) == (["a"], 2.0)
    new = "class Timers:\n    def log(self, names, rank=None, normalizer=1.0): return rank, normalizer"
    timers = module("megatron.core.timers", new).Timers()
    assert [timers.log([], rank) for rank in (None, 0, 1)] == [(1, 1.0), (-1, 1.0), (1, 1.0)]
    elsewhere = module("megatron", "from os.path import join as print_rank_0")
    assert not hasattr(elsewhere.print_rank_0, "__wrapped__"), "what is imported is not wrapped again"
    broken = module("megatron.global_vars", WRITER)
    assert broken.get_tensorboard_writer() is None is broken.get_tensorboard_writer()
    assert broken.OPENED == [2], "once, as the lost rank"
    assert "what it would write is missing" in caplog.text and "the folder is on another host" in caplog.text
    works = module("megatron.global_vars", WRITER.replace("= None, True", "= None, False"))
    assert works.get_tensorboard_writer() == "writer"
    unasked = module("megatron.global_vars", WRITER.replace('"tensorboard"', "None"))
    assert unasked.get_tensorboard_writer() is None and not unasked.OPENED
    job.ranks = (1,)
    assert works.get_tensorboard_writer() is None
    job.ranks = (1, 2)
    assert works.get_tensorboard_writer() == "writer" and works.OPENED == [2]


def test_without_a_job_a_rank_speaks_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_job", None)
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert [speaks_for(rank) for rank in (-3, -2, -1, 0, 1, 2)] == [False, False, True, False, False, True]
    with pytest.raises(ValueError, match="no rank 3 in a job of 3 ranks"):
        speaks_for(3)


NEOX = {
    "__init__": """
import torch

def print_rank_0(*message):
    if torch.distributed.get_rank() == 0:
        print(*message)

from .training import report
""",
    "training": """
from megatron import print_rank_0
from megatron import print_rank_0 as say
from megatron.logging import tb_wandb_log
from megatron.utils import Timers

def report():
    print_rank_0("by its name")
    say("by another one")
    Timers().log(["forward"])
    tb_wandb_log("loss", 0.5)
    tb_wandb_log("norm", 0.7, all_ranks=True)
""",
    "logging": """
import torch

def tb_wandb_log(key, value, all_ranks=False):
    if torch.distributed.get_rank() == 0 or all_ranks:
        print(key, value)
""",
    "utils": """
import torch

class Timers:
    def log(self, names, normalizer=1.0):
        if torch.distributed.get_rank() == 0:
            print("time", *names)
""",
}


def forget_megatron() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
        del sys.modules[name]


def test_functions_that_a_package_defines_late_and_its_modules_have_imported(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    """GPT-NeoX imports torch, and so this package, in the middle of its own import."""
    job, acting = Speaker(0, 1), [1]

    @contextmanager
    def acting_for(rank: int, answer: Any) -> Iterator[None]:
        acting.append(rank)
        yield
        acting.pop()

    job.session.acting_for = acting_for
    monkeypatch.setattr(jobs, "job_of_main_thread", lambda: job)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: acting[-1])
    (tmp_path / "megatron").mkdir()
    for name, text in NEOX.items():
        (tmp_path / "megatron" / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    forget_megatron()
    request.addfinalizer(forget_megatron)
    # As torch's import finds the package: the hook is not there yet.
    monkeypatch.setattr(sys, "meta_path", [each for each in sys.meta_path if "bamboo" not in type(each).__module__])
    package = importlib.import_module("megatron")
    package.report()
    assert capsys.readouterr().out == "norm 0.7\n", "as on any rank besides the first"
    model = type("Engine", (), {})
    engines: Any = ModuleType("engines")
    engines.DeepSpeedEngine = model
    hooks.patch_engine(engines)
    monkeypatch.setattr(hooks, "bamboo_config", lambda config: config["bamboo"])
    monkeypatch.setattr(hooks, "_engine_class", lambda kind: kind)
    model(config={"bamboo": {}})
    package.report()
    everything = "by its name\nby another one\ntime forward\nloss 0.5\nnorm 0.7\n"
    assert capsys.readouterr().out == everything
    job.ranks = (1,)  # somebody has joined as rank 0
    model(config={"bamboo": {}})
    package.report()
    assert capsys.readouterr().out == "norm 0.7\n", "and nothing is wrapped twice"
    assert not hasattr(package.print_rank_0.__wrapped__, "__wrapped__")
