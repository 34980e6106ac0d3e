"""Devices that warn: what NVML tells of them, by a stand-in with the real package's calls, and who leaves for it."""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from bamboo_ds.control.agent.command import device_of
from bamboo_ds.control.notices import nvml as source_module
from bamboo_ds.control.notices.nvml import NvmlSource
from bamboo_ds.control.notices.transport import SourceSilent
from bamboo_ds.control.notices.xids import OF_APPLICATION, OF_DEVICE
from bamboo_ds.errors import ConfigError
from tests.support.jobs import SUPPORT
from tests.support.notices import Watching, poll
from tests.support.nvml import pynvml as stand_in
from tests.support.settings import agent

pytestmark = pytest.mark.claim("guides/notices.md", "reference/limits.md", "reference/settings.md")

FOLDER = SUPPORT / "nvml"


class Devices:
    """The devices of this host, by UUID."""

    def __init__(self, path: Path, *devices: dict[str, Any]) -> None:
        self.path, self.devices = path, {each["uuid"]: each for each in devices}
        self.change()

    def change(self, uuid: str = "", **told: Any) -> None:
        if uuid:
            self.devices[uuid].update(told)
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(list(self.devices.values())))
        new.rename(self.path)

    def xid(self, uuid: str, *numbers: int) -> None:
        self.change(uuid, xids=[*self.devices[uuid]["xids"], *numbers])


WELL: dict[str, Any] = {
    "ecc": 3,
    "rows": [0, 0],
    "links": [1, 1, 0],
    "link_errors": [{"0": 5, "1": 1}] * 3,
    "clocks": 0,
}


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Devices:
    monkeypatch.setitem(sys.modules, "pynvml", stand_in)
    monkeypatch.setenv(stand_in.FILE, str(tmp_path / "devices.json"))
    monkeypatch.setattr(stand_in, "_initialized", 0)
    return Devices(tmp_path / "devices.json", stand_in.device("GPU-aa1", **WELL), stand_in.device("GPU-ab2", **WELL))


def asked(source: NvmlSource) -> tuple[bool, str] | None:
    """Whether the member leaves, and what for."""
    notice = poll(source)
    if notice is None:
        return None
    assert (notice.kind, notice.source, notice.deadline_s) == ("device", "nvml", None)
    return notice.vanishes, notice.detail.removeprefix("device 1 (Stand-in, GPU-ab2): ")


# -- the package ----------------------------------------------------------------------------------------


def real() -> ModuleType:
    spec = importlib.util.find_spec("pynvml")
    assert spec is not None and spec.origin is not None and not spec.origin.startswith(str(FOLDER))
    module = importlib.util.module_from_spec(spec)
    assert spec.loader is not None
    spec.loader.exec_module(module)
    return module


def test_the_stand_in_has_the_calls_of_the_package() -> None:
    package = real()
    names = [name for name in vars(stand_in) if name.lower().startswith("nvml")]
    assert len(names) > 30
    for name in names:
        ours, theirs = getattr(stand_in, name), getattr(package, name)
        if inspect.isfunction(ours):
            assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters), name
        elif not inspect.isclass(ours):
            assert ours == theirs, name
    assert package.NVMLError(package.NVML_ERROR_TIMEOUT).value == stand_in.NVML_ERROR_TIMEOUT
    fields = {name for name, _ in package.c_nvmlEventData_t._fields_}
    assert fields >= set(stand_in._Event.__dataclass_fields__)


def test_the_source_calls_nothing_that_the_stand_in_lacks() -> None:
    text = Path(source_module.__file__).read_text()
    used = {word for word in re.findall(r"nvml\.(\w+)", text) if word.lower().startswith("nvml")}
    assert used <= set(vars(stand_in)), used - set(vars(stand_in))


@pytest.mark.skipif(Path("/proc/driver/nvidia").exists(), reason="there is a driver")
def test_without_a_driver_the_package_says_so_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", real())
    with pytest.raises(ConfigError, match=r'"bamboo\.notices\.sources" lists "nvml".*driver.*Take "nvml" out'):
        NvmlSource("0").check()


# -- which device ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("visible", "rank", "device"),
    [
        ("GPU-ab2, GPU-aa1", 0, "GPU-ab2"),
        ("GPU-ab2,GPU-aa1", 3, "GPU-aa1"),
        ("5,7", 1, "7"),
        ("MIG-m1", 2, "MIG-m1"),
    ],
)
def test_the_workers_device_by_its_name(visible: str, rank: int, device: str) -> None:
    assert device_of(agent(slot=rank), {"CUDA_VISIBLE_DEVICES": visible}) == device


def test_the_workers_device_by_its_number() -> None:
    assert device_of(agent(slot=3, launched=True), {"LOCAL_RANK": "1"}) == "1"
    # A launcher that shows each rank its own device only.
    assert device_of(agent(slot=3, launched=True), {"LOCAL_RANK": "3", "CUDA_VISIBLE_DEVICES": "6"}) == "6"


@pytest.mark.parametrize("name", ["1", "GPU-ab2", "GPU-ab", "MIG-m1"])
def test_a_device_by_any_of_its_names(devices: Devices, name: str) -> None:
    devices.change("GPU-ab2", mig=["MIG-m1"])
    source = NvmlSource(name)
    source.check()
    assert poll(source) is None
    assert source.where == f"device {name} (Stand-in, GPU-ab2)"
    devices.xid("GPU-aa1", 79)
    assert poll(source) is None
    devices.xid("GPU-ab2", 79)
    notice = poll(source)
    assert notice is not None and notice.detail.startswith(source.where)


