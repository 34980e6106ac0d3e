"""What tests wait for while a job runs, and what must be true of it in the end."""

from __future__ import annotations

import psutil

from bamboo_ds.control.registry.access import open_store
from bamboo_ds.control.registry.keys import Keys
from bamboo_ds.control.registry.records import MemberRecord
from bamboo_ds.secret import NONE, JobSecret

from .compare import assert_computed
from .jobs import Result, RunningJob

#: Seconds within which the next thing happens, also on a machine with much to do.
PATIENCE_S = 180.0


def registered(urls: str, job: str, secret: JobSecret = NONE) -> list[MemberRecord]:
    """The members that etcd knows."""
    with open_store(urls, job, 10.0, secret) as store:
        entries = store.get_prefix(Keys.MEMBERS).entries.values()
    return [MemberRecord.from_json(entry.value) for entry in entries]


def wait_steps(job: RunningJob, more: int) -> None:
    """Until so many more steps are done."""
    goal = len(job.events("step")) + more
    job.wait_for(f"{more} more steps", lambda: len(job.events("step")) >= goal, PATIENCE_S)


def wait_entered(job: RunningJob) -> None:
    """Until a step is done under the newest plan."""

    def entered() -> bool:
        return bool(job.events("step")) and job.events("step")[-1]["epoch"] == job.plan()["epoch"]

    job.wait_for("a step under the newest plan", entered, PATIENCE_S)


def wait_whole(job: RunningJob, owners: int) -> None:
    """Until so many members own a stage, and every stage has a shadow."""

    def whole() -> bool:
        plan = job.plan() if job.events("plan") else {"owners": []}
        return len(set(plan["owners"])) == owners and bool(plan["shadows"]) and None not in plan["shadows"]

    job.wait_for(f"{owners} members own stages, all of them shadowed", whole, PATIENCE_S)


def kill_own_etcd(job: RunningJob) -> None:
    """SIGKILL to the etcd that ``bamboo run`` has started; returns when another one runs."""
    mine = psutil.Process(job.process.pid).children()
    (supervisor,) = [child for child in mine if any(part.endswith("supervisor.py") for part in child.cmdline())]
    (before,) = supervisor.children()
    before.kill()
    job.wait_for("etcd runs again", lambda: [c.pid for c in supervisor.children()] not in ([], [before.pid]))
    assert "the embedded etcd has ended (signal 9)" in job.output()


def wait_lost(job: RunningJob, count: int) -> None:
    """Until so many losses are known."""
    job.wait_for(f"{count} losses", lambda: len(job.events("member_lost")) >= count, PATIENCE_S)


def assert_exact(result: Result, reference: Result) -> None:
    """Losses, states and steps are those of the undisturbed run; no epoch was decided twice."""
    assert_computed(result, reference)
    steps = len(reference.ranks()[0]["losses"])
    assert sorted(event["step"] for event in result.events("step")) == list(range(1, steps + 1))
    epochs = [event["epoch"] for event in result.events("plan")]
    assert epochs == list(range(1, len(epochs) + 1))
    lost = [event["member_id"] for event in result.events("member_lost")]
    assert len(lost) == len(set(lost))
    assert not result.events("replica_mismatch")
