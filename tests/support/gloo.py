"""Groups of gloo whose ranks are threads of this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar

from torch import distributed as dist

T = TypeVar("T")


def on_threads(bodies: Sequence[Callable[[Any], T]]) -> list[T]:
    """What ``bodies`` return, each called in a thread of its own with its end of a group of them."""
    store = dist.HashStore()
    groups = []  # kept until all have returned: one that ends closes connections that others are still making

    def run(rank: int) -> T:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=60)
        group = dist.ProcessGroupGloo(store, rank, len(bodies), options)
        groups.append(group)
        return bodies[rank](group)

    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(run, range(len(bodies))))
