"""Tensors of a device go and come by streams of their own: nobody uses a copy before it is there, nor lets go of it."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from typing import Any

import pytest
import torch

from bamboo_ds.devices import staging
from tests.support.nccl.streams import LateMark, LateStreams

pytestmark = pytest.mark.claim("reference/limits.md")


def made(number: int) -> tuple[torch.Tensor, ...]:
    """A payload: some tensors of any size, small ones, and ones that go in several segments."""
    drawn = random.Random(number)
    sizes = [drawn.choice((0, 1, 7, 1000, 300_000)) for _ in range(drawn.randint(1, 3))]
    return tuple(torch.full((size,), float(number + place)) for place, size in enumerate(sizes))


class Pending:
    """A mark that is reached when told."""

    done = False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        raise AssertionError("the script's thread must not wait")


class PendingStreams(LateStreams):
    """Whose copies are never through, unless told."""

    def __init__(self) -> None:
        self.mark = Pending()

    def copy_out(self, sources: Any, targets: Any) -> Pending:
        return self.mark

    def copy_in(self, sources: Any, after: Any) -> tuple[list[torch.Tensor], Pending]:
        return [torch.empty_like(source) for source in sources], self.mark

    def order(self, mark: Any) -> None:
        assert mark is self.mark


def test_both_ends_of_a_copy_are_kept_until_it_is_complete() -> None:
    """And not longer: a device's memory is scarce."""
    streams = PendingStreams()
    stage = staging.Staging(streams)
    source, arrived = torch.zeros(4, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)
    sent, came = weakref.ref(source), weakref.ref(arrived)
    (target,), copy = stage.out([(0, source)])
    stage.into([arrived])
    given_up = weakref.ref(copy)
    del source, arrived, copy  # the epoch has ended, and the message is dropped
    gc.collect()
    assert sent() is not None and came() is not None
    streams.mark.done = True
    kept = given_up()
    assert kept is not None and kept.reached() and sent() is None
    stage.into([target])
    gc.collect()
    assert came() is None


def test_what_is_large_comes_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a mark of its own, so that a message goes out as far as it is there: two of three chunks, say."""
    monkeypatch.setattr(staging, "_CHUNK", 100)
    made: list[Pending] = []

    class Streams(PendingStreams):
        def copy_out(self, sources: Any, targets: Any) -> Pending:
            made.append(Pending())
            return made[-1]

    sources = [(0, torch.zeros(30, dtype=torch.uint8)), (40, torch.zeros(250, dtype=torch.uint8))]
    targets, copy = staging.Staging(Streams()).out(sources)
    assert [target.numel() for target in targets] == [30, 250] and len(made) == 3
    assert copy._begins == [0, 140, 240]
    assert not copy.reached(1)
    made[0].done = made[2].done = True
    assert copy.reached(140) and not copy.reached(141) and not copy.reached()
    made[1].done = True
    assert copy.reached(141) and copy.reached()
    largest = staging.Staging(Streams()).out([(0, torch.zeros(100 * 1000, dtype=torch.uint8))])[1]
    assert 10 < len(largest.marks) <= staging._CHUNKS + 1


def test_the_thread_that_waits_for_a_device_goes_on_after_a_failure_and_ends() -> None:
    """A device that has failed says so at every mark."""
    waiter, called = staging.Waiter(), threading.Event()
    failing = Pending()
    waiter.when(failing, lambda: pytest.fail("it is not reached"))
    reached = LateMark(lambda: None)
    waiter.when(reached, called.set)
    reached.run()
    assert called.wait(10)
    waiter.stop()
    assert waiter._thread is not None
    waiter._thread.join(10)
    assert not waiter._thread.is_alive()
