"""Which device a worker gets, and what carries its tensors. None is needed, and none is used."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch

from bamboo_ds.comm import work as work_module
from bamboo_ds.comm.work import ThroughHost
from tests.support.far import far
from tests.support.gloo import on_threads

pytestmark = pytest.mark.claim("reference/limits.md", "reference/settings.md")


@pytest.mark.integration
@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("allreduce", lambda rank: ([far(1.0 + rank, 2.0)],), [[3.0, 4.0], [3.0, 4.0]]),
        ("broadcast", lambda rank: ([far(5.0 + rank)],), [[5.0], [5.0]]),
        ("allgather", lambda rank: ([[far(0.0), far(0.0)]], [far(1.0 + rank)]), [[1.0, 2.0], [1.0, 2.0]]),
        ("alltoall_base", lambda rank: (far(0.0, 0.0), far(rank, rank + 10.0), [], []), [[0.0, 1.0], [10.0, 11.0]]),
    ],
)
@pytest.mark.parametrize("way", ["wait", "future"])
def test_collectives_of_devices_that_gloo_does_not_know(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    arguments: Callable[[int], tuple[Any, ...]],
    expected: list[list[float]],
    way: str,
) -> None:
    """They run on copies in host memory: the tensors' own elements are out of gloo's reach."""
    asked: list[torch.device] = []

    def future_of(tensors: Iterable[torch.Tensor]) -> torch.futures.Future[Any]:
        asked.extend(each.device for each in tensors)
        return torch.futures.Future()  # one with such devices needs their driver

    monkeypatch.setattr(work_module, "future_of", future_of)

    def run(rank: int, group: Any) -> list[float]:
        given = arguments(rank)
        work = getattr(ThroughHost(group), name)(*given)
        written = given[0] if isinstance(given[0], list) else [given[0]]
        rows = [tensor for row in written for tensor in (row if isinstance(row, list) else [row])]
        if way == "wait":
            assert work.wait(timedelta(seconds=60))
        else:
            assert [id(each) for each in work.get_future().wait()] == [id(each) for each in rows]
        assert work.wait() and work.is_completed() and [id(each) for each in work.result()] == [id(t) for t in rows]
        return [float(element) for row in rows for element in row.elements]

    assert on_threads([partial(run, 0), partial(run, 1)]) == expected
    assert set(asked) == ({torch.device("xpu:0")} if way == "future" else set())


@pytest.mark.integration
def test_a_group_through_the_host_is_the_group_in_all_else() -> None:
    def run(group: Any) -> tuple[int, bool]:
        staged = ThroughHost(group)
        tensor = torch.ones(1)
        assert staged.barrier().wait() and staged.allreduce([tensor]).wait()
        return staged.size(), hasattr(staged, "allgather_in_a_circle")

    assert on_threads([run, run]) == [(2, False), (2, False)]