@pytest.mark.parametrize("name", ["2", "GPU-x"])
def test_a_device_that_is_not_there(devices: Devices, name: str) -> None:
    with pytest.raises(ConfigError, match=f'lists "nvml".*for device {name} of this host.*CUDA_VISIBLE_DEVICES'):
        NvmlSource(name).check()


def test_devices_of_several_kinds_are_named_or_counted_alike(devices: Devices) -> None:
    devices.change("GPU-aa1", name="Another")
    with pytest.raises(ConfigError, match=r"several kinds \(Another, Stand-in\).*CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        NvmlSource("1").check()
    NvmlSource("1", by_bus=True).check()
    NvmlSource("GPU-ab2").check()


# -- what it tells --------------------------------------------------------------------------------------


def test_the_table_of_xids() -> None:
    """What NVIDIA's catalogue resets a device, or restarts its host, for is the device's; its examples of the other
    kind are not.
    """
    assert {48, 62, 64, 74, 79, 95, 119, 120, 140} <= OF_DEVICE.keys()
    assert {13, 31, 43, 45, 68} <= OF_APPLICATION.keys()
    assert not OF_DEVICE.keys() & OF_APPLICATION.keys()


def test_xids(devices: Devices) -> None:
    devices.xid("GPU-ab2", 79)  # before this job
    source = NvmlSource("1")
    assert asked(source) is None
    devices.xid("GPU-ab2", 31, 13)
    advice = (
        "Xid 31 (page fault), a fault of the application; Xid 13 (exception of the graphics engine), a fault of the"
    )
    assert asked(source) == (False, f"{advice} application")
    devices.xid("GPU-ab2", 63)
    assert asked(source) == (False, "Xid 63, which does not call for a reset of the device by itself")
    devices.xid("GPU-ab2", 43, 48)
    assert asked(source) == (True, "Xid 48 (uncorrectable ECC error)")
    devices.xid("GPU-ab2", 45)
    assert asked(source) == (True, "Xid 48 (uncorrectable ECC error)"), "it fails for good"


@pytest.mark.parametrize(
    ("change", "leaves", "what"),
    [
        ({"ecc": 4}, True, "uncorrectable ECC errors"),
        ({"rows": [1, 0]}, True, "rows of memory wait for a reset to be remapped"),
        ({"rows": [0, 1]}, True, "rows of memory could not be remapped"),
        ({"links": [1, 0, 0]}, True, "NVLink 1 is down"),
        ({"link_errors": [{"0": 5, "1": 2}] * 3}, True, "NVLink 0 had to be recovered; NVLink 1 had to be recovered"),
        (
            {"link_errors": [{"0": 5}, {"0": 6}, {"0": 5}]},
            False,
            "NVLink 1 repeats what is damaged on its way",
        ),
        ({"error": stand_in.NVML_ERROR_GPU_IS_LOST}, True, "the driver says: NVML error 15"),
        ({"error": stand_in.NVML_ERROR_RESET_REQUIRED}, True, "the driver says: NVML error 16"),
    ],
)
def test_counters_and_states(devices: Devices, change: Mapping[str, Any], leaves: bool, what: str) -> None:
    """Only what is news since the first question, and of this device."""
    source = NvmlSource("1")
    assert asked(source) is None
    devices.change("GPU-aa1", **change)
    assert asked(source) is None
    devices.change("GPU-ab2", **change)
    assert asked(source) == (leaves, what)
    devices.change("GPU-ab2", **WELL)
    assert asked(source) == (leaves, what), "a device fails until it is reset"


def test_a_lasting_fault_is_one_notice(devices: Devices) -> None:
    with Watching(NvmlSource("1")) as watching:
        devices.change("GPU-ab2", rows=[0, 1])
        notice = watching.next()
        devices.xid("GPU-ab2", 64)
        assert "remapped" in notice.detail and watching.next().detail.endswith(
            "Xid 64 (rows or pages of memory could not be remapped)"
        )
        assert watching.notices.empty()


def test_what_has_been_so_before_the_job(devices: Devices) -> None:
    devices.change("GPU-ab2", rows=[1, 0])
    source = NvmlSource("1")
    assert asked(source) == (False, "rows of memory wait for a reset to be remapped")
    devices.change("GPU-ab2", rows=[1, 1])
    assert asked(source) == (True, "rows of memory could not be remapped")


def test_only_a_slowdown_that_lasts(devices: Devices) -> None:
    now = [100.0]
    source = NvmlSource("1", slowed_s=10.0, clock=lambda: now[0])

    def after(seconds: float, clocks: int) -> tuple[bool, str] | None:
        now[0] += seconds
        devices.change("GPU-ab2", clocks=clocks)
        return asked(source)

    assert after(0, 0x40) is after(9, 0x40 | 0x4) is None
    assert after(0.5, 0x4) is None, "of the power cap no device fails"
    assert after(0.6, 0x80) is after(9, 0x80) is None
    assert after(1, 0x80 | 0x40) == (True, "slowed down by its hardware for 10 s (heat and the power brake)")
    assert after(1, 0) == (True, "slowed down by its hardware for 10 s (heat and the power brake)")


def test_a_device_that_has_not_everything(devices: Devices) -> None:
    """A consumer's card: no ECC, no NVLink. What a driver does not answer now it is asked for again."""
    devices.devices["GPU-ab2"] = stand_in.device("GPU-ab2")
    devices.change()
    source = NvmlSource("1")
    assert asked(source) is None
    devices.change("GPU-ab2", error=stand_in.NVML_ERROR_UNKNOWN)
    with pytest.raises(SourceSilent, match="Xids: NVML error 999"):
        poll(source)
    del devices.devices["GPU-ab2"]["error"]
    devices.xid("GPU-ab2", 79)
    assert asked(source) == (True, "Xid 79 (the GPU has fallen off the bus)")
