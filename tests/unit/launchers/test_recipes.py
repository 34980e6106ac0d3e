"""The recipes for clusters: every file is checked for what this machine can tell without the cluster.

``tests/real/test_recipes.py`` has their tools' own checks.
"""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from bamboo_ds.cli.main import cli
from bamboo_ds.config import BambooConfig, parse_block
from bamboo_ds.control.settings import MemberOptions
from bamboo_ds.errors import EXIT_CORRUPT, EXIT_EVICTED, EXIT_FATAL_LOSS, EXIT_LEFT, EXIT_OVER
from bamboo_ds.job_settings import JobSettings
from tests.support.recipes import (
    CLUSTER,
    Unit,
    by_kind,
    commands,
    documents,
    environment_file,
    files,
    text,
    variables_of,
)

pytestmark = pytest.mark.claim("guides/clusters.md")


MANIFEST, UNIT, ENVIRONMENT = "kubernetes/gpt.yaml", "systemd/bamboo@.service", "systemd/job.env"
SCRIPTS = ("slurm/members.sbatch", "slurm/allocation.sbatch")
TASKS = ("skypilot/etcd.yaml", "skypilot/member.yaml")
CHART = ("helm/Chart.yaml", "helm/values.yaml", "helm/values.schema.json")
TEMPLATES = ("helm/templates/members.yaml", "helm/templates/etcd.yaml", "helm/templates/monitoring.yaml")
#: What wrong usage ends with; see `bamboo join --help`.
EXIT_USAGE = 2
#: And what `bamboo join` ends with where etcd, or the job, is not there in time.
EXIT_UNAVAILABLE = 1
PORT = 9400


def objects() -> dict[tuple[str, str], Any]:
    return by_kind(documents(MANIFEST))


def container(kind: str, name: str) -> Any:
    """The only one of a workload's pods."""
    (found,) = objects()[kind, name]["spec"]["template"]["spec"]["containers"]
    return found


def lines() -> dict[str, list[list[str]]]:
    """All commands of ``bamboo`` in the recipes, by file."""
    member = container("Job", "gpt-1")
    written = member["command"] + member["args"]
    environ = environment_file(ENVIRONMENT)
    unit = Unit(UNIT).command("ExecStart", "0", environ)
    return {
        **{name: commands(text(name)) for name in SCRIPTS},
        TASKS[1]: commands(documents(TASKS[1])[0]["run"]),
        MANIFEST: [written],
        UNIT: [[Path(unit[0]).name, *unit[1:]]],
    }


def configurations() -> dict[str, dict[str, Any]]:
    """DeepSpeed's configurations in the recipes."""
    return {
        "ds_config.json": json.loads(text("ds_config.json")),
        MANIFEST: json.loads(objects()["ConfigMap", "gpt"]["data"]["ds_config.json"]),
        "helm/values.yaml": documents("helm/values.yaml")[0]["config"],
    }


def block(config: dict[str, Any]) -> BambooConfig:
    return parse_block(config["bamboo"])


def test_every_file_has_a_check() -> None:
    assert files() == {"ds_config.json", MANIFEST, UNIT, ENVIRONMENT, *SCRIPTS, *TASKS, *CHART, *TEMPLATES}


@pytest.mark.parametrize("name", [*SCRIPTS, TASKS[1], MANIFEST, UNIT])
def test_commands_are_understood(name: str) -> None:
    """By the parser of the command itself, values included; all members start the same number."""
    found = lines()[name]
    assert len(found) == 1
    for _, command, *arguments in found:
        params = cli.commands[command].make_context(command, arguments).params
        if command == "join":
            assert params["start"] and params["wait_s"] == 3600 and params["grace_s"] > 5
            assert params["script"] in ("train.py", "1"), "the script is not where options end"


def test_variables_exist() -> None:
    package = "".join(path.read_text() for path in (CLUSTER.parents[1] / "bamboo_ds").rglob("*.py"))
    named = set().union(*(variables_of(text(name)) for name in files()))
    assert named >= {"BAMBOO_STORE", "BAMBOO_JOB", "BAMBOO_JOB_SECRET", "BAMBOO_SECRET_FILE"}
    assert not {name for name in named if f'"{name}"' not in package}


