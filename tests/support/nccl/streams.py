"""Streams in the place of a device's, for tensors on the processor, that are harsher than a device.

A copy comes at a seeded moment later, from a thread that does one after the other as a device's stream does. Until then
its target is noise. A source that nobody keeps until then, or that has changed, is not what was to be copied: noise
comes instead of the first, and the copy has the changed bytes of the second.

A processor has no stream in which what is computed from a copy would wait for it: :meth:`LateStreams.order` makes the
script's thread wait.
"""

from __future__ import annotations

import queue
import random
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence

import torch

from bamboo_ds.devices import staging
from bamboo_ds.devices.staging import StreamMark

#: Seconds by which a copy is late at most.
LATE_S = 0.003


class LateMark:
    """The end of copies that come later."""

    def __init__(self, copy: Callable[[], None]) -> None:
        self._copy = copy
        self.made = time.perf_counter()
        self._done = threading.Event()

    def run(self) -> None:
        self._copy()
        self._done.set()

    def query(self) -> bool:
        return self._done.is_set()

    def synchronize(self) -> None:
        self._done.wait()


class _Stream:
    """Does copies in their order."""

    def __init__(self, seed: int, name: str) -> None:
        self.goes_on = threading.Event()
        self.goes_on.set()
        self._random = random.Random(f"{seed} {name}")
        self._marks: queue.SimpleQueue[tuple[LateMark, StreamMark | None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=f"late-{name}", daemon=True).start()

    def mark(self, copy: Callable[[], None], after: StreamMark | None = None) -> LateMark:
        found = LateMark(copy)
        self._marks.put((found, after))
        return found

    def _run(self) -> None:
        while True:
            mark, after = self._marks.get()
            time.sleep(self._random.choice((0.0, LATE_S * self._random.random())))
            self.goes_on.wait()
            if after is not None:
                after.synchronize()
            mark.run()
            del mark, after


class LateStreams:
    """See :class:`bamboo_ds.devices.staging.Streams`. All tensors count as those of a device.

    Attributes:
        counts: of copies out and in, and of sources that nobody had kept for them.
    """

    def __init__(self, seed: int) -> None:
        self._out, self._in, self._computing = (_Stream(seed, name) for name in ("out", "in", "computing"))
        self.counts: Counter[str] = Counter()

    def carries(self, tensor: torch.Tensor) -> bool:
        return True

    def memory(self, size: int) -> torch.Tensor:
        return noise(size)

    def copy_out(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> StreamMark:
        for target in targets:
            target.copy_(noise(target.numel()))
        self.counts["out"] += 1
        return self._out.mark(self._copying(sources, targets))

    def copy_in(
        self, sources: Sequence[torch.Tensor], after: StreamMark | None
    ) -> tuple[list[torch.Tensor], StreamMark]:
        found = [noise(source.numel()) for source in sources]
        self.counts["in"] += 1
        return found, self._in.mark(self._copying(sources, found), after)

    def order(self, mark: StreamMark) -> None:
        mark.synchronize()

    def mark(self) -> StreamMark:
        self.counts["marks"] += 1
        return self._computing.mark(lambda: None)

    def seconds(self, begin: StreamMark, end: StreamMark) -> float:
        assert isinstance(begin, LateMark) and isinstance(end, LateMark)
        assert begin.query() and end.query(), "nobody knows that yet"
        return end.made - begin.made

    def hold(self) -> None:
        """Copy nothing until :meth:`release`."""
        for stream in (self._out, self._in, self._computing):
            stream.goes_on.clear()

    def release(self) -> None:
        """Go on."""
        for stream in (self._out, self._in, self._computing):
            stream.goes_on.set()

    def _copying(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> Callable[[], None]:
        pairs = [(weakref.ref(s), weakref.ref(t)) for s, t in zip(sources, targets, strict=True)]

        def copy() -> None:
            for source, target in pairs:
                kept, into = source(), target()
                if kept is None or into is None:
                    self.counts["lost"] += 1  # its memory is somebody else's by now
                else:
                    into.copy_(kept)

        return copy


def noise(size: int) -> torch.Tensor:
    """Bytes that look like small numbers of any type."""
    return torch.full((size,), 0x3C, dtype=torch.uint8)


def install(seed: int) -> LateStreams:
    """Have what this process's engine sends and gets go by such streams."""
    streams = LateStreams(seed)
    staging.use(streams)
    return streams
