"""What idle time takes off the critical path: steps of replicas, before anything counts on them, and batches."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import pytest
import torch

from bamboo_ds.engine.iteration.redundant import RedundantPasses
from bamboo_ds.engine.iteration.replication import Replication
from bamboo_ds.engine.recovery.roles import RoleTransfer
from bamboo_ds.engine.stage.deepspeed_adapter import DeepSpeedAdapter
from bamboo_ds.engine.stage.runtime import StageRuntime
from bamboo_ds.topology import Plan, Role
from tests.model.test_takeover_cuts import LINE, check, every_loss, simulated, undisturbed
from tests.support.simulated_engine import Spec, World, state_of

__all__ = ["simulated"]

pytestmark = pytest.mark.claim("reference/guarantees.md")

LAZY = "lazy-frc-lazy-brc"


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often a pending step was taken, by the function that has asked for that."""
    monkeypatch.setattr("bamboo_ds.engine.iteration.exchanged._FIRST", 0)  # which looks at replicas, too
    done: Counter[str] = Counter()
    catch_up = StageRuntime.catch_up

    def counting(self: StageRuntime) -> None:
        if self.pending is not None:
            done[sys._getframe(1).f_code.co_name] += 1
        catch_up(self)
        assert self.pending is None

    monkeypatch.setattr(StageRuntime, "catch_up", counting)
    return done


@pytest.mark.parametrize(
    "spec",
    [Spec(evaluates=True), Spec(mode=LAZY, evaluates=True), Spec(pipelines=2, stages=2, evaluates=True)],
    ids=["eager", "lazy", "two pipelines"],
)
def test_a_loss_before_a_pending_step(spec: Spec, taken: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The heir takes the step first, whose owner had taken it before it was lost."""
    follow = RoleTransfer.follow

    def following(self: RoleTransfer, plan: Plan) -> None:
        follow(self, plan)
        assert not any(runtime.pending for runtime in self.binding.owned())

    monkeypatch.setattr(RoleTransfer, "follow", following)
    for seed, victim in enumerate(sorted(undisturbed(spec, 0).members)):
        for world in every_loss(spec, seed, victim, step=6):
            check(world)
            assert world.killed == [victim]
    assert taken["follow"] > 3, taken


@pytest.mark.parametrize(
    ("spec", "place"),
    [
        (Spec(mode=LAZY), "run"),
        (Spec(evaluates=True), "follow_owner"),
        (Spec(changes="rates"), "_follow_settings"),
        (Spec(blocks=3, lends=True, heals=True, iterations=6), "begin"),
        (Spec(stages=4, heals=True, leaves=True, iterations=8), "follow"),
    ],
    ids=["idle time", "evaluation", "settings", "divided stage", "handover"],
)
def test_what_takes_the_step_first(spec: Spec, place: str, taken: Counter[str]) -> None:
    """And comparisons of replicas, here after each step, find what is equal equal."""
    for seed in range(8):
        world = World(spec, seed).run()
        check(world)
        verified = [kind for member in world.members.values() for kind, _ in member.job.events]
        assert verified.count("replica_verified") > 0
        if taken[place]:
            return
    raise AssertionError(f"no step was pending at {place}: {taken}")


def test_a_step_that_is_forgotten_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetting(self: StageRuntime) -> None:
        self.pending = None

    monkeypatch.setattr(StageRuntime, "catch_up", forgetting)
    with pytest.raises(AssertionError, match=r"differs|m\d"):
        state_of(World(LINE, 0).run())


def test_a_step_goes_by_what_held_in_its_iteration(taken: Counter[str]) -> None:
    """Scripts change the size of batches, and clipping, before a replica takes the step of the iteration before."""
    settings: Any = {"train_batch_size": 4, "gradient_clipping": 0.5}
    now = {"train_batch_size": 8, "gradient_clipping": 1.0}

    class Config:
        def __init__(self) -> None:
            vars(self).update(now)

    engine: Any = type("Engine", (), {"_config": Config()})()
    ds = DeepSpeedAdapter(engine)
    with ds.with_step_settings(settings):
        assert ds.step_settings() == settings
    assert ds.step_settings() == now
    with ds.with_step_settings(now):
        vars(engine._config)["train_batch_size"] = 16  # by the script's scheduler, in a step that is not late
    assert ds.step_settings() == {**now, "train_batch_size": 16}
    runtime = StageRuntime(Role(0, 0), owned=False)
    found: list[StageRuntime] = []
    runtime.pending = found.append
    runtime.catch_up()
    runtime.catch_up()
    assert found == [runtime] and sum(taken.values()) == 1


def test_replicas_that_are_looked_at_step_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where members exchange shards or compare what they have after each step, none is pending."""
    late: list[torch.Tensor] = []
    monkeypatch.setattr(Replication, "_catch_up", lambda *_: late.append(torch.zeros(())))
    for spec in (Spec(pipelines=2, stages=2, sharded=True), Spec(checked=LINE.iterations)):
        check(World(spec, 0).run())
    assert not late


@pytest.mark.parametrize(
    "spec", [LINE, Spec(mode=LAZY), Spec(dataset=True), Spec(apart=0)], ids=["eager", "lazy", "data set", "apart"]
)
def test_batches_are_drawn_in_idle_time(spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each once, whenever that is, and while the script's own role is bound."""
    draw, done = RedundantPasses._draw, Counter[bool]()

    def counting(self: RedundantPasses, *place: Any) -> bool:
        done[found := draw(self, *place)] += 1
        return found

    monkeypatch.setattr(RedundantPasses, "_draw", counting)
    for seed in range(3):
        check(World(spec, seed).run())
    for world in every_loss(spec, 0, "m1", step=8):
        check(world)
    assert done[True] > 3 and done[False] > 3
