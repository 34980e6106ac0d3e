"""Comparing a job with an undisturbed one, bit by bit."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from .faults import mark
from .jobs import Result


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Where two nested structures differ; tensors must be bit-equal."""
    if torch.is_tensor(a) and torch.is_tensor(b):
        return [] if a.shape == b.shape and torch.equal(a, b) else [path]
    if isinstance(a, dict) and isinstance(b, dict):
        if a.keys() != b.keys():
            return [f"{path}: keys {sorted(map(str, a))} and {sorted(map(str, b))}"]
        return [d for k in a for d in differences(a[k], b[k], f"{path}/{k}")]
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        if len(a) != len(b):
            return [f"{path}: {len(a)} and {len(b)} items"]
        return [d for i, (x, y) in enumerate(zip(a, b, strict=True)) for d in differences(x, y, f"{path}[{i}]")]
    if a != b and type(a) is type(b) and type(a).__eq__ is object.__eq__ and hasattr(a, "__dict__"):
        return differences(vars(a), vars(b), path)  # such as a loss scaler
    return [] if a == b else [f"{path}: {a} and {b}"]


def assert_same_states(result: Result, reference: Result) -> None:
    """Parameters, buffers, optimizer state, learning rates and counters of every role, and of every replica."""
    roles, replicas = reference.roles(), result.replicas()
    for expected, found in ((roles, result.roles()), ({role: roles[role] for role in replicas}, replicas)):
        differing = differences(expected, found)
        assert not differing, differing[:10]


def assert_computed(result: Result, reference: Result) -> None:
    """What is left of the job has computed what ``reference`` has: losses from the step on with which a worker began,
    and :func:`the states of all roles <assert_same_states>`.
    """
    tail = result.output[-6000:]
    plain = reference.ranks()[0]["losses"]
    survivors = [*result.ranks().values(), *result.joined()]
    assert survivors, tail
    for dump in survivors:
        assert dump["losses"] == plain[len(plain) - len(dump["losses"]) :], tail
    assert_same_states(result, reference)


def assert_read(result: Result, reference: Result, lost: Collection[int]) -> None:
    """Every worker has read the samples that it has to, those of ``lost`` ranks the first of them."""
    read = result.samples()
    for rank, indices in reference.samples().items():
        mine = read.get(rank, [])
        assert mine == (indices[: len(mine)] if rank in lost else indices), f"rank {rank} read other samples"


def assert_left(result: Result, reference: Result, left: set[int], joined: int = 0) -> None:
    """``left`` have left; nothing was lost or done twice; all results are those of the undisturbed run."""
    tail = result.output[-5000:]
    assert result.exit_code == 0, tail
    plain, ranks = reference.ranks()[0], result.ranks()
    assert set(ranks) == set(reference.ranks()) - left, tail
    assert len(result.joined()) == joined, tail
    assert_computed(result, reference)
    assert_read(result, reference, left)
    for dump in [*ranks.values(), *result.joined()]:
        assert dump["losses"] == plain["losses"], "it has not begun with the first step"
    # In the file those of two agents that tell of steps one after the other may be in another order.
    assert sorted(event["step"] for event in result.events("step")) == list(range(1, len(plain["losses"]) + 1))
    for kind in ("recovered", "member_lost", "replica_mismatch", "fatal", "checkpoint_failed"):
        assert not result.events(kind), tail
    assert result.events("reconfigured")
    assert "Traceback" not in result.output


def assert_equal(result: Result, reference: Result, faults: list[dict[str, Any]]) -> None:
    """The job had exactly these faults, survived them, and computed from its first step what ``reference`` computed."""
    tail = result.output[-4000:]
    assert result.exit_code == 0, tail
    assert result.events("step"), "the engine was DeepSpeed's own"
    assert result.faults() == sorted(mark(f) for f in faults), tail
    lost = {f["rank"] for f in faults}
    expected, found = reference.ranks(), result.ranks()
    assert set(found) == set(expected) - lost, tail
    assert_computed(result, reference)
    for rank, dump in found.items():
        for what in ("losses", "evaluations"):
            assert dump[what] == expected[0][what], f"{what} of rank {rank}"
    told_losses = {event["loss"] for event in result.events("step")}
    assert told_losses <= set(expected[0]["losses"]), "events tell other losses than train_batch returns"
    told = [int(event["member_id"][1:].partition("-")[0]) for event in result.events("member_lost")]
    # A worker that only draws batches, in a further slot, ends with the member that has started it.
    assert sorted(slot for slot in told if slot in expected) == sorted(lost), f"told of {told}: {tail}"
    assert_read(result, reference, lost)
