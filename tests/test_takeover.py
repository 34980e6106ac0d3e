"""Losses at every instruction, of every stage: the job goes on and computes what the undisturbed one computes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bamboo_ds.errors import EXIT_FATAL_LOSS

from .support.compare import assert_equal
from .support.jobs import Result, run_bamboo, write_config

pytestmark = pytest.mark.integration
Reference = Callable[..., Result]

STEPS = 5


def fault(rank: int, step: int, at: str, micro_batch: int | None = None, **more: Any) -> dict[str, Any]:
    return {"rank": rank, "step": step, "at": at, "micro_batch": micro_batch, **more}


def survive(
    folder: Path,
    reference: Reference,
    faults: list[dict[str, Any]],
    stages: int = 4,
    pipelines: int = 1,
    micro_batches: int = 6,
    arguments: tuple[str, ...] = (),
    own: bool = False,
    bamboo: dict[str, Any] | None = None,
    **config: Any,
) -> Result:
    """Run with ``faults`` and compare with the undisturbed run."""
    arguments = ("--steps", str(STEPS), *arguments)
    undisturbed = reference(stages, pipelines, micro_batches, *arguments, own=own, **config)
    settings = bamboo if bamboo is not None else {"redundancy": {"verify_every": 2}}
    file = write_config(folder, settings, micro_batches, **config)
    command = ["--stages", str(stages), *arguments, "--faults", json.dumps(faults)]
    result = run_bamboo(folder, stages * pipelines, command, file)
    assert_equal(result, undisturbed, faults)
    return result


# Every instruction kind at every stage that executes it, two losses to a job: the second victim is no neighbour of the
# first, since redundancy does not heal.
INSTRUCTIONS = [
    ("LoadMicroBatch", (0,), 2),
    ("LoadMicroBatch", (3,), 4),
    ("ForwardPass", (0, 2), 3),
    ("ForwardPass", (1, 3), 0),
    ("SendActivation", (0, 2), 1),
    ("SendActivation", (1,), 5),
    ("RecvActivation", (2,), 4),
    ("RecvActivation", (1, 3), 0),
    ("BackwardPass", (2, 0), 5),
    ("BackwardPass", (3, 1), 0),
    ("SendGrad", (2,), 3),
    ("SendGrad", (1, 3), 2),
    ("RecvGrad", (0, 2), 3),
    ("RecvGrad", (1,), 0),
    ("ReduceGrads", (2, 0), None),
    ("ReduceGrads", (1, 3), None),
    ("SendReplica", (0, 2), None),
    ("SendReplica", (3, 1), None),
    ("RecvReplica", (2, 0), None),
    ("RecvReplica", (1, 3), None),
    ("Commit", (0, 2), None),
    ("Commit", (3, 1), None),
    ("OptimizerStep", (2, 0), None),
    ("OptimizerStep", (1, 3), None),
    ("StepReplica", (0, 2), None),
    ("StepReplica", (3, 1), None),
]


@pytest.mark.parametrize(("at", "victims", "micro_batch"), INSTRUCTIONS)
def test_loss_at_every_instruction(
    tmp_path: Path, reference: Reference, at: str, victims: tuple[int, ...], micro_batch: int | None
) -> None:
    # Late instructions need an early first step: `replicas` of the second victim exist until the end.
    faults = [fault(rank, 1 + 2 * i, at, micro_batch, stage=None) for i, rank in enumerate(victims)]
    if len(faults) == 2 and at in ("SendReplica", "RecvReplica", "StepReplica"):
        # After the first takeover the second victim has neither a shadow nor a replica at these places.
        faults[1]["at"] = "ReduceGrads" if at == "SendReplica" else "OptimizerStep"
        faults[1]["step"] = 2
    survive(tmp_path, reference, faults)


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "lazy-frc-lazy-brc"},
        {"mode": "eager-frc-eager-brc", "verify_every": 1},
        {"mode": "eager-frc-lazy-brc", "placement": "fixed"},
        {"mode": "eager-frc-eager-brc", "placement": "fixed", "verify_every": 1},
        {"mode": "eager-frc-lazy-brc", "placement": "fixed", "memory_budget_mb": 0.005},
    ],
    ids=lambda s: "-".join(map(str, s.values())),
)
@pytest.mark.parametrize("at", [("BackwardPass", 3), ("SendReplica", None)], ids=lambda a: a[0])
def test_every_mode(tmp_path: Path, reference: Reference, settings: dict[str, Any], at: tuple[str, int | None]) -> None:
    faults = [fault(2, 2, *at), fault(0, 3, "ForwardPass", 4, stage=0)]
    result = survive(tmp_path, reference, faults, bamboo={"redundancy": settings})
    done = [event["frc_done"] for event in result.events("step")]
    if settings["mode"].startswith("lazy"):
        assert done == [0] * STEPS
    elif settings.get("placement") == "fixed":
        assert done[0] > 0


@pytest.mark.parametrize("at", ["ForwardPass", "BackwardPass", "ReduceGrads", "SendReplica", "Commit", "OptimizerStep"])
def test_two_pipelines(tmp_path: Path, reference: Reference, at: str) -> None:
    # Ranks 0..3 are (pipeline, stage) = (0,0), (1,0), (0,1), (1,1).
    micro_batch = 2 if at.endswith("Pass") else None
    faults = [fault(0, 1, at, micro_batch), fault(3, 2, at, micro_batch)]
    survive(tmp_path, reference, faults, stages=2, pipelines=2, micro_batches=4)


@pytest.mark.parametrize(
    ("stages", "pipelines", "victims"),
    [(2, 1, (0,)), (2, 1, (1,)), (3, 1, (1,)), (8, 1, (0, 2, 4, 6)), (4, 2, (0, 3, 4, 7)), (2, 4, (0, 3, 5, 6))],
)
def test_shapes(tmp_path: Path, reference: Reference, stages: int, pipelines: int, victims: tuple[int, ...]) -> None:
    faults = [fault(rank, 1 + i % 3, ("BackwardPass", "ForwardPass")[i % 2], 2) for i, rank in enumerate(victims)]
    # With more than two pipelines the mean of their losses depends on the order of a sum, which DeepSpeed leaves to
    # the collective: bit-equal to our own run, and to DeepSpeed's within rounding.
    own = pipelines > 2
    result = survive(tmp_path, reference, faults, stages, pipelines, micro_batches=4, own=own)
    if own:
        stock = reference(stages, pipelines, 4, "--steps", str(STEPS))
        for dump in result.ranks().values():
            assert dump["losses"] == pytest.approx(stock.ranks()[0]["losses"], rel=1e-6)
        for role, state in stock.roles().items():
            for mine, theirs in zip(result.roles()[role]["parameters"], state["parameters"], strict=True):
                assert (mine - theirs).norm() <= 1e-6 * theirs.norm()


@pytest.mark.parametrize(("at", "micro_batch"), [("ForwardPass", 2), ("RecvGrad", 1), ("Commit", None)])
def test_stopped_process(tmp_path: Path, reference: Reference, at: str, micro_batch: int | None) -> None:
    settings = {"membership": {"lease_ttl_s": 2}}
    result = survive(tmp_path, reference, [fault(1, 2, at, micro_batch, signal="SIGSTOP")], stages=3, bamboo=settings)
    assert [event["reason"] for event in result.events("member_lost")] == ["heartbeat"]


def test_several_at_once(tmp_path: Path, reference: Reference) -> None:
    survive(tmp_path, reference, [fault(0, 2, "BackwardPass", 2), fault(2, 2, "BackwardPass", 2)])


@pytest.mark.parametrize("at", ["._adopt_roles", "._record", "ResendActivation", "ReduceGrads", "Commit"])
def test_loss_during_a_recovery(tmp_path: Path, reference: Reference, at: str) -> None:
    # Stage 1 goes at its third backward; stage 3 follows while the survivors recover or finish the iteration.
    faults = [fault(1, 2, "BackwardPass", 2), fault(0 if at == "ResendActivation" else 3, 2, at)]
    if at == "ResendActivation":
        # The new owner of stage 1 is stage 0's: it has nothing to fall back on, so the other survivor goes instead.
        faults = [fault(3, 2, "BackwardPass", 2), fault(1, 2, at)]
    survive(tmp_path, reference, faults)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_loss_during_evaluation(tmp_path: Path, reference: Reference, rank: int) -> None:
    faults = [fault(rank, 2, "._exec_forward_pass", 1, evaluating=True)]
    survive(tmp_path, reference, faults, stages=3, arguments=("--evaluate-every", "2"))


def test_loss_of_the_outputs_of_an_evaluation(tmp_path: Path, reference: Reference) -> None:
    # All others have entered the commit by then; what they would commit died with the last stage.
    faults = [fault(2, 2, "._reduce_outputs")]
    survive(tmp_path, reference, faults, stages=3, arguments=("--evaluate-every", "2"))


def test_loss_between_iterations(tmp_path: Path, reference: Reference) -> None:
    survive(tmp_path, reference, [fault(2, 2, "._train_schedule"), fault(0, 4, "._train_schedule")])


@pytest.mark.parametrize(
    ("name", "arguments", "own", "config"),
    [
        ("tuples", ("--model", "tuple"), False, {}),
        ("own-loss-and-buffers", ("--model", "loss", "--norm"), False, {}),
        ("dropout", ("--dropout", "0.2"), True, {}),
        ("checkpointed-dropout", ("--dropout", "0.2", "--checkpoint-activations", "1"), True, {}),
        ("non-reentrant", ("--checkpoint-activations", "1"), False, {"pipeline": {"use_reentrant": False}}),
        ("instances-and-dataset", ("--instances", "--training-data"), False, {}),
        ("client-sgd", ("--optimizer", "client-sgd"), False, {"optimizer": None, "scheduler": None}),
        (
            "client-adamw",
            ("--optimizer", "client-adamw"),
            False,
            {"optimizer": None, "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 20}}},
        ),
        ("no-clipping", (), False, {"gradient_clipping": 0.0}),
    ],
)
@pytest.mark.parametrize("victims", [(0,), (2,)], ids=["first", "last"])
def test_features(
    tmp_path: Path,
    reference: Reference,
    name: str,
    arguments: tuple[str, ...],
    own: bool,
    config: dict[str, Any],
    victims: tuple[int, ...],
) -> None:
    faults = [fault(rank, 2, "BackwardPass", 1) for rank in victims]
    survive(tmp_path, reference, faults, stages=3, micro_batches=4, arguments=arguments, own=own, **config)


def test_adjacent_losses_are_fatal_and_say_so(tmp_path: Path) -> None:
    file = write_config(tmp_path, {}, 4)
    # The owner of stage 1, and its shadow as soon as it takes the stage over.
    faults = [fault(1, 3, "BackwardPass", 1), fault(0, 3, "._recover")]
    command = ["--stages", "3", "--steps", "5", "--faults", json.dumps(faults), "--save-every", "2"]
    result = run_bamboo(tmp_path, 3, command, file)
    assert len(result.faults()) == 2
    assert result.exit_code == EXIT_FATAL_LOSS, result.output[-4000:]
    assert result.output.count("bamboo_ds.errors.FatalLoss: no living member holds stage 1 of pipeline 0") == 1
    assert str(tmp_path / "checkpoints" / "step2") in result.output
    (event,) = result.events("fatal")
    assert event["stages"] == [[0, 0], [0, 1]] or event["stages"] == [[0, 1]]
