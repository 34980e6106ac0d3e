"""Jobs on the work-alike of NCCL: what reduces over pipelines, slices and stages, undisturbed and with losses.

They compute what stock DeepSpeed does over gloo: with two ranks a sum has one order.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .support import gpt_jobs, sliced_jobs
from .support.nccl.groups import SEED
from .support.precisions import BF16, BF16_ZERO, FP16, FP32_ZERO
from .support.surviving import Reference, Result, fault, survive

pytestmark = [pytest.mark.claim("reference/limits.md"), pytest.mark.integration]

LOSS = fault(3, 2, "BackwardPass", 1)
#: Owners of a stage are about to gather the shards that they have stepped.
GATHER = ".iteration.replication.exchange_shards"


@pytest.fixture(autouse=True)
def on_nccl(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setenv(SEED, request.node.name)


def check(folder: Path, result: Result) -> None:
    """Workers have communicated by these groups: all that live, or who computes an end with tied weights."""
    counts = [int(file.read_text()) for file in folder.glob("nccl-*")]
    assert any(count > 4 for count in counts), (counts, result.output[-4000:])


@pytest.mark.parametrize(
    ("faults", "config"),
    [
        pytest.param([], {}, id="undisturbed"),
        pytest.param([LOSS], {}, id="fp32"),
        pytest.param([fault(0, 1, "ReduceGrads"), fault(3, 3, "Commit")], {}, id="two"),
        pytest.param([LOSS], FP32_ZERO, id="zero"),
        pytest.param([fault(2, 2, "OptimizerStep")], BF16_ZERO, id="bf16-zero"),
        pytest.param([], BF16_ZERO, id="bf16-zero-undisturbed", marks=pytest.mark.exhaustive),
        pytest.param([fault(1, 2, GATHER, pause=0.5), fault(2, 4, GATHER)], FP32_ZERO, id="zero-gather"),
        pytest.param([LOSS], BF16, id="bf16", marks=pytest.mark.exhaustive),
        pytest.param([LOSS], FP16, id="fp16", marks=pytest.mark.exhaustive),
        pytest.param([fault(1, 1, "ForwardPass", 0)], BF16_ZERO, id="bf16-zero-first", marks=pytest.mark.exhaustive),
    ],
)
def test_two_pipelines(tmp_path: Path, reference: Reference, faults: list[Any], config: dict[str, Any]) -> None:
    check(tmp_path, survive(tmp_path, reference, faults, 2, 2, micro_batches=4, **config))


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param([fault(3, 1, "ReduceTiedGrads")], id="last"),
        pytest.param([fault(0, 2, "BackwardPass", 2)], id="first", marks=pytest.mark.exhaustive),
    ],
)
def test_tied_weights(tmp_path: Path, reference: Reference, faults: list[Any]) -> None:
    check(tmp_path, gpt_jobs.survive(tmp_path, reference, faults, 4))


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param([fault(3, 1, "~backward", 1)], id="pass"),
        pytest.param([fault(0, 2, "ReduceGrads")], id="reduction"),
    ],
)
def test_tensor_slices(tmp_path: Path, reference: Reference, faults: list[Any]) -> None:
    check(tmp_path, sliced_jobs.survive(tmp_path, reference, faults))
