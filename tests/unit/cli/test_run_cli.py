"""``bamboo run`` and its companions: exit codes, and that nothing is left however the job ends."""

from __future__ import annotations

import json
import logging
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import psutil
import pytest
from click.testing import CliRunner

from bamboo_ds.cli import main
from bamboo_ds.cli.options import block_of
from bamboo_ds.control.registry.overview import overview
from bamboo_ds.control.registry.records import LayoutRecord
from bamboo_ds.errors import ConfigError, LaunchError
from bamboo_ds.launchers import jobs, network
from bamboo_ds.observe.live import LiveJob
from bamboo_ds.observe.logs import LOGGER
from bamboo_ds.topology import Layout
from bamboo_ds.topology.planner import initial_plan
from tests.support.records import member, mirror

pytestmark = pytest.mark.claim(
    "guides/elastic.md",
    "guides/logs.md",
    "guides/observing.md",
    "guides/security.md",
    "reference/cli.md",
    "reference/events.md",
    "reference/settings.md",
)


def test_members_whose_agents_could_not_say_goodbye_stay_in_the_status() -> None:
    """Their host has vanished, say: they are lost once the plan goes on without them."""
    plan, names = initial_plan(["m0-a", "m1-b"]), ("m0-a", "m1-b", "m12-c")
    reports = [LayoutRecord(id=name, layout=Layout(1, 2), redundant=True) for name in names]
    found = overview(mirror(plan, member("m0-a"), *reports))
    states = [(each.slot, each.state) for each in LiveJob("j").view(found).members]
    assert states == [(0, "building"), (1, "silent"), (12, "lost")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-n", "3", "--pipelines", "2", __file__], "--pipelines 2 does not divide -n 3"),
        (["-n", "2", "--ranks", "5", "--pipelines", "2", __file__], "--pipelines 2 does not divide --ranks 5"),
        (["-n", "3", "--ranks", "2", __file__], "--ranks 2 is less than -n 3"),
        (["-n", "1", "--job", "a/b", "x.py"], "job name 'a/b' is not usable"),
        (["-n", "1", "x.py", "--deepspeed_config", "/does/not/exist"], "does not exist"),
        (["-n", "1", "--events", "/does/not/exist/e", __file__], "/does/not/exist"),
        (["-n", "1", "--event", "e.jsonl", "x.py"], "No such option '--event'"),
        (["-n", "1", "x.py"], "there is no script 'x.py'"),
        (["-n", "1", "-m", "no_such_module"], "there is no module 'no_such_module'"),
        (["-n", "1", __file__.replace("test_run_cli.py", "../../../README.md")], "is not valid Python"),
    ],
)
def test_wrong_usage(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Told once, before anything is started."""
    monkeypatch.setattr(sys, "argv", ["bamboo", "run", *arguments])
    with pytest.raises(SystemExit) as end:
        main.main()
    told = capsys.readouterr().err
    assert end.value.code == 2, told
    assert len([line for line in told.splitlines() if message in line]) == 1, told


def test_variables_of_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They are defaults of all commands' options, but not in processes of another job, which agents give them."""
    for variable, value in (("STORE", "http://10.0.0.5:2379"), ("JOB", "a/b"), ("EVENTS", "e"), ("ADDRESS", "::1")):
        monkeypatch.setenv(f"BAMBOO_{variable}", value)
    found = {}
    for name in ("run", "join", "launch", "status", "stop", "plan", "chaos"):
        command = main.cli.commands[name]
        arguments = ["-n", "1", __file__] if name == "run" else [__file__] if name in ("join", "launch") else []
        values = command.make_context(name, arguments).params
        found[name] = {key: values[key] for key in ("store", "job", "events", "address") if values.get(key)}
    members = {"store": "http://10.0.0.5:2379", "job": "a/b", "events": "e", "address": "::1"}
    others = {key: members[key] for key in ("store", "job")}
    assert found == {name: members if name in ("run", "join", "launch") else others for name in found}
    assert main.cli.commands["run"].make_context("run", ["-n", "1", __file__]).params["logs"]
    monkeypatch.setenv("BAMBOO_MEMBER", "m0-a")
    values = main.cli.commands["run"].make_context("run", ["-n", "1", __file__]).params
    assert (values["store"], values["job"], values["events"], values["address"]) == ("embedded", None, None, None)
    assert values["logs"] is None


def test_a_configuration_without_the_block_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "ds.json"
    for block, told in (({}, 1), ({"bamboo": {}}, 0), ({"bamboo": {"enabled": False}}, 0)):
        config.write_text(json.dumps({"train_batch_size": 8, **block}))
        block_of(None, ["--deepspeed_config", str(config)])
        assert capsys.readouterr().err.count('the configuration has no "bamboo" block') == told


def test_a_member_that_joins_is_at_the_address_towards_etcd() -> None:
    own = [a.address for each in psutil.net_if_addrs().values() for a in each if a.family == socket.AF_INET]
    assert own
    for address in own:
        assert network.address_towards(f"http://{address}:2379") == address
    with pytest.raises(LaunchError, match=r"--store http://no\.such\.host\.invalid:1 .* say --address"):
        network.address_towards("http://no.such.host.invalid:1")
    with pytest.raises(ConfigError, match="is not an address with a port"):
        network.address_towards("http://10.0.0.1", 600.0)


def test_a_host_without_a_network_yet_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Names are not found, and no way leads out: both are usual at a host's start."""
    answers: list[Any] = [socket.gaierror(-3, "Temporary failure"), OSError(101, "Network is unreachable"), "10.0.0.7"]

    def own_address(*_: object) -> str:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return str(answer)

    caplog.set_level(logging.WARNING, LOGGER)
    monkeypatch.setattr(network, "own_address", own_address)
    monkeypatch.setattr(network, "_POLL_S", 0.001)
    assert network.address_towards("http://etcd:2379", 60.0) == "10.0.0.7"
    assert caplog.text.count("no way leads to --store http://etcd:2379 ([Errno -3] Temporary failure)") == 1


def test_version_and_help() -> None:
    for arguments, words in (
        (["version"], "bamboo_ds"),
        (["--version"], "bamboo_ds"),
        (["run", "--help"], "fatal loss"),
        (["-h"], "demo"),
    ):
        done = CliRunner().invoke(main.cli, arguments)
        assert done.exit_code == 0 and words in done.output


def test_a_command_line_without_a_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    """Scripts may have it in themselves, so it is no error; it is said before any worker starts."""
    assert block_of(None, ["train.py", "--steps", "3"]) is None
    assert "the command line names no configuration (--deepspeed_config FILE)" in capsys.readouterr().err


def test_the_list_of_commands_has_whole_sentences() -> None:
    shown = " ".join(CliRunner().invoke(main.cli, ["--help"]).output.split())
    for name, command in main.cli.commands.items():
        told = " ".join((command.help or "").replace("\b", " ").split())
        sentence = told.partition(". ")[0].rstrip(".")
        assert f" {name} {sentence}." in shown, name


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """All commands below ``group``, by their words."""
    for name, command in group.commands.items():
        yield (*path, name), command
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))


