"""What a member finds that comes by ``bamboo join``: a job to start, to wait for, to join or to lead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from bamboo_ds.cli import main
from bamboo_ds.control.leader.restarts import fatal_plan, unstarted_plan
from bamboo_ds.control.registry import vacancies
from bamboo_ds.control.registry.keys import Keys
from bamboo_ds.control.registry.records import JobRecord, RestartRecord, StopRecord
from bamboo_ds.control.settings import AgentSettings, MemberOptions
from bamboo_ds.errors import ConfigError, JobOver, LaunchError, StoreUnavailable
from bamboo_ds.job_settings import JobSettings
from bamboo_ds.launchers import join
from bamboo_ds.launchers.jobs import JobLocation
from bamboo_ds.store.records import Snapshot
from bamboo_ds.topology.planner import initial_plan
from tests.support.records import member
from tests.support.settings import block
from tests.support.simulated_etcd import Etcd, SimStore

pytestmark = pytest.mark.claim("guides/clusters.md", "reference/cli.md")

#: Nobody has reported an engine yet.
BUILDING = replace(initial_plan(["m0-a", "m1-b"]), epoch=1, generation=0, origin="x")
FIRST = RestartRecord(generation=0, after_epoch=0, ranks={0: (0,), 1: (1,)})
SPEC = JobRecord(job="gpt", world_size=2, settings=JobSettings(values=block(max_restarts=9))).to_json()
UNRESTARTED = JobRecord(job="gpt", world_size=2, settings=JobSettings(values=block(max_restarts=0))).to_json()

Prepare = Callable[..., AgentSettings]


@pytest.fixture
def keys() -> Etcd:
    world: Any = SimpleNamespace(now=0.0, off=frozenset(), check_write=lambda *_: None)
    return Etcd(world)


@pytest.fixture
def opened(keys: Etcd) -> SimStore:
    host: Any = SimpleNamespace(hold_s=0.0, held=False, hold_at="", etcd=True, alive=True, lose=False)
    world: Any = SimpleNamespace(etcd=keys, off=frozenset())
    return SimStore(world, host)


@pytest.fixture
def prepare(opened: SimStore, monkeypatch: pytest.MonkeyPatch) -> Prepare:
    """:func:`join.prepare` over ``keys``; leases of the job last for no time."""
    monkeypatch.setattr(join, "open_store", lambda *_: opened)
    monkeypatch.setattr(join, "_POLL_S", 0.001)
    monkeypatch.setattr(vacancies, "_DESERTED", 0.0002)

    def call(
        wait_s: float = 3.0, start: int | None = 2, max_restarts: int = 9, ranks: int | None = None
    ) -> AgentSettings:
        settings = JobSettings.resolve(block(max_restarts=max_restarts), {})
        options = MemberOptions(job="gpt", command=("x",), store="x", settings=settings)
        starters = None if start is None else join.Starters(start, ranks or start)
        return join.prepare(options, starters, wait_s)

    return call


def keep(keys: Etcd, **values: str) -> None:
    for key, value in values.items():
        keys.put(key, value, None, "")


@pytest.mark.parametrize("starters", [2, None])
def test_who_comes_when_all_that_built_the_engines_have_vanished_leads_the_job(
    keys: Etcd, prepare: Prepare, starters: int | None
) -> None:
    """Nobody is left who could write that the start has failed."""
    keep(keys, spec=SPEC, plan=BUILDING.to_json(), restart=FIRST.to_json())
    found = prepare(start=starters)
    assert (found.waiting, found.after_epoch, found.generation, found.slot) == (True, 1, 0, 2)


def test_while_one_that_builds_is_there_members_wait_for_it(keys: Etcd, prepare: Prepare) -> None:
    keep(keys, spec=SPEC, plan=BUILDING.to_json(), restart=FIRST.to_json())
    keys.put(Keys.member("m0-a"), member("m0-a").to_json(), None, "")
    with pytest.raises(LaunchError, match="has not built its engines within 0 s"):
        prepare(wait_s=0.1)


def test_without_restarts_nobody_leads_a_deserted_job(keys: Etcd, prepare: Prepare) -> None:
    keep(keys, spec=UNRESTARTED, plan=BUILDING.to_json())
    with pytest.raises(LaunchError, match="has not built its engines"):
        prepare(wait_s=0.1, start=None, max_restarts=0)


@pytest.mark.parametrize("starters", [3, 4])
def test_who_comes_with_another_number_of_members_starts_nothing(keys: Etcd, prepare: Prepare, starters: int) -> None:
    """Also where the first one has not told yet what the job is."""
    keep(keys, plan=unstarted_plan(4, None).to_json())
    if starters == 4:
        found = prepare(start=4)
        assert (found.world_size, found.waiting, found.slot) == (4, True, 0)
        spec = JobRecord.from_json(keys.keys[Keys.SPEC].value)
        assert spec.world_size == 4 and spec.since is not None
        return
    with pytest.raises(ConfigError, match="--start 3: job 'gpt' at x was started with 4 ranks"):
        prepare(start=3)
    assert Keys.SPEC not in keys.keys


def test_fewer_members_than_ranks_are_a_number_that_all_have(keys: Etcd, prepare: Prepare) -> None:
    found = prepare(start=3, ranks=4)
    assert (found.world_size, found.waiting, found.slot) == (4, True, 0)
    spec = JobRecord.from_json(keys.keys[Keys.SPEC].value)
    assert (spec.world_size, spec.starters) == (4, 3)
    with pytest.raises(ConfigError, match="--start 3 --ranks 5: job 'gpt' at x was started with --start 3 --ranks 4"):
        prepare(start=3, ranks=5)
    with pytest.raises(ConfigError, match="--start 2 --ranks 4: job 'gpt' at x was started with --start 3 --ranks 4"):
        prepare(start=2, ranks=4)
    assert prepare(start=3, ranks=4).slot == 1 and prepare(start=None).slot == 2


def test_ranks_without_start_are_refused() -> None:
    done = CliRunner().invoke(main.cli, ["join", "--ranks", "4", __file__])
    assert isinstance(done.exception, ConfigError) and "--ranks needs --start" in str(done.exception)


def test_who_would_go_by_other_settings_does_not_join(keys: Etcd, prepare: Prepare) -> None:
    keep(keys, spec=SPEC, plan=unstarted_plan(2, None).to_json())
    with pytest.raises(ConfigError, match=r"bamboo\.recovery\.max_restarts is 0 here and 9 in the job: a job goes by"):
        prepare(start=None, max_restarts=0)
    with pytest.raises(ConfigError, match=r"--start needs restarts: set bamboo\.recovery\.max_restarts"):
        prepare(start=2, max_restarts=0)
    keep(keys, spec=UNRESTARTED, plan=fatal_plan(BUILDING, (), BUILDING.members).to_json())
    with pytest.raises(JobOver, match="has ended by a fatal loss"):
        prepare(start=None, max_restarts=0)


def test_an_outage_of_etcd_does_not_end_the_wait(
    keys: Etcd, opened: SimStore, prepare: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(keys, spec=SPEC, plan=unstarted_plan(2, None).to_json())
    answers = iter((True, False, False))
    read = opened.get_prefix

    def get_prefix(prefix: str) -> Snapshot:
        if not next(answers, True):
            raise StoreUnavailable("no answer")
        return read(prefix)

    monkeypatch.setattr(opened, "get_prefix", get_prefix)
    assert prepare().waiting and next(answers, None) is None


def test_a_job_is_stopped_also_while_nobody_of_it_is_there(
    keys: Etcd, opened: SimStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next members that come would start it again."""
    monkeypatch.setattr(main, "open_store", lambda *_: opened)
    where = JobLocation("gpt", "x")
    with pytest.raises(ConfigError, match="no job 'gpt' runs at x"):
        main._stop_members(where)
    keep(keys, spec=SPEC, plan=fatal_plan(BUILDING, (), BUILDING.members).to_json())
    main._stop_members(where)
    assert StopRecord.from_json(keys.keys[Keys.STOP].value).reason == "bamboo stop"
    with pytest.raises(ConfigError, match="no job 'gpt' runs at x"):
        main._stop_members(where)
