"""Stands in for the module of nvidia-ml-py: the same calls, of devices that a file describes.

Processes import it that have its folder in ``PYTHONPATH`` and the file in :data:`FILE`: JSON, a list of devices as
:func:`device` makes them. A test changes it while they run. What a device lacks it does not support.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import Any

FILE = "BAMBOO_TEST_NVML"

NVML_ERROR_UNINITIALIZED = 1
NVML_ERROR_INVALID_ARGUMENT = 2
NVML_ERROR_NOT_SUPPORTED = 3
NVML_ERROR_NO_PERMISSION = 4
NVML_ERROR_NOT_FOUND = 6
NVML_ERROR_DRIVER_NOT_LOADED = 9
NVML_ERROR_TIMEOUT = 10
NVML_ERROR_FUNCTION_NOT_FOUND = 13
NVML_ERROR_GPU_IS_LOST = 15
NVML_ERROR_RESET_REQUIRED = 16
NVML_ERROR_UNKNOWN = 999
NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
NVML_VOLATILE_ECC = 0
NVML_NVLINK_MAX_LINKS = 36
NVML_NVLINK_ERROR_DL_REPLAY = 0
NVML_NVLINK_ERROR_DL_RECOVERY = 1
NVML_NVLINK_ERROR_DL_CRC_FLIT = 2
NVML_NVLINK_ERROR_DL_CRC_DATA = 3
nvmlEventTypeXidCriticalError = 8
nvmlClocksEventReasonHwThermalSlowdown = 0x40
nvmlClocksEventReasonHwPowerBrakeSlowdown = 0x80

_initialized = 0


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


@dataclass
class _Event:
    device: str
    eventType: int
    eventData: int


@dataclass
class _EventSet:
    seen: dict[str, int] = field(default_factory=dict)  # Xids of each registered device that have been told


def device(uuid: str, name: str = "Stand-in", **told: Any) -> dict[str, Any]:
    """A device as the file has it.

    Args:
        uuid, name: of the device.
        told: ``xids`` (a list), ``ecc`` (a count), ``rows`` (pending, failure), ``links`` (of each: whether it is
            active), ``link_errors`` (of each: counts by kind), ``clocks`` (bits); ``error``: what all calls raise.
    """
    return {"uuid": uuid, "name": name, "xids": [], **told}


def _devices() -> list[dict[str, Any]]:
    if not _initialized:
        raise NVMLError(NVML_ERROR_UNINITIALIZED)
    with open(os.environ[FILE]) as file:
        return json.load(file)


def _of(handle: str, key: str | None = None) -> Any:
    found = next(each for each in _devices() if each["uuid"] == handle)
    if "error" in found:
        raise NVMLError(found["error"])
    if key is None:
        return found
    if key not in found:
        raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
    return found[key]


def nvmlInit() -> None:
    global _initialized
    if not os.path.exists(os.environ[FILE]):
        raise NVMLError(NVML_ERROR_DRIVER_NOT_LOADED)
    _initialized += 1


def nvmlShutdown() -> None:
    global _initialized
    _devices()
    _initialized -= 1


def nvmlDeviceGetCount() -> int:
    return len(_devices())


def nvmlDeviceGetHandleByIndex(index: int) -> str:
    devices = _devices()
    if index >= len(devices):
        raise NVMLError(NVML_ERROR_INVALID_ARGUMENT)
    return devices[index]["uuid"]


def nvmlDeviceGetHandleByUUID(uuid: str) -> str:
    if uuid.startswith("MIG-"):
        return uuid
    if uuid not in (each["uuid"] for each in _devices()):
        raise NVMLError(NVML_ERROR_NOT_FOUND)
    return uuid


def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(migDevice: str) -> str:
    return next(each["uuid"] for each in _devices() if migDevice in each.get("mig", ()))


def nvmlDeviceGetName(handle: str) -> str:
    return next(each["name"] for each in _devices() if each["uuid"] == handle)


def nvmlDeviceGetUUID(handle: str) -> str:
    return handle


def nvmlEventSetCreate() -> _EventSet:
    _devices()
    return _EventSet()


def nvmlDeviceRegisterEvents(handle: str, eventTypes: int, eventSet: _EventSet) -> None:
    assert eventTypes == nvmlEventTypeXidCriticalError
    eventSet.seen[handle] = len(_of(handle, "xids"))


def nvmlEventSetWait_v2(eventSet: _EventSet, timeoutms: int) -> _Event:
    assert timeoutms == 0
    for handle, seen in eventSet.seen.items():
        xids = next(each for each in _devices() if each["uuid"] == handle)["xids"]
        if seen < len(xids):
            eventSet.seen[handle] += 1
            return _Event(handle, nvmlEventTypeXidCriticalError, xids[seen])
        _of(handle)
    raise NVMLError(NVML_ERROR_TIMEOUT)


def nvmlEventSetFree(eventSet: _EventSet) -> None:
    eventSet.seen.clear()


def nvmlDeviceGetTotalEccErrors(handle: str, errorType: int, counterType: int) -> int:
    assert (errorType, counterType) == (NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC)
    return _of(handle, "ecc")


def nvmlDeviceGetRemappedRows(device: str) -> tuple[int, int, int, int]:
    pending, failure = _of(device, "rows")
    return 0, 1, pending, failure


def nvmlDeviceGetNvLinkState(device: str, link: int) -> int:
    links = _of(device, "links")
    if link >= len(links):
        raise NVMLError(NVML_ERROR_INVALID_ARGUMENT)
    return links[link]


def nvmlDeviceGetNvLinkErrorCounter(device: str, link: int, counter: int) -> int:
    counts = _of(device, "link_errors")[link]
    if str(counter) not in counts:
        raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
    return counts[str(counter)]


def nvmlDeviceGetCurrentClocksEventReasons(handle: str) -> int:
    return _of(handle, "clocks")
