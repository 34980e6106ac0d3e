"""The recipes for clusters, by the checks of the tools that read them. Slurm runs them in ``test_slurm.py``."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from ..support.jobs import bamboo_command
from ..support.recipes import CLUSTER, by_kind, documents, text
from .conftest import TOOLS

pytestmark = pytest.mark.claim("guides/clusters.md")

MANIFEST = CLUSTER / "kubernetes" / "gpt.yaml"

#: Renders a chart (first argument) for a release ``gpt`` with values (second one), as JSON; or says why it does not.
_RENDER = """
import json, sys, helm_python
findings = helm_python.lint(sys.argv[1], strict=True)
with helm_python.Chart.load(sys.argv[1]) as chart:
    try:
        files = chart.render(json.loads(sys.argv[2]), name="gpt")
    except helm_python.HelmValuesError as error:
        files, findings = {}, {"errors": [str(error)]}
print(json.dumps([findings["errors"], findings.get("messages", []), list(files.values())]))
"""
#: Reads one object from standard input as one of Prometheus' operator, and prints all of it that this knows.
_MONITOR = """
import json, sys
from cloudcoil.models.prometheus_operator.v1 import ServiceMonitor
found = ServiceMonitor.model_validate(json.load(sys.stdin))
print(found.model_dump_json(by_alias=True, exclude_unset=True))
"""
#: Loads a task (first argument) with variables (second) and secrets (third), as ``sky launch`` does.
_TASK = """
import json, sys, yaml, sky
envs, secrets = (list(json.loads(each).items()) for each in sys.argv[2:])
with open(sys.argv[1]) as file:
    task = sky.Task.from_yaml_config(yaml.safe_load(file), env_overrides=envs, secrets_overrides=secrets)
(resources,) = task.resources
told = {"spot": resources.use_spot, "region": resources.region, "recovery": resources.job_recovery, "envs": task.envs}
print(json.dumps(told))
"""


def checked(tool: str, program: str, *arguments: str, given: str | None = None) -> Any:
    """What a program prints as JSON with the interpreter that has the ``tool``."""
    command = [str(TOOLS[tool].path()), "-c", program, *arguments]
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def validated(file: Path) -> list[str]:
    """Check a file by Kubernetes' schemas, in which unknown fields are errors; returns what else it has said."""
    program = str(Path(str(TOOLS["kubernetes-validate"].path())).with_name("kubernetes-validate"))
    done = subprocess.run([program, "--strict", str(file)], capture_output=True, text=True, check=False, timeout=120)
    said = (done.stdout + done.stderr).splitlines()
    others = [line for line in said if " passed " not in line]
    if done.returncode or len(said) - len(others) < 5:
        raise AssertionError("\n".join(others))
    return others


def rendered(**values: Any) -> dict[tuple[str, str], Any]:
    """The objects of the chart, by kind and name."""
    errors, messages, files = checked("helm-python-sdk", _RENDER, str(CLUSTER / "helm"), json.dumps(values))
    assert not errors and not [each for each in messages if each["severity"] > 1], (errors, messages)
    return by_kind([each for file in files for each in yaml.safe_load_all(file) if each])


def plain(objects: dict[tuple[str, str], Any]) -> dict[tuple[str, str], Any]:
    """``objects`` with the configuration as what it says, not as text."""
    config = objects["ConfigMap", "gpt"]["data"]
    config["ds_config.json"] = json.loads(config["ds_config.json"])
    return objects


@pytest.mark.tools("kubernetes-validate", "prometheus-operator")
def test_kubernetes() -> None:
    """The manifest by Kubernetes' schemas, the ServiceMonitor by that of Prometheus' operator."""
    (other,) = validated(MANIFEST)
    assert "kind ServiceMonitor" in other
    monitor = by_kind(documents("kubernetes/gpt.yaml"))["ServiceMonitor", "gpt"]
    assert checked("prometheus-operator", _MONITOR, given=json.dumps(monitor)) == monitor


@pytest.mark.tools("helm-python-sdk", "kubernetes-validate")
def test_chart(tmp_path: Path) -> None:
    """Helm lints and renders the chart: the objects of the manifest; other values, and wrong ones."""
    assert plain(rendered()) == plain(by_kind(documents("kubernetes/gpt.yaml")))
    other = rendered(monitoring=None, gpus=0, members=4, parallelism=6, run=3, secret="mine", graceSeconds=20)
    assert {kind for kind, _ in by_kind(documents("kubernetes/gpt.yaml"))} - {kind for kind, _ in other} == {
        "ServiceMonitor"
    }
    job = other["Job", "gpt-3"]["spec"]
    pod = job["template"]["spec"]
    (member,) = pod["containers"]
    assert (job["parallelism"], other["PodDisruptionBudget", "gpt"]["spec"]["minAvailable"]) == (6, 5)
    assert member["command"][member["command"].index("--start") + 1] == "4"
    assert pod["terminationGracePeriodSeconds"] == 40
    assert len(other["NetworkPolicy", "gpt"]["spec"]["ingress"]) == 1, "without monitoring nothing else comes in"
    file = tmp_path / "rendered.yaml"
    file.write_text(yaml.safe_dump_all(other.values()))
    assert not validated(file)
    for wrong in ({"members": "eight"}, {"membres": 8}, {"command": []}, {"etcd": {"imagee": "x"}}):
        errors, _, files = checked("helm-python-sdk", _RENDER, str(CLUSTER / "helm"), json.dumps(wrong))
        assert errors and not files, wrong


@pytest.mark.tools("SkyPilot")
def test_tasks_of_skypilot() -> None:
    """SkyPilot loads both tasks, and wants what the guide gives."""
    folder, secret = CLUSTER / "skypilot", json.dumps({"BAMBOO_JOB_SECRET": "s" * 43})
    etcd = checked("SkyPilot", _TASK, str(folder / "etcd.yaml"), "{}", "{}")
    assert not etcd["spot"]
    member = checked("SkyPilot", _TASK, str(folder / "member.yaml"), '{"STORE": "http://10.0.0.5:2379"}', secret)
    assert member["spot"] and member["region"] == etcd["region"]
    assert 88 in member["recovery"]["recover_on_exit_codes"]
    assert member["envs"] == {"STORE": "http://10.0.0.5:2379", "JOB": "gpt-1", "MEMBERS": "8"}
    with pytest.raises(AssertionError, match="STORE"):
        checked("SkyPilot", _TASK, str(folder / "member.yaml"), "{}", secret)


@pytest.mark.tools("systemd")
def test_unit(tmp_path: Path) -> None:
    """systemd-analyze verify finds nothing; a setting that does not exist is found."""
    unit = text("systemd/bamboo@.service").replace("/opt/gpt/venv/bin/bamboo", bamboo_command())
    command = [str(TOOLS["systemd"].path()), "verify"]
    for content, fault in ((unit, None), (unit.replace("KillMode", "KillMood"), "KillMood")):
        file = tmp_path / "bamboo@0.service"
        file.write_text(content)
        done = subprocess.run([*command, str(file)], capture_output=True, text=True, check=False, timeout=60)
        said = [line for line in done.stderr.splitlines() if "bamboo@" in line]
        assert (done.returncode, said) == (0, []) if fault is None else fault in "".join(said), done.stderr
