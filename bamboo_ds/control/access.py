"""How the control plane's processes get at etcd: URLs as arguments, secrets through the environment."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from typing import TYPE_CHECKING

from ..store.variables import ENV_CA, ENV_CERT, ENV_KEY, ENV_PASSWORD, ENV_STORE, ENV_USER
from .membership import namespace

if TYPE_CHECKING:
    from ..store import Store

__all__ = ["ENV_NOTICES", "ENV_STORE", "open_store", "without_access"]

#: ``bamboo.notices`` of an agent as JSON: there may be a password in a URL, and everybody can read command lines.
ENV_NOTICES = "BAMBOO_AGENT_NOTICES"


def open_store(urls: str, job: str, timeout_s: float) -> Store:
    """The store of ``job``; raises as :class:`~bamboo_ds.store.Store` does. Loads gRPC."""
    from ..store import Store, TlsFiles

    files = [os.environ.get(name) for name in (ENV_CA, ENV_CERT, ENV_KEY)]
    return Store(
        urls.split(","),
        namespace=namespace(job),
        tls=TlsFiles(*files) if any(files) else None,
        user=os.environ.get(ENV_USER),
        password=os.environ.get(ENV_PASSWORD),
        timeout_s=timeout_s,
    )


def without_access(env: MutableMapping[str, str]) -> None:
    """Remove from ``env`` what is for agents only: workers have no business with it."""
    for name in (ENV_STORE, ENV_NOTICES, ENV_USER, ENV_PASSWORD, ENV_CA, ENV_CERT, ENV_KEY):
        env.pop(name, None)
