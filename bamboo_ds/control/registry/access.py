"""Access of the control plane's processes to etcd: URLs as arguments, secrets through the environment."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, MutableMapping
from typing import TYPE_CHECKING

from ...errors import ConfigError
from ...secret import ENV_SECRET_FILE, NONE, SETTING, JobSecret, file_of, find
from ...store.endpoints import ENV_CA, ENV_CERT, ENV_KEY, ENV_PASSWORD, ENV_USER, OWN, Endpoint
from ...variables import ENV_STORE
from .keys import ROOT, namespace

if TYPE_CHECKING:
    from ...store.client import Store
    from ...store.embedded import EmbeddedEtcd
    from ...store.records import KeyValue

logger = logging.getLogger("bamboo_ds.control.access")

#: What an agent is told, as JSON: there are secrets in it, and everybody can read command lines.
ENV_AGENT = "BAMBOO_AGENT"


def open_store(urls: str, job: str, timeout_s: float, secret: JobSecret | None = None) -> Store:
    """The store of ``job``; raises as :class:`~bamboo_ds.store.Store` does. Loads gRPC.

    Args:
        secret: the job's; ``None``: the one that this process finds.
    """
    return _open(urls, namespace(job), timeout_s, find(job) if secret is None else secret)


def jobs_in(urls: str, timeout_s: float) -> list[str]:
    """Names of the jobs that an etcd has keys of; raises as :class:`~bamboo_ds.store.Store` does. Loads gRPC.

    Raises:
        ConfigError: also where the etcd is that of one job, which nobody lists without knowing it.
    """
    if OWN in urls:
        raise ConfigError(f"{urls} is the etcd of a single job: name it with --job in bamboo status or bamboo top")
    with _open(urls, ROOT, timeout_s, NONE) as store:
        return store.folders()


def _open(urls: str, prefix: str, timeout_s: float, secret: JobSecret) -> Store:
    from ...store.client import Store
    from ...store.records import TlsFiles

    files = [os.environ.get(name) for name in (ENV_CA, ENV_CERT, ENV_KEY)]
    return Store(
        urls.split(","),
        namespace=prefix,
        tls=TlsFiles(*files) if any(files) else None,
        user=os.environ.get(ENV_USER),
        password=os.environ.get(ENV_PASSWORD),
        secret=secret,
        timeout_s=timeout_s,
    )


def embedded_etcd(address: str, job: str, secret: JobSecret) -> EmbeddedEtcd:
    """The etcd of a job that brings its own, to be started: for this user alone, or for who knows the secret.

    Args:
        address: at which members reach it. If that is a loopback address all are on this host, and it gets no port.
    """
    from ...store.embedded import EmbeddedEtcd

    if Endpoint(address, 0, False).loopback:
        return EmbeddedEtcd(None)
    if not secret:
        logger.warning(
            "the job has no secret: whoever reaches its etcd at %s can read, steer and end it; give every host the "
            "same %s",
            address,
            SETTING,
        )
        return EmbeddedEtcd(address)
    from ...store.certificates import certificates_of

    return EmbeddedEtcd(address, certificates=certificates_of(secret, namespace(job)))


def check_secret(entries: Collection[KeyValue], job: str, secret: JobSecret) -> None:
    """Raises :class:`ConfigError` if ``entries`` of ``job`` say that this process has not the job's secret.

    One that is genuine proves that it has: others may be somebody else's.
    """
    sealed = any(entry.sealed for entry in entries)
    if not entries or (any(entry.genuine for entry in entries) if secret else not sealed):
        return
    where = f"a copy of {file_of(job).name} of the host where it was started ({file_of(job)} there)"
    if not secret:
        raise ConfigError(f"job {job!r} has a secret, and none is known here: set {ENV_SECRET_FILE} to {where}")
    if not sealed:
        raise ConfigError(
            f"no process that knows a secret has written what etcd has of job {job!r}: the job was started without the "
            f"one that {SETTING} gives, or it was written by somebody else"
        )
    raise ConfigError(f"job {job!r} has another secret than {SETTING} gives: it must be {where}")


def without_access(env: MutableMapping[str, str]) -> None:
    """Removes from ``env`` what is for agents only: workers have no business with it."""
    for name in (ENV_SECRET_FILE, ENV_STORE, ENV_AGENT, ENV_USER, ENV_PASSWORD, ENV_CA, ENV_CERT, ENV_KEY):
        env.pop(name, None)


# -- records that are written once, and others that somebody else may have put in their place ----------------------


def put_once(store: Store, key: str, value: str, given: Mapping[str, int] | None = None) -> bool:
    """Sets ``key`` unless a genuine record is there, whose place no other one holds.

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
