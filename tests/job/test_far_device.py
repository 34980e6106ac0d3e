"""Jobs on a device whose tensors torch keeps apart from those of the host: see ``support/far_device.cpp``."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.exhaustive import test_sliced_jobs
from tests.job import test_divided, test_elastic, test_losses, test_precision
from tests.support import far_device
from tests.support.jobs import SUPPORT, Reference, run_bamboo, write_config
from tests.support.on_device import on_the_device
from tests.support.surviving import fault, survive_in_turn

pytestmark = [
    pytest.mark.claim("reference/limits.md"),
    pytest.mark.integration,
    pytest.mark.skipif(far_device.compiler() is None, reason="there is no C++ compiler"),
]


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """No job waits for a compiler."""
    far_device.library()


def test_the_device_is_apart_from_the_host() -> None:
    on_the_device(
        """
x, y = torch.arange(6.0).view(2, 3), torch.arange(6.0, device="far").view(2, 3)
assert y.device == torch.device("far:0") and torch.equal((y @ y.t() * 2).cpu(), x @ x.t() * 2)
for mixed in (lambda: x + y, lambda: torch.dot(x[0], y[0])):
    with pytest.raises(RuntimeError, match="xpected all tensors"):
        mixed()
with pytest.raises(TypeError, match="to numpy"):
    y.numpy()
assert (y + torch.tensor(1.0)).sum().item() == 21 and y[torch.tensor([1])].cpu().tolist() == [[3, 4, 5]]
y.t()[1].add_(10)
assert y.cpu().tolist() == [[0, 11, 2], [3, 14, 5]]
model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.5)).to("far")
step = torch.optim.Adam(model.parameters(), lr=0.1)
model(y).sum().backward()
step.step()
assert {p.grad.device.type for p in model.parameters()} == {"far"}
torch.manual_seed(1)
here = torch.rand(3)
assert not torch.equal(torch.rand(3, device="far").cpu(), here)
"""
    )


def test_its_memory_is_limited_and_counted() -> None:
    on_the_device(
        """
before = far_device.counts()["allocated"]
x = torch.zeros(1000, device="far")
y = x * 2
assert far_device.counts()["allocated"] == before + 8000
del x, y
assert far_device.counts()["allocated"] == before and far_device.counts()["peak"] >= before + 8000
from bamboo_ds.devices.accelerators import page_locked, release_page_locked
assert page_locked(100).is_pinned()
release_page_locked()
torch.ops.far.limit(1 << 20)
with pytest.raises(torch.OutOfMemoryError):
    torch.zeros(1 << 20, device="far")
"""
    )


def test_copies_that_do_not_block_are_late() -> None:
    on_the_device(
        """
side = torch.Stream(device="far")
found = []
for number in range(20):
    source = torch.full((50,), float(number), device="far")
    target = torch.empty(50, pin_memory=True)
    assert target.is_pinned()
    with side:
        target.copy_(source, non_blocking=True)
    found.append(target[0].item() == number)
    mark = side.record_event()
    mark.synchronize()
    assert mark.query() and target.tolist() == [number] * 50
assert not all(found), "none was late"
assert far_device.counts()["lost"] == 0
for _ in range(20):
    with side:
        torch.empty(50, pin_memory=True).copy_(torch.ones(50, device="far"), non_blocking=True)
side.synchronize()
assert far_device.counts()["lost"] > 0
""",
        seed=1,
    )


def test_threads_that_wait_for_the_device_sleep() -> None:
    """And a message of several chunks has a mark for each, so that it goes out while it comes from the device."""
    on_the_device(
        """
import threading
from bamboo_ds.comm.wire import payloads
from bamboo_ds.devices import staging
from bamboo_ds.devices.streams import use_accelerator
from deepspeed.accelerator import get_accelerator
use_accelerator()
found = staging.current()
sent = torch.arange(1 << 22, dtype=torch.int32, device="far")
payload = payloads.staged((sent, torch.ones(5), sent[:7]))
assert len(payload.copy.marks) == 9
waiter, done = staging.Waiter(), threading.Event()
for mark in payload.copy.marks:
    waiter.when(mark, lambda: done.set() if payload.copy.reached() else None)
