"""Messages between two processes of one host: channels beside a plain pair of TCP sockets and stock gloo.

Ratios of one run: bandwidth of large tensors, round trips of tiny ones, and processor seconds per GB. See ``--help``.
"""

from __future__ import annotations

import multiprocessing
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
from common import console, save_json
from rich.table import Table
from torch import distributed as dist

from bamboo_ds.comm.session import Session
from bamboo_ds.devices.accelerators import HOST
from bamboo_ds.topology import Plan

ADDRESS = "127.0.0.1"
NAMES = ("a", "b")
#: Sends to the other end, and receives from it, a tensor.
Send, Receive = Callable[[torch.Tensor], None], Callable[[torch.Tensor], None]


def plain(own: int, here: Connection) -> tuple[Send, Receive]:
    """A blocking pair of TCP sockets."""
    listener = socket.create_server((ADDRESS, 0)) if own == 0 else None
    if listener is not None:
        here.send(listener.getsockname())
        pair, _ = listener.accept()
    else:
        pair = socket.create_connection(here.recv())
    pair.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def receive(tensor: torch.Tensor) -> None:
        view: Any = memoryview(tensor.numpy()).cast("B")
        while len(view):
            view = view[pair.recv_into(view, 0, socket.MSG_WAITALL) :]

    return lambda tensor: pair.sendall(memoryview(tensor.numpy()).cast("B")), receive


def gloo(own: int, here: Connection) -> tuple[Send, Receive]:
    """Stock torch."""
    if own == 0:
        store = dist.TCPStore(ADDRESS, 0, 2, True, wait_for_workers=False)
        here.send(store.port)
    else:
        store = dist.TCPStore(ADDRESS, here.recv(), 2, False)
    dist.init_process_group("gloo", store=store, rank=own, world_size=2)
    return lambda tensor: dist.send(tensor, 1 - own), lambda tensor: dist.recv(tensor, 1 - own)


def channels(own: int, here: Connection, hosts: tuple[str, str]) -> tuple[Send, Receive]:
    """The project's; members share memory if their hosts have one name."""
    session = Session(NAMES[own], ADDRESS, timedelta(seconds=60), lambda member, reason: None, host=hosts[own])
    here.send(session.place)
    places = (session.place, here.recv()) if own == 0 else (here.recv(), session.place)
    session.attach(Plan(epoch=1, owners=NAMES, members=NAMES, places=places))
    session.meet()
    out, back = (session.current.open(HOST, NAMES[at], NAMES[at], NAMES[1 - at]) for at in (own, 1 - own))
    sent, got = iter(range(1 << 30)), iter(range(1 << 30))
    return lambda tensor: out.send(next(sent), tensor), lambda tensor: back.recv(next(got))


STREAM, MEMORY = "channels, stream", "channels, shared memory"
WAYS = {
    "plain TCP": plain,
    "gloo": gloo,
    STREAM: partial(channels, hosts=("one", "other")),
    MEMORY: partial(channels, hosts=("one", "one")),
}


def work(way: str, own: int, here: Connection, size: int, count: int, trips: int) -> None:
    """One end: ``count`` tensors of ``size`` bytes from the first to the second, then round trips of 64 bytes."""
    torch.set_num_threads(1)
    send, receive = WAYS[way](own, here)
    large, tiny = torch.zeros(size // 4), torch.zeros(16)
    for _ in range(2):  # the second time counts
        begin, used = time.monotonic(), time.process_time()
        for _ in range(count):
            (receive if own else send)(large)
        (send if own else receive)(tiny)  # all has arrived
        seconds, cpu = time.monotonic() - begin, time.process_time() - used
    begin = time.monotonic()
    for _ in range(trips):
        if own:
            receive(tiny)
            send(tiny)
        else:
            send(tiny)
            receive(tiny)
    here.send((seconds, cpu, (time.monotonic() - begin) / trips))
    here.recv()  # both are through


def measure(way: str, size: int, count: int, trips: int) -> tuple[float, float, float]:
    """GB/s, processor seconds of both ends per GB, and seconds of a round trip."""
    context = multiprocessing.get_context("spawn")
    ends = []
    pairs = [context.Pipe() for _ in range(2)]
    for own, (_, there) in enumerate(pairs):
        ends.append(context.Process(target=work, args=(way, own, there, size, count, trips)))
        ends[-1].start()
    first, second = (here for here, _ in pairs)
    if way in (STREAM, MEMORY):
        place = first.recv()
        first.send(second.recv())
        second.send(place)
    else:
        second.send(first.recv())
    (seconds, one, trip), (_, other, _) = first.recv(), second.recv()
    for here in (first, second):
        here.send(None)
    for end in ends:
        end.join()
    gigabytes = size * count / 1e9
    return gigabytes / seconds, (one + other) / gigabytes, trip


@click.command(help="Measure messages between two processes of this host.")
@click.option("--size-mb", default=16.0, show_default=True)
@click.option("--count", default=64, show_default=True)
@click.option("--trips", default=2000, show_default=True)
@click.option("--repetitions", default=3, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=Path("out"), show_default=True)
def main(size_mb: float, count: int, trips: int, repetitions: int, out: Path) -> None:
    """Take turns, and tell the medians."""
    found: dict[str, list[tuple[float, float, float]]] = {way: [] for way in WAYS}
    for _ in range(repetitions):
        for way in WAYS:
            found[way].append(measure(way, int(size_mb * 1e6) // 64 * 64, count, trips))
    table = Table(title=f"{count} tensors of {size_mb:g} MB; {trips} round trips of 64 bytes", title_justify="left")
    for column in ("", "GB/s", "CPU s per GB", "round trip, µs"):
        table.add_column(column, justify="right")
    medians = {way: [median(each) for each in zip(*runs, strict=True)] for way, runs in found.items()}
    for way, (rate, cpu, trip) in medians.items():
        table.add_row(way, f"{rate:.2f}", f"{cpu:.2f}", f"{trip * 1e6:.0f}")
    console.print(table)
    save_json(out / "carriers.json", {"runs": found, "medians": medians})


if __name__ == "__main__":
    main()
