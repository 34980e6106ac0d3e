"""Members that leave on notice: they hand over between two iterations, and nothing is computed twice."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import psutil
import pytest

from bamboo_ds.errors import EXIT_LEFT
from tests.support.compare import assert_left
from tests.support.jobs import Reference, RunningJob, slow_until, write_config
from tests.support.metadata_servers import AwsMetadata, AzureMetadata, Handler
from tests.unit.control.test_notice_leave import block

pytestmark = pytest.mark.claim(
    "guides/clusters.md",
    "guides/elastic.md",
    "guides/notices.md",
    "reference/cli.md",
    "reference/events.md",
    "reference/limits.md",
)


# -- whole jobs -----------------------------------------------------------------------------------------


def below_slots(routes: dict[str, Handler], slots: int) -> dict[str, Handler]:
    """``routes`` below ``/<slot>`` of every slot."""
    return {key.replace(" /", f" /{slot}/"): handler for slot in range(slots) for key, handler in routes.items()}


class NoticedAws(AwsMetadata):
    """The metadata service of each slot's instance, below ``/<slot>``; only those in ``noticed`` have an action."""

    def __init__(self, slots: int) -> None:
        super().__init__()
        self.slots, self.noticed = slots, frozenset[int]()

    def routes(self) -> dict[str, Handler]:
        return below_slots(super().routes(), self.slots)

    async def _action(self, request: Any) -> Any:
        slot = int(request.path.split("/")[1])
        return self._answer(request, self.action if slot in self.noticed else None)


class AzureHosts(AzureMetadata):
    """The metadata service of each slot's machine, below ``/<slot>``; two slots to a machine ``vm<n>``."""

    def __init__(self, slots: int) -> None:
        super().__init__()
        self.slots = slots

    def routes(self) -> dict[str, Handler]:
        return below_slots(super().routes(), self.slots)

    async def _name(self, request: Any) -> Any:
        self.name = f"vm{int(request.path.split('/')[1]) // 2}"
        return await super()._name(request)


def notify(folder: Path, slot: int, **payload: Any) -> None:
    """Write the file that the member of ``slot`` takes for a notice."""
    temporary = folder / f".notice-{slot}"
    temporary.write_text(json.dumps(payload))
    temporary.rename(folder / f"notice-{slot}")


def seconds_between(notice: dict[str, Any], left: dict[str, Any]) -> float:
    begin, end = (datetime.fromisoformat(event["time"].replace("Z", "+00:00")) for event in (notice, left))
    return (end - begin).total_seconds()


@pytest.mark.integration
def test_members_leave_one_after_the_other(tmp_path: Path, reference: Reference) -> None:
    """An inner stage by AWS's notice, an end, a third; the last cannot. Checkpoints are written."""
    go = tmp_path / "go"
    config = write_config(tmp_path, block(tmp_path, "aws", "file"))
    command = ["--stages", "4", "--save-every", "7", *slow_until(go)]
    with NoticedAws(4) as aws:
        variables = {"BAMBOO_AWS_METADATA_URL": f"{aws.url}/{{slot}}"}
        with RunningJob(tmp_path, 4, command, config, variables=variables) as job:
            job.wait_for("steps", lambda: len(job.events("step")) >= 2)
            until = datetime.now(timezone.utc) + timedelta(seconds=120)
            aws.change(action={"action": "terminate", "time": f"{until:%Y-%m-%dT%H:%M:%SZ}"}, noticed=frozenset([2]))
            job.wait_for("slot 2 has left", lambda: len(job.events("member_left")) == 1)
            notify(tmp_path, 0, kind="rebalance")
            notify(tmp_path, 3, deadline_s=30.0, detail="spot market")
            job.wait_for("slot 3 has left", lambda: len(job.events("member_left")) == 2)
            notify(tmp_path, 1)
            job.wait_for("slot 1 has left", lambda: len(job.events("member_left")) == 3)
            notify(tmp_path, 0)
            job.wait_for("the last one cannot", lambda: "nobody is left who could take over" in job.output())
            states = [m["state"].split()[0] for m in job.status()["members"]]
            assert states == ["leaving", "left", "left", "left"]
            go.touch()
            result = job.finish()
    assert_left(result, reference(4, 1, 6, *result.length), {1, 2, 3})
    advice = [event for event in result.events("notice") if not event["leaves"]]
    assert [(event["kind"], event["member"][:2]) for event in advice] == [("rebalance", "m0")]
    notices = {event["member"]: event for event in result.events("notice") if event["deadline_seconds"] is not None}
    first, second, _ = result.events("member_left")
    assert (first["member_id"][:2], first["reason"], second["member_id"][:2]) == ("m2", "preempt", "m3")
    assert first["detail"].startswith("aws: spot instance-action terminate")
    for event in (first, second):
        notice = notices[event["member_id"]]
        assert 0 < seconds_between(notice, event) < notice["deadline_seconds"]
    assert len(result.events("checkpoint_saved")) == int(result.length[1]) // 7 > 1


