"""The same unchanged script under each launcher loses a rank by SIGKILL and goes on, as if nothing had happened."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest

from bamboo_ds import secret
from bamboo_ds.errors import ConfigError, LaunchError
from bamboo_ds.launchers import meeting, ranks, slurm
from bamboo_ds.secret import NONE, JobSecret
from tests.support.jobs import free_port

pytestmark = pytest.mark.claim("guides/launchers.md", "guides/security.md", "reference/events.md")


# -- Slurm's variables ------------------------------------------------------------------------------------


def task(**changes: str) -> dict[str, str]:
    usual = {
        "SLURM_PROCID": "5",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "2",
        "SLURM_STEP_NODELIST": "gpu[03-04,10],login-1",
        "SLURM_STEP_NUM_TASKS": "7",
        "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
        "SLURM_JOB_ID": "17",
        "SLURM_STEP_ID": "1",
    }
    return usual | changes


@pytest.mark.parametrize("hosts", [("a", "b"), ("a", "a")])
def test_an_etcd_on_one_of_several_hosts_is_told(
    hosts: tuple[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The loss of that host would be the end of all recoveries."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    answer = {"store": "http://127.0.0.1:1", "job": "j", "embedded": True, "wrapped": False}

    def meet(rank: int) -> dict[str, object]:
        place = ranks.Launched(rank, 2, "127.0.0.1", int(os.environ["MASTER_PORT"]))
        own = meeting.Meeting(place, timedelta(seconds=60), hosts[rank])
        return own.agree(None, lambda: (answer, NONE))[0]

    with ThreadPoolExecutor() as pool:
        assert list(pool.map(meet, (0, 1))) == [answer, answer]
    assert ("2 hosts take part, and the job's etcd is on one of them, a" in caplog.text) == (hosts == ("a", "b"))


GIVEN, MADE = JobSecret.new(), JobSecret.new()


@pytest.mark.parametrize(
    ("sealed_by", "own", "local", "outcome"),
    [
        (NONE, None, False, NONE),
        (GIVEN, GIVEN, False, GIVEN),
        (GIVEN, GIVEN, True, GIVEN),
        (MADE, None, True, MADE),  # rank 0 has made one, and all are on its host
        (NONE, GIVEN, False, "without proving"),
        (NONE, None, True, "without proving"),
        (GIVEN, None, False, "that this rank does not have"),
        (GIVEN, MADE, False, "another secret"),
        (GIVEN, None, True, "another secret"),
    ],
)
def test_only_rank_0_is_believed(
    sealed_by: JobSecret,
    own: JobSecret | None,
    local: bool,
    outcome: JobSecret | str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever is the first to write where the ranks meet could name an etcd of its own."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    secret.keep("j", MADE)
    answer = {"store": "http://127.0.0.1:1", "job": "j", "embedded": True, "wrapped": False}
    place = ranks.Launched(1, 2, "127.0.0.1", 29500, local)
    said = sealed_by.seal(json.dumps(answer), "bamboo/0")
    if isinstance(outcome, JobSecret):
        assert meeting.verified(said, place, own, "bamboo/0") == (answer, outcome)
        return
    with pytest.raises(LaunchError, match=f"127.0.0.1:29500 .*{outcome}.*BAMBOO_SECRET_FILE"):
        meeting.verified(said, place, own, "bamboo/0")


@pytest.mark.parametrize("said", ["", "[]", "{}", "no", '{"job": "../../etc/x"}', '{"error": "no etcd"}'])
def test_other_answers_are_refused(said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with pytest.raises((LaunchError, ConfigError)):
        meeting.verified(said, ranks.Launched(1, 2, "127.0.0.1", 29500, True), None, "bamboo/0")


@pytest.mark.parametrize(
    ("variables", "local"),
    [
        ({"LOCAL_WORLD_SIZE": "4"}, True),
        ({"LOCAL_SIZE": "4"}, True),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, True),
        ({"LOCAL_WORLD_SIZE": "2", "LOCAL_SIZE": "2"}, False),
        ({}, False),
    ],
)
def test_ranks_of_one_host_know_it(variables: dict[str, str], local: bool) -> None:
    usual = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    place = ranks.launched(usual | variables)
    assert place is not None and place.local == local


def test_variables_of_a_task() -> None:
    assert slurm.variables(task()) == {
        "RANK": "5",
        "WORLD_SIZE": "7",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "LOCAL_SIZE": "2",
        "MASTER_ADDR": "gpu03",
        "MASTER_PORT": "21718",
    }


def test_what_is_set_stays() -> None:
    found = slurm.variables(task(MASTER_ADDR="10.0.0.1", MASTER_PORT="29500"))
    assert "MASTER_ADDR" not in found and "MASTER_PORT" not in found


def test_a_batch_script_is_no_task() -> None:
    assert slurm.is_task(task())
    assert not slurm.is_task({"SLURM_JOB_ID": "17", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a", ["a"]),
        ("a,b-1", ["a", "b-1"]),
        ("a[1-3]", ["a1", "a2", "a3"]),
        ("a[08-10,1]b", ["a08b", "a09b", "a10b", "a1b"]),
        ("r[1-2]n[1,3],x", ["r1n1", "r1n3", "r2n1", "r2n3", "x"]),
    ],
)
def test_lists_of_nodes(text: str, expected: list[str]) -> None:
    assert list(slurm.hosts(text)) == expected


@pytest.mark.parametrize(
    "wrong", [{"SLURM_STEP_NODELIST": "a[x]"}, {"SLURM_STEP_TASKS_PER_NODE": "two"}, {"SLURM_NODEID": "9"}]
)
def test_unreadable_variables_are_named(wrong: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="set RANK, WORLD_SIZE"):
        slurm.variables(task(**wrong))
