"""Members come and go: redundancy heals, members join, roles move, and the results stay those of an undisturbed run."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bamboo_ds.cli.building import Built
from bamboo_ds.cli.options import read_job
from bamboo_ds.cli.profile import profile_of, told
from bamboo_ds.launchers.jobs import locate
from bamboo_ds.observe.events import read_events
from bamboo_ds.observe.goodput import account
from bamboo_ds.observe.goodput.lives import Category
from bamboo_ds.observe.spans import Kind, read_timelines
from bamboo_ds.simulate.profiling import Told
from tests.support import precisions
from tests.support.compare import assert_computed, assert_read
from tests.support.faults import in_turn, mark
from tests.support.jobs import SUPPORT, Reference, Result, RunningJob, run_bamboo, run_text, slow_until, write_config
from tests.support.surviving import fault
from tests.support.watching import kill_own_etcd

pytestmark = [
    pytest.mark.claim(
        "guides/elastic.md",
        "guides/worth-it.md",
        "reference/events.md",
        "reference/guarantees.md",
        "reference/settings.md",
    ),
    pytest.mark.integration,
]


#: A script that tells what of its copies has come.
COPYING = SUPPORT / "train_copying.py"
LONG = SUPPORT / "train_long.py"


def assert_same(
    result: Result, reference: Result, faults: list[dict[str, Any]], joined: int = 0, untold: Sequence[int] = ()
) -> None:
    """All faults struck; losses, states of roles and replicas, and samples are those of the undisturbed run."""
    tail = result.output[-5000:]
    assert result.exit_code == 0, tail
    assert result.faults() == sorted(mark(f) for f in faults), tail
    plain = reference.ranks()[0]
    survivors = [*result.ranks().values(), *result.joined()]
    assert len(result.joined()) == joined, tail
    assert len(survivors) == len(reference.ranks()) - len(faults) + joined, tail
    assert_computed(result, reference)
    assert_read(result, reference, {f["rank"] for f in faults})
    # The steps of the event file: each once, none missing but those whose emitter was lost just then.
    steps = [event["step"] for event in result.events("step")]
    assert sorted([*steps, *untold]) == list(range(1, len(plain["losses"]) + 1))


def test_one_by_one_down_to_one_member(tmp_path: Path, reference: Reference) -> None:
    """Three of four members vanish; between the losses every stage gets a new replica elsewhere."""
    faults = in_turn(fault(2, 3, "RecvReplica"), fault(1, 3, "ReduceGrads"), fault(3, 3, "Commit"))
    config = write_config(tmp_path, {"redundancy": {"verify_every": 3}})
    pace = slow_until(tmp_path / mark(faults[-1]), 0.1)
    result = run_bamboo(
        tmp_path, 4, ["--stages", "4", "--training-data", *pace, "--faults", json.dumps(faults)], config
    )
    assert_same(result, reference(4, 1, 6, "--training-data", *result.length), faults)
    owners = result.events("plan")[-1]["owners"]
    assert len(set(owners)) == 1
    assert len(result.events("replica_built")) >= 5
    assert not result.events("replica_mismatch")
    # Only a loss interrupts: replicas are built, and the plan changes, between iterations.
    assert len(result.events("recovered")) == 3 + 2 + 1
    spent = account(read_events(tmp_path / "events.jsonl"))
    assert (spent.losses, spent.steps, spent.repeated_steps) == (3, len(result.events("step")), 0)
    assert spent.seconds == pytest.approx(sum(spent.categories.values()))
    assert spent.categories[Category.DETECTION] > 0 and spent.categories[Category.PRODUCTIVE] > 0
    assert spent.categories[Category.REDONE] <= sum(event["redo_seconds"] for event in result.events("recovered"))
    assert spent.categories[Category.WASTED] > 0 and not spent.categories[Category.STANDBY]


@pytest.mark.exhaustive
def test_a_copy_goes_on_when_another_member_is_lost(tmp_path: Path, reference: Reference) -> None:
    """A worker is killed while another one copies a stage; what that has of it serves when the stage's owner is lost.

    Of four members the third one is lost: the second one copies the last stage, slowly, from the fourth one.
    """
    healing = in_turn(fault(2, 3, "BackwardPass", 1), fault(3, 3, "BackwardPass", 1))
    healing[1]["after"], healing[1]["when"] = 0, str(tmp_path / "verified-1-3")
    under_way = fault(0, 4, "RecvReplica", when=str(tmp_path / "copying-3"), pause=0.2)
    faults = [*healing, under_way]
    topology = {"transfer_mb_per_s": 0.002}
    config = write_config(tmp_path, {"redundancy": {"verify_every": 2}, "topology": topology})
    pace = slow_until(tmp_path / mark(healing[1]), 0.05)
    command = ["--stages", "4", "--training-data", *pace, "--faults", json.dumps(faults)]
    result = run_bamboo(tmp_path, 4, command, config, COPYING)
    assert_same(result, reference(4, 1, 6, "--training-data", *result.length), faults)
    lost = [event["member_id"] for event in result.events("member_lost")]
    assert [member[:2] for member in lost] == ["m2", "m0", "m3"]
    (after,) = (e for e in result.events("plan") if e["lost"] == [lost[1]])
    # The copy that was under way is the one that is complete in the end.
    begun = [line.split() for line in (tmp_path / "begun-1").read_text().splitlines()]
    (key,) = {key for _, key, _ in begun if key.endswith("/3")}
    (share,) = (float(share) for epoch, other, share in begun if (int(epoch), other) == (after["epoch"], key))
    assert 0 < share < 1
    pieces = [line.split() for line in (tmp_path / "fetched-1").read_text().splitlines()]
    fetched = [(int(number), int(size)) for other, number, size in pieces if other == key]
    assert [number for number, _ in fetched] == list(range(len(fetched)))
    (built,) = (e for e in result.events("replica_built") if e["member"][:2] == "m1" and e["role"] == [0, 3])
    assert sum(size for _, size in fetched) >= built["bytes"]
    assert not result.events("replica_mismatch")
    assert any(event["role"] == [0, 3] and event["member"][:2] == "m1" for event in result.events("replica_verified"))
    (heir,) = (e for e in result.events("takeover_planned") if e["role"] == [0, 3])
    assert heir["to"][:2] == "m1"


@pytest.mark.exhaustive
def test_nobody_left_who_draws_batches(tmp_path: Path, reference: Reference) -> None:
    """Both members with iterators vanish; a worker that draws batches is started, and the iteration goes on."""
    # The first victim leads. It needs gradients here: the others have committed the step that it has told of.
    faults = in_turn(fault(0, 3, "BackwardPass", 2), fault(3, 3, "BackwardPass", 2))
    pace = slow_until(tmp_path / mark(faults[-1]), 0.1)
    config = write_config(tmp_path, {})
    result = run_bamboo(tmp_path, 4, ["--stages", "4", *pace, "--faults", json.dumps(faults)], config)
    undisturbed = reference(4, 1, 6, *result.length)
    assert_same(result, undisturbed, faults, joined=1)
    assert "nobody else can draw its batches" in result.output
    (drawn,) = result.drawn()
    assert drawn == undisturbed.samples()[0]


@pytest.mark.exhaustive
def test_ends_that_give_different_batches(tmp_path: Path, reference: Reference) -> None:
    """The first stage vanishes in the first step, the last one later; for each a worker draws that runs as its rank.

    Labels are zeros at the first stage, and inputs are noise at the last one.
    """
    arguments = ("--evaluate-every", "2")
    # The first victim leads: a worker that its agent had started would end with that.
    faults = in_turn(fault(0, 0, "ForwardPass", 2), fault(3, 3, "BackwardPass", 2))
    pace = slow_until(tmp_path / mark(faults[-1]), 0.1)
    command = ["--stages", "4", "--noise", *arguments, *pace, "--faults", json.dumps(faults)]
    result = run_bamboo(tmp_path, 4, command, write_config(tmp_path, {}))
    undisturbed = reference(4, 1, 6, *arguments, *result.length)
    assert_same(result, undisturbed, faults, joined=2)
    first, last = (undisturbed.samples()[rank] for rank in (0, 3))
    # If the last victim's agent had started the first one's successor, it ended with that, and another drew it all.
    *ended, one, other = sorted(result.drawn(), key=len)
    assert sorted([one, other]) == sorted([first, last])
    assert all(indices == first[: len(indices)] for indices in ended)
    assert [event["call"] for event in result.events("iterators_differ")] == ["train_batch", "eval_batch"]


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(("--count-samples",), id="megatron-scheduler"),
        pytest.param(("--adjust", "--dropout", "0.1"), id="script-sets", marks=pytest.mark.exhaustive),
    ],
)
def test_members_join(tmp_path: Path, reference: Reference, more: tuple[str, ...]) -> None:
    """Two of four are lost, two come: each stage has a member of its own again. Copies are slow."""
    arguments = ("--evaluate-every", "10", *more)
    go = tmp_path / "go"
    faults = in_turn(fault(2, 3, "ForwardPass", 3), fault(0, 4, "BackwardPass", 2))
    command = ["--stages", "4", *arguments, *slow_until(go), "--faults", json.dumps(faults)]
    config = write_config(tmp_path, {"topology": {"transfer_mb_per_s": 0.01}})
    with RunningJob(tmp_path, 4, command, config) as job:
        job.wait_for("two losses", lambda: len(job.events("member_lost")) == 2)
        job.join()
        job.join()
        job.wait_for("each stage has an owner of its own", lambda: len(set(job.plan()["owners"])) == 4)
        # Where they come late a worker that only draws batches has come as well, for rank 0.
        joined = {event["member_id"] for event in job.events("member_joined")[4:]}
        assert len(joined.intersection(job.plan()["owners"])) == 2
        go.touch()
        result = job.finish()
    undisturbed = reference(4, 1, 6, *arguments, *result.length, own="--dropout" in more)
    assert_same(result, undisturbed, faults, joined=2)
    # A joiner at an end of the pipeline has drawn what its predecessor would have drawn; the other one until it came.
    drawn, whole = result.drawn(), undisturbed.samples()[0]
    assert whole in drawn and all(indices == whole[: len(indices)] for indices in drawn)


def test_a_standby_takes_over(tmp_path: Path, reference: Reference) -> None:
    """A member without a stage holds replicas; a lost stage goes to it at once, and nobody gets a second one.

    The job's etcd was killed before, and has been started again.
    """
    now, go = tmp_path / "now", tmp_path / "go"
    faults = in_turn(fault(1, 3, "BackwardPass", 2, when=str(now)))
    command = ["--stages", "2", *slow_until(go), "--faults", json.dumps(faults)]
    config = write_config(tmp_path, {"standby": {"replicas": True}, "redundancy": {"verify_every": 2}})
    with RunningJob(tmp_path, 2, command, config) as job:
        job.wait_for("a step", lambda: bool(job.events("step")))
        job.join()
        job.wait_for("it is admitted", lambda: len(job.events("member_joined")) == 3)
        standby = job.events("member_joined")[-1]["member_id"]
        job.wait_for("it holds replicas", lambda: set(job.plan()["shadows"]) == {standby})
        assert standby not in job.plan()["owners"]
        kill_own_etcd(job)
        now.touch()
        job.wait_for("the loss", lambda: len(job.events("member_lost")) == 1)
        go.touch()
        result = job.finish()
    assert_same(result, reference(2, 1, 6, *result.length), faults, joined=1)
    (event,) = result.events("takeover_planned")
    assert (event["role"], event["to"]) == ([0, 1], standby)
    assert {e["role"][1] for e in result.events("replica_built") if e["member"] == standby} == {0, 1}
    assert any(e["member"] == standby for e in result.events("replica_verified"))
    assert not result.events("replica_mismatch")
    assert len(set(job.plan()["owners"])) == 2
    told = [line for line in (tmp_path / "join-0.log").read_text().splitlines() if line.startswith("[bamboo]")]
    assert any(f" {standby} has joined the job and " in line for line in told), told
    assert told[-1].endswith(f" {standby} has ended: finished (exit 0)"), told


@pytest.mark.exhaustive
def test_long_iterations_are_interrupted(tmp_path: Path, reference: Reference) -> None:
    """A member joins and a worker is killed; the standby has the stage before the interrupted iteration ends."""
    now = tmp_path / "now"
    faults = in_turn(fault(2, 2, "BackwardPass", 1, when=str(now)))
    command = ["--stages", "4", "--pause-s", "0.1", *slow_until(tmp_path / mark(faults[0]), 0.1)]
    redundancy = {"mode": "lazy-frc-lazy-brc", "sync_every": 1, "verify_every": 2}
    config = write_config(tmp_path, {"redundancy": redundancy, "topology": {"blocks": 1}})
    with RunningJob(tmp_path, 4, [*command, "--faults", json.dumps(faults)], config, LONG) as job:
        job.wait_for("a step", lambda: bool(job.events("step")))
        job.join()
        job.wait_for("it is admitted", lambda: len(job.events("member_joined")) == 5)
        joined = job.events("member_joined")[-1]["member_id"]
        now.touch()
        result = job.finish()
    assert_same(result, reference(4, 1, 6, *result.length), faults, joined=1)
    plans = {event["epoch"]: event for event in result.events("plan")}
    (lost,) = (event for event in plans.values() if event["lost"])
    (step,) = {event["step"] for event in result.events("recovered") if event["epoch"] >= lost["epoch"]}
    told = {event["epoch"] for event in result.events("recovered") if event["step"] == step}
    # The newest plan of the interrupted iteration is not the takeover's: nobody has two stages any more.
    (epoch,) = told
    assert epoch > lost["epoch"] and not plans[epoch]["lost"]
    assert len(set(lost["owners"])) == 3 and joined in plans[epoch]["owners"] and len(set(plans[epoch]["owners"])) == 4
    assert not result.events("replica_mismatch") and result.events("replica_verified")


@pytest.mark.exhaustive
def test_join_a_job_with_checkpoints(tmp_path: Path, reference: Reference) -> None:
    """A script that resumes by load_checkpoint begins at the job's newest checkpoint."""
    go = tmp_path / "go"
    faults = in_turn(fault(3, 9, "ForwardPass", 3))
    command = ["--stages", "4", *slow_until(go), "--save-every", "7", "--resume", "--faults", json.dumps(faults)]
    with RunningJob(tmp_path, 4, command, write_config(tmp_path, {})) as job:
        job.wait_for("a loss", lambda: len(job.events("member_lost")) == 1)
        job.join()
        job.wait_for("each stage has an owner of its own", lambda: len(set(job.plan()["owners"])) == 4)
        go.touch()
        result = job.finish()
    undisturbed = reference(4, 1, 6, *result.length)
    assert_same(result, undisturbed, faults, joined=1)
    (dump,) = result.joined()
    assert len(dump["losses"]) < len(undisturbed.ranks()[0]["losses"]), "it has replayed everything"
    (indices,) = result.drawn()
    assert indices == undisturbed.samples()[3]


