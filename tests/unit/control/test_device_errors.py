"""A device that fails is a loss of its member, and no failure of the script; what the script brings about is one."""

from __future__ import annotations

import pytest
import torch

from bamboo_ds.comm.lifetime import Lifetime
from bamboo_ds.control.leader.failures import hopeless
from bamboo_ds.control.messages import ExitNotice
from bamboo_ds.control.registry.records import LeftRecord
from bamboo_ds.devices.errors import is_device_error
from bamboo_ds.errors import EXIT_DEVICE, EpochChanged, PeerLost
from bamboo_ds.worker.exit import exit_code_of
from tests.unit.control.test_slot import RUNNING, slot

pytestmark = pytest.mark.claim("reference/settings.md")


class AcceleratorError(RuntimeError):
    """As torch's, which 2.6 does not have."""


LATER = "\nCUDA kernel errors might be asynchronously reported at some other API call."


@pytest.mark.parametrize(
    ("error", "of_device"),
    [
        (AcceleratorError("CUDA error: uncorrectable ECC error encountered" + LATER), True),
        (AcceleratorError("CUDA error: unspecified launch failure"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered" + LATER), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, opa)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), True),
        (RuntimeError("HIP error: unspecified launch failure"), True),
        (RuntimeError("NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled cuda error, NCCL version 2.27.5"), True),
        (AcceleratorError("CUDA error: device-side assert triggered" + LATER), False),
        (AcceleratorError("CUDA error: out of memory"), False),
        (AcceleratorError("CUDA error: invalid device ordinal"), False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling `cublasGemmEx`"), False),
        (RuntimeError("CUDA error: no kernel image is available for execution on the device"), False),
        (torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("CUDA error: unspecified launch failure"), False),
    ],
)
def test_what_is_a_failure_of_the_device(error: BaseException, of_device: bool) -> None:
    assert is_device_error(error) is of_device
    assert exit_code_of(error) == (EXIT_DEVICE if of_device else None)


def test_also_where_the_script_makes_another_error_of_it() -> None:
    made = ValueError("the step has failed")
    made.__cause__ = RuntimeError("CUDA error: unspecified launch failure")
    assert exit_code_of(made) == EXIT_DEVICE


def test_the_own_device_is_no_lost_peer() -> None:
    life = Lifetime(3, lambda member, reason: pytest.fail("nobody else is lost"))
    own = RuntimeError("NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled cuda error, NCCL version 2.27.5")
    assert life.translate(own, "allreduce") is own
    others = Lifetime(3, lambda member, reason: None)
    remote = RuntimeError("NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited")
    assert isinstance(others.translate(remote, "allreduce"), PeerLost)
    others.abort("a loss")
    assert isinstance(others.translate(remote, "allreduce"), EpochChanged)


def test_a_member_without_its_device_is_lost_unless_it_comes_again() -> None:
    why = "AcceleratorError: CUDA error: unspecified launch failure"

    def ending(step: int) -> LeftRecord:
        return slot(RUNNING).note_end(EXIT_DEVICE, 5.0, None, ExitNotice(reason=why), step)

    first = ending(7)
    assert (first.outcome, first.detail, first.error, first.code) == ("lost", why, why, EXIT_DEVICE)
    assert hopeless([first]) is None
    assert hopeless([first, ending(8)]) is None
    assert hopeless([first, ending(7)]) is not None
