"""The table of what torch's ProcessGroupNCCL does: rows that a processor can show, on torch or on the work-alike."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from tests.support.nccl.groups import LateGroup, LateWork
from tests.support.nccl.table import Row, numbers, rows

pytestmark = pytest.mark.claim("reference/limits.md")

ROWS = {row.key: row for row in rows()}
_C10D = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d"
_OPTIONS = (
    "AllToAllOptions",
    "AllreduceCoalescedOptions",
    "AllreduceOptions",
    "BarrierOptions",
    "BroadcastOptions",
    "GatherOptions",
    "ReduceOptions",
    "ReduceScatterOptions",
    "ScatterOptions",
)
_CALLS = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
    "barrier",
)


# -- on torch --------------------------------------------------------------------------------------------------


def header(text: str, name: str = "ProcessGroupNCCL.hpp") -> bool:
    """Whether a header of the torch that is installed has ``text``."""
    return text in (_C10D / name).read_text()


def source(name: str) -> str:
    return inspect.getsource(getattr(dist, name))


#: What shows a row, on torch of a version that it holds for.
ON_TORCH: dict[str, Callable[[], bool]] = {
    "async.options_old": lambda: not hasattr(dist.AllreduceOptions(), "asyncOp"),
    "async.options": lambda: all(getattr(dist, name)().asyncOp is True for name in _OPTIONS),
    "async.python_sets": lambda: all("opts.asyncOp = async_op" in source(name) for name in _CALLS),
    "async.python_none": lambda: all("work is not None" in source(name) for name in _CALLS),
    "async.stream_sync": lambda: header("bool asyncOp"),
    "async.stash": lambda: header("TensorShelf"),
    "async.record_streams_env": lambda: header("AVOID_RECORD_STREAMS") or numbers(torch.__version__) >= (2, 15),
    "work.wait_blocking": lambda: header("TORCH_NCCL_BLOCKING_WAIT"),
    "work.block_current_stream": lambda: hasattr(dist.Work, "block_current_stream"),
    "watchdog.modes": lambda: header("SkipCleanUp = 3") and header("TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    "watchdog.store": lambda: header("TORCH_NCCL_PROPAGATE_ERROR"),
    "watchdog.teardown": lambda: header("tearDownOnTimeout_"),
    "init.nonblocking_hang": lambda: not header("getAsyncError", "NCCLUtils.hpp"),
    "init.nonblocking_locked": lambda: header("getAsyncError", "NCCLUtils.hpp"),
    "coalesce.batch": lambda: "_coalescing_manager" in source("batch_isend_irecv"),
    "p2p.self": lambda: "_check_not_self_rank" in source("send"),
    "refuse.complex": lambda: "view_as_real" in source("all_reduce"),
    "barrier.monitored": lambda: "ValueError" in source("monitored_barrier"),
    "options.fields": lambda: header("global_ranks_in_group", "Backend.hpp"),
    "api.since_27": lambda: hasattr(dist.ProcessGroupGloo, "supports_coalescing"),
    "abort.all_python": lambda: "_group_start" in inspect.getsource(dist.distributed_c10d._abort_process_group),
}


@pytest.mark.parametrize("key", ON_TORCH)
def test_torch_is_as_the_table_says(key: str) -> None:
    if not ROWS[key].holds_for(torch.__version__):
        pytest.skip(f"it is about torch {ROWS[key].since} to {ROWS[key].until or 'the newest'}")
    assert ON_TORCH[key](), ROWS[key].says


def test_rows_are_told_apart_by_version() -> None:
    assert len(ROWS) == len(rows()) > 100
    assert all(row.says and row.file and row.function for row in rows())
    row = Row("a.b", "It does.", "f", "g", "2.8", "2.9")
    assert [row.holds_for(version) for version in ("2.7.1", "2.8.0+cu126", "2.9.1", "2.10.0")] == [
        False,
        True,
        True,
        False,
    ]
    assert Row("a.b", "It does.", "f", "g", "2.6").holds_for("2.15.0")


# -- on the work-alike -------------------------------------------------------------------------------------------


class Two:
    """A group of two ranks of this process, whose collectives are held until :meth:`go`."""

    def __init__(self, folder: Path) -> None:
        self.held, self._folder = True, folder
        self._pause = threading.Event()
        self.groups = [LateGroup(folder, rank, 2, self._hold, in_order=False) for rank in range(2)]

    def _hold(self, group: LateGroup, operation: str, size: int) -> None:
        while not (self._pause.is_set() or group.aborted.is_set()):
            self._pause.wait(0.001)

    def go(self) -> None:
        self._pause.set()

    def all_reduce(self, **options: Any) -> tuple[list[torch.Tensor], list[LateWork | None]]:
        asked = dist.AllreduceOptions()
        for name, value in options.items():
            setattr(asked, name, value)
        tensors = [torch.full((3,), float(rank + 1)) for rank in range(2)]
        with ThreadPoolExecutor(2) as pool:
            works = [pool.submit(group.allreduce, [tensors[rank]], asked) for rank, group in enumerate(self.groups)]
            return tensors, [work.result(60) for work in works]


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    made = Two(tmp_path / "group")
    yield made
    for group in made.groups:
        group.end()


def ended(works: list[Any]) -> bool:
    for work in works:
        work._ended.wait(60)
    return all(work.is_completed() for work in works)


def shows(*keys: str) -> Any:
    """The test shows these rows on the work-alike."""
    assert set(keys) <= set(ROWS)
    return pytest.mark.rows(*keys)


@shows("work.wait", "stream.order", "work.future")
def test_a_wait_does_not_wait_for_the_result(two: Two) -> None:
    tensors, works = two.all_reduce()
    assert all(work is not None and work.wait() for work in works), "at once"
    assert not any(work.is_completed() for work in works if work is not None)
    assert all(not torch.equal(tensor, torch.full((3,), 3.0)) for tensor in tensors)
    again, later = two.all_reduce()
    two.go()
    assert ended(later) and all(work is not None and work.is_completed() for work in works), "in order"
    assert all(torch.equal(tensor, torch.full((3,), 3.0)) for tensor in (*tensors, *again))


@shows("async.stream_sync")
@pytest.mark.skipif(not hasattr(dist.AllreduceOptions(), "asyncOp"), reason="of torch 2.8 and newer")
def test_without_asynchronous_operation_there_is_no_work(two: Two) -> None:
    two.go()
    tensors, works = two.all_reduce(asyncOp=False)
    assert works == [None, None] and all(torch.equal(tensor, torch.full((3,), 3.0)) for tensor in tensors)


@shows("barrier.sync", "barrier.old")
@pytest.mark.skipif(not hasattr(dist.BarrierOptions(), "asyncOp"), reason="of torch 2.8 and newer")
def test_a_barrier_blocks_its_caller(two: Two) -> None:
    options = dist.BarrierOptions()
    options.asyncOp = False
    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(group.barrier, options) for group in two.groups]
        assert not any(call.done() for call in calls)
        two.go()
        assert [call.result(60) for call in calls] == [None, None]
        works = list(pool.map(lambda group: group.barrier(), two.groups))
        assert all(work is not None and work.wait() and work.is_completed() for work in works)


@shows("abort.kernels", "work.wait_after_abort", "work.exception", "abort.then_collective", "abort.peers")
def test_an_abort_ends_what_is_under_way_like_a_success(two: Two) -> None:
    (mine, theirs), (own, other) = two.all_reduce()
    assert own is not None and other is not None
    two.groups[0].abort()
    assert own.is_completed() and own.wait() and own.exception() is None
    assert not torch.equal(mine, torch.full((3,), 3.0)), "what was written by then"
    assert not other.is_completed(), "peers notice nothing"
    with pytest.raises(dist.DistBackendError, match="NCCL communicator was aborted"):
        two.groups[0].allreduce([torch.ones(1)])
    two.groups[1].abort()
    assert other.is_completed() and not torch.equal(theirs, torch.full((3,), 3.0))


@shows("work.is_success")
def test_success_cannot_be_asked_for(two: Two) -> None:
    _, (work, _) = two.all_reduce()
    assert work is not None
    with pytest.raises(NotImplementedError):
        work.is_success()
    two.go()


@shows("abort.by_nccl", "error.cached")
def test_what_nccl_ends_itself_tells_no_error(two: Two) -> None:
    (mine, _), (own, _) = two.all_reduce()
    assert own is not None
    two.groups[0].fail()
    assert own.is_completed() and own.exception() is None and not torch.equal(mine, torch.full((3,), 3.0))
    assert not two.groups[0].aborted.is_set()


@shows("bits.communicators")
def test_two_groups_add_in_orders_of_their_own(tmp_path: Path) -> None:
    found = set()
    for number in range(8):
        groups = [LateGroup(tmp_path / str(number), rank, 3, lambda *_: None, in_order=False) for rank in range(3)]
        tensors = [torch.tensor([value]) for value in (1e8, 1.0, -1e8)]
        works: list[Any] = [group.allreduce([tensor]) for group, tensor in zip(groups, tensors, strict=True)]
        assert ended(works) and len({tensor.item() for tensor in tensors}) == 1, "all ranks have the same bits"
        found.add(tensors[0].item())
        for group in groups:
            group.end()
    assert len(found) > 1