def assert_measured(result: Result, stages: dict[int, Told]) -> None:
    """The profile of the job has the seconds of its timelines and the bytes of its tensors."""
    timelines = read_timelines(result.out / "events.jsonl")
    spans = [span for timeline in timelines for span in timeline.spans]
    layers = tuple(len(stages[stage].blocks) for stage in range(4))
    built = Built(stages=4, layers=layers, each=(1,) * sum(layers), optimizer="Adam")
    (samples,) = {event["samples"] for event in result.events("step")}
    profile = profile_of("job", "", built, samples, stages, spans, retains=True)
    assert (profile.micro_batch, profile.micro_batches(1), profile.stages) == (4, 6, 4)
    # All but the last stage hand 16 floats of each of 4 samples on.
    assert [stages[stage].output for stage in range(4)] == [4 * 16 * 4] * 3 + [0]
    begin = 0
    for stage, count in enumerate(layers):
        mine = profile.each[begin : begin + count]
        begin += count
        for kind, field in ((Kind.FORWARD, "forward_s"), (Kind.BACKWARD, "backward_s"), (Kind.STEP, "update_s")):
            of_it = [s.end - s.begin for s in spans if s.kind is kind and s.role == (0, stage) and s.step > 2]
            assert min(of_it) <= sum(getattr(layer, field) for layer in mine) <= max(of_it), (stage, field)
        assert all(layer.boundary_bytes == 4 * 16 * 4 for layer in mine)