@pytest.mark.exhaustive
@pytest.mark.integration
def test_both_members_of_a_host_leave(tmp_path: Path, reference: Reference) -> None:
    """Azure is told that it may go on, once nobody is left on the machine."""
    go = tmp_path / "go"
    command = ["--stages", "4", "--training-data", *slow_until(go)]
    with AzureHosts(4) as azure:
        variables = {"BAMBOO_AZURE_METADATA_URL": f"{azure.url}/{{slot}}"}
        config = write_config(tmp_path, block(tmp_path, "azure"))
        with RunningJob(tmp_path, 4, command, config, options=["--emulate-hosts", "2"], variables=variables) as job:
            job.wait_for("steps", lambda: len(job.events("step")) >= 2)
            begin = datetime.now(timezone.utc) + timedelta(seconds=60)
            azure.change(events=[azure.event("E-1", "Preempt", f"{begin:%a, %d %b %Y %H:%M:%S GMT}", "vm1")])
            job.wait_for("both have left", lambda: len(job.events("member_left")) == 2)
            azure.wait_for(lambda: "E-1" in azure.acknowledged)
            go.touch()
            result = job.finish()
    assert_left(result, reference(4, 1, 6, "--training-data", *result.length), {2, 3})
    # Of two that leave at the same time each may find that nobody is left; to ask again changes nothing.
    assert azure.acknowledged in (["E-1"], ["E-1", "E-1"])
    for event in result.events("member_left"):
        notice = next(e for e in result.events("notice") if e["member"] == event["member_id"])
        assert 0 < seconds_between(notice, event) < notice["deadline_seconds"]


@pytest.mark.exhaustive
@pytest.mark.integration
def test_both_that_draw_batches_leave(tmp_path: Path, reference: Reference) -> None:
    """One of them stays, without a stage, until a worker that is started for that can draw the batches."""
    arguments = ("--evaluate-every", "2")
    go = tmp_path / "go"
    command = ["--stages", "4", *arguments, *slow_until(go)]
    with RunningJob(tmp_path, 4, command, write_config(tmp_path, block(tmp_path, "file"))) as job:
        # Then it is known that all iterators give the same, also those for evaluations.
        job.wait_for("steps", lambda: len(job.events("step")) >= 3)
        notify(tmp_path, 0)
        notify(tmp_path, 3)
        job.wait_for("both have left", lambda: len(job.events("member_left")) == 2)
        go.touch()
        result = job.finish()
    undisturbed = reference(4, 1, 6, *arguments, *result.length)
    assert_left(result, undisturbed, {0, 3}, joined=1)
    (drawn,) = result.drawn()
    assert drawn == undisturbed.samples()[0]


@pytest.mark.integration
def test_signals(tmp_path: Path, reference: Reference) -> None:
    """SIGTERM to a member that has joined; SIGUSR1 to ``bamboo run``, whose members all leave to the last one.

    All processes below that get the signal, as Slurm sends it.
    """
    go = tmp_path / "go"
    command = ["--stages", "2", *slow_until(go)]
    with RunningJob(tmp_path, 2, command, write_config(tmp_path, {}, 4)) as job:
        job.wait_for("a step", lambda: bool(job.events("step")))
        one, other = job.join("--grace-s", "30"), job.join()
        job.wait_for("both have joined", lambda: len(job.events("member_joined")) == 4)
        admitted = job.events("member_joined")[-1]["epoch"]
        job.wait_for("both take part", lambda: job.events("step")[-1]["epoch"] >= admitted)
        os.kill(one.pid, signal.SIGTERM)
        assert one.wait(30) == EXIT_LEFT
        (left,) = job.events("member_left")
        assert left["detail"] == "signal: SIGTERM"
        below = psutil.Process(job.process.pid).children(recursive=True)
        assert len(below) >= 6, "agents, workers, etcd and its supervisor"
        for pid in (job.process.pid, *(process.pid for process in below)):
            os.kill(pid, signal.SIGUSR1)
        job.wait_for("all others have left", lambda: len(job.events("member_left")) == 3)
        assert len(job.plan()["members"]) == 1
        told = Counter(event["member"] for event in job.events("notice"))
        assert len(told) == 3 and set(told.values()) == {1}
        assert other.poll() is None and job.process.poll() is None, "its etcd is needed"
        go.touch()
        result = job.finish()
    assert other.returncode == 0
    assert_left(result, reference(2, 1, 4, *result.length), {0, 1}, joined=1)
    assert [event["exit_code"] for event in result.events("run_finished")] == [0]
