"""Operations, losses at every place of them, and what members tell each other then; without a job."""

from __future__ import annotations

import gc
import math
import weakref
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from bamboo_ds.engine.context.operation import Outcome
from bamboo_ds.engine.context.records import Progress, Recovery
from bamboo_ds.engine.recovery.copies import Copies
from bamboo_ds.engine.recovery.reports import (
    MemberReport,
    RoleReport,
    ScriptReport,
    all_at_boundary,
    all_in_iteration,
    decision_of,
    newest_of,
)
from bamboo_ds.engine.recovery.takeover import Takeover
from bamboo_ds.engine.replicas.construction import Construction, Kept, OfferedState, Snapshots
from bamboo_ds.engine.stage.layers import Changes
from bamboo_ds.errors import EpochChanged
from bamboo_ds.schedule import Decision, PartProgress
from bamboo_ds.topology import Layout, Role, initial_plan, with_redundancy
from tests.support.planning import undivided

pytestmark = pytest.mark.claim("guides/elastic.md")

LAYOUT = Layout(1, 2)
PLAN = with_redundancy(initial_plan(["a", "b"]), LAYOUT, True)
FRESH = {role: undivided() for role in LAYOUT.roles}
BEGUN = {role: undivided(2, 1) for role in LAYOUT.roles}
#: How a recovery of member "a" may end.
RESUME = Decision(0, "resume", progress=BEGUN)
COMMIT = Decision(0, "commit", progress=BEGUN)
BEHIND = Decision(1, "resume", ("a",), (1.0,), FRESH)
LOSS = EpochChanged("another loss")


class Operation:
    """Notes what becomes of it; interrupted as often as it is told to be."""

    call = "train_batch"
    draws = watched = False
    takes_steps = goes_on = True

    def __init__(self, progress: Progress, losses: int = 0) -> None:
        self._progress, self._losses = progress, losses
        self.done: list[Any] = []

    def run(self, progress: Any) -> None:
        self._do("run" if progress is None else "resume")

    def commit(self) -> None:
        self._do("commit")

    def _do(self, what: str) -> None:
        self.done.append((what, self._progress.operation.resumed))
        if self._losses:
            self._losses -= 1
            raise LOSS
        self._progress.vector = (2.0,)

    def repeatable(self) -> bool:
        return True

    def finish(self, outcome: Outcome) -> None:
        self.done.append((outcome, self._progress.vector))


class Member:
    """The loop of one member, whose recoveries end as ``recoveries`` says."""

    def __init__(self, *recoveries: Decision | EpochChanged, aborted: str | None = None) -> None:
        self.progress, self.events = Progress(seed=1), []  # type: ignore[var-annotated]
        self._recoveries = list(recoveries)
        self.boundary: list[str] = []
        self.losses_at_boundary = 0
        channel = SimpleNamespace(
            activity=SimpleNamespace(at_work=nullcontext), event=lambda kind, **_: self.events.append(kind)
        )
        job = SimpleNamespace(channel=channel, await_fence=lambda: self.events.append("fence"))
        self.epoch: Any = SimpleNamespace(
            job=job,
            session=SimpleNamespace(aborted=aborted, confirm=lambda operation: None, conclude=lambda: None),
            layout=LAYOUT,
            plan=PLAN,
            member="a",
            switch_due=False,
            copied=False,
        )
        context: Any = SimpleNamespace(
            binding=SimpleNamespace(use=lambda _: None, local=None),
            job=job,
            epoch=self.epoch,
            progress=self.progress,
            beats=SimpleNamespace(busy=lambda _: nullcontext()),
        )
        checks = SimpleNamespace(on=False, end_iteration=self._end_iteration)
        own = SimpleNamespace(take=lambda: None)
        iteration: Any = SimpleNamespace(checks=checks, commits=None, own=own)
        recovery: Any = SimpleNamespace(run=self._recover)
        collectives: Any = SimpleNamespace(begin_gap=self.boundary.append)
        announcements: Any = SimpleNamespace(
            begin_operation=lambda: None, listen=lambda: self.events.append("listened")
        )
        self.takeover = Takeover(context, iteration, recovery, collectives, announcements)

    def _recover(self) -> Decision:
        found = self._recoveries.pop(0)
        if isinstance(found, EpochChanged):
            raise found
        self.progress.operation.recovery = Recovery(found, 0.0, 0.0, 0.0, 0, 0, 0, None)
        self.progress.operation.taken_over.add(Role(0, 1))
        return found

    def _end_iteration(self) -> None:
        if self.losses_at_boundary:
            self.losses_at_boundary -= 1
            raise LOSS

    def run(self, losses: int = 0) -> list[Any]:
        operation = Operation(self.progress, losses)
        self.takeover.run(operation)
        assert not self._recoveries and self.boundary == [self.progress.sequence]
        assert not self.progress.operation.entered
        return operation.done


