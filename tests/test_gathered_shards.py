"""Shards of partitioned optimizers after a step: owners of a stage gather them, other holders get them over lanes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bamboo_ds.comm.transport import Lane

from .support.precisions import BF16_ZERO, FP32_ZERO
from .support.simulated_engine import Cut, Spec, World, same, state_of
from .support.simulated_network import SimulatedTransport
from .support.surviving import Reference, fault, survive, survive_in_turn
from .test_takeover_cuts import simulated

__all__ = ["simulated"]

pytestmark = pytest.mark.claim("state.md", "reference/guarantees.md")

#: Between the optimizer step and the exchange of shards.
STEPPED = ".iteration.replication.exchange_shards"
#: Meanwhile the others have begun to gather.
WAITED_FOR = {"pause": 0.5}


def gathers_and_messages(world: World, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], Counter[tuple[str, str]]]:
    """How often each member of ``world`` has gathered shards, and how many messages of them have gone over lanes."""
    messages: Counter[tuple[str, str]] = Counter()
    send = SimulatedTransport.send

    def counting(self: SimulatedTransport, lane: Lane, sequence: int, payload: Any) -> Any:
        if lane.name.startswith("shard "):
            messages[lane.source, lane.destination] += 1
        return send(self, lane, sequence, payload)

    with monkeypatch.context() as patch:
        patch.setattr(SimulatedTransport, "send", counting)
        world.run()
    return [member.gathered for member in world.members.values()], messages


def test_owners_gather_once_after_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing goes between them over lanes."""
    world = World(Spec(pipelines=2, stages=2, iterations=4, sharded=True), 0)
    gathers, messages = gathers_and_messages(world, monkeypatch)
    assert gathers == [4] * 4
    assert messages == Counter({("m0", "m3"): 4, ("m1", "m2"): 4, ("m2", "m1"): 4, ("m3", "m0"): 4})


def test_shards_where_members_become_fewer_than_roles_of_a_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of six are left in the end: one of them owns two of the three roles of each stage."""
    spec = Spec(pipelines=3, stages=2, iterations=12, heals=True, sharded=True)

    def healed(world: World) -> bool:
        return None not in world.plan.shadows and not world.plan.learners and world._entered()

    world = World(spec, 0, (Cut("m0", 9), *(Cut(f"m{number}", 5, healed) for number in (4, 2, 3))))
    gathers, messages = gathers_and_messages(world, monkeypatch)
    assert world.killed == ["m0", "m4", "m2", "m3"] and min(gathers[1], gathers[5]) > 0
    assert {len(set(world.plan.owners[:3])), len(set(world.plan.owners[3:]))} == {2}
    assert messages["m1", "m5"] > 0 and messages["m5", "m1"] > 0
    states, expected = state_of(world), state_of(World(replace(spec, heals=False), 0).run())
    assert all(same(states[role], expected[role]) for role in expected)


@pytest.mark.exhaustive
@pytest.mark.integration
@pytest.mark.parametrize(
    ("faults", "config"),
    [
        pytest.param([fault(2, 1, STEPPED), fault(1, 3, STEPPED, **WAITED_FOR)], FP32_ZERO, id="two"),
        pytest.param([fault(3, 2, ".iteration.replication.step")], BF16_ZERO, id="before a replica's step"),
    ],
)
def test_jobs(tmp_path: Path, reference: Reference, faults: list[Any], config: dict[str, Any]) -> None:
    """A member is lost after its step, when nobody has its shard: others are in the gather by then, or are not."""
    result = survive(tmp_path, reference, faults, 2, 2, micro_batches=4, **config)
    assert result.events("replica_verified") and not result.events("replica_mismatch")


@pytest.mark.integration
def test_losses_until_one_member_has_several_roles_of_a_stage(tmp_path: Path, reference: Reference) -> None:
    """Healing comes between; what is left of four members are two, and then one."""
    faults = [fault(1, 2, STEPPED, **WAITED_FOR), fault(2, 5, STEPPED), fault(3, 8, STEPPED)]
    result = survive_in_turn(tmp_path, reference, faults, 2, 2, micro_batches=4, **BF16_ZERO)
    assert result.events("replica_verified") and not result.events("replica_mismatch")
    assert len(set(result.events("plan")[-1]["owners"])) == 1
