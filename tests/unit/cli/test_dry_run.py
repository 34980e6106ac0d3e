"""``bamboo run --dry-run``: what a script builds, and what is told of it."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from bamboo_ds.cli import building, dry_run
from bamboo_ds.cli.building import Built
from bamboo_ds.cli.doctor import Finding
from bamboo_ds.cli.main import cli
from bamboo_ds.launchers.run import LocalSlots
from bamboo_ds.topology import Candidate, Layout, initial_plan, with_redundancy
from bamboo_ds.topology.memory import StateBytes
from bamboo_ds.topology.room import member_bytes
from tests.support.processes import start

pytestmark = pytest.mark.claim("guides/even-shares.md", "reference/cli.md")

SCRIPT = """
import sys
import deepspeed, torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

class Big(nn.Linear):
    def __init__(self):
        super().__init__(1_000_000, 1_000_000)  # 4 TB, if there were memory for it
        self.bias.requires_grad_(False)

what = sys.argv[1]
deepspeed.init_distributed()
dist, size = torch.distributed, torch.distributed.get_world_size()
half = dist.new_group([0, size - 1])
count, most, mean = torch.ones(1), torch.ones(1), torch.ones(1)
deepspeed.comm.all_reduce(count)  # as scripts count their ranks
dist.all_reduce(most, dist.ReduceOp.MAX)
dist.all_reduce(mean, group=half)
assert [count.item(), most.item(), mean.item()] == [size, 1, 2], "every rank contributes what this one does"
parts, names, scattered = [torch.zeros(1) for _ in range(size)], [None] * size, torch.zeros(1)
dist.all_gather(parts, torch.ones(1))
dist.all_gather_object(names, "rank")
dist.reduce_scatter(scattered, [torch.full((1,), 1.0 + i) for i in range(size)])
dist.all_to_all_single(torch.zeros(size), torch.ones(size))
told = ["something"]
dist.broadcast_object_list(told)
dist.barrier()
received = torch.full((1,), 5.0)
dist.recv(received, 1)
assert sum(parts).item() == size and names == ["rank"] * size and scattered.item() == size and told == ["something"]
assert received.item() == 5 and dist.get_backend() == "gloo" and dist.get_rank() == 0
layers = [TiedLayerSpec("ends", nn.Linear, 10, 20), LayerSpec(Big), nn.ReLU(), nn.Linear(20, 5)]
layers += [TiedLayerSpec("ends", nn.Linear, 10, 20), TiedLayerSpec("ends", nn.Linear, 10, 20)]
if what == "picky":
    class Picky(nn.Module):
        def __init__(self):
            super().__init__()
            self.rates = [x.item() for x in torch.linspace(0, 1, 3)]
    layers[2] = LayerSpec(Picky)
net = PipelineModule(layers, num_stages=int(sys.argv[2]), partition_method="uniform")
net = net.to("cpu").cuda()  # as scripts do; there is nothing to move
if what == "looks":
    print(sum(p.sum().item() for p in net.parameters()))
if what == "early":
    sys.exit()
if what == "raises":
    raise RuntimeError("a test says so, with metadata")
arguments = {"config": {"train_batch_size": 8, "bamboo": {}, "bf16": {"enabled": True}}}
if what == "refused":
    arguments["config"]["sparse_gradients"] = True
if what == "named":
    arguments["config"]["optimizer"] = {"type": "Adam"}
    deepspeed.initialize(model=net, **arguments)