def test_an_undisturbed_operation() -> None:
    member = Member()
    assert member.run() == [("run", False), (Outcome.COMMITTED, (2.0,))]
    assert member.progress.sequence == 1 and member.progress.operation.pending is None and member.events == []


@pytest.mark.parametrize("interrupted", range(3))
@pytest.mark.parametrize("then", [RESUME, COMMIT, BEHIND], ids=["resume", "commit", "behind"])
def test_a_loss_in_an_operation(interrupted: int, then: Decision) -> None:
    """Also where other losses interrupt the recoveries from it: what the last recovery says is done."""
    member = Member(*[LOSS] * interrupted, then)
    done = member.run(losses=1)
    assert done[0] == ("run", False) and member.progress.operation.taken_over == set()
    if then is BEHIND:
        assert done[1:] == [(Outcome.BEHIND, (1.0,))]
        # It is about the next operation, and is reported when that is over.
        assert member.progress.operation.pending == Decision(1, "resume", (), (1.0,), FRESH)
        assert member.progress.operation.recovery is not None and member.events == ["fence"]
    else:
        assert done[1:] == [(then.mode, True), (Outcome.COMMITTED, (2.0,))]
        assert member.progress.operation.pending is None and member.events == ["recovered"]


def test_a_loss_before_an_operation() -> None:
    """It was noticed in the script: nothing is attempted before the recovery."""
    member = Member(COMMIT, aborted="a plan arrived")
    assert member.run() == [("commit", True), (Outcome.COMMITTED, (2.0,))]


@pytest.mark.parametrize(
    ("then", "pending"), [(RESUME, True), (COMMIT, True), (Decision(1, "resume", progress=FRESH), False)]
)
def test_a_loss_between_two_operations(then: Decision, pending: bool) -> None:
    """The next one begins as the recovery has decided; roles that were taken over stay so until it ends."""
    member = Member(then)
    member.losses_at_boundary = 1
    assert member.run() == [("run", False), (Outcome.COMMITTED, (2.0,))]
    assert member.progress.operation.pending == (then if pending else None)
    assert member.progress.operation.taken_over == {Role(0, 1)} and member.progress.sequence == 1


def test_a_new_plan_at_a_boundary() -> None:
    member = Member(Decision(1, "resume", progress=FRESH))
    member.epoch.switch_due = True
    member.run()
    assert member.events == ["listened", "reconfigured"] and member.progress.operation.recovery is None


def test_between_two_recoveries_of_an_operation_members_compute() -> None:
    first = Recovery(RESUME, 10.0, 0.2, 0.3, 1, 2, 3, None)
    second = Recovery(COMMIT, 70.0, 0.1, 0.4, 0, 1, 0, None)
    told = second.after(first)
    assert (told.noticed, told.planned, told.rebuilt) == (10.0, pytest.approx(0.3), pytest.approx(0.7))
    assert replace(told, noticed=70.0, planned=0.1, rebuilt=0.4) == second and first.after(None) is first


# -- reports ------------------------------------------------------------------------------------------------


def done_of(forwards: int, backwards: int, begin: int = 0, end: int = 1) -> PartProgress:
    return PartProgress(begin, end, forwards, backwards)


