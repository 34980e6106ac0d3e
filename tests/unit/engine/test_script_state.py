"""State that a script keeps in places of its own, and what it changes itself, on all copies of a stage."""

from __future__ import annotations

import math
import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from bamboo_ds.engine.checkpoints.kept import keeping_types, load_kept, save_kept
from bamboo_ds.engine.context.channels import Channels, Stream
from bamboo_ds.engine.context.records import Progress, ScriptPhase
from bamboo_ds.engine.data.batches import as_message, from_message
from bamboo_ds.engine.recovery.announcements import Announcements, RoleChanges, abandoned, lacking
from bamboo_ds.engine.recovery.reports import RoleReport
from bamboo_ds.engine.script.assigned import fingerprint
from bamboo_ds.engine.script.changes import Weights, away_from, count_of, unchanged
from bamboo_ds.engine.stage.clones import (
    PristineOptimizer,
    kept_by,
    load_optimizer,
    put_kept,
    without_strangers,
)
from bamboo_ds.engine.stage.layers import Changes, Layers, copied
from bamboo_ds.engine.stage.rng import Drawing, drawing_seed
from bamboo_ds.engine.stage.schedulers import put_settings, settings_of
from bamboo_ds.engine.stage.tracing import content_checksum
from bamboo_ds.errors import FatalLoss, UnsupportedError
from bamboo_ds.schedule import Decision
from bamboo_ds.topology import Layout, Role, initial_plan, with_redundancy
from tests.support.channels import Mailboxes
from tests.support.planning import undivided

pytestmark = pytest.mark.claim("guides/exactness.md", "reference/guarantees.md")


def changed(*roles: tuple[bool, bool, int, int]) -> dict[Role, RoleChanges]:
    """Of the stages: whether it was taken over, whether it has its change, and its changes."""
    return {Role(0, n): RoleChanges(Changes(c, last), t, d) for n, (t, d, c, last) in enumerate(roles)}


def test_whose_changes_are_lost() -> None:
    mine, quiet, others = (False, False, 3, 5), (True, False, 0, -1), (True, False, 3, 5)
    assert lacking(changed(mine, others), 5) == [Role(0, 1)]
    assert lacking(changed((False, False, 0, -1), others), 5) == [Role(0, 1)], "its script alone"
    assert lacking(changed(mine, (True, True, 3, 5)), 5) == [], "it came with the reduced gradients"
    assert lacking(changed(mine, quiet), 5) == [], "it has not been changed with the others before"
    assert lacking(changed((False, False, 1, 5), quiet), 5) == [Role(0, 1)], "it may have been, for the first time"
    assert lacking(changed((False, False, 0, 0), quiet), 0) == [Role(0, 1)]
    assert lacking(changed((False, False, 3, 4), (True, False, 3, 4)), 5) == [], "nobody has changed anything"
    assert abandoned(changed(mine, others, quiet), 9) == [Role(0, 1)]
    assert abandoned(changed((True, True, 0, 0), (True, True, 1, 4)), 6) == [], "once, long ago"
    assert abandoned(changed((True, True, 0, 0)), 1) == abandoned(changed((True, True, 1, 5)), 6) == [Role(0, 0)]
    assert abandoned(changed(mine), 5) == []
    changes = Changes()
    for step in (0, 0, 2, 2, 5):
        changes.note(step)
    assert changes == Changes(2, 5)
    changes.follow(1, 7)
    assert changes == Changes(2, 7)


