"""Errors that mean that a worker's device has failed, and not its script.

Nothing on such a device can be trusted any more: the worker ends, and is lost like one that was killed. Torch raises
``AcceleratorError`` for what the device's runtime reports, in torch 2.6 and from its libraries a plain ``RuntimeError``
with the same words.
"""

from __future__ import annotations

import re

#: The runtime's errors, and those of its libraries.
_DEVICE = re.compile(
    r"(CUDA|HIP|XPU|NPU) error: |CUDA driver error: |(CU(BLAS|SPARSE|SOLVER|FFT|DNN)|(HIP|ROC)BLAS|MIOPEN)_STATUS_"
    r"|(cuDNN|MIOpen) error: |unhandled (cuda|hip) error|Xid",
    re.IGNORECASE,
)
#: What a script brings about by its arguments, its memory or its installation: on any other device it comes again.
_OF_SCRIPTS = re.compile(
    r"device-side assert|out of memory|ALLOC_FAILED|\binvalid\b|INVALID_VALUE|BAD_PARAM|NOT_SUPPORTED|ARCH_MISMATCH"
    r"|not (supported|permitted|compiled)|no kernel image|symbol not found|capture|peer access|driver version",
    re.IGNORECASE,
)


def is_device_error(error: BaseException) -> bool:
    """Whether ``error`` says that a device has failed (by ECC, its bus, its driver, or in the middle of a kernel).

    An assertion in a kernel is none: it is about the script's data. A memory that is full is none either.
    """
    names = {kind.__name__ for kind in type(error).__mro__}
    if not isinstance(error, RuntimeError) or "OutOfMemoryError" in names:
        return False
    text = str(error)
    return ("AcceleratorError" in names or _DEVICE.search(text) is not None) and _OF_SCRIPTS.search(text) is None
