"""Latency of the pipeline transport against raw gloo: ``python -m tests.support.comm_latency``.

Two processes on this machine play ping-pong; half a round trip is printed (median and 95th percentile).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed as dist

from bamboo_ds.comm.transport import Lane, Transport
from tests.support.comm_worker import Cluster, Member, cluster, stop_fork_server
from tests.support.ports import free_port

SIZES = {"4 B": 1, "64 KB": 1 << 14, "1 MB": 1 << 18, "4 MB": 1 << 20, "64 MB": 1 << 24}  # float32 elements


def _measure(rank: int, send: Callable[[torch.Tensor], None], recv: Callable[[], None], elements: int) -> list[float]:
    tensor = torch.ones(elements)
    times = []
    for turn in range(220 if elements <= 1 << 20 else 20):
        start = time.perf_counter()
        if rank == 0:
            send(tensor)
            recv()
        else:
            recv()
            send(tensor)
        if turn >= 5:
            times.append((time.perf_counter() - start) / 2)
    return times


def ping_transport(member: Member, elements: int) -> list[float]:
    """Through lanes, as the engine does."""
    rank = int(member.name[1:])
    lanes = [Lane(0, "m0", "m1", "there"), Lane(1, "m1", "m0", "back")]
    transport = Transport.open(member.session, lanes)
    counts = {"sent": 0, "received": 0}

    def send(tensor: torch.Tensor) -> None:
        transport.send(lanes[rank], counts["sent"], tensor)
        counts["sent"] += 1

    def recv() -> None:
        transport.recv(lanes[1 - rank], counts["received"])
        counts["received"] += 1

    times = _measure(rank, send, recv, elements)
    transport.close()
    return times


def ping_gloo(member: Member, elements: int) -> list[float]:
    """Raw gloo of a known size: asynchronous send, blocking receive."""
    rank = dist.get_rank()
    room = torch.empty(elements)
    works: list[Any] = []

    def send(tensor: torch.Tensor) -> None:
        works.append(dist.isend(tensor, 1 - rank))

    def recv() -> None:
        dist.recv(room, 1 - rank)
        while works:
            works.pop().wait()

    times = _measure(rank, send, recv, elements)
    while works:
        works.pop().wait()
    return times


def all_reduce(member: Member, transport: bool) -> list[float]:
    """Of 16 numbers over all members."""
    tensor = torch.ones(16, dtype=torch.float64)
    opened = Transport.open(member.session, []) if transport else None
    times = []
    for _ in range(200):
        start = time.perf_counter()
        if opened is not None:
            opened.all_reduce(tensor)
        else:
            dist.all_reduce(tensor)
        times.append(time.perf_counter() - start)
    return times


def _show(name: str, times: list[float]) -> None:
    ordered = sorted(times)
    median, p95 = 1e6 * statistics.median(ordered), 1e6 * ordered[int(0.95 * len(ordered))]
    print(f"{name:38s} median {median:9.0f} us   p95 {p95:9.0f} us")


def main() -> None:
    """Print the table."""
    stock = Cluster(4)
    try:
        port = free_port()
        stock.everybody("init_stock", lambda index: (index, 4, port))
        with cluster(4) as bamboo:
            for label, elements in SIZES.items():
                for name, made, function in (("raw gloo", stock, ping_gloo), ("transport", bamboo, ping_transport)):
                    for index in (0, 1):
                        made[index].start("call", function, elements)
                    if made is bamboo:  # opening and closing is collective
                        for index in (2, 3):
                            made[index].start("call", open_and_close)
                    results = [made[index].finish(60) for index in range(2 if made is stock else 4)]
                    _show(f"{label}, {name}", results[0])
            for name, made in (("raw gloo", stock), ("transport", bamboo)):
                times = made.everybody("call", lambda _, made=made: (all_reduce, made is bamboo))
                _show(f"all_reduce of 4 members, {name}", times[0])
            attach = [seconds for _ in range(10) for seconds in bamboo.attach()]
            _show("attach of 4 members", attach)
        stock.close()
    finally:
        stock.destroy()
        stop_fork_server()


def open_and_close(member: Member) -> None:
    """Take part in a transport without using it."""
    Transport.open(member.session, []).close()


if __name__ == "__main__":
    main()