def test_a_change_that_went_with_a_reduction_that_is_done_again() -> None:
    """What a member had received is dropped where the roles of a stage are reduced again."""
    layout = Layout(1, 2)
    plan = with_redundancy(initial_plan(["m0", "m1"]), layout, True)
    lost = replace(plan, owners=("m0", "m0"), members=("m0",), lost=("m1",), shadows=(None, None))
    role = RoleReport(role=(0, 1), parts=(), reduced=True, state_only=True, changes=Changes(1, 4))
    reports: Any = {"m0": SimpleNamespace(roles=(role,), steps=4)}
    told: list[str] = []
    job = SimpleNamespace(
        newest_checkpoint=lambda plan: None,
        channel=SimpleNamespace(need_every_rank=lambda: told.append("every rank")),
    )
    context: Any = SimpleNamespace(job=job, epoch=SimpleNamespace(job=job), progress=Progress(seed=1))
    announcements = Announcements(context)
    progress = {Role(0, stage): undivided(state_only=stage == 1) for stage in (0, 1)}
    with pytest.raises(FatalLoss, match="has just changed in stage 1 of pipeline 0"):
        announcements.check(lost, reports, Decision(4, "resume", progress=progress))
    assert told == ["every rank"], "a restart without one would end in the same way"
    assert announcements.progress.script.known_changes == {Role(0, 1): Changes(1, 4)}


def test_all_who_hold_a_stage_are_told_also_when_the_plan_changes() -> None:
    plan = with_redundancy(initial_plan(["m0", "m1", "m2"]), Layout(1, 3), True)
    builder = next(member for member in ("m1", "m2") if member != plan.shadow(Role(0, 0)))
    mail = Mailboxes()
    channels = Channels(replace(plan, builders=((0, builder),)), mail.open, False)
    assert len({channel.name for _, _, channel in channels}) == len(list(channels))
    local = SimpleNamespace(role=Role(0, 0), trained=None)
    binding: Any = SimpleNamespace(local=local)
    epoch: Any = SimpleNamespace(channels=channels, drain=lambda: None, member="m0")
    progress = Progress(seed=1, sequence=5, steps=3)
    context: Any = SimpleNamespace(binding=binding, epoch=epoch, progress=progress)
    announcements = Announcements(context)
    announcements.tell_again()
    assert not any(mail.sent.values())
    progress.script.changed.add("w")
    local.trained = [True, False]
    announcements.tell_again()
    assert list(mail.sent) == [f"told (0,0) from m0 to {holder}" for holder in (plan.shadow(Role(0, 0)), builder)]
    told = [(sequence, payload.tolist()) for sent in mail.sent.values() for sequence, payload in sent]
    assert told == [(5, [3, 1, -1, 0, 1, 0])] * 2
    progress.script.phase = ScriptPhase.JOINING
    announcements.tell_again()
    assert sum(map(len, mail.sent.values())) == 2, "a member that joins has changed nothing"


def test_what_is_assigned_is_told_when_nothing_can_follow() -> None:
    """Between two operations a script may go on to assign, and what is compared then differs from what it has later."""
    plan = with_redundancy(initial_plan(["m0", "m1"]), Layout(1, 2), True)
    mail = Mailboxes()
    binding: Any = SimpleNamespace(local=SimpleNamespace(role=Role(0, 0), trained=None))
    epoch: Any = SimpleNamespace(channels=Channels(plan, mail.open, False), drain=lambda: None, member="m0")
    progress = Progress(seed=1, sequence=5, steps=3)
    progress.script.assigned["engine.value"] = "1"
    context: Any = SimpleNamespace(binding=binding, epoch=epoch, progress=progress)
    sent = mail.sent["told (0,0) from m0 to m1"]
    message = 5, [3, 0, 5, fingerprint(progress.script.assigned)]

    def told() -> list[Any]:
        return [(sequence, payload.tolist()) for sequence, payload in sent]

    announcements = Announcements(context)
    announcements.tell_again()
    assert not sent, "a plan that changes between two operations"
    announcements.assigned = True
    with progress.calling("train_batch"):
        for _ in range(2):
            announcements.begin_operation()
        assert told() == [message], "once"
        announcements.tell_again()
        assert told() == [message] * 2, "a plan that changes in an operation"
        progress.end_operation()
        announcements.tell_again()
        assert len(sent) == 2, "after an operation, before the script goes on"


