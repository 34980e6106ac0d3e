"""The settings of a job: resolved once, kept in etcd, and compared with what scripts and joining members have."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner

from bamboo_ds.cli.options import setting_option
from bamboo_ds.config import BambooConfig, RedundancyMode, parse_block
from bamboo_ds.control.agent.command import worker_environment
from bamboo_ds.control.registry.records import JobRecord
from bamboo_ds.control.settings import settings_told
from bamboo_ds.errors import ConfigError
from bamboo_ds.job_settings import JobSettings, paths_by_name, value_at
from bamboo_ds.worker.job import Job
from tests.support.settings import agent


def test_a_fence_is_longer_than_leases() -> None:
    """Otherwise workers would pause before anybody could have noticed anything."""
    own = parse_block({"membership": {"lease_ttl_s": 4, "fence_s": 7}})
    with pytest.raises(ConfigError, match=r"bamboo\.membership\.fence_s = 7 is less than twice lease_ttl_s = 4"):
        JobSettings.resolve(own, {})
    assert JobSettings.resolve(own, {"lease_ttl_s": 3.0}).values.fence_s == 7
    assert JobSettings.resolve(own, {"max_restarts": 0}).values.fence_s is None, "nobody starts the job again"
    assert JobSettings.resolve(None, {}).values.fence_s == 120


def test_no_two_settings_share_a_name() -> None:
    """Options name a setting by its own name."""
    parts = BambooConfig.model_fields.values()
    leaves = [name for part in parts for name in getattr(part.annotation, "model_fields", ())]
    assert sorted(paths_by_name()) == sorted(leaves)


@pytest.mark.parametrize(
    ("name", "text", "value", "wrong"),
    [
        ("lease_ttl_s", "2.5", 2.5, "greater than or equal to 1"),
        ("max_restarts", "3", 3, "valid integer"),
        ("check_exact", "4", 4, "valid integer"),
        ("mode", "none", RedundancyMode.NONE, "'eager-frc-lazy-brc'"),
    ],
)
def test_an_option_is_made_from_its_setting(name: str, text: str, value: object, wrong: str) -> None:
    """A wrong value is named as the user has typed it."""

    @click.command()
    @setting_option(name)
    def command(**values: Any) -> None:
        assert values == {name: value}

    (option,) = (param for param in command.params if isinstance(param, click.Option))
    assert option.help is not None and f"In place of bamboo.{paths_by_name()[name]}." in option.help
    assert not re.search(r"`|\]\(", option.help)
    assert CliRunner().invoke(command, [*option.opts, text]).exit_code == 0
    refused = CliRunner().invoke(command, [*option.opts, "0.5"])
    assert (
        refused.exit_code == 2
        and f"'{option.opts[0]}'" in refused.output
        and "'0.5'" in refused.output
        and wrong in refused.output
    )


def test_agent_and_worker_get_the_settings_with_what_the_command_line_gives() -> None:
    own = parse_block({"membership": {"lease_ttl_s": 9, "settle_ms": 3}, "redundancy": {"mode": "none"}})
    resolved = JobSettings.resolve(own, {"lease_ttl_s": 1.5, "max_restarts": None})
    told = replace(agent(zone="z", slot=3, script_rank=2, extra={5: 7}), settings=resolved)
    again = settings_told(told.environment({}))
    assert again == told
    membership = again.bamboo.membership
    assert (membership.lease_ttl_s, membership.settle_ms, membership.heartbeat_limit_s) == (1.5, 3, 1.5)
    assert JobSettings.model_validate_json(worker_environment(again, "m")["BAMBOO_SETTINGS"]) == resolved
    assert JobRecord.from_json(told.record(4).to_json()).settings == resolved


def test_a_worker_knows_its_host_s_name_where_it_is_another_one_than_the_machine_s() -> None:
    """Emulated hosts share no memory."""
    emulated = settings_told(replace(agent(), host="emulated-1").environment({}))
    assert worker_environment(emulated, "m")["BAMBOO_HOST"] == "emulated-1"
    assert "BAMBOO_HOST" not in worker_environment(agent(), "m")


@pytest.mark.parametrize("known", [True, False])
def test_a_script_goes_by_the_settings_of_its_job(known: bool) -> None:
    job: Any = object.__new__(Job)
    settings = JobSettings.resolve(
        parse_block({"topology": {"min_gain": 0.3}}) if known else None, {"lease_ttl_s": 1.5}
    )
    job.channel = SimpleNamespace(settings=settings)
    told = {"topology": {"min_gain": 0.3}, "membership": {"lease_ttl_s": 7}}
    job.settings = settings.of_script(parse_block(told))
    assert job.settings.membership.lease_ttl_s == 1.5, "the command line holds"
    assert job.settings.topology.min_gain == job.channel.goes_by.topology.min_gain == 0.3


def test_a_script_with_another_block_than_its_job_is_told_the_difference() -> None:
    job = JobSettings.resolve(parse_block({"topology": {"min_gain": 0.3}}), {})
    with pytest.raises(ConfigError) as caught:
        job.of_script(parse_block({"topology": {"min_gain": 0.2}, "standby": {"replicas": True}}))
    assert str(caught.value) == (
        "bamboo.standby.replicas is True here and False in the job, bamboo.topology.min_gain is 0.2 here and 0.3 in "
        "the job: a job goes by one block. Start all of its members with the same configuration and options"
    )


def test_what_has_been_in_force_before_a_script_tells_its_block_does_not_change() -> None:
    job = JobSettings.resolve(None, {"settle_ms": 7})
    wrong = {"membership": {"lease_ttl_s": 9, "settle_ms": 3}, "observe": {"http": ":0"}, "topology": {"min_gain": 0.2}}
    with pytest.raises(ConfigError) as caught:
        job.of_script(parse_block(wrong))
    text = str(caught.value)
    assert "bamboo.membership.lease_ttl_s is 9.0 here and 5 in the job, bamboo.observe.http is ':0' here" in text
    assert "settle_ms" not in text and "min_gain" not in text
    assert "start the job with --config FILE, a configuration with the same block" in text
    complete = job.completed(job.of_script(parse_block({"topology": {"min_gain": 0.2}})))
    assert not complete.open and value_at(complete.values, "topology.min_gain") == 0.2
    assert value_at(complete.values, "membership.settle_ms") == 7 and complete.given == ("membership.settle_ms",)


def test_a_member_that_joins_goes_by_the_settings_of_the_job() -> None:
    job = JobSettings.resolve(parse_block({"membership": {"rejoin_s": 7}}), {"lease_ttl_s": 3})
    same = JobSettings.resolve(parse_block({"membership": {"rejoin_s": 7}}), {})
    assert job.of_member(same) == job.of_member(JobSettings(open=True)) == job, "its launcher had an option more"
    for other in (JobSettings.resolve(None, {"rejoin_s": 8}), JobSettings.resolve(same.values, {"rejoin_s": 8})):
        with pytest.raises(ConfigError, match=r"bamboo\.membership\.rejoin_s is 8 here and 7(\.0)? in the job"):
            job.of_member(other)