deepspeed.initialize(model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), **arguments)
print("goes on")
"""


def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str, workers: int = 4) -> Built:
    """What the script builds with ``arguments``, in a process of the fork server."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def popen(command: list[str], env: dict[str, str], stdout: Any, **_: Any) -> Any:
        command.remove("-u")
        return start(command, {**env, "PYTHONPATH": str(Path(__file__).parents[3])}, stdout.fileno())

    monkeypatch.setattr(dry_run, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": popen}))
    found = dry_run.build("127.0.0.1", LocalSlots(workers), [str(script), *arguments])
    monkeypatch.undo()
    return found


WAITING = (
    "replicas wait in host memory until they compute, where members have other devices than CPUs: "
    "48.00 GiB on host emulated-0, the most; so much of a device is kept free for them (the event replicas_placed "
    "says where they are)"
)
PAGE_LOCKED = (
    "page-locked, at most: gradients and sums of replicas that wait, and on their way to them; boundary tensors and "
    "slabs for steps come on top"
)


def test_what_would_become_of_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = Built(stages=2, layers=(3, 3), parameters=(1 << 30, 3 << 30), optimizer="Adam")
    findings = [Finding("etcd", "ok", "there"), Finding("disk", "warning", "little", "make room")]
    monkeypatch.setattr(dry_run, "examine", lambda patient: findings)
    monkeypatch.setattr(dry_run, "build", lambda address, slots, script: built)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("BAMBOO_LOGS")
    monkeypatch.delenv("COLUMNS", raising=False)  # that xdist sets

    def run(*options: str, script: tuple[str, ...] = ()) -> tuple[int, list[str]]:
        done = CliRunner().invoke(cli, ["run", "--dry-run", "-n", "2", *options, __file__, *script])
        lines = [re.sub(r" +", " ", line.strip()) for line in done.output.splitlines()]
        return done.exit_code, [line for line in lines if not line.startswith("bamboo: the command line names no ")]

    code, told = run("--emulate-hosts", "2")
    assert code == 0 and told == [
        "1 checks of bamboo doctor are well, but:",
        "warning: disk: little; make room",
        "plan: 1 pipeline of 2 stages on 2 members, redundancy auto",
        "member host owns shadows parameters own state replicas sum page-locked",
        "m0 emulated-0 (0,0) (0,1) 1,073,741,824 16.00 GiB 48.00 GiB 64.00 GiB 48.00 GiB",
        "m1 emulated-1 (0,1) (0,0) 3,221,225,472 48.00 GiB 16.00 GiB 64.00 GiB 48.00 GiB",
        "state: 16 bytes per parameter of an own stage, 16 of a replica (fp32, Adam); what passes keep comes on top",
        "for a while also 8 on owners, of copies of gradients; 8 on shadows, of sums of gradients, in bytes per "
        "parameter",
        WAITING,
        PAGE_LOCKED,
        "they compute ahead of a loss on members with room for that, once passes have been measured (redundancy.mode "
        "auto)",
    ]
    little = tmp_path / "little.json"
    little.write_text('{"bamboo": {"redundancy": {"mode": "eager-frc-lazy-brc", "sync_every": 0}}}')
    told = run("--emulate-hosts", "2", script=("--deepspeed_config", str(little)))[1]
    assert told[3].endswith("sum") and told[-1].startswith("state: 16 bytes per parameter"), "nothing waits, or leaves"
    little.unlink()
    lazy = tmp_path / "lazy.json"
    lazy.write_text('{"bamboo": {"redundancy": {"mode": "lazy-frc-lazy-brc"}}}')
    told = run("--emulate-hosts", "2", script=("--deepspeed_config", str(lazy)))[1]
    assert told[-2:] == [WAITING, PAGE_LOCKED]
    before, built = built, replace(built, optimizer="Lamb")
    assert run(script=("--deepspeed_config", str(lazy)))[1][-1].startswith("replicas stay on devices: Lamb may not")
    built = before
    whole, built = built, replace(built, stages=4, parameters=(1 << 30, 3 << 30, 1 << 30, 1 << 30))
    code, told = run("--emulate-hosts", "2", "--ranks", "4")
    assert code == 0 and told[2:7] == [
        "plan: 1 pipeline of 4 stages on 2 members, redundancy auto",
        "so once the job runs: until then members start 2 further workers for the ranks beyond their first",
        "member host owns shadows parameters own state replicas sum page-locked",
        "m0 emulated-0 (0,0) (0,3) (0,1) (0,2) 2,147,483,648 32.00 GiB 64.00 GiB 96.00 GiB 72.00 GiB",
        "m1 emulated-1 (0,1) (0,2) (0,0) (0,3) 4,294,967,296 64.00 GiB 32.00 GiB 96.00 GiB 72.00 GiB",
    ]
    built = replace(whole, frozen=(0, 1 << 30), precision="bf16")
    told = run("--emulate-hosts", "2")[1]
    assert told[3:7] == [
        "member host owns shadows parameters frozen own state replicas sum page-locked",
        "m0 emulated-0 (0,0) (0,1) 1,073,741,824 0 18.00 GiB 56.00 GiB 74.00 GiB 48.00 GiB",
        "m1 emulated-1 (0,1) (0,0) 3,221,225,472 1,073,741,824 56.00 GiB 18.00 GiB 74.00 GiB 48.00 GiB",
        "state: 18 bytes per parameter of an own stage, 18 of a replica, 2 of a frozen one on either (bf16, Adam); "
        "what passes keep comes on top",
    ]
    config = tmp_path / "ds_config.json"
    config.write_text('{"bamboo": {"topology": {"memory_limit_mb": 71680}, "checkpoint": {"every_s": 90}}}')
    told = run("--emulate-hosts", "2", script=("--deepspeed_config", str(config)))[1]
    assert " ".join(told[2:4]).startswith(
        "checkpoint.every_s is 90: the job takes checkpoints of its own once its script"
    )
    told = told[told.index("plan: 1 pipeline of 2 stages on 2 members, redundancy auto") - 2 :]
    assert told[4:6] == [
        "m0 emulated-0 (0,0) (0,1) 1,073,741,824 0 18.00 GiB 56.00 GiB 74.00 GiB 36.00 GiB",
        "m1 emulated-1 (0,1) - 3,221,225,472 1,073,741,824 56.00 GiB 0.0 MiB 56.00 GiB 36.00 GiB",
    ]
    # With an optimizer at rest the larger replica takes 20 GiB, and 12 for a step.
    assert told[-2:] == [
        "no replica of (0,0): one takes 6144.0 MiB; of members that might hold it m1 has most room, 2048.0 MiB",
        "m0 lacks 4096.0 MiB to hold its roles as they are: optimizers, but that of its script's own role, are in host "
        "memory between steps",
    ]
    config.unlink()
    lazy.unlink()
    built = Built(unknown="a test says so")
    assert run()[1][2:] == [
        "warning: script: a test says so",
        "plan: 2 members; how many stages there are only the script knows",
    ]
    code, told = run("--pipelines", "1")
    assert code == 0 and told[3] == "plan: 1 pipeline of 2 stages on 2 members, redundancy auto"
    assert told[-1] == "memory: unknown, as the parameters of the stages are"
    built = Built(problem="a test says so")
    assert run() == (1, [*told[:2], "problem: script: a test says so"])
    assert not list(tmp_path.iterdir()), "nothing was begun"


def test_bytes_per_parameter_are_the_measured_ones() -> None:
    """Those of ``docs/benchmarks.md``: of all members, by parameters of one pipeline."""
    figures = (Path(__file__).parents[3] / "docs" / "benchmarks.md").read_text()
    for words, state in (
        ("fp32 Adam | stock and `none` {} bytes, with replicas {} bytes", StateBytes("fp32", "Adam")),
        ("fp16: stock {} bytes, with replicas {}", StateBytes("fp16", "Adam")),
        ("bf16 with fp32 gradients: {}, {}", StateBytes("bf16", "Adam")),
        (
            "stock {} bytes (both pipelines together), with replicas {}",
            StateBytes("bf16", "Adam", zero=True, pipelines=2),
        ),
    ):
        count = state.pipelines
        own, whole = state.owner * count, (state.owner + state.shadow) * count
        assert words.format(f"{own:g}", f"{whole:g}") in figures, words
    assert StateBytes("bf16", "Adam", fp32_gradients=False).owner == 16
    assert [StateBytes("fp32", name).known for name in ("FusedAdam", "Mine", None)] == [True, False, False]
    sgd = [StateBytes("fp32", name) for name in ("SGD", "SGD without momentum")]
    assert [(each.known, each.owner) for each in sgd] == [(True, 12), (True, 8)]
    assert StateBytes("fp32", "Lion").owner == 12 and StateBytes("fp32", "Mine").owner == 16


def test_the_optimizer_s_name() -> None:
    plain, mine = type("SGD", (SimpleNamespace,), {}), SimpleNamespace()
    plain = plain(param_groups=[{"momentum": 0}, {"momentum": 0.9}])
    assert [
        building._optimizer(*each)
        for each in (
            (None, {}),
            (None, {"type": "SGD"}),
            (None, {"type": "SGD", "params": {"momentum": 0.9}}),
            (plain, {"type": "Adam"}),
            (mine, {}),
        )
    ] == [None, "SGD without momentum", "SGD", "SGD", "SimpleNamespace"]


def test_bytes_of_members() -> None:
    members = [Candidate(f"m{slot}", slot, f"h{slot}", script_rank=slot) for slot in range(2)]
    plan = with_redundancy(initial_plan(["m0", "m1"]), Layout(1, 2), True, members)
    stages = [StateBytes().of(10), StateBytes().of(100)]
    assert member_bytes(plan, stages) == {"m0": (160, 1600), "m1": (1600, 160)}
    frozen = member_bytes(plan, [StateBytes("bf16").of(10, 1000), StateBytes("bf16").of(100)])
    assert frozen == {"m0": (2180, 1800), "m1": (1800, 2180)}
    bare = with_redundancy(initial_plan(["m0", "m1"]), Layout(1, 2), False, members)
    assert member_bytes(bare, stages)["m0"] == (160, 0)