assert done.wait(30)
back = payload.payload()
assert torch.equal(back[0].cpu(), sent.cpu()) and back[1].tolist() == [1.0] * 5 and back[2].tolist() == list(range(7))
begin, end = found.streams.mark(), found.streams.mark()
end.synchronize()
assert get_accelerator().spinning == 0
""",
        seed=1,
    )


# -- jobs ------------------------------------------------------------------------------------------------------


def lose_two(folder: Path, reference: Reference, seed: int) -> None:
    """Kept tensors are sent again, sums and replicas come late."""
    drawn = random.Random(seed)
    places = [("ForwardPass", 2), ("BackwardPass", 1), ("ReduceGrads", None)]
    faults = [fault(rank, 2 + rank, *drawn.choice(places)) for rank in drawn.sample((1, 2, 3), 2)]
    mode = drawn.choice(("lazy-frc-lazy-brc", "eager-frc-lazy-brc", "eager-frc-eager-brc"))
    block = {"redundancy": {"mode": mode, "sync_every": drawn.choice((0, 2)), "verify_every": 2}}
    survive_in_turn(folder, reference, faults, bamboo=block)


#: More memory of the device than any of these jobs needs. Bytes.
LARGEST = 2**28

#: Tests of other modules, whose jobs are tested again.
JOBS: dict[str, Callable[[Path, Reference, int], None]] = {
    "takeovers": lose_two,
    "evaluations": lambda folder, reference, _: test_losses.test_losses_during_evaluations(folder, reference),
    "recoveries": lambda folder, reference, _: test_losses.test_loss_during_a_recovery(
        folder, reference, *test_losses.AFTER_A_RESENT_ACTIVATION
    ),
    "checkpoints": lambda folder, reference, _: test_elastic.test_join_a_job_with_checkpoints(folder, reference),
    "joins": lambda folder, reference, _: test_elastic.test_members_join(folder, reference, ("--count-samples",)),
    "divided": lambda folder, reference, _: test_divided.test_a_job_grows_beyond_its_stages(folder, reference),
    "sharded": lambda folder, reference, _: test_precision.test_precision(folder, reference, "fp16-zero-data"),
    "sliced": lambda folder, reference, _: test_sliced_jobs.test_losses_inside_of_layers(folder, reference),
}


#: What ``make test`` runs; jobs of several pipelines and slices are those of :mod:`.test_on_nccl`.
USUAL = [("takeovers", 1)]
CASES = [*USUAL, *((job, 1) for job in JOBS if job not in dict(USUAL)), *(("takeovers", seed) for seed in range(2, 6))]


@pytest.mark.parametrize(
    ("job", "seed"),
    [case if case in USUAL else pytest.param(*case, marks=pytest.mark.exhaustive) for case in CASES],
)
def test_jobs(tmp_path: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch, job: str, seed: int) -> None:
    monkeypatch.setenv(far_device.SEED, str(seed))
    JOBS[job](tmp_path, reference, seed)
    counts = [json.loads(file.read_text()) for file in tmp_path.glob("far-*")]
    assert any(each["late"] > 0 for each in counts), counts
    assert not any(each["lost"] or each["pageable"] for each in counts), counts
    assert all(each["peak"] < LARGEST for each in counts), "DeepSpeed's buckets of 2 GB are of no use here"


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", ["lazy-frc-lazy-brc", "eager-frc-eager-brc"])
def test_the_script_waits_for_no_device_in_an_iteration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Between the first forward pass and the measuring of gradients, which does. Steps of parked replicas would."""
    monkeypatch.setenv(far_device.SEED, "1")
    block = {"redundancy": {"mode": mode, "sync_every": 2, "park": False}}
    config = write_config(tmp_path, block, gradient_clipping=0.01)
    result = run_bamboo(tmp_path, 4, ["--stages", "2", "--steps", "4"], config, SUPPORT / "train_syncs.py")
    assert result.exit_code == 0, result.output[-4000:]
    files = sorted(tmp_path.glob("syncs-*"))
    assert len(files) == 4
    for file in files:
        found = [list(map(int, line.split())) for line in file.read_text().splitlines()[1:]]
        assert [line[0] for line in found] == [0] * 4, found
        # Micro-batches that DeepSpeed, or a redundant pass, loads: the first one before that pass.
        assert max(line[1] for line in found) < 6 * (1 if mode.startswith("lazy") else 2), found
        assert all(line[2] for line in found[:-1]), found