@pytest.mark.parametrize("words", [words for words, _ in commands(main.cli)], ids=" ".join)
def test_help_says_the_one_use_first(words: tuple[str, ...]) -> None:
    """One sentence, right after the usage, and short."""
    done = CliRunner().invoke(main.cli, [*words, "--help"])
    assert done.exit_code == 0
    usage, use, *_ = (" ".join(paragraph.split()) for paragraph in done.output.split("\n\n"))
    assert usage.startswith("Usage: ") and use[0].isupper() and use.endswith(".")
    assert ". " not in use and len(use) <= 120, use


# -- the files of running jobs ------------------------------------------------------------------------


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def test_job_files(runtime: Path) -> None:
    with pytest.raises(ConfigError, match="no job runs here"):
        jobs.choose(None)
    one = jobs.this_process("one", "http://user:secret@x")
    one.write()
    assert one.path.stat().st_mode & 0o777 == 0o600
    assert one.path.parent.stat().st_mode & 0o777 == 0o700
    assert jobs.choose(None) == one
    with pytest.raises(LaunchError, match="runs already"):
        jobs.this_process("one", "y").write()
    two = jobs.this_process("two", "y")
    two.write()
    with pytest.raises(ConfigError, match="one, two"):
        jobs.choose(None)
    assert jobs.choose("two") == two
    one.remove()
    one.remove()
    assert jobs.running() == [two]
