"""Replicas in host memory (``redundancy.park``), on the device of tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.job import test_divided, test_elastic, test_losses, test_precision
from tests.support import far_device, gpt_jobs, surviving
from tests.support.jobs import Reference, write_config
from tests.support.on_device import on_the_device

pytestmark = [
    pytest.mark.claim("reference/limits.md"),
    pytest.mark.integration,
    pytest.mark.skipif(far_device.compiler() is None, reason="there is no C++ compiler"),
]

LAZY: dict[str, Any] = {"mode": "lazy-frc-lazy-brc", "verify_every": 1}


@pytest.fixture(autouse=True)
def _on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs have it, and replicas that do not compute redundantly."""
    far_device.library()
    monkeypatch.setenv(far_device.SEED, "1")

    def write(folder: Path, bamboo: dict[str, Any] | None, *args: Any, **config: Any) -> Path:
        own = bamboo or {}
        return write_config(folder, {**own, "redundancy": {**LAZY, **own.get("redundancy", {})}}, *args, **config)

    for module in (surviving, test_divided, test_elastic):
        monkeypatch.setattr(module, "write_config", write)


def events_in(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Events of a job, from the file that it leaves."""
    found = [json.loads(line) for file in folder.glob("**/events.jsonl") for line in file.read_text().splitlines()]
    return [event for event in found if event["event"] == kind]


def are_parked(folder: Path) -> None:
    """Replicas of the job were parked, and no copy of theirs was lost."""
    placed = events_in(folder, "replicas_placed")
    assert placed and all(each["parked"] and each["bytes"] > 1000 for each in placed), placed
    assert events_in(folder, "replica_verified") and not events_in(folder, "replica_mismatch")
    counts = [json.loads(file.read_text()) for file in folder.glob("far-*")]
    assert counts and not any(each["lost"] for each in counts), counts


@pytest.mark.exhaustive
@pytest.mark.parametrize("job", ["fp16-zero-data", "bf16-zero", "bf16-data"])
def test_they_take_over(tmp_path: Path, reference: Reference, job: str) -> None:
    """The first steps are checked: a replica is on the device for its rehearsal, and parked again."""
    precision, pipelines, stages, loss = test_precision.JOBS[job]
    more, block = {"micro_batches": 4, "checked": True, **precision}, {"redundancy": {"check_exact": 2}}
    surviving.survive(tmp_path, reference, [loss], stages, pipelines, ("--steps", "6"), bamboo=block, **more)
    are_parked(tmp_path)
    assert {event["step"] for event in events_in(tmp_path, "step")} == set(range(1, 7))


@pytest.mark.exhaustive
def test_fused_optimizers_with_flat_masters(tmp_path: Path, reference: Reference) -> None:
    losses = [(3, 3, "SendReplica"), (0, 7, "Commit")]
    test_precision.test_fused_fp16(tmp_path, reference, test_precision.FP16_SMALL, 2, 2, losses)
    are_parked(tmp_path)


@pytest.mark.exhaustive
def test_those_of_other_optimizers_stay_on_the_device(tmp_path: Path, reference: Reference) -> None:
    surviving.survive(tmp_path, reference, [surviving.fault(1, 2, "BackwardPass", 2)], 3, arguments=("--hooks",))
    last = {event["member"]: event for event in events_in(tmp_path, "replicas_placed")}
    assert {(each["parked"], each["reason"]) for each in last.values()} == {(False, "AdamW has hooks on its steps")}
    assert max(each["bytes"] for each in last.values()) < 1000, "counts of steps alone are in host memory"


#: Bytes for a role and a replica that computes, or for two roles and one, but not for a role and two.
ROOM = 58_000


def test_they_compute_where_there_is_room(tmp_path: Path, reference: Reference) -> None:
    """With ``auto``, once it is known what passes keep. After a loss one member has two, which wait; the others go on.

    The check of the first steps is over by then, and is not begun again.
    """
    redundancy = {"mode": "auto", "sync_every": 2, "check_exact": 3}
    block = {"redundancy": redundancy, "topology": {"blocks": 1, "memory_limit_mb": ROOM / 2**20}}
    faults = [surviving.fault(2, 7, "BackwardPass", 2)]
    result = surviving.survive_in_turn(tmp_path, reference, faults, bamboo=block, checked=True)
    placed = result.events("replicas_placed")
    first, last = [True, False], [True, False, True]
    found = {slot: [e["parked"] for e in placed if e["member"].startswith(f"m{slot}-")] for slot in range(4)}
    assert found == {0: last, 1: first, 2: first, 3: first}, placed
    assert {e["reason"] for e in placed} == {
        "what redundant passes keep is not known yet",
        "there is room for what redundant passes keep",
        "there is no room for what redundant passes keep",
    }
    assert [e["step"] for e in result.events("exact_checked")] == [3], "no other plan has interrupted it"
    (healed,) = (e["epoch"] for e in placed if e["parked"] and e["epoch"] > 3)
    steps = result.events("step")
    assert any(e["frc_done"] for e in steps if e["epoch"] == 3)
    after = [e["frc_done"] for e in steps if e["epoch"] == healed]
    assert 0 < max(after) <= 2 * 6 and len(after) > 1, "of the stages that m1 and m3 shadow"
    assert len(result.events("plan")) == 5, "the last two of the loss"
    assert result.events("replica_verified") and not result.events("replica_mismatch")
    counts = [json.loads(file.read_text()) for file in tmp_path.glob("far-*")]
    assert len(counts) == 3 and not any(each["lost"] for each in counts), counts


#: By precision: bytes for all that a member has after the losses if optimizers rest, and not for all of it as it is.
TIGHT: dict[str, tuple[int, int, int, Any]] = {
    "fp32": (40_000, 1, 4, {}),
    "fp16": (24_000, 1, 3, test_precision.FP16),
    "fp16-zero": (27_000, 2, 2, test_precision.FP16_ZERO),
    "bf16": (36_000, 2, 2, test_precision.BF16),
}


@pytest.mark.parametrize(
    "precision",
    [name if name in ("fp32", "fp16") else pytest.param(name, marks=pytest.mark.exhaustive) for name in TIGHT],
)
def test_optimizers_rest_where_there_is_no_room(tmp_path: Path, reference: Reference, precision: str) -> None:
    """No role goes without a shadow, and nobody holds more than it may, as there are fewer members."""
    room, pipelines, stages, config = TIGHT[precision]
    faults = [surviving.fault(2, 3, "BackwardPass", 2), surviving.fault(1, 7, "SendReplica")]
    faults = faults[: pipelines * stages - 2]
    block = {"topology": {"blocks": 1, "memory_limit_mb": room / 2**20}}
    more: dict[str, Any] = {"micro_batches": 4, "bamboo": block, **config}
    result = surviving.survive_in_turn(tmp_path, reference, faults, stages, pipelines, **more)
    assert len(result.events("member_lost")) == len(faults)
    resting = [event for event in result.events("replicas_placed") if event["resting"]]
    assert resting, result.events()
    for event in resting:  # the script's own role never does
        own = int(event["member"][1:].partition("-")[0])
        assert own not in [stage * pipelines + pipeline for pipeline, stage in event["resting"]], event
    steps = [event["step"] for event in result.events("step")]
    assert min(event["step"] for event in resting) + 2 < max(steps), "they are stepped some times"
    short = result.events("memory_short")
    assert all(not event["roles"] and not event["members"] for event in short), short
    assert any(event["resting"] for event in short) and not any(event["under_way"] for event in short), short
    assert not result.events("replica_mismatch")
    counts = [json.loads(file.read_text()) for file in tmp_path.glob("far-*")]
    assert counts and not any(each["lost"] for each in counts), counts


@pytest.mark.parametrize("precision", ["fp32", pytest.param("fp16-zero", marks=pytest.mark.exhaustive)])
def test_checkpoints_of_optimizers_that_rest(tmp_path: Path, reference: Reference, precision: str) -> None:
    """The script saves after two losses, and goes back to that checkpoint."""
    room, pipelines, stages, config = TIGHT[precision]
    # From the begin on, as some members may have no room before the script goes back.
    block = {"topology": {"blocks": 1, "memory_limit_mb": room / 2**20}}
    faults = [surviving.fault(2, 2, "BackwardPass", 2), surviving.fault(1, 6, "SendReplica")]
    steps = ("--steps", "14", "--save-every", "5", "--save-until", "10", "--reload-at", "11")
    more: dict[str, Any] = {"micro_batches": 4, "bamboo": block, **config}
    result = surviving.survive(tmp_path, reference, faults, stages, pipelines, steps, **more)
    resting = {event["step"] for event in result.events("replicas_placed") if event["resting"]}
    assert len(result.events("member_lost")) == 2 and resting and min(resting) < 10, resting
    assert 10 in [event["step"] for event in result.events("checkpoint_saved")], result.events("checkpoint_saved")


def test_what_rests_takes_no_memory_of_the_device(tmp_path: Path, reference: Reference) -> None:
    """A member comes to own two stages; its device holds less of the second one where the plan has no room for it."""
    layers, stages, peaks = 64, 4, {}
    parameters = 272 * layers // stages
    for name, room in (("whole", 1e9), ("tight", 3.6 * 16 * parameters)):
        (folder := tmp_path / name).mkdir()
        block = {"topology": {"blocks": 1, "memory_limit_mb": room / 2**20}, "redundancy": {"sync_every": 0}}
        faults, arguments = [surviving.fault(2, 3, "BackwardPass", 2)], ("--layers", str(layers))
        result = surviving.survive_in_turn(folder, reference, faults, stages, arguments=arguments, bamboo=block)
        assert len(result.events("member_lost")) == 1
        resting = [event["resting"] for event in result.events("replicas_placed") if event["resting"]]
        assert resting == ([[[0, 2]]] if name == "tight" else []), resting
        peaks[name] = max(json.loads(file.read_text())["peak"] for file in folder.glob("far-*"))
    state = 8 * parameters  # Adam's
    assert peaks["whole"] - peaks["tight"] > 0.9 * state, (peaks, state)


#: Bytes for four roles of two pipelines with one micro-batch of each under way, and not with two.
SCANT = 33_300


def test_fewer_micro_batches_are_under_way_where_there_is_no_room(tmp_path: Path, reference: Reference) -> None:
    """Two members own the same stages, so that either can take over what its device has no room for a replica of."""
    faults = [surviving.fault(*each) for each in ((2, 3, "BackwardPass", 2), (3, 7, "SendReplica"), (1, 11, "Commit"))]
    block = {"topology": {"blocks": 1, "memory_limit_mb": SCANT / 2**20}}
    steps = ("--steps", "15")
    result = surviving.survive(tmp_path, reference, faults, 2, 2, steps, micro_batches=4, bamboo=block)
    assert len(result.events("member_lost")) == 3
    short = result.events("memory_short")
    assert not any(event["members"] for event in short), "nobody holds more than it may"
    (left,) = {slot for event in result.events("plan")[-1:] for slot in event["owners"]}
    assert short[-1]["under_way"] == [[left, 1]] and not any(event["under_way"] for event in short[:-2]), short
    assert sum(event["epoch"] == short[-1]["epoch"] for event in result.events("step")) > 1


@pytest.mark.exhaustive
def test_stages_with_weights_in_common(tmp_path: Path, reference: Reference) -> None:
    faults = [surviving.fault(3, 1, "RecvReplica"), surviving.fault(1, 3, "ReduceTiedGrads")]
    gpt_jobs.survive(tmp_path, reference, faults, 4)
    are_parked(tmp_path)


@pytest.mark.exhaustive
def test_members_join(tmp_path: Path, reference: Reference) -> None:
    test_elastic.test_members_join(tmp_path, reference, ("--count-samples",))
    are_parked(tmp_path)


@pytest.mark.exhaustive
def test_shadows_compute_parts_of_stages(tmp_path: Path, reference: Reference) -> None:
    test_divided.test_a_job_grows_beyond_its_stages(tmp_path, reference)
    are_parked(tmp_path)


@pytest.mark.exhaustive
def test_losses_during_evaluations(tmp_path: Path, reference: Reference) -> None:
    test_losses.test_losses_during_evaluations(tmp_path, reference)
    are_parked(tmp_path)


def test_a_stage_goes_to_host_memory_and_back_as_it_is() -> None:
    """Parameters may become other objects; extra state is where the owner has it, wherever it was on its way."""
    on_the_device(
        """
from torch.utils._pytree import tree_map_only
from bamboo_ds.engine.replicas.building import relocate
from bamboo_ds.engine.stage.layers import Layers
from bamboo_ds.devices.accelerators import accelerator, on_host
from deepspeed.accelerator import get_accelerator

class Scaled(torch.nn.Linear):
    def get_extra_state(self):
        return {"scale": self.scale, "seen": torch.ones(1)}

    def set_extra_state(self, state):
        self.scale = state["scale"]
        assert state["seen"].device.type == "cpu"

def made():
    stage = torch.nn.Sequential(Scaled(3, 3), torch.nn.Linear(3, 3)).to("far")
    stage[0].scale = torch.full((1,), 2.0, device="far")
    stage[1].weight = stage[0].weight
    return stage

stage, called = made(), []
stage[0].weight.mark = 7
stage[0].bias.register_hook(lambda gradient: called.append("hook"))
stage[0].bias.register_post_accumulate_grad_hook(lambda parameter: called.append("post"))
values = [p.cpu() for p in stage.parameters()]
for place in ("cpu", "far"):
    relocate(stage, torch.device(place))
    assert {p.device.type for p in stage.parameters()} == {place} and stage[1].weight is stage[0].weight
    assert stage[0].weight.mark == 7 and all(torch.equal(p.cpu(), v) for p, v in zip(stage.parameters(), values))
    stage(torch.ones(1, 3, device=place)).sum().backward()
    assert sorted(called) == ["hook", "post"]
    called.clear()

other = made()
other[0].scale.fill_(5.0)
there, here = Layers(other), Layers(stage)
here.restore(tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), there.capture(whole=True)))
assert stage[0].scale.device.type == "far" and stage[0].scale.item() == 5

import threading
found = {}
with on_host():
    thread = threading.Thread(target=lambda: found.update(other=get_accelerator().device_name()))
    thread.start()
    thread.join()
    found.update(mine=get_accelerator().device_name(), package=accelerator().device_name())
    with on_host():
        pass
    found["still"] = get_accelerator().device_name()
assert found == {"other": "far", "mine": "cpu", "package": "far", "still": "cpu"}
assert get_accelerator().device_name() == "far"
"""
    )
