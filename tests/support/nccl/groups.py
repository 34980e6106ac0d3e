"""Groups in the place of torch's ProcessGroupNCCL, for tensors on the processor, that are harsher than a device.

Their behaviour is that of the rows of ``table.toml`` which ``test_nccl_table.py`` shows on them.

A collective returns at once, and so does the ``wait`` of its work; the result comes later, from a thread that does one
collective after the other as a device's stream does, and until then there is noise in the tensors that it writes. An
abort completes everything that was begun, without an error, and leaves the noise. Each group adds in an order of its
own. A collective that is asked for with ``asyncOp`` off has no work, as since torch 2.8. Members exchange what they
contribute by files in a folder, so that nothing but an abort tells a collective of a loss.

A processor has no stream in which its layers would wait for a result. ``in_order`` makes them wait where a stream does,
in ``wait``: until the collective has ended, whatever it has ended by. Exchanges always do.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import itertools
import os
import queue
import random
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from bamboo_ds.devices import nccl
from bamboo_ds.devices.accelerators import accelerator
from bamboo_ds.variables import ENV_MEMBER

#: The variable with which jobs of tests run on these groups; its value is a seed.
SEED = "BAMBOO_TEST_NCCL"

Before = Callable[["LateGroup", str, int], None]
Combine = Callable[[list[list[torch.Tensor]]], list[torch.Tensor]]
_MODULES = ("inner", "groups", "calls.collectives", "calls.order", "backend")


class LateWork(dist.Work):  # type: ignore[misc]
    """A collective that is under way behind the host.

    Attributes:
        waits: how often it was waited for.
    """

    def __init__(self, written: list[torch.Tensor], in_order: bool = False) -> None:
        super().__init__()
        self._written, self._in_order = written, in_order
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self.waits = 0
        self.error: RuntimeError | None = None
        for tensor in written:
            spoil(tensor)

    def end(self, results: list[torch.Tensor] | None) -> None:
        """The device is through, or was made to stop: ``None``."""
        with self._lock, torch.no_grad():
            if self._ended.is_set():
                return
            for tensor, result in zip(self._written, results or [], strict=False):
                tensor.copy_(result.view_as(tensor))
            self._ended.set()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self.waits += 1
        if self._in_order:
            self._ended.wait()
        return True

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def is_success(self) -> bool:
        raise NotImplementedError("as that of NCCL")

    def exception(self) -> RuntimeError | None:
        return self.error

    def result(self) -> list[torch.Tensor]:
        return self._written


def spoil(tensor: torch.Tensor) -> None:
    """Fill with noise that looks like numbers."""
    with torch.no_grad():
        if tensor.dtype.is_floating_point:
            tensor.copy_(torch.rand(tensor.shape, generator=torch.Generator().manual_seed(5)))
        else:
            tensor.fill_(77)


class LateGroup:
    """A group over files in ``folder``; its stream calls ``before`` with each collective and its number of elements.

    Attributes:
        aborted: set by :meth:`abort`.
    """

    def __init__(self, folder: Path, rank: int, size: int, before: Before, in_order: bool) -> None:
        self._folder, self._rank, self._size, self._before = folder, rank, size, before
        self._in_order = in_order
        self._number = 0
        self._begun: list[LateWork] = []
        self._stream: queue.Queue[Callable[[], None]] = queue.Queue()
        self.aborted = threading.Event()
        folder.mkdir(parents=True, exist_ok=True)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> LateWork | None:
        return self._begin("allreduce", tensors, tensors, self._combined(options), options)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[torch.Tensor], options: Any) -> LateWork | None:
        written = tensors if self._rank == options.rootRank else []
        return self._begin("reduce", tensors, written, self._combined(options), options)

    def _combined(self, options: Any) -> Combine:
        """What a reduction makes of what all ranks give, in an order that is the group's own."""
        operator = dist.ReduceOp.SUM if options is None else options.reduceOp

        def combine(parts: list[list[torch.Tensor]]) -> list[torch.Tensor]:
            columns = [torch.stack(column) for column in zip(*parts, strict=True)]
            if operator == dist.ReduceOp.MAX:
                return [column.amax(0) for column in columns]
            if operator == dist.ReduceOp.MIN:
                return [column.amin(0) for column in columns]
            if operator != dist.ReduceOp.SUM and operator != dist.ReduceOp.AVG:
                raise ValueError(f"jobs of tests do not ask for {operator}")
            first, *others = random.Random(self._folder.name).sample(range(self._size), self._size)
            sums = [functools.reduce(torch.add, [column[rank] for rank in others], column[first]) for column in columns]
            return sums if operator == dist.ReduceOp.SUM else [each / self._size for each in sums]

        return combine

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> LateWork | None:
        root: int = options.rootRank
        written = tensors if self._rank != root else []
        return self._begin("broadcast", tensors, written, lambda parts: parts[root], options)

    def alltoall_base(
        self, output: torch.Tensor, given: torch.Tensor, outputs: list[int], inputs: list[int], options: Any = None
    ) -> LateWork | None:
        parts = list(given.split(inputs or [given.numel() // self._size] * self._size))

        def mine(parts: list[list[torch.Tensor]]) -> list[torch.Tensor]:
            return [torch.cat([row[self._rank] for row in parts])]

        return self._begin("alltoall", parts, [output], mine, options, in_order=True)

    def _allgather_base(self, output: torch.Tensor, given: torch.Tensor, options: Any = None) -> LateWork | None:
        def joined(parts: list[list[torch.Tensor]]) -> list[torch.Tensor]:
            return [torch.cat([row[0] for row in parts])]

        return self._begin("allgather", [given], [output], joined, options, in_order=True)

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: Any = None
    ) -> LateWork | None:
        (row,) = outputs
        return self._begin("allgather", inputs, row, lambda parts: [part[0] for part in parts], options, in_order=True)

    def _reduce_scatter_base(self, output: torch.Tensor, given: torch.Tensor, options: Any = None) -> LateWork | None:
        combine = self._combined(options)

        def mine(parts: list[list[torch.Tensor]]) -> list[torch.Tensor]:
            return [combine(parts)[0].reshape(self._size, *output.shape)[self._rank]]

        return self._begin("reduce_scatter", [given], [output], mine, options)

    def barrier(self, options: Any = None) -> LateWork | None:
        """An all-reduce; its work's ``wait`` waits on the host, for ever."""
        return self._begin(
            "barrier", [torch.zeros(1)], [torch.zeros(1)], lambda parts: parts[0], options, in_order=True
        )

    def fail(self) -> None:
        """NCCL raises the abort's flag by itself, as after a connection that was made late and failed.

        What is under way ends early, and no error is told: the first state that torch has seen is kept.
        """
        for work in list(self._begun):
            work.end(None)

    def end(self) -> None:
        """Abort, and wait until nothing is done any more."""
        self.abort()
        self._stream.put(lambda: None)
        self._thread.join()

    def abort(self) -> None:
        self.aborted.set()
        for work in list(self._begun):
            work.end(None)

    def _begin(
        self,
        operation: str,
        given: list[torch.Tensor],
        written: list[torch.Tensor],
        combine: Combine,
        options: Any,
        in_order: bool = False,
    ) -> LateWork | None:
        if self.aborted.is_set():
            raise dist.DistBackendError("NCCL communicator was aborted on rank")
        number, mine = self._number, [tensor.detach().to("cpu", copy=True) for tensor in given]
        self._number += 1
        work = LateWork(written, self._in_order or in_order)
        self._begun.append(work)

        def run() -> None:
            self._before(self, operation, sum(tensor.numel() for tensor in mine))
            if self.aborted.is_set():
                return
            partial = self._folder / f"partial-{number}-{self._rank}"
            torch.save(mine, partial)
            partial.rename(self._folder / f"{number}-{self._rank}")
            files = [self._folder / f"{number}-{rank}" for rank in range(self._size)]
            while not all(file.exists() for file in files):
                if self.aborted.wait(0.002):
                    return
            try:
                results = combine([torch.load(file) for file in files])
            except Exception as error:
                work.error = RuntimeError(str(error))
                work.end(None)
                raise
            time.sleep(0.002)
            work.end(results)

        self._stream.put(run)
        if not getattr(options, "asyncOp", True):  # what follows on the current stream comes after it
            work._ended.wait()
            return None
        return work

    def _run(self) -> None:
        while not self.aborted.is_set():
            self._stream.get()()


def install(folder: Path, before: Before, in_order: bool) -> None:
    """Have collectives of this process run in such groups, which meet in ``folder``."""
    modules = [importlib.import_module(f"bamboo_ds.comm.{name}") for name in _MODULES]
    inner: Any = modules[0]
    create = inner.create_inner

    def create_late(kind: str, store: Any, rank: int, size: int, timeout: timedelta, gloo_device: Any) -> Any:
        if kind == inner.GLOO:
            return create(kind, store, rank, size, timeout, gloo_device)
        missing = [each.name for each in nccl.SETTINGS if each.name not in os.environ]
        assert not missing, f"made before {missing} were set"
        if rank == 0:
            store.set("late", os.urandom(8).hex())
        return LateGroup(folder / store.get("late").decode(), rank, size, before, in_order)

    def kind_for(device: torch.device) -> str:
        return inner.NCCL if device.type == accelerator().device_name() else inner.GLOO

    for module in modules:
        for name, late in (("kind_for", kind_for), ("create_inner", create_late)):
            if hasattr(module, name):
                setattr(module, name, late)


def install_in_job() -> None:
    """:func:`install` in a worker of a job of this package that has :data:`SEED`, which draws how late collectives are.

    A worker that ends leaves a file ``nccl-PID`` in the job's folder: how many collectives it has begun.
    """
    if SEED not in os.environ or ENV_MEMBER not in os.environ:
        return
    folder, begun = Path(os.environ["BAMBOO_TEST_JOB"]), itertools.count()
    pause = random.Random(f"{os.environ[SEED]}-{os.getpid()}")

    def delay(group: LateGroup, operation: str, size: int) -> None:
        next(begun)
        group.aborted.wait(pause.choice((0.0, 0.0, 0.01 * pause.random())))

    install(folder / "late", delay, in_order=True)
    atexit.register(lambda: (folder / f"nccl-{os.getpid()}").write_text(str(next(begun))))
