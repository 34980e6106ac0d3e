"""Devices that warn: what NVML tells of them, by a stand-in with the real package's calls, and who leaves for it."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.support.compare import assert_left
from tests.support.jobs import Reference, RunningJob, slow_until, write_config
from tests.support.nvml import pynvml as stand_in
from tests.unit.control.test_nvml import FOLDER, WELL, Devices

pytestmark = pytest.mark.claim("guides/notices.md", "reference/limits.md", "reference/settings.md")


def found_in(folder: Path) -> str:
    """``PYTHONPATH`` with ``folder`` in front."""
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Devices:
    monkeypatch.setitem(sys.modules, "pynvml", stand_in)
    monkeypatch.setenv(stand_in.FILE, str(tmp_path / "devices.json"))
    monkeypatch.setattr(stand_in, "_initialized", 0)
    return Devices(tmp_path / "devices.json", stand_in.device("GPU-aa1", **WELL), stand_in.device("GPU-ab2", **WELL))


@pytest.mark.integration
@pytest.mark.parametrize(
    ("package", "cure"),
    [("raise ModuleNotFoundError", r'pip install "bamboo_ds\[nvml\]"'), (None, "install the driver")],
    ids=["no package", "no driver"],
)
def test_a_job_without_package_or_driver_does_not_start(tmp_path: Path, package: str | None, cure: str) -> None:
    config = write_config(tmp_path, {"notices": {"sources": ["nvml"]}}, 2)
    folder = FOLDER
    if package is not None:
        (folder := tmp_path / "lib").mkdir()
        (folder / "pynvml.py").write_text(package)
    variables = {"PYTHONPATH": found_in(folder), stand_in.FILE: str(tmp_path / "none")}
    with RunningJob(tmp_path, 2, ["--stages", "2", "--steps", "2"], config, variables=variables) as job:
        result = job.finish()
    assert result.exit_code != 0 and not result.out.joinpath("events.jsonl").exists()
    found = re.search(rf'"bamboo\.notices\.sources" lists "nvml".*{cure}', result.output)
    assert found, result.output
    assert "Traceback" not in result.output


# -- jobs -----------------------------------------------------------------------------------------------


@pytest.mark.integration
def test_who_has_a_failing_device_leaves(tmp_path: Path, reference: Reference) -> None:
    """One worker's fault of its own is told and no more; the device of another one fails: nothing is lost."""
    go = tmp_path / "go"
    uuids = [f"GPU-{rank}" for rank in range(4)]
    devices = Devices(tmp_path / "devices.json", *(stand_in.device(uuid, **WELL) for uuid in uuids))
    block = {"notices": {"sources": ["nvml"], "poll_s": 0.1}, "redundancy": {"verify_every": 2}}
    variables = {
        "PYTHONPATH": found_in(FOLDER),
        stand_in.FILE: str(devices.path),
        "CUDA_VISIBLE_DEVICES": ",".join(uuids),
    }
    command = ["--stages", "4", *slow_until(go)]
    with RunningJob(tmp_path, 4, command, write_config(tmp_path, block), variables=variables) as job:
        job.wait_for("steps", lambda: len(job.events("step")) >= 2)
        devices.xid("GPU-1", 13)
        job.wait_for("the application's fault is told", lambda: len(job.events("notice")) == 1)
        devices.xid("GPU-2", 79)
        job.wait_for("slot 2 has left", lambda: bool(job.events("member_left")))
        go.touch()
        result = job.finish()
    assert_left(result, reference(4, 1, 6, *result.length), {2})
    advice, notice = result.events("notice")
    assert (advice["member"][:2], advice["kind"], advice["leaves"]) == ("m1", "device", False)
    assert advice["detail"].endswith(": Xid 13 (exception of the graphics engine), a fault of the application")
    assert (notice["member"][:2], notice["kind"], notice["source"], notice["leaves"]) == ("m2", "device", "nvml", True)
    assert notice["detail"] == "device GPU-2 (Stand-in, GPU-2): Xid 79 (the GPU has fallen off the bus)"
    (left,) = result.events("member_left")
    assert (left["member_id"], left["reason"]) == (notice["member"], "device")
    assert left["detail"] == f"nvml: {notice['detail']}"
