"""``bamboo doctor`` finds what it says it looks for."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bamboo_ds.cli import doctor
from bamboo_ds.cli.doctor import Finding, Patient
from bamboo_ds.launchers.owning import EMBEDDED
from tests.support.etcd import EtcdServer
from tests.unit.cli.test_doctor import only

pytestmark = pytest.mark.claim("reference/cli.md")


def test_etcd(etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch) -> None:
    patient = Patient(etcd.url, None, None)
    assert only(doctor.etcd, patient).state == "ok"
    monkeypatch.setattr(doctor, "_SLOW_S", 0.0)
    assert only(doctor.etcd, patient).state == "warning"
    assert only(doctor.clock, patient).state == "ok"
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 60)
    finding = only(doctor.clock, patient)
    assert finding.state == "warning" and finding.found.startswith(("60 s ahead of", "59 s ahead of", "61 s ahead of"))


@pytest.mark.parametrize(
    ("store", "address", "state"),
    [
        (EMBEDDED, None, "ok"),
        ("http://127.0.0.1:2379", None, "ok"),
        ("http://192.0.2.1:2379", "127.0.0.1", "problem"),
        (EMBEDDED, "192.0.2.1", "problem"),
    ],
)
def test_addresses(store: str, address: str | None, state: str) -> None:
    finding = only(doctor.address, Patient(store, address, None))
    assert finding.state == state and ("--address" in finding.cure) == (state != "ok")


@pytest.fixture
def builder(tmp_path: Path) -> Iterator[Path]:
    """A process that has a lock open."""
    lock = tmp_path / "py311_cpu" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    program = "import sys; file = open(sys.argv[1], 'w'); print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", program, str(lock)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        yield lock


@pytest.mark.integration
def test_locks(tmp_path: Path, builder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert only(doctor.compiler_locks) == Finding("compiler locks", "ok", f"1 builds under way in {tmp_path}")
    left = tmp_path / "py311_cpu" / "utils" / "lock"
    left.parent.mkdir()
    left.touch()
    finding = only(doctor.compiler_locks)
    assert finding.state == "problem" and finding.cure.endswith(f"rm {left}") and str(builder) not in finding.found