@pytest.mark.parametrize("step", [3, 4])
def test_what_a_lost_owner_has_told(step: int) -> None:
    """Of the next iteration, in which the others are already, only what is taken over in it has to know."""
    plan = with_redundancy(initial_plan(["m0", "m1"]), Layout(1, 2), True)
    role = Role(0, 1)
    begun: list[Any] = []
    replica: Any = SimpleNamespace(
        role=role,
        layers=SimpleNamespace(changes=Changes(1, 2)),
        trained=None,
        trains=lambda: [True, True],
        begin_again=lambda: begun.append("again"),
        catch_up=lambda: None,
        train_only=begun.append,
    )
    binding: Any = SimpleNamespace(replicas=lambda: [replica], refresh=lambda: None, reload=lambda: None)
    given = [torch.tensor([step, 1, 0, 0]), torch.tensor([step, 0, 0, 0, 1, 0])]
    channels = Channels(plan, Mailboxes().open, False)
    for each in given:
        channels[Stream.TOLD, role].send(step, each)
    epoch: Any = SimpleNamespace(begun=True, channels=channels, member="m0")
    context: Any = SimpleNamespace(binding=binding, epoch=epoch, progress=Progress(seed=1, steps=3))
    announcements = Announcements(context)
    for _ in range(2):  # the second time nothing has arrived
        announcements.listen()
        assert replica.layers.changes == Changes(2, step) and replica.trained == [True, False]
        assert begun == (["again", [True, False]] if step == 3 else [])


def test_who_may_go_on_to_change_its_stage() -> None:
    layout = Layout(1, 3)
    plan = with_redundancy(initial_plan(["m0", "m1", "m2"]), layout, True)
    known = {Role(0, 0): Changes(2, 3), Role(0, 1): Changes(), Role(0, 2): Changes(1, 1)}
    assert not away_from(plan, Role(0, 0), known, 0)
    for taken, before, none in ((1, 2, False), (1, 0, True), (2, 2, True)):
        owners = tuple("m0" if rank == taken else owner for rank, owner in enumerate(plan.owners))
        away = replace(plan, owners=owners)
        assert away_from(away, Role(0, 0), known, before) == [Role(0, taken)] * none


def test_what_a_restart_gets_besides_deepspeed_s_files(tmp_path: Path) -> None:
    def role() -> Any:
        net = nn.ModuleList([Counting()])
        inner: Any = torch.optim.SGD([net[0].register_parameter("w", nn.Parameter(torch.zeros(2))) or net[0].w], lr=0.1)
        inner.taken, inner.counts = 0, {"steps": [0]}
        return SimpleNamespace(layers=Layers(net), optimizer=SimpleNamespace(inner=inner), net=net)

    one, other, third = role(), role(), role()
    one.optimizer.inner.__dict__.pop("taken"), one.optimizer.inner.__dict__.pop("counts")
    save_kept(one, tmp_path, 1, torch.save)
    assert not list(tmp_path.iterdir()), "there is nothing to keep"
    one.net[0].calls, one.net[0].last = 7, 0.5
    one.optimizer.inner.taken, one.optimizer.inner.counts = 3, {"steps": [3]}
    for step in (2, 3):
        one.layers.changes.note(step)
    save_kept(one, tmp_path, 1, torch.save)
    load_kept(other, tmp_path, 1)
    load_kept(third, tmp_path, 2)
    assert (other.net[0].calls, other.net[0].last) == (7, 0.5) and other.layers.changes == Changes(2, 0)
    assert (other.optimizer.inner.taken, other.optimizer.inner.counts) == (3, {"steps": [3]})
    assert third.net[0].calls == 0 and third.layers.changes == Changes()
    wide = {"moment": torch.tensor([1 / 3, 2 / 3], dtype=torch.float64)}
    one.optimizer.inner.state[one.net[0].w] = wide
    with keeping_types(other.optimizer.inner):
        other.optimizer.inner.load_state_dict(one.optimizer.inner.state_dict())
    assert other.optimizer.inner.state[other.net[0].w]["moment"].equal(wide["moment"])
    assert "load_state_dict" not in vars(other.optimizer.inner)


