"""The keys of a job in an etcd that serves several: claimed by whoever starts the job, removed after its end."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from ...errors import LaunchError, StoreError
from .access import open_store
from .keys import Keys

logger = logging.getLogger("bamboo_ds.control.claims")

_TIMEOUT_S = 10.0


def claim(urls: str, job: str) -> None:
    """Removes what a dead job of this name has left in etcd.

    Raises:
        LaunchError: a job of this name runs.
        StoreError: etcd cannot be used.
    """
    with open_store(urls, job, _TIMEOUT_S) as store:
        alive = store.get_prefix(Keys.MEMBERS).entries
        if alive:
            raise LaunchError(
                f"a job named {job!r} runs already at {urls}: it has {len(alive)} members; take another name"
            )
        store.delete_prefix("")


def release(urls: str, job: str) -> None:
    """Removes the job's keys, unless members go on with it. If etcd cannot be used they stay for :func:`claim`."""
    try:
        with open_store(urls, job, _TIMEOUT_S) as store:
            if not store.get_prefix(Keys.MEMBERS).entries:
                store.delete_prefix("")
    except StoreError as error:
        logger.warning("the keys of job %s stay in etcd until a job of this name begins: %s", job, error)


@contextmanager
def claimed(urls: str, job: str) -> Iterator[None]:
    """Own the job's keys in the body."""
    claim(urls, job)
    yield
    release(urls, job)
