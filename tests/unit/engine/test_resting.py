"""Optimizers that rest in host memory: when members bring them there, and back."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bamboo_ds.config import BambooConfig, RedundancyMode
from bamboo_ds.devices import staging
from bamboo_ds.engine.iteration.steps import Steps
from bamboo_ds.engine.replicas.building import StageBuilder
from bamboo_ds.topology import Layout, Plan, Role, initial_plan, takeover, with_redundancy
from tests.unit.engine.test_engine_parts import member_of


class _Optimizer(SimpleNamespace):
    """Counts what is asked of it."""

    inner = None
    resting = False

    def masters(self) -> list[torch.Tensor]:
        return []

    def rest(self) -> None:
        self.resting = True

    def rouse(self) -> None:
        self.resting = False


def _builder(plan: Plan, told: list[Any]) -> tuple[StageBuilder, Any]:
    """That of a member ``m0`` which owns all roles and has no replicas, and what it is a part of."""
    runtimes: dict[Role, Any] = {
        role: SimpleNamespace(role=role, parked=False, optimizer=_Optimizer()) for role in plan.world.roles
    }
    binding = SimpleNamespace(
        runtimes=runtimes, local=runtimes[Role(0, 0)], replicas=list, bound=lambda runtime: nullcontext()
    )
    context: Any = SimpleNamespace(
        binding=binding,
        ds=SimpleNamespace(device=torch.device("cpu")),
        job=SimpleNamespace(channel=SimpleNamespace(event=lambda name, **values: told.append(values["resting"]))),
        epoch=SimpleNamespace(member="m0", plan=plan),
        progress=SimpleNamespace(steps=4),
        settings=BambooConfig(),
        mode=RedundancyMode.LAZY,
    )
    return StageBuilder(context), context


def test_they_are_told_to_rest_and_to_rest_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no replica is told of."""
    monkeypatch.setattr(staging, "current", lambda: SimpleNamespace())
    plan = with_redundancy(initial_plan(["m0"]), Layout(1, 1), True)
    plan = replace(plan, layout=Layout(1, 3), owners=("m0",) * 3, shadows=(None,) * 3)
    told: list[Any] = []
    builder, context = _builder(plan, told)
    for tight in ((), (("m0", 0),), (("m0", 2),), (("m1", 0),), ()):
        context.epoch.plan = replace(plan, tight=tight)
        builder.place(context.epoch.plan)
        found = [each.optimizer.resting for each in context.binding.runtimes.values()]
        assert found == [False, *[tight[:1] in ((("m0", 0),), (("m0", 2),))] * 2]
    assert told == [[(0, 1), (0, 2)], []]


def test_a_member_makes_room_before_it_clones_a_role() -> None:
    before = with_redundancy(initial_plan([f"m{n}" for n in range(4)]), Layout(2, 2), True)
    before = replace(before, shadows=(None,) * 4)
    after = takeover(before, {"m0"})
    (heir,) = {after.owners[0]}
    found, done = member_of(before, heir), list[str]()
    for runtime in found.binding.runtimes.values():
        runtime.layers = SimpleNamespace(kept=list)  # type: ignore[assignment]

    def clone(source: Any, role: Role) -> Any:
        done.append("clone")
        found.binding.runtimes[role] = SimpleNamespace(  # type: ignore[assignment]
            role=role, owned=False, usable=True, pending=None, share=source.share
        )
        return found.binding.runtimes[role]

    found.builder.clone = clone  # type: ignore[method-assign]
    found.builder.make_room = lambda: done.append("room")  # type: ignore[method-assign]
    found.follow(after)
    assert done == ["room", "clone"]


def test_a_step_that_cannot_be_taken_chunk_by_chunk_any_more_is_taken_on_the_device() -> None:
    """The script has given its optimizer a hook since the last step."""
    done: list[str] = []
    builder: Any = SimpleNamespace(
        parks=False,
        move=lambda runtime, parked: done.append(f"move, parked {parked}"),
        make_room=lambda: done.append("make room"),
        at_home=lambda runtime: nullcontext(),
    )
    context: Any = SimpleNamespace(
        ds=SimpleNamespace(
            with_step_settings=lambda settings: nullcontext(), optimizer_step=lambda: done.append("step")
        ),
        binding=SimpleNamespace(bound=lambda runtime: nullcontext()),
    )
    steps = Steps(context, SimpleNamespace(), builder)  # type: ignore[arg-type]
    steps._apply_results = lambda *_: None  # type: ignore[method-assign]
    steps._note_checksum = lambda *_: None  # type: ignore[method-assign]
    inputs: Any = SimpleNamespace(positions=lambda: None, trained=(), settings={}, committed=None, results=None)
    steps.apply_step(SimpleNamespace(owned=True), inputs)  # type: ignore[arg-type]
    assert done == ["move, parked False", "make room", "step"]
    builder.parks = True
    done.clear()
    steps.apply_step(SimpleNamespace(owned=True), inputs)  # type: ignore[arg-type]
    assert done == ["step"]