def test_every_drawing_has_numbers_of_its_own() -> None:
    places = [Role(0, 0), Role(0, 1), Role(1, 0)]
    seeds = {drawing_seed(drawing, 7, step, role) for drawing in Drawing for step in (1, 2) for role in places}
    assert len(seeds) == len(Drawing) * 2 * 3


def test_optimizer_state_keeps_its_types() -> None:
    def make() -> torch.optim.Optimizer:
        return torch.optim.SGD([nn.Parameter(torch.zeros(2, dtype=torch.bfloat16)) for _ in range(2)], lr=0.1)

    given, loaded = make(), make()
    third = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64)
    state = {"wide": third, "mask": torch.tensor([True, False]), "nested": {"wide": [third.float()]}, "count": 3}
    state |= {"phase": "warm", "past": ["a", ("b", None)], "seen": numpy.arange(3.0), "largest": numpy.float32(0.5)}
    given.state[given.param_groups[0]["params"][1]] = state
    load_optimizer(loaded, given.state_dict())
    found = loaded.state[loaded.param_groups[0]["params"][1]]
    assert found["wide"].equal(third) and found["wide"].dtype == torch.float64
    assert found["mask"].dtype == torch.bool
    assert found["nested"]["wide"][0].equal(third.float()) and found["nested"]["wide"][0].dtype == torch.float32
    assert found["count"] == 3 and len(loaded.state) == 1
    assert found["phase"] == "warm" and found["past"] == ["a", ("b", None)]
    assert found["seen"].tolist() == [0.0, 1.0, 2.0] and found["seen"] is not state["seen"]
    assert type(found["largest"]) is numpy.float32 and found["largest"] == 0.5


def test_buffers_whose_elements_share_memory() -> None:
    """As ``expand`` makes them; torch writes to none of these."""

    def make(value: float) -> nn.Module:
        net = nn.Linear(2, 2)
        net.register_buffer("spread", torch.full((1, 3), value).expand(2, 3))
        net.register_buffer("row", torch.tensor([value, 2 * value]).expand(4, 2))
        return net

    given, restored = make(3.0), make(1.0)
    Layers(restored).restore(Layers(given).capture())
    assert restored.get_buffer("spread").equal(torch.full((2, 3), 3.0))
    assert restored.get_buffer("row")[2].tolist() == [3.0, 6.0]


def test_buffers_that_layers_share() -> None:
    """They are one tensor on every copy, which a pass of one layer changes for all."""

    def make(value: float) -> nn.Sequential:
        net, shared = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.tensor([value])
        for layer in net:
            layer.register_buffer("seen", shared)
        return net

    given, restored = make(3.0), make(1.0)
    Layers(restored).restore(Layers(given).capture())
    assert restored[0].seen is restored[1].seen and restored[1].seen.tolist() == [3.0]


def test_clones_share_nothing() -> None:
    net = nn.Linear(2, 2)
    original: Any = torch.optim.SGD(net.parameters(), lr=0.1)
    original.counts, original.taken, original.history = {"steps": [3]}, 3, {1: torch.zeros(1)}
    original.itself = original
    clone: Any = PristineOptimizer(original).clone(nn.Linear(2, 2), [["weight"], ["bias"]])
    clone.counts["steps"][0] = 4
    assert original.counts == {"steps": [3]} and clone.itself is clone
    assert clone.history[1] is not original.history[1]
    kept = kept_by(original)
    assert kept["counts"] == {"steps": [3]} and kept["taken"] == 3 and kept["history"][1] is original.history[1]
    assert not {"itself", "state", "defaults", "_optimizer_step_pre_hooks"} & set(kept)


