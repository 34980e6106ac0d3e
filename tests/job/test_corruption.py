"""Members whose copy of a stage is wrong: who is found, who goes, and that the others have equal state afterwards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.compare import differences
from tests.support.faults import mark
from tests.support.jobs import Reference, Result, run_bamboo, write_config
from tests.support.surviving import fault, survive

pytestmark = pytest.mark.claim("guides/exactness.md", "reference/events.md", "reference/settings.md")

EVICT: dict[str, Any] = {"redundancy": {"verify_every": 2, "on_mismatch": "evict"}}
WEIGHTS, MOMENTS = "parameter ", "exp_avg of"
STEPS = 9


# -- jobs -----------------------------------------------------------------------------------------------


def flipped(rank: int, copy: str, tensor: str) -> dict[str, Any]:
    """Before the third step; checksums are taken after the fourth one, and compared in the commit of the fifth."""
    return fault(rank, 2, "Commit", signal="flip", copy=copy, tensor=tensor)


def assert_evicted(result: Result, spoilt: dict[str, Any]) -> None:
    """The member with the flipped bit is lost, and no other one; what is told names it and its tensors."""
    tail, rank = result.output[-6000:], spoilt["rank"]
    assert result.exit_code == 0, tail
    assert result.faults() == [mark(spoilt)]
    (place, name) = (result.out / mark(spoilt)).read_text().split(" ", 1)
    (event,) = result.events("member_corrupt")
    assert (event["member_id"][:2], event["copy_of"], event["step"]) == (f"m{rank}", spoilt["copy"], 4), tail
    assert place == "({},{})".format(*event["role"])
    assert name in event["tensors"], "what the flipped bit has spoilt since is named, too"
    (lost,) = result.events("member_lost")
    assert (lost["member_id"], lost["reason"]) == (event["member_id"], "exit") and "Corrupt: " in lost["detail"]
    (found,) = result.events("replica_mismatch")
    assert (found["role"], found["tensors"]) == (event["role"], event["tensors"])
    assert not result.events("member_left") and not result.events("fatal")
    assert result.events("step")[-1]["step"] == STEPS
    assert "[bamboo] losses: 1;" in result.output and "1 wrong copy of stages" in result.output
    # Every role is owned, and compared with its replica again where it has one.
    assert {
        tuple(each["role"]) for each in result.events("replica_verified") if each["step"] > 5
    } == result.roles().keys()


def assert_alike(result: Result, pipelines: int, stages: int) -> None:
    """Owners, replicas and siblings have equal state, to the last bit."""
    roles, replicas = result.roles(), result.replicas()
    assert len(roles) == pipelines * stages and replicas
    for (pipeline, stage), state in roles.items():
        assert not differences(roles[0, stage], state), f"owners of stage {stage}"
        if (pipeline, stage) in replicas:
            assert not differences(state, replicas[pipeline, stage]), f"replica of {pipeline, stage}"


def corrupted(folder: Path, *spoilt: dict[str, Any], members: int = 4) -> Result:
    config = write_config(folder, EVICT)
    command = ["--stages", "2", "--steps", str(STEPS), "--faults", json.dumps(spoilt)]
    return run_bamboo(folder, members, command, config)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("rank", "tensor"),
    [
        pytest.param(3, MOMENTS, id="last-moments"),
        pytest.param(0, WEIGHTS, id="first-weights", marks=pytest.mark.exhaustive),
    ],
)
def test_an_owner_with_wrong_state_is_lost(tmp_path: Path, rank: int, tensor: str) -> None:
    """One of the first pipeline, and of the second, which is its sibling: its replica goes on, equal to the others."""
    spoilt = flipped(rank, "owner", tensor)
    result = corrupted(tmp_path, spoilt)
    assert_evicted(result, spoilt)
    assert_alike(result, 2, 2)
    assert set(result.ranks()) == {0, 1, 2, 3} - {rank}


@pytest.mark.exhaustive
@pytest.mark.integration
def test_a_replica_with_wrong_state_spoils_nothing(tmp_path: Path, reference: Reference) -> None:
    """Its member is lost; all results are those of an undisturbed run."""
    spoilt = flipped(1, "replica", WEIGHTS)
    result = survive(tmp_path, reference, [spoilt], 2, 2, ("--steps", str(STEPS)), bamboo=EVICT)
    assert_evicted(result, spoilt)
    assert_alike(result, 2, 2)


@pytest.mark.exhaustive
@pytest.mark.integration
def test_pipelines_that_differ_end_the_job(tmp_path: Path) -> None:
    """Owner and replica of a stage have the same wrong state, and so have as many copies as have the right one."""
    spoilt = [flipped(0, "owner", MOMENTS), flipped(2, "replica", MOMENTS)]
    result = corrupted(tmp_path, *spoilt)
    assert result.exit_code != 0 and result.faults() == sorted(map(mark, spoilt)), result.output[-4000:]
    assert "CopiesDiffer: the copies of the same stage differ, and it cannot be told which" in result.output
    assert not result.events("member_corrupt") and not result.events("replica_mismatch")
    assert result.events("step")[-1]["step"] == 4, "the next one has been committed, and nobody tells of it"


@pytest.mark.integration
def test_with_one_pipeline_the_replica_is_mended(tmp_path: Path) -> None:
    """Nobody can tell which of two is wrong; once, that is no more than a replica to be copied again."""
    spoilt = flipped(0, "replica", WEIGHTS)
    result = corrupted(tmp_path, spoilt, members=2)
    assert result.exit_code == 0 and result.faults() == [mark(spoilt)], result.output[-4000:]
    assert len(result.events("replica_mismatch")) == 1 and not result.events("member_corrupt")
    assert not result.events("member_lost")
    assert_alike(result, 1, 2)
