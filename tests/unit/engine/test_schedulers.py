"""Schedulers of replicas, and what a script sets itself."""

from __future__ import annotations

import enum
from collections import defaultdict, namedtuple
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from deepspeed.runtime.lr_schedules import WarmupLR

from bamboo_ds.engine.data.batches import as_message, from_message
from bamboo_ds.engine.script.changes import Adjustable
from bamboo_ds.engine.stage.clones import begin_groups, kept_by, put_kept
from bamboo_ds.engine.stage.runtime import StageRuntime
from bamboo_ds.engine.stage.schedulers import (
    Pristine,
    SchedulerPosition,
    capture_scheduler,
    load_scheduler,
    restore_scheduler,
    settings_of,
    take_step,
)
from bamboo_ds.errors import UnsupportedError
from bamboo_ds.topology import Role
from tests.support.sample_scheduler import SampleScheduler
from tests.unit.engine.test_attributes import Odd

pytestmark = pytest.mark.claim("reference/guarantees.md")


def optimizer_of(groups: int = 2) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": [torch.nn.Parameter(torch.zeros(2))]} for _ in range(groups)])


def runtime_with(optimizer: torch.optim.Optimizer, scheduler: Any = None, steps: int = 0) -> StageRuntime:
    runtime = StageRuntime(Role(0, 0), owned=True)
    counters = {"global_steps": steps, "global_samples": 8 * steps, "skipped_steps": 0}
    runtime.attributes = {"basic_optimizer": optimizer, "lr_scheduler": scheduler, **counters}
    return runtime


def samples(optimizer: torch.optim.Optimizer) -> SampleScheduler:
    return SampleScheduler(optimizer, 100)