def report(**changes: Any) -> MemberReport:
    known: dict[str, Any] = {
        "step": 3,
        "entered": False,
        "at_boundary": False,
        "training": False,
        "roles": (
            RoleReport(role=(0, 0), parts=(done_of(2, 1),), reduced=False, state_only=False, changes=Changes(1, 3)),
        ),
        "helped": ((2, done_of(3, 1, begin=1)),),
        "spent": (),
        "commit": (0.1, 2.0),
        "received": {"0": {"inputs": 1, "labels": 0}},
        "repeatable": True,
        "stale": False,
        "replicas": (1,),
        "copying": {3: ("a", "7/3")},
        "sums": ((0, PartProgress(sums=(2, 4))),),
        "joining": False,
        "history": 3,
        "steps": 3,
        "iteration_s": 1.5,
        "ahead": 0,
        "consumed": 12,
        "seed": 2**64 - 1,
        "nonce": "n",
        "checksums": True,
        "script": ScriptReport(
            gap=3, done={"world": 1}, open=0, newcomers={"m9": 3}, had={"world/0/1/0": 5}, missed=None
        ),
        "exact": 0,
        "device": None,
    }
    return MemberReport(**{**known, **changes})


def test_a_report_arrives_as_it_was() -> None:
    """Every bit of a number, also of one that JSON does not know."""
    mine = report(commit=(0.1 + 0.2, 5e-324, math.inf, -math.inf, -0.0))
    found = MemberReport.model_validate_json(mine.model_dump_json())
    assert found == mine and math.copysign(1, found.commit[-1]) == -1  # type: ignore[index]
    nan = MemberReport.model_validate_json(report(commit=(math.nan,)).model_dump_json())
    assert nan.commit is not None and math.isnan(nan.commit[0])


@pytest.mark.parametrize("damage", [('"step":3', '"step":"x"'), ('"seed"', '"sead"'), ('"joining":false,', "")])
def test_a_report_of_another_form_is_refused(damage: tuple[str, str]) -> None:
    text = report().model_dump_json()
    assert damage[0] in text
    with pytest.raises(ValueError, match="validation error"):
        MemberReport.model_validate_json(text.replace(*damage))


def test_a_decision_from_reports() -> None:
    """Only a commit that every member can enter again is repeated; members that join have no part in it."""
    done = {"parts": (done_of(4, 4),), "reduced": True, "state_only": False, "changes": Changes()}
    entered = {
        name: report(entered=True, roles=(RoleReport(role=(0, stage), **done),))  # type: ignore[arg-type]
        for stage, name in enumerate("ab")
    }
    joiner = report(joining=True, roles=(), step=0, history=0)
    plan = replace(with_redundancy(initial_plan(["a", "b"]), LAYOUT, True), members=("a", "b", "c"))
    assert decision_of({**entered, "c": joiner}, plan, 4, ()).mode == "commit"
    entered["b"] = entered["b"].model_copy(update={"repeatable": False})
    again = decision_of({**entered, "c": joiner}, plan, 4, ())
    assert again.mode == "resume" and all(each.reduced for each in again.progress.values())
    newest, informed = newest_of({**entered, "c": joiner, "d": report(history=2)})
    assert newest.history == 3 and informed == ["a", "b"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"at_boundary": False}, False),
        ({"step": 2}, False),
        ({"stale": True}, False),
        ({"joining": True, "at_boundary": False, "step": 0, "history": 2}, True),
        # It has replayed the last operation, and its script has gone on.
        ({"joining": True, "at_boundary": False, "step": 0, "history": 3}, False),
    ],
)
def test_all_are_at_the_boundary(changes: dict[str, Any], expected: bool) -> None:
    """Snapshots that are taken there lack nothing that some script has set for the next operation."""
    assert (
        all_at_boundary({"a": report(at_boundary=True), "b": report(**{"at_boundary": True, **changes})}, 3) is expected
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"training": False}, False),
        ({"step": 2}, False),
        ({"joining": True}, False),
        ({"joining": True, "training": False, "step": 0, "roles": ()}, True),
        ({"stale": True}, False),
    ],
)
def test_all_are_in_the_iteration(changes: dict[str, Any], expected: bool) -> None:
    """Then states are what they were at its begin, and everybody will finish it."""
    told = {"a": report(training=True), "b": report(**{"training": True, **changes})}
    assert all_in_iteration(told, 3) is expected


