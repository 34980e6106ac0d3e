"""A device that fails is a loss of its member, and no failure of the script; what the script brings about is one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.surviving import Reference, fault, survive

pytestmark = pytest.mark.claim("reference/settings.md")


@pytest.mark.integration
def test_the_job_goes_on_without_a_member_whose_device_fails(
    tmp_path: Path, reference: Callable[..., Any] | Reference
) -> None:
    result = survive(tmp_path, reference, [fault(1, 2, "BackwardPass", 2, signal="device")], stages=2)
    (lost,) = result.events("member_lost")
    assert lost["reason"] == "exit" and "uncorrectable ECC error" in lost["detail"]
