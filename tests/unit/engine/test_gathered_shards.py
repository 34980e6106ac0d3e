"""Shards of partitioned optimizers after a step: owners of a stage gather them, other holders get them by channels."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from tests.model.test_takeover_cuts import simulated
from tests.support.simulated_engine import Cut, Spec, World, same, state_of
from tests.support.simulated_network import SimulatedChannel

__all__ = ["simulated"]

pytestmark = pytest.mark.claim("state.md", "reference/guarantees.md")


def gathers_and_messages(world: World, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], Counter[tuple[str, str]]]:
    """How often each member of ``world`` has gathered shards, and how many messages of them have gone over channels."""
    messages: Counter[tuple[str, str]] = Counter()
    send = SimulatedChannel.send

    def counting(self: SimulatedChannel, sequence: int, payload: Any) -> Any:
        if self.name.startswith("shard "):
            messages[self.source, self.destination] += 1
        return send(self, sequence, payload)

    with monkeypatch.context() as patch:
        patch.setattr(SimulatedChannel, "send", counting)
        world.run()
    return [member.gathered for member in world.members.values()], messages


def test_owners_gather_once_after_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing goes between them over channels."""
    world = World(Spec(pipelines=2, stages=2, iterations=4, sharded=True), 0)
    gathers, messages = gathers_and_messages(world, monkeypatch)
    assert gathers == [4] * 4
    assert messages == Counter({("m0", "m3"): 4, ("m1", "m2"): 4, ("m2", "m1"): 4, ("m3", "m0"): 4})


def test_shards_where_members_become_fewer_than_roles_of_a_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of six are left in the end: one of them owns two of the three roles of each stage."""
    spec = Spec(pipelines=3, stages=2, iterations=12, heals=True, sharded=True)

    def healed(world: World) -> bool:
        return None not in world.plan.shadows and not world.plan.builders and world._entered()

    world = World(spec, 0, (Cut("m0", 9), *(Cut(f"m{number}", 5, healed) for number in (4, 2, 3))))
    gathers, messages = gathers_and_messages(world, monkeypatch)
    assert world.killed == ["m0", "m4", "m2", "m3"] and min(gathers[1], gathers[5]) > 0
    assert {len(set(world.plan.owners[:3])), len(set(world.plan.owners[3:]))} == {2}
    assert messages["m1", "m5"] > 0 and messages["m5", "m1"] > 0
    states, expected = state_of(world), state_of(World(replace(spec, heals=False), 0).run())
    assert all(same(states[role], expected[role]) for role in expected)
