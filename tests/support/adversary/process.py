"""What scripts do to their process before everything else."""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import torch


class Tee:
    """In the place of standard output."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def write(self, text: str) -> int:
        return int(self.inner.write(text))

    def flush(self) -> None:
        self.inner.flush()


def _tee() -> None:
    sys.stdout = Tee(sys.stdout)  # type: ignore[assignment]


PROCESS: dict[str, Callable[[], Any]] = {
    "warnings": lambda: warnings.simplefilter("error"),
    "socket-timeout": lambda: socket.setdefaulttimeout(0.5),
    "tee": _tee,
    "no-gc": gc.disable,
    "logging": lambda: logging.disable(logging.CRITICAL),
    "root-logger": lambda: logging.basicConfig(level=logging.DEBUG, force=True),
    "children": lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN),
    "terminate": lambda: signal.signal(signal.SIGTERM, lambda *_: sys.exit(3)),
    "recursion": lambda: sys.setrecursionlimit(400),
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True),
    "deterministic": lambda: torch.use_deterministic_algorithms(True),
    "device": lambda: torch.set_default_device("cpu"),
    "numpy-errors": lambda: numpy.seterr(all="raise"),
    "umask": lambda: os.umask(0o077),
    "excepthook": lambda: setattr(sys, "excepthook", lambda *error: sys.__excepthook__(*error)),
    "folder": lambda: os.chdir("/"),
    "print-options": lambda: torch.set_printoptions(precision=1, sci_mode=True),
    "switch-interval": lambda: sys.setswitchinterval(0.5),
    "trace": lambda: sys.setprofile(lambda *_: None),
    "tensor-print": lambda: setattr(torch.Tensor, "__repr__", lambda self: "a tensor"),
}
