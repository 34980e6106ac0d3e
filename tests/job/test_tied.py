"""Tied layers: a GPT whose embedding is its head, on the first and the last stage."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn

from bamboo_ds.engine.iteration import reduction as reduction_module
from bamboo_ds.engine.iteration.reduction import Reduction
from bamboo_ds.engine.stage import shares, tied
from bamboo_ds.engine.stage.groups import RoleGroups
from bamboo_ds.engine.stage.optimizers import PlainOptimizer
from bamboo_ds.engine.stage.runtime import StageRuntime
from bamboo_ds.topology import Layout, Role
from tests.job.test_checkpoint import assert_same_files
from tests.job.test_elastic import assert_same
from tests.support.compare import differences
from tests.support.gpt_jobs import TRAIN_GPT, survive
from tests.support.jobs import RunningJob, run_bamboo, run_stock, slow_until, write_config
from tests.support.surviving import Reference, fault

pytestmark = pytest.mark.claim("guides/checkpoints.md", "reference/guarantees.md")


def test_where_tied_layers_are() -> None:
    specs = [TiedLayerSpec(key, nn.Linear, 2, 2) for key in ("b", "a", "b", "a", "c", "c")]
    module = SimpleNamespace(_layer_specs=[*specs, LayerSpec(nn.Linear, 2, 2)], stage_owner=lambda index: index // 2)
    assert tied.ties(module) == {"a": [0, 1], "b": [0, 1], "c": [2]}
    assert tied.tied_stages(module) == {0, 1}


class Stage(nn.Module):
    """A stage with a tied and another layer."""

    def __init__(self, keys: dict[str, list[int]], own: float, frozen: bool) -> None:
        super().__init__()
        self.tied_modules = nn.ModuleDict({key: nn.Linear(2, 2, bias=False) for key in keys})
        self.other = nn.Linear(2, 2, bias=False)
        self.tied_comms = {k: {"ranks": ranks, "group": k, "weight_attr": ["weight"]} for k, ranks in keys.items()}
        for parameter in self.parameters():
            parameter.grad = torch.full((2, 2), own)
        if frozen:
            self.tied_modules["b"].requires_grad_(False)


@pytest.mark.parametrize("frozen", [False, True])
def test_one_member_adds_its_stages_up(monkeypatch: pytest.MonkeyPatch, frozen: bool) -> None:
    """It takes part in a collective once, in the order of the keys; its own sums stay; each role has its own tensor."""
    both = {"a": [0, 2, 4], "b": [0, 2, 4]}
    stages = {0: Stage(both, 1.0, frozen), 1: Stage(both, 10.0, frozen), 2: Stage({"a": [1, 3, 5]}, 100.0, False)}
    runtimes = [
        StageRuntime(role, True, attributes={"module": stages[role.stage], "optimizer": None})
        for role in (Role(0, 0), Role(0, 1), Role(1, 2))
    ]
    reduced = []

    def all_reduce(tensor: torch.Tensor, group: str) -> None:
        reduced.append(group)
        if tensor.dtype == torch.uint8:  # contributions as they are
            tensor.view(torch.float32).view(3, -1)[2] = 1000.0  # the stage of another member
        else:
            tensor.add_(1000.0)

    monkeypatch.setattr(reduction_module.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(shares, "dist", SimpleNamespace(all_reduce=all_reduce))
    binding: Any = SimpleNamespace(owned=lambda: runtimes, current=None)
    ds: Any = SimpleNamespace(gradients=lambda: [p.grad for p in binding.current.trainable()])
    plan = SimpleNamespace(owners=["me", "b", "me", "c", "d", "me"])
    epoch: Any = SimpleNamespace(layout=Layout(2, 3), plan=plan)
    context: Any = SimpleNamespace(ds=ds, binding=binding, epoch=epoch)
    reduction = Reduction(context, frozenset((0, 1, 2)))

    def use(runtime: StageRuntime) -> None:
        binding.current, ds.module = runtime, runtime.module

    binding.use = use
    for runtime in runtimes:
        runtime.optimizer = PlainOptimizer(ds, RoleGroups(None, Layout(2, 3)), runtime)  # type: ignore[arg-type]
    for runtime in runtimes:
        use(runtime)
        reduction.reduce_tied()
        assert binding.current is runtime
    assert runtimes[0].results.tied[0] is not runtimes[1].results.tied[0]
    keys = ["a"] if frozen else ["a", "b"]
    assert [group for group, _ in itertools.groupby(reduced)] == [*keys, *(["a"] if keys[-1] != "a" else [])]
    for runtime, expected in zip(runtimes, (1011.0, 1011.0, 1100.0), strict=True):
        count = 1 if runtime.role.stage == 2 else len(keys)
        assert [runtime.results.tied[place].unique().tolist() for place in range(count)] == [[expected]] * count
        use(runtime)
        sums = reduction.local_sums(runtime)
        own = stages[runtime.role.stage].other.weight.grad
        assert own is not None and sums[-1] is own and len(sums) == count + 1
        assert all(bool((p.grad == own).all()) for p in runtime.module.parameters())


@pytest.mark.integration
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("pipelines", "faults"),
    [
        # Ranks of two pipelines are (pipeline, stage) = (0,0), (1,0), (0,1), ...
        (2, [fault(0, 1, "ReduceTiedGrads"), fault(7, 2, "BackwardPass", 1), fault(3, 3, "Commit")]),
        # The last stage's gradients are reduced with those of the first and may be at its shadow already.
        (1, [fault(3, 1, "RecvReplica"), fault(1, 3, "ReduceTiedGrads")]),
        (1, [fault(3, 2, "ReduceTiedGrads"), fault(1, 2, ".recovery.report")]),
    ],
)
def test_losses(tmp_path: Path, reference: Reference, pipelines: int, faults: list[dict[str, Any]]) -> None:
    arguments = ("--evaluate-every", "3") if pipelines > 1 else ()
    survive(tmp_path, reference, faults, 4, pipelines, arguments)


def without_unused(roles: dict[tuple[int, int], Any]) -> dict[tuple[int, int], Any]:
    """The head's copy of the position embeddings is used by nobody, and DeepSpeed does not save it."""
    roles[0, 1]["parameters"].pop(1)
    return roles