def test_a_replica_that_is_given_up_is_free_at_once() -> None:
    """What is to be done with it refers to it, and gradients on a device must not wait for a collection."""
    cancelled: list[bool] = []
    fetch: Any = SimpleNamespace(cancel=lambda: cancelled.append(True))
    construction = Construction(Role(0, 1), ("a", "key"), fetch)
    construction.kept.append(Kept(3, lambda runtime, made=construction: None))  # type: ignore[misc]
    context: Any = SimpleNamespace(
        job=SimpleNamespace(channel=SimpleNamespace(activity=SimpleNamespace(telling={}))),
        binding=SimpleNamespace(local=None),
    )
    iteration: Any = SimpleNamespace(constructions={construction.role: construction})
    nothing: Any = None
    gone = weakref.ref(construction)
    del construction
    gc.disable()
    try:
        Copies(context, iteration, nothing, SimpleNamespace(close=lambda: None)).close()  # type: ignore[arg-type]
        assert cancelled == [True] and gone() is None
    finally:
        gc.enable()


def test_snapshots_stay_as_long_as_they_are_wanted() -> None:
    offered: dict[str, str] = {}
    offers: Any = SimpleNamespace(offer=lambda key, text, _: offered.update({key: text}), withdraw=offered.pop)
    snapshots, first, second = Snapshots(offers), Role(0, 1), Role(0, 2)
    snapshots.want({"7/1": first, "7/2": second})
    assert snapshots.due() == [("7/1", first), ("7/2", second)] and not offered
    snapshots.offer("7/1", OfferedState((3, False), True, {}))
    before = dict(offered)
    snapshots.want({"7/1": first, "8/1": first})
    assert snapshots.due() == [("8/1", first)] and offered == before
    snapshots.want({})
    assert not offered and not snapshots.due()
    snapshots.want({"7/1": first})  # by a builder that has not heard of the plan before
    assert snapshots.due() == [("7/1", first)]


@pytest.mark.parametrize("recovering", [True, False])
def test_a_wait_for_batches_counts_once(monkeypatch: pytest.MonkeyPatch, recovering: bool) -> None:
    """It begins in the operation that a loss has interrupted, or in a later one; another member is lost meanwhile."""
    clock = [100.0]
    monkeypatch.setattr("bamboo_ds.engine.recovery.takeover.time", SimpleNamespace(monotonic=lambda: clock[0]))
    job, recovery, nothing, progress = MagicMock(lost_at=None), MagicMock(), MagicMock(), Progress(seed=1)

    def wait_plan(*_: object) -> Any:
        job.lost_at, clock[0] = 103.0, 105.0
        return MagicMock(epoch=3)

    job.channel.wait_plan.side_effect = wait_plan
    before = Recovery(Decision(1, "resume"), 99.0, 0.25, 0.5, 0, 0, 0, None)
    progress.operation.recovery = before if recovering else None
    seen: list[tuple[Any, Any]] = []
    recovery.run.side_effect = lambda: seen.append((job.lost_at, progress.operation.recovery)) or before.decision
    recovery.supply.apart, recovery.supply.hungry.side_effect = False, [[1], [1], []]
    epoch: Any = MagicMock(member="a", switch_due=False, copied=False, job=job)
    epoch.session.aborted = None
    operation: Any = MagicMock(goes_on=True, draws=True, takes_steps=False, watched=False)
    Takeover(MagicMock(epoch=epoch, job=job, progress=progress), nothing, recovery, nothing, nothing).run(operation)
    assert operation.run.call_count == 1
    if recovering:
        assert seen == [(None, replace(before, planned=5.25))]
    else:
        assert seen == [(100.0, None)], "the next recovery counts from there"
