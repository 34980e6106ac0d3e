"""``benchmarks/gpu``: commands do not call a run on processors one on a GPU, keep their time, and find differences."""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from bamboo_ds.observe.spans import Kind, Span

pytestmark = pytest.mark.claim("benchmarks.md")

FOLDER = Path(__file__).parents[3] / "benchmarks" / "gpu"
COMMANDS = sorted(file.stem for file in FOLDER.glob("*.py") if "@experiment(" in file.read_text())
EMULATED = "EMULATED on the CPU: not a run on a GPU"


@pytest.fixture(scope="module")
def modules() -> Iterator[Callable[[str], Any]]:
    """The programs by name. They have names of programs of the folder above, which they import."""
    before, found = list(sys.path), {}
    sys.path.insert(0, str(FOLDER))

    def load(name: str) -> Any:
        if name not in found:
            spec = importlib.util.spec_from_file_location(f"gpu_{name}", FOLDER / f"{name}.py")
            assert spec is not None and spec.loader is not None
            found[name] = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(found[name])
        return found[name]

    yield load
    sys.path[:] = before


@pytest.fixture
def invoke(modules: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs a command on a machine without a GPU."""

    def run(name: str, *arguments: str) -> Any:
        main = modules(name).main
        cpu = SimpleNamespace(device_name=lambda: "cpu", is_available=lambda: True)
        monkeypatch.setattr(sys.modules["bench"], "get_accelerator", lambda: cpu)
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # a command sets it, where it is not set
        return CliRunner().invoke(main, arguments)

    return run


def test_all_experiments_are_commands_and_all_runs_them(modules: Callable[[str], Any]) -> None:
    assert set(COMMANDS) == {
        *("all", "copies", "exact", "first", "memory", "nccl", "overhead", "plain", "recovery", "smoke", "syncs"),
    }
    assert {program for (program, *_), _ in modules("all").EXPERIMENTS.values()} == set(COMMANDS) - {"all", "first"}
    assert {program for (program, *_), _ in modules("first").STEPS.values()} < set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_without_a_gpu_a_command_tells_its_options_and_refuses(
    name: str, invoke: Callable[..., Any], tmp_path: Path
) -> None:
    told = invoke(name, "--help")
    assert told.exit_code == 0
    assert all(option in told.output for option in ("--allow-cpu", "--minutes", "--out"))
    refused = invoke(name, "--out", str(tmp_path / "out"))
    assert refused.exit_code == 2
    assert "sees no GPU" in refused.output and "--allow-cpu" in refused.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ("exact", "copies", "memory")])
def test_a_command_whose_time_is_over_starts_nothing_and_leaves_its_results(
    name: str, invoke: Callable[..., Any], tmp_path: Path
) -> None:
    ended = invoke(name, "--allow-cpu", "--minutes", "0", "--out", str(tmp_path))
    assert ended.exit_code == 1
    result = json.loads((tmp_path / f"gpu-{name}.json").read_text())
    assert result["problems"]
    assert (result["device"], result["emulated"]) == (EMULATED, True)
    assert not (tmp_path / "jobs").exists()


def test_all_output_of_an_emulated_run_says_so(invoke: Callable[..., Any], tmp_path: Path) -> None:
    done = invoke("exact", "--allow-cpu", "--kernel", "layer_norm", "--out", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert done.output.count(EMULATED) >= 2
    result = json.loads((tmp_path / "gpu-exact.json").read_text())
    assert (result["device"], result["emulated"]) == (EMULATED, True)
    assert [row["forward"] + row["backward"] for row in result["rows"]] == [0] * 6
    assert all(row["repetitions"] for row in result["rows"])


def test_a_kernel_that_differs_is_found(modules: Callable[[str], Any]) -> None:
    exact, calls = modules("exact"), itertools.count()

    def unlike_itself(x: torch.Tensor) -> torch.Tensor:
        return x * (1 + 2e-7 * (next(calls) > 1))

    row = exact.Figures("unlike itself", "fp32", False)
    load = exact.Load("cpu", exact.random.Random(1))
    exact.measure(lambda: ([torch.ones(4, requires_grad=True)], unlike_itself), row, load, 3, 60)
    # The second time is like the first.
    assert (row.repetitions, row.forward, row.backward, row.refused) == (3, 2, 2, "")
    assert 0 < row.largest < 1e-6


@pytest.mark.parametrize(("by_slice", "differ"), [(False, False), (True, True)])
def test_an_optimizer_whose_step_depends_on_the_slice_is_found(
    by_slice: bool, differ: bool, modules: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = modules("memory")

    class Scaled(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            (parameters,) = (group["params"] for group in self.param_groups)
            if by_slice:
                torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            return super().step(closure)

    monkeypatch.setitem(memory.OPTIMIZERS, "scaled", lambda parameters: Scaled(parameters, foreach=True))
    row = memory.Parked("scaled", "odd", 64)
    memory.compare(SimpleNamespace(kind="cpu", gpu=False), row, [40, 3])
    assert (row.problem, row.values, row.differ > 0) == ("", 3 * 43, differ)


def test_redundant_passes_that_are_queued_at_once(modules: Callable[[str], Any]) -> None:
    order = "RFRRBFRRR"
    kinds = {"F": Kind.FORWARD, "B": Kind.BACKWARD, "R": Kind.REDUNDANT_FORWARD}
    found = [Span(kinds[each], 1, float(at), at + 1.0) for at, each in enumerate(order)]
    assert modules("syncs").bubbles(found) == [1, 2, 0, 3]