@pytest.mark.integration
def test_both_ends_on_one_member(tmp_path: Path, reference: Reference) -> None:
    """From a checkpoint of stock DeepSpeed's down to one member, and back to stock from what that one saves."""
    arguments = ("--steps", "6", "--save-every", "3")
    whole = reference(2, 1, 4, *arguments, script=TRAIN_GPT)
    theirs = whole.out / "checkpoints"
    folders = {name: tmp_path / name for name in ("stock-to-bamboo", "bamboo-to-stock")}
    for folder in folders.values():
        folder.mkdir()
    faults = [fault(0, 1, "ReduceTiedGrads")]
    command = ["--stages", "2", *arguments, "--load", str(theirs), "--tag", "step3", "--faults", json.dumps(faults)]
    folder = folders["stock-to-bamboo"]
    second = run_bamboo(folder, 2, command, write_config(folder, {}, 4), TRAIN_GPT)
    assert second.exit_code == 0 and len(second.faults()) == 1, second.output[-4000:]
    assert len(set(second.events("plan")[-1]["owners"])) == 1
    assert second.ranks()[1]["losses"] == whole.ranks()[1]["losses"][3:]
    assert differences(without_unused(whole.roles()), without_unused(second.roles())) == []
    assert_same_files(folder / "checkpoints" / "step6", theirs / "step6")
    command = ["--stages", "2", "--steps", "8", "--load", str(folder / "checkpoints")]
    folder = folders["bamboo-to-stock"]
    third = run_stock(folder, 2, command, write_config(folder, None, 4), TRAIN_GPT)
    assert third.exit_code == 0, third.output[-4000:]
    longer = reference(2, 1, 4, "--steps", "8", script=TRAIN_GPT)
    assert third.ranks()[0]["losses"] == longer.ranks()[0]["losses"][6:]
    assert differences(without_unused(longer.roles()), without_unused(third.roles())) == []


@pytest.mark.exhaustive
@pytest.mark.integration
def test_an_end_joins(tmp_path: Path, reference: Reference) -> None:
    """The owner of the last stage is lost, its role goes to a member that comes: a group of both ends again."""
    go = tmp_path / "go"
    faults = [fault(1, 3, "ReduceTiedGrads")]
    command = ["--stages", "2", *slow_until(go), "--faults", json.dumps(faults)]
    with RunningJob(tmp_path, 2, command, write_config(tmp_path, {}, 4), TRAIN_GPT) as job:
        job.wait_for("the loss", lambda: bool(job.events("member_lost")))
        job.join()
        job.wait_for("each stage has an owner of its own", lambda: len(set(job.plan()["owners"])) == 2)
        go.touch()
        result = job.finish()
    undisturbed = reference(2, 1, 4, *result.length, script=TRAIN_GPT)
    assert_same(result, undisturbed, faults, joined=1)
