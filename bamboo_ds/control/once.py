"""Records that are written once, and the others that somebody else may have put in their place."""

from __future__ import annotations

from collections.abc import Mapping

from ..store.client import Store


def put_once(store: Store, key: str, value: str, given: Mapping[str, int] | None = None) -> bool:
    """Set ``key`` unless a genuine record is there, whose place no other one holds.

    Args:
        given: see :meth:`~bamboo_ds.store.Store.compare_and_swap`.

    Returns:
        Whether this call wrote.
    """
    revision = 0
    while not store.compare_and_swap(key, revision, value, given=given):
        entry = store.get(key)
        found = 0 if entry is None else entry.mod_revision
        if found == revision or (entry is not None and entry.genuine):
            return False
        revision = found
    return True


def is_genuine(store: Store, key: str) -> bool:
    """Whether ``key`` is there, from a process that knows the job's secret."""
    entry = store.get(key)
    return entry is not None and entry.genuine