@pytest.mark.parametrize("name", ["ds_config.json", MANIFEST, "helm/values.yaml"])
def test_blocks_are_valid(name: str) -> None:
    """A restart waits for as many members as there are GPUs for workers: NCCL refuses two workers on one."""
    config = configurations()[name]
    options = MemberOptions(job="gpt-1", command=("train.py",), settings=JobSettings.resolve(block(config), {}))
    options.check_notices()
    assert options.bamboo.recovery.min_members == 8
    assert options.bamboo.recovery.max_restarts, "bamboo join --start needs restarts"


def test_no_secret_is_on_a_command_line() -> None:
    for found in lines().values():
        assert not any("secret" in word.lower() for words in found for word in words)
    for name in files():
        assert not re.search(r"(?i)(secret|password|token)\w*[=:] *[\"']?[A-Za-z0-9+/]{20}", text(name)), name


# -- Kubernetes -----------------------------------------------------------------------------------------


def test_kubernetes_objects_fit_together() -> None:
    """Selectors select, names and ports are those of others, and numbers agree."""
    found = objects()
    job, pod = found["Job", "gpt-1"]["spec"], found["Job", "gpt-1"]["spec"]["template"]
    etcd, member = found["StatefulSet", "gpt-etcd"]["spec"], container("Job", "gpt-1")
    labels = {"member": pod["metadata"]["labels"], "etcd": etcd["template"]["metadata"]["labels"]}
    assert len(set(map(str, labels.values()))) == 2

    def selects(selector: dict[str, str]) -> set[str]:
        return {name for name, each in labels.items() if selector.items() <= each.items()}

    assert (
        selects(found["Service", "gpt-etcd"]["spec"]["selector"])
        == {"etcd"}
        == selects(etcd["selector"]["matchLabels"])
    )
    assert selects(found["Service", "gpt-metrics"]["spec"]["selector"]) == {"member"}
    assert selects(found["PodDisruptionBudget", "gpt"]["spec"]["selector"]["matchLabels"]) == {"member"}
    for name, who in (("gpt", "member"), ("gpt-etcd", "etcd")):
        policy = found["NetworkPolicy", name]["spec"]
        assert selects(policy["podSelector"]["matchLabels"]) == {who}
        peers = [peer["podSelector"]["matchLabels"] for peer in policy["ingress"][0]["from"]]
        assert [selects(peer) for peer in peers] == [{"member"}], "of pods only members may come"
    (spread,) = pod["spec"]["topologySpreadConstraints"]
    assert selects(spread["labelSelector"]["matchLabels"]) == {"member"}
    assert etcd["serviceName"] == "gpt-etcd"

    environ = {each["name"]: each for each in member["env"]}
    used = {found for word in member["command"] + member["args"] for found in re.findall(r"\$\((\w+)\)", word)}
    assert used == {"NODE", "ZONE"} < environ.keys()
    names = list(environ)
    mounts = {each["mountPath"] for each in member["volumeMounts"]}
    assert environ["BAMBOO_EVENTS"]["value"] == "/tmp/$(BAMBOO_JOB).jsonl"
    assert "/tmp" not in mounts, "pods that share a file on NFS would write over each other's lines"
    assert names.index("BAMBOO_JOB") < names.index("BAMBOO_EVENTS"), "only what stands before is expanded"
    assert environ["BAMBOO_STORE"]["value"] == "http://gpt-etcd:2379"
    options = cli.commands["join"].make_context("join", [*member["command"][2:], *member["args"]]).params
    assert options["start"] == job["parallelism"] == found["PodDisruptionBudget", "gpt"]["spec"]["minAvailable"] + 1
    assert options["grace_s"] < pod["spec"]["terminationGracePeriodSeconds"] - 10
    volumes = {each["name"] for each in pod["spec"]["volumes"]}
    assert {each["name"] for each in member["volumeMounts"]} == volumes
    config = options["arguments"][options["arguments"].index("--deepspeed_config") + 1]
    assert config == "/etc/bamboo/ds_config.json"
    (port,) = member["ports"]
    assert configurations()[MANIFEST]["bamboo"]["observe"]["http"].endswith(f":{PORT}")
    assert (port["containerPort"], found["Service", "gpt-metrics"]["spec"]["ports"][0]["port"]) == (PORT, PORT)


def test_pods_that_end_mean_what_the_codes_say() -> None:
    """A job that is over, or set up wrongly, fails; a member that leaves on notice is replaced and does not count."""
    rules = objects()["Job", "gpt-1"]["spec"]["podFailurePolicy"]["rules"]
    codes = {rule["action"]: rule["onExitCodes"]["values"] for rule in rules if "onExitCodes" in rule}
    assert codes == {"FailJob": [EXIT_USAGE, EXIT_OVER], "Ignore": [EXIT_LEFT]}
    assert "completions" not in objects()["Job", "gpt-1"]["spec"], "one member that has finished is the job's end"


