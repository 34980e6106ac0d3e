"""Xids: which errors of NVIDIA's driver are the device's, and which are faults of what runs on it.

By the action that NVIDIA's catalogue advises at once (A100 and later): a device that must be reset, or whose host must
be restarted, is a failing one. https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html
"""

from __future__ import annotations

#: Errors of the device, or of its memory, buses and firmware.
OF_DEVICE: dict[int, str] = {
    46: "the GPU has stopped working",
    48: "uncorrectable ECC error",
    54: "no auxiliary power",
    62: "internal micro-controller halted",
    64: "rows or pages of memory could not be remapped",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    94: "memory error, contained",  # the device should be reset as soon as its work can be elsewhere
    95: "memory error, not contained",
    109: "context switch timed out",
    110: "security fault",
    119: "GSP does not answer",
    120: "GSP error",
    136: "NVLink training failed",
    140: "unrecovered ECC error",
    143: "initialization failed",
    149: "NVLink down",
    151: "key rotation failed",
    156: "resource retired",
    158: "fatal timeout",
    167: "fatal timeout of PCIe",
    169: "security micro-controller halted",
    171: "uncorrectable error in DRAM",
    172: "uncorrectable error in SRAM",
}
#: Faults of the application, or the end that it has met: the device goes on as before.
OF_APPLICATION: dict[int, str] = {
    8: "work timed out",
    11: "invalid commands",
    13: "exception of the graphics engine",
    25: "invalid commands",
    31: "page fault",
    43: "stopped after a fault of the application",
    45: "ended by its driver",
    68: "exception of the video decoder",
    69: "class error of the graphics engine",
    80: "corrupted commands",
    137: "illegal access over NVLink",
}


def meaning(xid: int) -> str:
    """The meaning of ``xid``, in words."""
    if xid in OF_DEVICE:
        return f"Xid {xid} ({OF_DEVICE[xid]})"
    if xid in OF_APPLICATION:
        return f"Xid {xid} ({OF_APPLICATION[xid]}), a fault of the application"
    return f"Xid {xid}, which does not call for a reset of the device by itself"