def test_state_of_parameters_that_are_in_no_group_any_more_is_left_out() -> None:
    """Adagrad makes all of its state at once, and DeepSpeed then puts its masters in the place of the parameters."""
    optimizer = torch.optim.Adagrad(nn.Linear(2, 2).parameters())
    before, master = list(optimizer.state), nn.Parameter(torch.zeros(6))
    optimizer.param_groups[0]["params"] = [master]
    with pytest.raises(KeyError):
        optimizer.state_dict()
    optimizer.state[master] = {"sum": torch.ones(6)}
    with without_strangers(optimizer):
        assert list(optimizer.state_dict()["state"]) == [0]
    assert set(optimizer.state) == {*before, master}


def test_tensors_that_an_optimizer_counts_in_are_its_owner_s() -> None:
    """A member's own optimizer may be several steps behind, or ahead, when it makes a copy of another stage."""
    mine: Any = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    theirs: Any = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    mine.total, theirs.total = torch.tensor(4.0), torch.tensor(2.0)
    mine.by_kind, theirs.by_kind = {"large": torch.tensor([4])}, {"large": torch.tensor([2])}
    clone: Any = PristineOptimizer(mine).clone(nn.Linear(2, 2), [["weight", "bias"]])
    put_kept(clone, from_message(as_message(kept_by(theirs))))
    assert (clone.total, clone.by_kind) == (2.0, {"large": 2}) and mine.total == 4.0
    put_kept(clone, kept_by(theirs))
    theirs.total.add_(1)
    assert clone.total == 2.0, "it is the clone's own"


def test_objects_of_an_optimizer_are_copied_as_before_its_steps() -> None:
    """What they have of later steps is not of the state that a copy gets. What a script puts in their place is new."""
    own: Any = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    own.meter, own.clock = SimpleNamespace(steps=0, of=own), SimpleNamespace(ticks=0)
    pristine = PristineOptimizer(own)
    own.meter.steps, own.clock = 3, SimpleNamespace(ticks=3)
    first, second = (pristine.clone(nn.Linear(2, 2), [["weight", "bias"]]) for _ in range(2))
    assert (first.meter.steps, first.clock.ticks) == (0, 3)
    assert first.meter.of is first and second.meter.of is second and own.meter.of is own
    assert first.clock is not own.clock and first.meter is not second.meter


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda net: threading.Lock(), "'own' of optimizer SGD cannot be copied .*lock.*deepcopy can copy"),
        (lambda net: {"inner": [torch.optim.SGD(net.parameters(), lr=0.1)]}, "keeps parameters in its attribute 'own'"),
        (lambda net: torch.zeros(2), "keeps parameters in its attribute 'own'"),
    ],
    ids=["lock", "nested-parameters", "tensor"],
)
def test_attributes_that_no_clone_can_have(value: Any, message: str) -> None:
    net = nn.Linear(2, 2)
    original: Any = torch.optim.SGD(net.parameters(), lr=0.1)
    original.own = value(net)
    with pytest.raises(UnsupportedError, match=message):
        PristineOptimizer(original).clone(nn.Linear(2, 2), [["weight", "bias"]])


def test_learning_rates_that_are_tensors() -> None:
    mine, theirs = (torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=torch.tensor(0.1)) for _ in range(2))
    rate = theirs.param_groups[0]["lr"]
    before = settings_of(mine)
    assert before == settings_of(theirs)
    mine.param_groups[0]["lr"].fill_(0.3)
    found = settings_of(mine)
    assert found != before
    put_settings(theirs.param_groups[0], found[0])
    assert theirs.param_groups[0]["lr"] is rate and rate.equal(torch.tensor(0.3))
    group = {"lr": 0.5}
    put_settings(group, found[0])
    mine.param_groups[0]["lr"].fill_(0.7)
    assert torch.is_tensor(group["lr"]) and group["lr"].equal(torch.tensor(0.3))  # type: ignore[attr-defined]


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(2))
        self.calls, self.ratio, self.last, self.cache, self.hidden = 0, math.nan, None, None, [0]

    def get_extra_state(self) -> list[int]:
        return self.hidden

    def set_extra_state(self, state: list[int]) -> None:
        self.hidden = state


