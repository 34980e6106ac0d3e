"""What a rank prints and writes for the whole job goes on when the rank is lost, once."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from bamboo_ds import hooks, megatron, speaks_for
from bamboo_ds.worker import job as jobs

pytestmark = pytest.mark.claim("guides/scripts.md")


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
        self.session = SimpleNamespace(attachment=SimpleNamespace(script=None, context="engine"))

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

    job.session.attachment.acting_for = acting_for
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
