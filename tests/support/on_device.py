"""Python that runs in a process of its own that has the device of tests."""

from __future__ import annotations

import subprocess
import sys

from .jobs import SUPPORT

DEVICE = """
import sys
sys.path.insert(0, {support!r})
import far_device, pytest, torch
far_device.install({seed})
"""


def on_the_device(text: str, seed: int | None = None) -> None:
    """Run Python that has the device."""
    begin = DEVICE.format(support=str(SUPPORT), seed=seed)
    subprocess.run([sys.executable, "-c", begin + text], check=True, timeout=120)