@pytest.mark.exhaustive
def test_joiners_that_fail_cost_nothing(tmp_path: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """One has another script, notices that and ends; one dies while it starts, one when it has been admitted.

    Meanwhile the job is measured as ``bamboo profile`` does it.
    """
    arguments = ("--evaluate-every", "2")
    go = tmp_path / "go"
    command = ["--stages", "4", *arguments, *slow_until(go)]

    def measured() -> dict[int, Told]:
        return told(read_job(locate(job.name, None)), 4)

    with RunningJob(tmp_path, 4, command, write_config(tmp_path, {}), options=["--measured"]) as job:
        monkeypatch.setenv("XDG_RUNTIME_DIR", job.env["XDG_RUNTIME_DIR"])  # where the job can be found
        job.wait_for("an evaluation", lambda: len(job.events("step")) >= 4)
        job.command += ["--evaluate-every", "3"]
        other = job.join()
        job.wait_for("it has ended", lambda: other.poll() is not None)
        assert other.returncode == 1
        assert "must run the same script" in job.output()

        del job.command[-2:]
        starting, log = job.join(), tmp_path / "join-1.log"
        job.wait_for("the joiner's script runs", lambda: "Using topology" in log.read_text())
        os.killpg(starting.pid, signal.SIGKILL)
        starting.wait(30)

        admitted = job.join()
        job.wait_for("it is admitted", lambda: len(job.events("member_joined")) == 5)
        assert not job.events("member_lost")
        os.killpg(admitted.pid, signal.SIGKILL)
        admitted.wait(30)
        job.wait_for("its loss is known", lambda: len(job.events("member_lost")) == 1)
        job.wait_for("it is measured", lambda: all(each.blocks and each.kept for each in measured().values()))
        stages = measured()
        go.touch()
        result = job.finish()
    assert_same(result, reference(4, 1, 6, *arguments, *result.length), [])
    assert_measured(result, stages)
    assert len(set(job.plan()["owners"])) == 4


def test_a_whole_pipeline_vanishes(tmp_path: Path, reference: Reference) -> None:
    """Owners and shadows of all stages of one pipeline at once: the other pipeline has the same parameters.

    Sums are rounded before they are reduced, each pipeline's by itself, also where one member has both. With a dataset
    everybody draws for training; what a script evaluates on only those can who begin at an end.
    """
    arguments = ("--steps", "9", "--training-data", "--evaluate-every", "3")
    rounded = {"communication_data_type": "bf16"}
    undisturbed = reference(2, 2, 4, *arguments, **rounded)
    faults = [fault(0, 4, "BackwardPass", 2), fault(2, 4, "BackwardPass", 2)]
    config = write_config(tmp_path, {"membership": {"settle_ms": 300}}, 4, **rounded)
    result = run_bamboo(tmp_path, 4, ["--stages", "2", *arguments, "--faults", json.dumps(faults)], config)
    assert "goes on from the state of role" in result.output, f"no role was cloned:\n{result.output[-4000:]}"
    assert_same(result, undisturbed, faults, joined=1)
    assert "nobody else can draw its batches" in result.output
    evaluations = undisturbed.ranks()[0]["evaluations"]
    assert [dump["evaluations"] for dump in result.ranks().values()] == [evaluations] * 2


@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", [precisions.FP16, {"communication_data_type": "bf16"}], ids=["fp16", "rounded"])
def test_three_pipelines_on_the_members_of_two(tmp_path: Path, reference: Reference, precision: dict[str, Any]) -> None:
    """The sum over three pipelines depends on its order, which stays."""
    arguments = ("--steps", "9", "--training-data")
    undisturbed = reference(2, 3, 4, *arguments, own=True, **precision)
    faults = [fault(0, 4, "BackwardPass", 2), fault(3, 4, "BackwardPass", 2)]
    config = write_config(tmp_path, {"membership": {"settle_ms": 300}}, 4, **precision)
    result = run_bamboo(tmp_path, 6, ["--stages", "2", *arguments, "--faults", json.dumps(faults)], config)
    assert "goes on from the state of role" in result.output, f"no role was cloned:\n{result.output[-4000:]}"
    assert_same(result, undisturbed, faults)


REPLACED = """
from small_job import begin
from bamboo_ds.engine.replicas.replica import capture, restore

engine, data = begin(-1)  # 2**64 - 1: where a script sets none, torch's is any number of 64 bits
engine.train_batch(data)
binding = engine._parts.binding
local, (replica,) = binding.local, binding.replicas()
replica.catch_up()
assert local.verification.checksum is not None and replica.verification.checksum is not None
for runtime in (local, replica):
    binding.use(runtime)
    binding.refresh()
    restore(runtime, capture(runtime))
    assert runtime.verification.checksum is None, "it is of the state before"
binding.use(local)
for _ in range(3):
    engine.train_batch(data)
replica.catch_up()
assert replica.verification.checksum is not None
"""


def test_a_state_that_is_replaced_has_no_checksum(tmp_path: Path) -> None:
    """What a runtime was before it came back to a member is not compared with what its owner has now."""
    result = run_text(tmp_path, REPLACED, bamboo={"redundancy": {"verify_every": 1}})
    assert len(result.events("replica_verified")) >= 4
    assert not result.events("replica_mismatch")
