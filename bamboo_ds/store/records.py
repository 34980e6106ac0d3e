"""Results of the store: values, snapshots, watch events. Keys are relative to the store's namespace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class KeyValue:
    """One key as it was at some revision of the store.

    Attributes:
        key: name, relative to the namespace.
        value: the text; empty in the event of a deletion.
        mod_revision: revision of the last change of this key, in the event of a deletion of that.
        create_revision: revision at which the key came into being; 0 in the event of a deletion.
        lease: id of the lease that the key hangs on, ``None`` if it stays until deleted.
        genuine: whether its writer knows the job's secret; always true in a job without one.
        sealed: whether it carries a tag, made with any secret.
    """

    key: str
    value: str
    mod_revision: int
    create_revision: int
    lease: int | None = None
    genuine: bool = True
    sealed: bool = False


@dataclass(frozen=True)
class Snapshot:
    """All keys under a prefix at one revision.

    Attributes:
        entries: key (relative to the namespace, prefix included) to value, sorted by key.
        revision: revision of the store at which it was read. A watch from ``revision + 1`` on sees
            everything that the snapshot does not.
    """

    entries: Mapping[str, KeyValue]
    revision: int


@dataclass(frozen=True)
class WatchEvent:
    """One change of one key.

    Attributes:
        kind: ``put`` or ``delete``.
        key: name, relative to the namespace.
        kv: the state after the change; see :class:`KeyValue` for deletions.
    """

    kind: Literal["put", "delete"]
    key: str
    kv: KeyValue


@dataclass(frozen=True)
class TlsFiles:
    """PEM files for TLS.

    Attributes:
        ca: certificate(s) of the authority that signed the server's; ``None`` for the system's roots.
        cert: the client's certificate chain, if the server asks for one; needs ``key``.
        key: the private key to ``cert``.
    """

    ca: Path | str | None = None
    cert: Path | str | None = None
    key: Path | str | None = field(default=None, repr=False)
