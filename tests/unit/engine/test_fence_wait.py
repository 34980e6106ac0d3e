"""A worker whose agent does not reach etcd: what waits for that, and for how long."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from bamboo_ds.comm.session import Session
from bamboo_ds.config import BambooConfig
from bamboo_ds.control import fencing
from bamboo_ds.control.messages import Contact
from bamboo_ds.engine.context.records import Progress
from bamboo_ds.engine.iteration.committing import Commits
from bamboo_ds.engine.operations.checkpointing import End
from bamboo_ds.engine.operations.training import Training
from bamboo_ds.engine.recovery.takeover import Takeover
from bamboo_ds.errors import Isolated
from bamboo_ds.schedule import Decision
from bamboo_ds.topology import Layout, Plan, initial_plan, with_redundancy
from bamboo_ds.worker.job import Job

pytestmark = pytest.mark.claim("guides/elastic.md")

PATIENCE_S = 0.3


def plan() -> Plan:
    return replace(with_redundancy(initial_plan(["a", "b"]), Layout(1, 2), True), origin="o", fence_s=5.0)


class Links:
    """Nothing comes from the others; ``meanwhile`` happens while one waits."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        self.changed = threading.Condition()
        self._meanwhile = meanwhile

    def wait(self, operation: str, ready: Callable[[], bool], members: Any, timeout: timedelta) -> bool:
        self._meanwhile()
        self.changed.wait(0.01)
        return ready()


def job(meanwhile: Callable[[Job], None] = lambda job: None) -> Job:
    """Of one worker that waits for a contact, and whose group operations time out after a while."""
    one = Job.__new__(Job)
    epoch = SimpleNamespace(links=Links(lambda: meanwhile(one)), plan=plan())
    session: Any = SimpleNamespace(plan=epoch.plan, current=epoch, timeout=timedelta(seconds=2 * PATIENCE_S))
    session.wait = partial(Session.wait, session)
    one.channel = MagicMock(contact=None, job="j", member="a")
    one.session, one.settings, one._step = session, BambooConfig(), 0
    one.find_checkpoint = lambda plan: "/checkpoints/step40"
    return one


def test_a_pause_ends_with_an_error_that_says_what_to_do() -> None:
    with pytest.raises(Isolated, match=r"store of job j, .* bamboo\.membership\.fence_s = 5 s .*/checkpoints/step40"):
        job().await_fence()


def test_a_pause_ends_when_etcd_is_back() -> None:
    def contact(one: Job) -> None:
        one.channel.contact = Contact(origin="o", generation=0, at=fencing.now())

    job(contact).await_fence()


def test_how_long_it_may_last() -> None:
    """As long as one looks for a way back; less where others wait in a collective with a short timeout."""
    one = job()
    assert one._outage_s == PATIENCE_S
    one.session = SimpleNamespace(timeout=timedelta(minutes=30))  # type: ignore[assignment]
    assert one._outage_s == one.settings.membership.rejoin_s == 600


@pytest.mark.parametrize("ends", [True, False])
def test_the_end_of_the_script_needs_no_etcd(ends: bool) -> None:
    epoch: Any = MagicMock(plan=plan(), member="a")
    epoch.job.boundary.return_value = 0
    epoch.agreement.all_reduce = lambda vector: vector
    progress, nothing = Progress(seed=1), MagicMock()
    context = MagicMock(epoch=epoch, progress=progress)
    commits = Commits(context, nothing, nothing, nothing, {}, ())
    if ends:
        End(context, commits, nothing).commit()
    else:
        commits.agree(torch.zeros(1))
    assert epoch.job.await_fence.call_count == (0 if ends else 2)


def test_a_member_that_is_behind_waits_before_it_steps() -> None:
    """It has the vector of the others' commit, as if it had come by itself."""
    order: list[str] = []
    epoch: Any = MagicMock(member="a", switch_due=False, copied=False)
    epoch.job.await_fence.side_effect = lambda: order.append("fence")
    recovery, nothing = MagicMock(), MagicMock()
    recovery.run.return_value = Decision(1, "resume", ("a",), (1.0,))
    operation: Any = MagicMock(spec=Training, goes_on=True, draws=False, takes_steps=False)
    operation.finish.side_effect = lambda outcome: order.append("step")
    Takeover(MagicMock(epoch=epoch, progress=Progress(seed=1)), nothing, recovery, nothing, nothing).run(operation)
    assert order == ["fence", "step"]
