"""Tries the package with several versions of DeepSpeed and torch; not part of the test suite.

python tests/matrix.py --out FOLDER [--torch 2.6.0 --torch ...] [--deepspeed 0.16.9 --deepspeed ...] [--every]

For each version of torch an environment is made in FOLDER, in which DeepSpeed is exchanged. Without ``--every`` each
DeepSpeed is tried with the oldest and the newest torch, and each torch with the newest DeepSpeed. What has been tried
is kept in FOLDER/results.json and not tried again.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import click
from rich import box
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
TORCH = ("2.6.0", "2.7.1", "2.8.0", "2.9.1", "2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
#: In 0.18.7 and 0.18.9 DeepSpeed's own ZeRO-1 with pipelines fails on CPUs.
#: 0.18.6 and 0.19.2 divide the gradients of each stage.
DEEPSPEED = ("0.16.9", "0.17.6", "0.18.6", "0.19.2", "0.19.8")
#: What touches DeepSpeed's and torch's insides, and jobs that lose workers; the longest first.
TESTS = (
    "tests/job/test_precision.py::test_optimizers_of_roles_that_went_elsewhere_leave_memory",
    "tests/job/test_precision.py::test_precision[bf16-zero-data]",
    "tests/job/test_precision.py::test_precision[fp16-zero-data]",
    "tests/job/test_tied.py::test_both_ends_on_one_member",
    "tests/job/test_elastic.py::test_members_join",
    "tests/job/test_engine_surface.py::test_surface[losses]",
    "tests/job/test_engine_surface.py::test_curriculum",
    "tests/unit/state/test_converting.py",
    "tests/unit/engine/test_corruption.py",
    "tests/job/test_stored_jobs.py",
    "tests/job/test_versions.py",
    *(
        f"tests/process/test_backend.py::test_{name}"
        for name in (
            "every_call_equals_stock_gloo",
            "torch_knows_the_groups",
            "groups_of_the_backends_that_carry_ours_are_ours",
            "groups_of_other_backends_are_refused",
            "roles_that_share_a_member",
            "adopting_a_role_of_a_group_made_by_torch",
            "ddp",
        )
    ),
    "tests/unit/schedule/test_schedule.py",
    "tests/unit/state/test_state_tree.py",
)
#: Where a test ends when the run fails that it compares with.
_STOCK = "tests/support/references.py:"


def pairs(torches: Sequence[str], deepspeeds: Sequence[str], every: bool) -> list[tuple[str, str]]:
    """(torch, DeepSpeed) in the order of torch's versions, which are costly to exchange."""
    ends = {torches[0], torches[-1]}
    return [(t, d) for t in torches for d in deepspeeds if every or t in ends or d == deepspeeds[-1]]


class Environment:
    """A virtual environment with one version of torch."""

    def __init__(self, folder: Path, torch: str) -> None:
        self.python = folder / "bin" / "python"
        self._folder = folder
        if (folder / "ready").exists():
            return
        if folder.exists():
            shutil.rmtree(folder)
        venv.create(folder, with_pip=True)
        self._pip("--upgrade", "pip", "setuptools", "wheel")
        self._pip(f"torch=={torch}")
        self._pip("--no-deps", "--no-build-isolation", "--editable", str(ROOT))
        self._pip(*(r for r in self._requirements() if not r.startswith(("torch", "deepspeed"))))
        (folder / "ready").touch()

    def _pip(self, *arguments: str) -> None:
        subprocess.run([self.python, "-m", "pip", "install", "--quiet", *arguments], check=True)

    def _requirements(self) -> list[str]:
        """The package's own, with those of its tests."""
        code = "import importlib.metadata, json; print(json.dumps(importlib.metadata.requires('bamboo_ds')))"
        text = subprocess.run([self.python, "-c", code], check=True, capture_output=True, text=True).stdout
        return [str(r).partition(";")[0].strip() for r in json.loads(text)]

    def run(self, deepspeed: str, report: Path) -> dict[str, Any]:
        """The tests with this version of DeepSpeed."""
        self._pip("--no-build-isolation", f"deepspeed=={deepspeed}")
        env = os.environ | {
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            "TORCH_EXTENSIONS_DIR": str(self._folder / f"extensions-{deepspeed}"),
            "PATH": f"{self.python.parent}{os.pathsep}{os.environ['PATH']}",
        }
        options = ["-m", "", "--numprocesses", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
        command = [self.python, "-m", "pytest", *options, f"--junitxml={report}"]
        with open(report.with_suffix(".txt"), "wb") as log:
            subprocess.run([*command, *TESTS], cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT, check=False)
        return outcome(report)


def outcome(report: Path) -> dict[str, Any]:
    """How many tests passed, which did not, and in which of these the undisturbed run failed: DeepSpeed's own."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    found = {
        f"{case.get('classname')}::{case.get('name')}": case.findtext("failure") or case.findtext("error")
        for case in cases
    }
    bad = {name: text for name, text in found.items() if text is not None}
    stock = [name for name, text in bad.items() if text.rstrip().rpartition("\n")[2].startswith(_STOCK)]
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {
        "passed": len(found) - len(bad) - skipped,
        "skipped": skipped,
        "failed": sorted(set(bad) - set(stock)),
        "stock_fails": sorted(stock),
    }


def table(results: dict[str, dict[str, Any]], torches: Sequence[str], deepspeeds: Sequence[str]) -> Table:
    """A row for each torch, a column for each DeepSpeed: passed of all."""
    shown = Table("torch", *(f"DeepSpeed {d}" for d in deepspeeds), box=box.MARKDOWN)
    for torch in torches:
        found = [results.get(f"{torch} {deepspeed}") for deepspeed in deepspeeds]
        shown.add_row(torch, *("not run" if r is None else _summary(r) for r in found))
    return shown


def _summary(result: dict[str, Any]) -> str:
    text = f"{result['passed']} of {result['passed'] + len(result['failed'])}"
    return f"{text} (stock fails in {len(result['stock_fails'])})" if result["stock_fails"] else text


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder for environments and results.")
@click.option("--torch", "torches", multiple=True, default=TORCH, show_default=True)
@click.option("--deepspeed", "deepspeeds", multiple=True, default=DEEPSPEED, show_default=True)
@click.option("--every", is_flag=True, help="Each DeepSpeed with each torch.")
@click.option("--keep", is_flag=True, help="Keep the environments, some gigabytes each.")
def main(out: Path, torches: tuple[str, ...], deepspeeds: tuple[str, ...], every: bool, keep: bool) -> None:
    """Try the package with several versions of DeepSpeed and torch."""
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    file = out / "results.json"
    results: dict[str, dict[str, Any]] = json.loads(file.read_text()) if file.exists() else {}
    todo = [pair for pair in pairs(torches, deepspeeds, every) if " ".join(pair) not in results]
    for torch in dict.fromkeys(torch for torch, _ in todo):
        folder = out / f"torch-{torch}"
        environment = Environment(folder, torch)
        for deepspeed in (d for t, d in todo if t == torch):
            result = environment.run(deepspeed, out / f"torch-{torch}-deepspeed-{deepspeed}.xml")
            results[f"{torch} {deepspeed}"] = result
            file.write_text(json.dumps(results, indent=1))
            click.echo(f"torch {torch}, DeepSpeed {deepspeed}: {json.dumps(result)}")
        if not keep:
            shutil.rmtree(folder)
    Console().print(table(results, torches, deepspeeds))
    if any(result["failed"] for result in results.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