def test_service_monitor() -> None:
    """Its names are those of others; `make real` checks it by the models of Prometheus' operator."""
    found = objects()
    monitor, service = found["ServiceMonitor", "gpt"], found["Service", "gpt-metrics"]
    assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert (
        not monitor["spec"]["selector"]["matchLabels"].items()
        <= found["Service", "gpt-etcd"]["metadata"]["labels"].items()
    )
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    assert endpoint["path"] == "/metrics"
    assert endpoint["authorization"]["credentials"] == {"name": "gpt-1-metrics", "key": "token"}
    (label,) = endpoint["relabelings"]
    assert label["targetLabel"] == "bamboo_job", "the label by which rules and dashboard tell jobs apart"


def test_chart_and_manifest_have_the_same_objects() -> None:
    """By kind; `make real` renders the chart and compares all of them."""
    templates = "".join(text(name) for name in TEMPLATES)
    assert sorted(re.findall(r"^kind: (\w+)", templates, re.MULTILINE)) == sorted(kind for kind, _ in objects())
    values = documents("helm/values.yaml")[0]
    named = {name.partition(".")[0] for name in re.findall(r"\.Values\.([\w.]+)", templates)}
    assert named == set(values) == set(json.loads(text("helm/values.schema.json"))["properties"]) - {"global"}
    assert yaml.safe_load(text("helm/Chart.yaml"))["apiVersion"] == "v2"


# -- SkyPilot, Slurm ------------------------------------------------------------------------------------


def test_tasks_of_skypilot() -> None:
    etcd, member = documents(TASKS[0])[0], documents(TASKS[1])[0]
    assert (etcd["resources"]["use_spot"], member["resources"]["use_spot"]) == (False, True)
    assert etcd["resources"]["infra"] == member["resources"]["infra"], "not in one network"
    assert not any("ports" in task["resources"] for task in (etcd, member)), "open to the internet"
    codes = set(member["resources"]["job_recovery"]["recover_on_exit_codes"])
    killed = {
        128 + signum for signum in (signal.SIGABRT, signal.SIGBUS, signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM)
    }
    assert codes == {EXIT_UNAVAILABLE, EXIT_FATAL_LOSS, EXIT_EVICTED, EXIT_LEFT, *killed}
    assert not codes & {0, EXIT_USAGE, EXIT_OVER}, "nobody is brought any more to a job that has ended"
    used = set(re.findall(r"\$(\w+)", member["run"]))
    assert used == set(member["envs"])


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_of_slurm(name: str) -> None:
    first, *rest = text(name).splitlines()
    assert first == "#!/bin/bash"
    options = [line.removeprefix("#SBATCH ") for line in rest if line.startswith("#SBATCH")]
    assert "--signal=USR1@120" in options
    kept = {"slurm/members.sbatch": {"--requeue", "--array=1-8"}, "slurm/allocation.sbatch": {"--no-kill"}}
    assert kept[name] <= set(options)
    assert '"$@"' in text(name), "the script and its arguments are those of sbatch"


# -- systemd --------------------------------------------------------------------------------------------


def test_unit() -> None:
    """Its variables are in its files; only the member gets SIGTERM, and has time for what it says it needs."""
    unit = Unit(UNIT)
    environ = environment_file(ENVIRONMENT)
    assert set(re.findall(r"\$\{?(\w+)", unit.one("ExecStart"))) <= environ.keys()
    assert environ["BAMBOO_JOB_SECRET"] == "", "an example has none"
    arguments = unit.command("ExecStart", "0", environ)[2:]
    options = cli.commands["join"].make_context("join", arguments).params
    assert unit.one("KillMode") == "mixed"
    assert float(unit.one("TimeoutStopSec")) > options["grace_s"] + 10
    assert unit.one("RestartPreventExitStatus") == f"{EXIT_USAGE} {EXIT_LEFT} {EXIT_OVER} {EXIT_CORRUPT}"
    assert unit.one("SuccessExitStatus") == str(EXIT_LEFT)
    zone = unit.settings["Service"]["EnvironmentFile"][1].removeprefix("-").replace("%i", "0")
    assert zone in " ".join(unit.command("ExecStartPre", "0", {}))
    assert zone == f"/run/{unit.one('RuntimeDirectory')}/zone.env".replace("%i", "0")
