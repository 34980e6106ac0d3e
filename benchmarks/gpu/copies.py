"""Copies between host and device beside matrix products, and memory of two processes that both have registered.

Bandwidth of pinned and pageable memory alone and beside products, by how much products become slower; then a memfd that
two processes map and register with the device: one copies from the device into it, the other from it. See ``--help``.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import click
import torch
from bench import MIB, Experiment, experiment, table
from deepspeed.accelerator import get_accelerator
from torch import Tensor

DIRECTIONS = ("to the device", "to the host")


@dataclass
class Figures:
    """One size, direction, and kind of host memory.

    Attributes:
        alone, beside: GB/s of copies alone, and beside products.
        products_ms: of a product alone and beside copies.
        slower: by what share products take longer; ``None`` for pageable memory, whose copies keep the host waiting, so
            that it can queue no products meanwhile.
    """

    megabytes: float
    direction: str
    memory: str
    alone: float
    beside: float
    products_ms: tuple[float, float | None]
    slower: float | None


class Device:
    """Streams of a device, where there are any.

    Args:
        kind: of the device.
        size: rows and columns of the factors of a product.
    """

    def __init__(self, kind: str, size: int) -> None:
        self.kind, self._accelerator = kind, get_accelerator()
        self._factor = torch.randn(size, size, device=kind, dtype=torch.bfloat16 if kind != "cpu" else torch.float32)
        self._product = torch.empty_like(self._factor)
        self.side: Callable[[], AbstractContextManager[Any]] = nullcontext
        if kind != "cpu":
            stream = self._accelerator.Stream()
            self.side = lambda: self._accelerator.stream(stream)

    def products(self, count: int) -> None:
        """Queue so many on the current stream."""
        for _ in range(count):
            torch.matmul(self._factor, self._factor, out=self._product)

    def timed(self, *works: tuple[Callable[[], None], bool]) -> float:
        """Seconds until the first of ``works`` is through; all are queued at once, those marked on a side stream.

        On a CPU they run one after the other.
        """
        self._accelerator.synchronize()
        begin = time.monotonic()
        for work, aside in reversed(works):
            with self.side() if aside else nullcontext():
                work()
        if self.kind == "cpu":
            return time.monotonic() - begin
        with self.side() if works[0][1] else nullcontext():
            self._accelerator.current_stream().synchronize()
        return time.monotonic() - begin


def host_memory(size: int, pinned: bool) -> Tensor:
    """Bytes."""
    memory = torch.ones(size, dtype=torch.uint8)
    return get_accelerator().pin_memory(memory) if pinned else memory


def measure(
    device: Device, megabytes: float, direction: str, pinned: bool, total_mb: float, repetitions: int
) -> Figures:
    """Both alone and at once."""
    size = int(megabytes * MIB)
    host, there = host_memory(size, pinned), torch.empty(size, dtype=torch.uint8, device=device.kind)
    source, target = (host, there) if direction == DIRECTIONS[0] else (there, host)
    times = max(1, int(total_mb / megabytes))

    def copies(count: int) -> Callable[[], None]:
        def work() -> None:
            for _ in range(count):
                target.copy_(source, non_blocking=True)

        return work

    def seconds(*works: tuple[Callable[[], None], bool]) -> float:
        device.timed(*works)  # the second time counts
        return median(device.timed(*works) for _ in range(repetitions))

    alone_s, one_s = seconds((copies(times), True)), seconds((lambda: device.products(1), False))
    count = max(1, int(alone_s / one_s))  # products that take as long as the copies
    products_s = seconds((lambda: device.products(count), False))
    # The one that is beside lasts longer than the one that is timed.
    beside_s = seconds((copies(times), True), (lambda: device.products(3 * count), False))
    slowed_s = seconds((lambda: device.products(count), False), (copies(3 * times), True)) if pinned else None
    ms = products_s * 1000 / count, None if slowed_s is None else slowed_s * 1000 / count
    slower, gigabytes = None if slowed_s is None else slowed_s / products_s - 1, times * size / 1e9
    memory = "pinned" if pinned else "pageable"
    return Figures(megabytes, direction, memory, gigabytes / alone_s, gigabytes / beside_s, ms, slower)


def registered(descriptor: int, size: int, gpu: bool) -> Tensor:
    """The memory of a memfd, which copies of the device need not stage."""
    memory = torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=size, dtype=torch.uint8)
    if gpu:
        runtime = torch.cuda.cudart()
        code = runtime.cudaHostRegister(memory.data_ptr(), size, 0)
        if int(code):
            raise RuntimeError(f"cudaHostRegister: error {code}")
    return memory


def copy_from(path: str, size: int, gpu: bool, here: Connection) -> None:
    """The other process: registers the same memory, and says what it has got from there, and at which rate."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        memory = registered(descriptor, size, gpu)
    except RuntimeError as error:
        here.send(str(error))
        return
    here.send("")
    while (value := here.recv()) is not None:
        target = torch.empty(size, dtype=torch.uint8, device=get_accelerator().device_name() if gpu else "cpu")
        get_accelerator().synchronize()
        begin = time.monotonic()
        target.copy_(memory, non_blocking=True)
        get_accelerator().synchronize()
        here.send((bool(target.eq(value).all()), time.monotonic() - begin))


