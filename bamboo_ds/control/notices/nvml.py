"""NVML: what NVIDIA's driver tells of the device that a slot's worker computes on.

https://docs.nvidia.com/deploy/nvml-api/
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...errors import ConfigError
from .notice import Notice, NoticeSource
from .transport import SourceSilent
from .xids import OF_DEVICE, meaning

if TYPE_CHECKING:
    import aiohttp

logger = logging.getLogger("bamboo_ds.control.notices.nvml")

#: Seconds for which the hardware slows a device down without a pause before it counts as failing.
SLOWED_S = 10.0

_SETTING = '"bamboo.notices.sources" lists "nvml"'


@dataclass(frozen=True)
class DeviceFinding:
    """A report of a device, once.

    Attributes:
        what: in words; tells findings of a device apart.
        fails: the device fails; else it is worth a line in the log, and no more.
    """

    what: str
    fails: bool = True


class NvmlSource(NoticeSource):
    """Asks the driver's library on this host for one device; needs the package ``nvidia-ml-py``.

    What a device has told stands for good: it fails until it is reset. What it has told before the first question is
    not news: counters are compared with the first answer.

    Args:
        device: index or UUID (of the GPU, its beginning, or a MIG device), as ``CUDA_VISIBLE_DEVICES`` names it.
        by_bus: indices follow the PCI bus in CUDA, as they do in NVML (``CUDA_DEVICE_ORDER``).
        slowed_s: see :data:`SLOWED_S`.
        clock: monotonic seconds.
    """

    name = "nvml"

    def __init__(
        self,
        device: str,
        by_bus: bool = False,
        slowed_s: float = SLOWED_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.where = f"device {device}"
        self._device, self._by_bus, self._slowed_s, self._clock = device, by_bus, slowed_s, clock
        self._watched: _Device | None = None
        self._told: dict[bool, Notice] = {}

    def check(self) -> None:
        """Raises :class:`ConfigError` without the package, the driver or the device."""
        nvml = _library()
        try:
            nvml.nvmlInit()
            try:
                _handle(nvml, self._device)
                handles = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
                kinds = {nvml.nvmlDeviceGetName(handle) for handle in handles}
            finally:
                nvml.nvmlShutdown()
        except nvml.NVMLError as error:
            raise ConfigError(
                f"{_SETTING}, and NVIDIA's driver does not answer for device {self._device} of this host: {error}. "
                'Take "nvml" out of the list where members have no NVIDIA GPUs; else install the driver, or mount it '
                "into the container, and let CUDA_VISIBLE_DEVICES name devices that there are"
            ) from error
        if len(kinds) > 1 and self._device.isdecimal() and not self._by_bus:
            raise ConfigError(
                f"{_SETTING}, and this host has GPUs of several kinds ({', '.join(sorted(kinds))}), which CUDA and "
                "NVML count in different orders: set CUDA_DEVICE_ORDER=PCI_BUS_ID, or name them in "
                "CUDA_VISIBLE_DEVICES by UUID"
            )

    async def poll(self, session: aiohttp.ClientSession) -> Notice | None:
        found = await asyncio.to_thread(self._ask)  # a driver may hang that has lost its device
        for fails in (True, False):
            new = [finding.what for finding in found if finding.fails is fails]
            if new:
                what = f"{self.where}: {'; '.join(new)}"
                self._told[fails] = Notice("device", self.name, what, None, vanishes=fails, key=what)
        return self._told.get(True) or self._told.get(False)

    def _ask(self) -> list[DeviceFinding]:
        if self._watched is None:
            nvml = _library()
            try:
                nvml.nvmlInit()
                handle = _handle(nvml, self._device)
                self.where = f"device {self._device} ({_name(nvml, handle)})"
                self._watched = _Device(nvml, handle, self._slowed_s, self._clock)
            except nvml.NVMLError as error:
                raise SourceSilent(f"NVML does not answer: {error}") from error
        return list(self._watched.look())


class _Device:
    """A device, and what it has told so far.

    Args:
        nvml: the library, initialized.
        handle: the library's, of a whole GPU.
        slowed_s, clock: see :class:`NvmlSource`.
    """

    def __init__(self, nvml: Any, handle: Any, slowed_s: float, clock: Callable[[], float]) -> None:
        self._nvml, self._handle, self._slowed_s, self._clock = nvml, handle, slowed_s, clock
        self._found: set[DeviceFinding] = set()
        self._first: dict[str, int] = {}
        self._up: set[int] = set()
        self._slow_since: float | None = None
        self._slowdowns: Mapping[int, str] = {
            nvml.nvmlClocksEventReasonHwThermalSlowdown: "heat",
            nvml.nvmlClocksEventReasonHwPowerBrakeSlowdown: "the power brake",
        }
        self._events: Any = None
        self._kinds: dict[str, Callable[[], Iterator[DeviceFinding]]] = {
            "Xids": self._xids,
            "ECC errors": self._memory,
            "remapped rows": self._rows,
            "NVLinks": self._links,
            "slowdowns": self._clocks,
        }

    def look(self) -> Iterator[DeviceFinding]:
        """The new findings. A kind that device, driver or this user's rights lack is not asked for again.

        Raises:
            SourceSilent: the library does not answer.
        """
        nvml = self._nvml
        for kind, ask in list(self._kinds.items()):
            try:
                for finding in ask():
                    if finding not in self._found:
                        self._found.add(finding)
                        yield finding
            except nvml.NVMLError as error:
                if error.value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED):
                    lost = DeviceFinding(f"the driver says: {error}")
                    if lost not in self._found:
                        self._found.add(lost)
                        yield lost
                elif error.value in (
                    nvml.NVML_ERROR_NOT_SUPPORTED,
                    nvml.NVML_ERROR_NO_PERMISSION,
                    nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
                ):
                    del self._kinds[kind]
                    logger.info("this device tells nothing of %s: %s", kind, error)
                else:
                    raise SourceSilent(f"NVML does not answer about {kind}: {error}") from error

    def _xids(self) -> Iterator[DeviceFinding]:
        """The Xids since the first question, of which the driver keeps a queue for every event set."""
        nvml = self._nvml
        if self._events is None:
            events = nvml.nvmlEventSetCreate()
            try:
                nvml.nvmlDeviceRegisterEvents(self._handle, nvml.nvmlEventTypeXidCriticalError, events)
            except nvml.NVMLError:
                nvml.nvmlEventSetFree(events)
                raise
            self._events = events
        while True:
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
            except nvml.NVMLError as error:
                if error.value == nvml.NVML_ERROR_TIMEOUT:  # no more
                    return
                raise
            if event.eventType & nvml.nvmlEventTypeXidCriticalError:
                yield DeviceFinding(meaning(event.eventData), fails=event.eventData in OF_DEVICE)

    def _memory(self) -> Iterator[DeviceFinding]:
        nvml = self._nvml
        count = nvml.nvmlDeviceGetTotalEccErrors(
            self._handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        )
        if self._rises("ECC", count):
            yield DeviceFinding("uncorrectable ECC errors")

    def _rows(self) -> Iterator[DeviceFinding]:
        _, _, pending, failure = self._nvml.nvmlDeviceGetRemappedRows(self._handle)
        if failure:
            yield DeviceFinding("rows of memory could not be remapped")
        if pending:
            news = self._rises("pending rows", 1)
            yield DeviceFinding("rows of memory wait for a reset to be remapped", fails=news)
        else:
            self._first.setdefault("pending rows", 0)

    def _links(self) -> Iterator[DeviceFinding]:
        nvml = self._nvml
        recovery = nvml.NVML_NVLINK_ERROR_DL_RECOVERY
        repeated = (
            nvml.NVML_NVLINK_ERROR_DL_REPLAY,
            nvml.NVML_NVLINK_ERROR_DL_CRC_FLIT,
            nvml.NVML_NVLINK_ERROR_DL_CRC_DATA,
        )
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            try:
                active = nvml.nvmlDeviceGetNvLinkState(self._handle, link)
            except nvml.NVMLError as error:
                beyond = error.value == nvml.NVML_ERROR_INVALID_ARGUMENT
                if beyond or (link and error.value == nvml.NVML_ERROR_NOT_SUPPORTED):
                    return
                raise
            if not active:
                if link in self._up:
                    yield DeviceFinding(f"NVLink {link} is down")
                continue
            self._up.add(link)
            if self._counts(link, recovery):
                yield DeviceFinding(f"NVLink {link} had to be recovered")
            # What was sent again has arrived.
            if any([self._counts(link, kind) for kind in repeated]):
                yield DeviceFinding(f"NVLink {link} repeats what is damaged on its way", fails=False)

    def _counts(self, link: int, kind: int) -> bool:
        """Whether a link's counter has risen; not all generations of links have each."""
        nvml, name = self._nvml, f"link {link} {kind}"
        if self._first.get(name) == -1:
            return False
        try:
            return self._rises(name, nvml.nvmlDeviceGetNvLinkErrorCounter(self._handle, link, kind))
        except nvml.NVMLError as error:
            if error.value not in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_INVALID_ARGUMENT):
                raise
            self._first[name] = -1
            return False

    def _clocks(self) -> Iterator[DeviceFinding]:
        reasons, now = self._nvml.nvmlDeviceGetCurrentClocksEventReasons(self._handle), self._clock()
        causes = [name for bit, name in self._slowdowns.items() if reasons & bit]
        if not causes:
            self._slow_since = None
            return
        if self._slow_since is None:
            self._slow_since = now
        if now - self._slow_since >= self._slowed_s:
            yield DeviceFinding(f"slowed down by its hardware for {self._slowed_s:g} s ({' and '.join(causes)})")

    def _rises(self, name: str, count: int) -> bool:
        """Whether ``count`` is above that of the first question."""
        return count > self._first.setdefault(name, count)


def _library() -> Any:
    """The package's module; raises :class:`ConfigError` without it."""
    try:
        import pynvml
    except ModuleNotFoundError as error:
        raise ConfigError(
            f'{_SETTING}, which needs the package nvidia-ml-py: pip install "bamboo_ds[nvml]", or take it out of the '
            "list"
        ) from error
    return pynvml


def _handle(nvml: Any, device: str) -> Any:
    """The library's handle of ``device``, for a MIG device that of its GPU."""
    if device.isdecimal():
        return nvml.nvmlDeviceGetHandleByIndex(int(device))
    if device.startswith("MIG-"):
        return nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvml.nvmlDeviceGetHandleByUUID(device))
    for index in range(nvml.nvmlDeviceGetCount()):  # the beginning of a UUID is enough for CUDA
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        if nvml.nvmlDeviceGetUUID(handle).startswith(device):
            return handle
    return nvml.nvmlDeviceGetHandleByUUID(device)


def _name(nvml: Any, handle: Any) -> str:
    return f"{nvml.nvmlDeviceGetName(handle)}, {nvml.nvmlDeviceGetUUID(handle)}"
