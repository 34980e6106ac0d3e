"""The model of a job: what is news, how losses are grouped, what is kept. Its renderers have tests of their own."""

from __future__ import annotations

import pytest

from bamboo_ds.observe import events as ev
from bamboo_ds.observe.model import JobModel, Learned
from bamboo_ds.observe.view import LOSSES, PLANS
from tests.support.synthetic_job import SyntheticJob
from tests.support.written import Written


def folded(events: list[ev.Event], bounded: bool = True) -> JobModel:
    model = JobModel(bounded)
    for event in events:
        model.fold(event)
    return model


def shrinking() -> Written:
    """``c`` is lost, and while ``a`` and ``b`` recover ``b`` is lost, too."""
    job = Written("a", "b", "c")
    job.plan(5, 2, "abc", "abc", "bca", pipelines=1)
    job.steps(1, 2, 5, epoch=2)
    job.lose(10, "c")
    job.plan(10, 3, "ab", "aba", [None, "a", "b"], lost=["c"], pipelines=1)
    job.add(ev.TakeoverDone, 10.2, 3, role=(0, 2), **{"from": "c", "to": "a"}, seconds=0.7)
    job.recover(11, 3, "a", step=3, pause=0.3, redo=0.5)
    job.lose(11.1, "b")
    job.plan(11.2, 4, "a", "aaa", [None] * 3, lost=["b"], pipelines=1)
    job.recover(12, 4, "a", step=3, pause=0.2, redo=0.5)
    job.step(12, 3, epoch=4)
    return job


def test_what_several_events_tell_is_news_once() -> None:
    job = shrinking()
    saved = {"step": 3, "path": "/c/3", "seconds": 0.4, "bytes": 9}
    for member in ("a", "x"):
        job.add(ev.CheckpointSaved, 13, 4, member, **saved)
    model = JobModel()
    news = [model.fold(event) for event in job.events]
    assert [each for each in news if each is not None and each.loss] == [Learned(loss=True)] * 2
    assert [each.plan.kind for each in news if each and each.plan] == ["start", "start", "loss", "loss"]
    assert sum(each.first_step for each in news if each) == 1 and news[-1] is None
    told = [event for event in job.events if isinstance(event, ev.MemberLost | ev.PlanWritten | ev.CheckpointSaved)]
    before = model.totals
    assert [model.fold(event) for event in told] == [None] * len(told) and model.totals == before
    assert (before.losses, before.takeovers, before.checkpoints, before.steps) == (2, 2, 1, 3)


def test_the_phases_of_losses() -> None:
    model = folded(shrinking().events)
    first, second = model.losses.views
    assert (first.epoch, first.left, first.takeover_seconds, first.recovered) == (3, 2, 0.7, False)
    assert (second.epoch, second.left, second.pause_seconds, second.recovered) == (4, 1, 0.2, True)
    assert [(each.role, each.before, each.after) for each in second.moved] == [((0, 1), "b", "a")]
    assert model.totals.pause_seconds == pytest.approx(0.5) and model.losses.longest_pause == 0.3
    detail = model.losses.detail(1)
    assert detail is not None and [each.id for each in detail.survivors] == ["a"]
    assert model.unsettled, "stages have no replica"


def test_a_step_that_a_plan_has_interrupted_is_no_loss() -> None:
    job = Written("a", "b", "c")
    job.plan(5, 2, "abc", "abc", "bca", pipelines=1)
    job.step(7, 1, epoch=2)
    job.lose(8, "c")
    job.plan(8, 3, "ab", "aba", [None, "a", "b"], lost=["c"], pipelines=1)
    for member in "ab":
        job.recover(10, 3, member, step=2, pause=0.3, redo=0.5)
    job.step(10, 2, epoch=3)
    before = folded(job.events).losses.views
    job.plan(11, 4, "abd", "abd", "bda", pipelines=1)
    for member in "abd":
        job.recover(13, 4, member, step=3, pause=2.0, redo=1.0)
    job.step(13, 3, epoch=4)
    (loss,) = folded(job.events).losses.views
    assert (loss.step, loss.survivors, loss.pause_seconds, loss.forwards_redone) == (2, 2, 0.3, 0)
    assert loss.model_copy(update={"replicas_back_seconds": None}) == before[0]


def test_a_plan_has_the_longest_pause_of_those_that_enter_it() -> None:
    job = Written("a", "b")
    job.plan(5, 2, "ab", "ab", "ba", pipelines=1)
    for at, pause, member in ((6, 0.1, "a"), (6.1, 0.3, "b")):
        job.reconfigure(at, 2, pause, member)
    *_, plan = folded(job.events).plans
    assert (plan.epoch, plan.pause_seconds) == (2, 0.3) and plan.entered == job.events[-1].time.timestamp()


@pytest.mark.parametrize("bounded", [True, False])
def test_a_model_of_a_file_keeps_all(bounded: bool) -> None:
    job = SyntheticJob("long", 1, 4)
    for number in range(LOSSES + 6):
        job.lose(number % 4).train(1).heal().join(4 + number)
    model = folded(job.events, bounded)
    assert len(model.losses.views) == (LOSSES if bounded else LOSSES + 6)
    assert (len(model.plans) == PLANS) == bounded and model.totals.losses == LOSSES + 6
