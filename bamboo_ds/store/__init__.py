"""etcd through ``etcd3``: the only way in which the control plane's processes share state.

Names are loaded on first use, so that ``bamboo_ds.store.embedded`` costs no gRPC import.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .client import Lease as Lease
    from .client import Store as Store
    from .embedded import EmbeddedEtcd as EmbeddedEtcd
    from .embedded import find_etcd as find_etcd
    from .records import KeyValue as KeyValue
    from .records import Snapshot as Snapshot
    from .records import TlsFiles as TlsFiles
    from .records import WatchEvent as WatchEvent
    from .watch import Watch as Watch

_HOME = {
    "EmbeddedEtcd": "embedded",
    "KeyValue": "records",
    "Lease": "client",
    "Snapshot": "records",
    "Store": "client",
    "TlsFiles": "records",
    "Watch": "watch",
    "WatchEvent": "records",
    "find_etcd": "embedded",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
