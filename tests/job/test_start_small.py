"""Jobs that fewer members start than there are ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.support.compare import assert_computed, assert_read
from tests.support.etcd import EtcdServer
from tests.support.faults import in_turn, mark
from tests.support.jobs import TRAIN, Reference, RunningJob, slow_until, write_config
from tests.support.members import MembersJob
from tests.support.processes import Process
from tests.support.surviving import fault

pytestmark = [pytest.mark.claim("guides/elastic.md", "reference/cli.md"), pytest.mark.integration]

MEMBERS, RANKS = 3, 4


@contextmanager
def started(
    how: str, folder: Path, command: list[str], config: Path
) -> Iterator[tuple[RunningJob, Callable[[], Process]]]:
    """The job, started by ``bamboo run`` or by as many of ``bamboo join``, and how one more member comes."""
    if how == "run":
        with RunningJob(folder, MEMBERS, command, config, options=["--ranks", str(RANKS)]) as job:
            yield job, job.join
        return
    with EtcdServer(folder) as etcd, MembersJob(folder, "gpt", {}) as job:
        job.command = [str(TRAIN), "--deepspeed_config", str(config), "--out", str(folder), *command]
        numbers = ["--start", str(MEMBERS), "--ranks", str(RANKS), "--store", etcd.url, "--job", "gpt"]
        one_more = partial(job.member, ["join", *numbers, *job.command])
        one_more()  # whose end is the job's: it gets slot 0, and so another rank than the one that is lost
        job.wait_for("the first one has a slot", lambda: "slot 0 waits until the job starts" in job.output())
        for _ in range(MEMBERS - 1):
            one_more()
        yield job, one_more


@pytest.mark.parametrize("how", [pytest.param("run", marks=pytest.mark.exhaustive), "join"])
def test_fewer_members_than_ranks(tmp_path: Path, reference: Reference, how: str) -> None:
    """The further worker gives its stage away and ends; then a loss and a newcomer are those of any other job."""
    now, go = tmp_path / "now", tmp_path / "go"
    faults = in_turn(fault(1, 3, "BackwardPass", 2, when=str(now)))
    config = write_config(tmp_path, {"topology": {"blocks": "auto"}, "redundancy": {"verify_every": 2}})
    command = ["--stages", str(RANKS), *slow_until(go), "--faults", json.dumps(faults)]
    with started(how, tmp_path, command, config) as (job, one_more):
        sizes = lambda: [len(plan["members"]) for plan in job.events("plan")]  # noqa: E731
        job.wait_for("the further worker is there, and has gone", lambda: RANKS in sizes() and sizes()[-1] == MEMBERS)
        now.touch()
        job.wait_for("a loss", lambda: len(job.events("member_lost")) == 1)
        one_more()
        job.wait_for("a newcomer takes part", lambda: len({*job.plan()["owners"], *job.plan()["shadows"]}) == MEMBERS)
        go.touch()
        result = job.finish()
    assert result.exit_code == 0, result.output[-4000:]
    assert result.faults() == sorted(map(mark, faults))
    undisturbed = reference(RANKS, 1, 6, *result.length)
    assert len([*result.ranks(), *result.joined()]) == MEMBERS
    assert_computed(result, undisturbed)
    assert_read(result, undisturbed, {1, RANKS - 1})
    assert not result.events("replica_mismatch") and not result.events("restart")
    (begun,) = result.events("run_started")
    assert begun["members"] == MEMBERS