def test_what_layers_keep() -> None:
    owner, replica = (nn.ModuleList([Counting(), nn.Linear(2, 2)]) for _ in range(2))
    mine, theirs = Layers(owner), Layers(replica)
    assert mine.capture()["numbers"] == {}, "nothing has changed"
    owner.eval()
    layer, other = owner[0], replica[0]
    layer.calls, layer.last, layer.hidden, layer.late = 5, 0.25, [7], 2
    layer.table = torch.ones(2, dtype=torch.int64)
    other.calls, other.ratio, other.cache, other.hidden = 3, 1.0, "here", [1]  # by redundant passes
    theirs.restore(copied(mine.capture(["1.weight"])))
    assert (other.calls, other.last, other.late, other.hidden) == (5, 0.25, 2, [7]) and math.isnan(other.ratio)
    assert other.cache == "here" and other.training and other.table.dtype == torch.int64
    assert torch.equal(replica[1].weight, owner[1].weight) and not torch.equal(replica[1].bias, owner[1].bias)
    other.hidden[0] = 8
    assert layer.hidden == [7]


def test_what_passes_have_changed_has_a_name() -> None:
    net = nn.ModuleList([nn.BatchNorm1d(2), nn.Linear(2, 2), Counting()])
    layers = Layers(net)
    assert layers.kept() == ["2._extra_state"], "whether that has changed is not known"
    net[0](torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    net[2].last = 0.25
    assert layers.kept() == ["0.running_mean", "0.running_var", "0.num_batches_tracked", "2.last", "2._extra_state"]


def test_what_a_script_puts_in_the_place_of_something_else_has_changed() -> None:
    net = nn.ModuleList([Counting(), nn.Linear(2, 2), nn.Linear(2, 2)])
    net[2].weight = net[1].weight
    layers = Layers(net)
    for change, name in (
        (lambda: setattr(net[0], "table", torch.zeros(2)), "0.table"),
        (lambda: net[0].register_buffer("other", torch.zeros(2)), "0.other"),
        (lambda: delattr(net[0], "other"), "0.other"),
        (lambda: net[0].hidden.append(1), "the extra state of 0"),
        (lambda: nn.init.zeros_(net[1].bias), "1.bias"),
        (lambda: setattr(net[1].bias, "data", torch.zeros(2)), "1.bias"),
    ):
        weights = Weights(layers)
        assert weights.changed() == []
        change()
        assert weights.changed() == [name]
    weights.check_parameters()
    for place in ("weight", "bias"):
        before, other = getattr(net[2], place), nn.Parameter(torch.zeros(2, 2) if place == "weight" else torch.zeros(2))
        setattr(net[2], place, other)
        with pytest.raises(UnsupportedError, match=f"other parameters in the place of 2.{place} since .*copy_"):
            weights.check_parameters()
        setattr(net[2], place, before)


def test_what_must_leave_parameters_as_it_finds_them() -> None:
    """Their bits where there is time for that, as before a stage is written; torch's counts where a loss is handled."""
    net = nn.Linear(2, 2)
    layers = Layers(net)

    def merge() -> None:
        net.weight.data.add_(1)

    def back_and_forth() -> None:
        with torch.no_grad():
            before = net.weight.clone()
            net.weight.add_(1)
            net.weight.copy_(before)

    for told, change, refused in (
        (content_checksum, merge, True),
        (content_checksum, back_and_forth, False),
        (count_of, back_and_forth, True),
        (count_of, lambda: setattr(net, "bias", nn.Parameter(net.bias.detach())), True),
        (count_of, lambda: net(torch.ones(2)), False),
    ):
        names = "bias" if told is count_of and change is not back_and_forth else "weight"
        expected = pytest.raises(UnsupportedError, match=f"^it changes {names}, which") if refused else nullcontext()
        with expected, unchanged("it", layers, told):
            change()