def warmup(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    schedulers = torch.optim.lr_scheduler
    return schedulers.SequentialLR(
        optimizer,
        [schedulers.LinearLR(optimizer, 0.1, total_iters=3), schedulers.CosineAnnealingLR(optimizer, 9)],
        [3],
    )


def cyclic(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CyclicLR(
        optimizer, 0.1, 1.0, step_size_up=3, mode="exp_range", gamma=0.9, cycle_momentum=False
    )


def having(scheduler: Any, optimizer: torch.optim.Optimizer, pristine: Pristine) -> Any:
    """What a runtime has of its scheduler."""
    return SimpleNamespace(attributes={"lr_scheduler": scheduler, "basic_optimizer": optimizer}, pristine=pristine)


@pytest.mark.parametrize("make", [samples, warmup, cyclic])
def test_a_replica_steps_like_its_owner(make: Any, capsys: pytest.CaptureFixture[str]) -> None:
    mine, theirs = optimizer_of(), optimizer_of()
    scheduler = make(mine)
    pristine = Pristine(scheduler, mine)
    for _ in range(4):
        mine.step()
        take_step(scheduler, 8)
    replica = pristine.clone(theirs)
    for _ in range(2):  # the second time it is copied again, as after a failed check
        load_scheduler(having(replica, theirs, pristine), scheduler.state_dict())
        for group, given in zip(theirs.param_groups, settings_of(mine), strict=True):
            group.update(given)  # with the optimizer's own state
        for _ in range(3):
            for optimizer, each in ((mine, scheduler), (theirs, replica)):
                optimizer.step()
                take_step(each, 8)
            assert settings_of(mine) == settings_of(theirs)
        assert replica.state_dict() == scheduler.state_dict()
    assert replica.optimizer is theirs and scheduler.optimizer is mine
    assert not capsys.readouterr().out, "a scheduler prints although the script has loaded nothing"


def decays(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 1 / (1 + count))


def alike(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, [decay_of(0.5) for _ in optimizer.param_groups])


def nested(optimizer: torch.optim.Optimizer) -> Any:
    schedulers = torch.optim.lr_scheduler
    factor = schedulers.MultiplicativeLR(optimizer, lambda count: 0.5)
    sequence = schedulers.SequentialLR(optimizer, [decays(optimizer), schedulers.ExponentialLR(optimizer, 0.9)], [2])
    return schedulers.ChainedScheduler([factor, sequence], optimizer)


def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    rates = [0.1 * (n + 1) for n in range(len(optimizer.param_groups))]
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=rates, total_steps=12)


def deepspeed_s(optimizer: torch.optim.Optimizer) -> Any:
    return WarmupLR(optimizer, 0.0, [0.1 * (n + 1) for n in range(len(optimizer.param_groups))], 5)


def by_group(optimizer: torch.optim.Optimizer) -> Any:
    functions = [decay_of(group["weight_decay"]) for group in optimizer.param_groups]
    return torch.optim.lr_scheduler.LambdaLR(optimizer, functions)


def decay_of(base: float) -> Any:
    return lambda count: base**count


def groups_with(*decays: float) -> torch.optim.Optimizer:
    parameters = [{"params": [torch.nn.Parameter(torch.ones(2))], "weight_decay": decay} for decay in decays]
    return torch.optim.AdamW(parameters, lr=0.1)


@pytest.mark.parametrize("called", [False, True], ids=["instance", "callable"])
@pytest.mark.parametrize("counts", [(1, 3), (3, 1), (2, 2), (0, 2), (2, 0)], ids=str)
@pytest.mark.parametrize("make", [decays, alike, nested, one_cycle, deepspeed_s, by_group])
def test_stages_whose_optimizers_have_other_groups(make: Any, counts: tuple[int, int], called: bool) -> None:
    """A member with ``counts[0]`` groups holds the replica of a stage with ``counts[1]``, which it follows."""
    local, owner, replica = (
        groups_with(*[0.1 * (n + 1 + place) for n in range(max(1, count))])
        for place, count in ((0, counts[0]), (5, counts[1]), (5, counts[1]))
    )
    for optimizer, count in ((local, counts[0]), (owner, counts[1]), (replica, counts[1])):
        del optimizer.param_groups[count:]
    pristine = Pristine(make(local), local, given=make if called else None)
    scheduler = make(owner)
    for _ in range(4):
        owner.step()
        scheduler.step()
    begin_groups(replica, owner.state_dict()["param_groups"])
    home, runtime = runtime_with(owner, scheduler), runtime_with(replica)
    runtime.pristine = pristine
    unknown = (make is by_group and counts[1]) or (not counts[0] and make in (decays, alike, nested))
    if unknown and not called:

        def copy_it() -> None:
            runtime.attributes["lr_scheduler"] = pristine.clone(replica)
            restore_scheduler(runtime, capture_scheduler(home))

        with pytest.raises(UnsupportedError, match=r"has (a function of its own|other functions).*lr_scheduler=lambda"):
            copy_it()
        return
    clone = runtime.attributes["lr_scheduler"] = pristine.clone(replica)
    for _ in range(2):  # the second time it is copied again, as after a failed check
        restore_scheduler(runtime, from_message(as_message(capture_scheduler(home))))
        replica.load_state_dict(owner.state_dict())
        for _ in range(3):
            for optimizer, each in ((owner, scheduler), (replica, clone)):
                optimizer.step()
                each.step()
            assert settings_of(owner) == settings_of(replica)
        assert clone.get_last_lr() == scheduler.get_last_lr()


class Mode(enum.StrEnum):
    FAST = "fast"


class Keeping(torch.optim.lr_scheduler.LRScheduler):
    """Has attributes of every kind, all of which torch puts into its state."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.table, self.last, self.mode = numpy.linspace(0.1, 1.0, 20), torch.zeros(3), Mode.FAST
        self.counts, self.odd, self.function = defaultdict(int), Odd(), len
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:  # type: ignore[override]
        assert self.mode is Mode.FAST and self.function is len
        self.counts[self.last_epoch % 3] += 1
        self.last = self.last + self.counts[0]
        return [float(self.table[self.last_epoch] + self.last.sum()) for _ in self.optimizer.param_groups]


def test_attributes_of_every_kind() -> None:
    mine, theirs = optimizer_of(), optimizer_of(3)
    scheduler = Keeping(mine)
    pristine = Pristine(scheduler, mine)
    for _ in range(4):
        scheduler.step()
    home = runtime_with(mine, scheduler)
    replica = runtime_with(theirs, pristine.clone(theirs))
    home.pristine = replica.pristine = pristine
    clone = replica.attributes["lr_scheduler"]
    restore_scheduler(replica, from_message(as_message(capture_scheduler(home))))
    for _ in range(3):
        for each in (scheduler, clone):
            each.step()
        assert settings_of(theirs)[2]["lr"] == settings_of(mine)[0]["lr"]
    position = SchedulerPosition.of(home)
    assert position == SchedulerPosition.of(home) != SchedulerPosition.of(replica), "these have other groups"
    position.restore(home)
    assert SchedulerPosition.of(home) == position and scheduler.mode is Mode.FAST
    scheduler.last = scheduler.last + 1
    assert SchedulerPosition.of(home) != position


def test_what_optimizers_count_keeps_its_types() -> None:
    mine: Any = optimizer_of()
    theirs: Any = optimizer_of()
    pair = namedtuple("pair", "one other")
    for each in (mine, theirs):
        each.counts, each.pair, each.mode, each.number = defaultdict(int), pair(0, 0), Mode.FAST, numpy.int64(3)
    mine.counts["steps"] += 2
    mine.pair, mine.number = pair(1, 2), numpy.int64(5)
    put_kept(theirs, from_message(as_message(kept_by(mine))))
    theirs.counts["others"] += 1
    assert theirs.counts == {"steps": 2, "others": 1} and theirs.pair.other == 2 and theirs.mode is Mode.FAST
    assert theirs.number == 5 and type(theirs.number) is numpy.int64


@pytest.mark.parametrize("make", [decays, lambda optimizer: in_turn(optimizer, 2)])
def test_a_scheduler_that_comes_later_drives_other_groups(make: Any) -> None:
    """Before the owner's state comes: what a script assigns after ``initialize`` all members give to their replicas."""
    local, owner, replica = groups_with(0.1), groups_with(0.1, 0.2), groups_with(0.1, 0.2)
    scheduler = make(owner)
    clone = Pristine(make(local), local).clone(replica)
    for group, given in zip(replica.param_groups, owner.param_groups, strict=True):
        group.update({name: value for name, value in given.items() if name != "params"})
    for _ in range(4):
        for optimizer, each in ((owner, scheduler), (replica, clone)):
            optimizer.step()
            each.step()
        assert [group["lr"] for group in replica.param_groups] == [group["lr"] for group in owner.param_groups]


def in_turn(optimizer: torch.optim.Optimizer, milestone: int) -> Any:
    """As qlora-pipe's, of which the second begins with its bases."""
    schedulers = torch.optim.lr_scheduler
    parts = [
        schedulers.LinearLR(optimizer, 1 / 3, total_iters=milestone),
        schedulers.CosineAnnealingLR(optimizer, 100),
    ]
    return schedulers.SequentialLR(optimizer, parts, [milestone])


def test_what_a_scheduler_says_before_it_fails_is_seen(capsys: pytest.CaptureFixture[str]) -> None:
    optimizer = optimizer_of()
    scheduler = samples(optimizer)
    pristine = Pristine(scheduler, optimizer)
    with pytest.raises(KeyError):
        load_scheduler(having(scheduler, optimizer, pristine), {})
    assert "using checkpoint value" in capsys.readouterr().out


def test_one_that_cannot_be_copied_is_refused() -> None:
    class Locked:
        def __deepcopy__(self, known: dict[int, Any]) -> Any:
            raise TypeError("cannot pickle '_thread.lock' object")

    with pytest.raises(UnsupportedError, match=r"Locked cannot be copied .*lock.*"):
        Pristine(Locked(), optimizer_of())


def test_late_steps_stand_where_those_in_time_stood() -> None:
    mine, theirs = optimizer_of(), optimizer_of()
    scheduler = samples(mine)
    pristine = Pristine(scheduler, mine)
    take_step(scheduler, 8)
    replica = pristine.clone(theirs)
    late, home = runtime_with(theirs, replica), runtime_with(mine, scheduler)
    position = SchedulerPosition.of(home)
    take_step(scheduler, 8)
    late.pristine = pristine
    position.restore(late)
    assert SchedulerPosition.of(late) == position != SchedulerPosition.of(home)


def test_what_a_script_sets_goes_to_other_roles() -> None:
    mine, others = runtime_with(optimizer_of(), steps=3), runtime_with(optimizer_of(), steps=3)
    found = Adjustable.of(mine)
    mine.attributes["global_steps"] = 0
    mine.attributes["basic_optimizer"].param_groups[1].update(lr=0.5, betas=(0.5, 0.6))
    others.attributes["basic_optimizer"].param_groups[0]["weight_decay"] = 0.25  # theirs
    Adjustable.of(mine).since(found).give(others)
    assert others.attributes["global_steps"] == 0 and others.attributes["global_samples"] == 24
    first, second = others.attributes["basic_optimizer"].param_groups
    assert (first["lr"], first["weight_decay"], second["lr"], second["betas"]) == (1e-3, 0.25, 0.5, (0.5, 0.6))


def test_groups_that_do_not_match() -> None:
    mine, others = runtime_with(optimizer_of()), runtime_with(optimizer_of(1))
    found = Adjustable.of(mine)
    groups = mine.attributes["basic_optimizer"].param_groups
    for group in groups:
        group["lr"] = 0.5
    Adjustable.of(mine).since(found).give(others)
    assert settings_of(others.attributes["basic_optimizer"])[0]["lr"] == 0.5
    found = Adjustable.of(mine)
    groups[0]["lr"] = 0.25
    with pytest.raises(UnsupportedError, match="set all groups alike"):
        Adjustable.of(mine).since(found).give(others)
    mine.attributes["basic_optimizer"].add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    with pytest.raises(UnsupportedError, match=r"give all groups to deepspeed\.initialize"):
        Adjustable.of(mine).since(found)