def share(run: Experiment, megabytes: float) -> dict[str, Any]:
    """A memfd, from the device of this process to that of another one."""
    size, context = int(megabytes * MIB), multiprocessing.get_context("spawn")
    descriptor = os.memfd_create("copies")
    os.ftruncate(descriptor, size)
    here, there = context.Pipe()
    path = f"/proc/{os.getpid()}/fd/{descriptor}"
    other = context.Process(target=copy_from, args=(path, size, run.gpu, there))
    other.start()
    there.close()
    found: dict[str, Any] = {"megabytes": megabytes, "right": True, "in_s": [], "out_s": []}
    try:
        memory, problem = registered(descriptor, size, run.gpu), here.recv()
        for value in range(1, 1 + (0 if problem else 5)):
            source = torch.full((size,), value, dtype=torch.uint8, device=run.kind)
            get_accelerator().synchronize()
            begin = time.monotonic()
            memory.copy_(source, non_blocking=True)
            get_accelerator().synchronize()
            found["in_s"].append(time.monotonic() - begin)
            here.send(value)
            right, seconds = here.recv()
            found["right"] &= right
            found["out_s"].append(seconds)
        if not problem:
            here.send(None)
    except (RuntimeError, EOFError) as error:
        problem = repr(error)
        other.terminate()
    finally:
        other.join()
        os.close(descriptor)
    return {**found, "problem": problem, "right": found["right"] and not problem}


@experiment("copies", minutes=4.0)
@click.option("--megabytes", type=float, multiple=True, default=(1.0, 16.0, 64.0), show_default=True)
@click.option("--total-mb", type=float, default=2048.0, show_default=True, help="Of each measurement.")
@click.option("--repetitions", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--product", type=click.IntRange(min=16), default=4096, show_default=True, help="Rows of a factor.")
def main(run: Experiment, megabytes: tuple[float, ...], total_mb: float, repetitions: int, product: int) -> None:
    """Copy beside matrix products, and through memory that two processes have registered."""
    if not run.gpu:
        megabytes, total_mb, repetitions, product = (0.25,), 1.0, 1, 64
    device, rows = Device(run.kind, product), []
    view = table(
        "copies", "MB", " direction", " memory", "GB/s", "beside products", "products [ms]", "beside", "slower"
    )
    shared = share(run, max(megabytes))
    run.say(f"memfd that two processes have registered: {shared}")
    if not shared["right"]:
        run.blame(f"memfd of two processes: {shared['problem'] or 'wrong bytes'}")
    for size in megabytes:
        for direction in DIRECTIONS:
            for pinned in (True, False):
                run.timeout_s("copies", 1)
                row = measure(device, size, direction, pinned, total_mb, repetitions)
                rows.append(row)
                cells = [f"{row.alone:.2f}", f"{row.beside:.2f}"]
                cells += ["" if ms is None else f"{ms:.3f}" for ms in row.products_ms]
                cells += ["" if row.slower is None else f"{row.slower:+.1%}"]
                view.add_row(f"{size:g}", direction, row.memory, *cells)
                run.save(shared=shared, rows=[asdict(each) for each in rows])
    run.end(view, shared=shared, rows=[asdict(each) for each in rows])


if __name__ == "__main__":
    main()
