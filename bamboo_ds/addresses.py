"""Addresses as users write them."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urlsplit

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
#: Kinds of URLs in which what stands before an ``@`` is no user: ``abfs://container@account.dfs.core.windows.net/path``.
_CONTAINERS = ("abfs", "abfss", "az", "wasb", "wasbs")


def is_url(location: Path | str) -> bool:
    """Whether ``location`` is a URL, and not a path."""
    return isinstance(location, str) and _URL.match(location) is not None


def check_storage_url(url: str) -> str:
    """``url`` without slashes at its end; raises ``ValueError`` with the cure if it has credentials, or no place."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ValueError(f"it is not a URL: {error}") from error
    user = parts.username is not None and parts.scheme.lower() not in _CONTAINERS
    # A secret may have slashes in it, so that what follows the colon need not be the password of a URL.
    if user or re.search(r"://[^@]*:[^@]*@", url) or parts.query or parts.fragment:
        raise ValueError(
            "it must not have credentials in it, nor anything behind ? or #, since settings are in logs and in etcd: "
            "give credentials to the hosts of the job by the store's own means (environment variables such as "
            "AWS_ACCESS_KEY_ID, a configuration file, or a role of the instance)"
        )
    if not (parts.netloc or parts.path.strip("/")):
        raise ValueError("it must name a place, such as s3://bucket/prefix")
    return url.rstrip("/")


def without_credentials(text: str) -> str:
    """``text``, with dots in place of what may be credentials where it is a URL."""
    return re.sub(r"(?<=://).*@", "...@", re.sub(r"[?#].*", "?...", text)) if is_url(text) else text


def check_url(url: str) -> str:
    """``url`` without a slash at its end; raises ``ValueError`` with the cure unless it is HTTP(S) with a host."""
    try:
        parts = urlsplit(url)
        port_is_one = parts.port is None or parts.port > 0
    except ValueError as error:
        raise ValueError(f"{url!r} is not a URL: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_is_one:
        raise ValueError(f"{url!r} is not a URL like http://host:port/path")
    return url.rstrip("/")


def split_address(value: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``, the host of IPv6 without its brackets; raises ``ValueError`` with the cure."""
    host, colon, port = value.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    number = int(port) if port.isdecimal() and port.isascii() else -1
    if not colon or (":" in host and not bracketed) or any(c.isspace() or c in "/@" for c in host) or number > 65535:
        number = -1
    if number < 0:
        raise ValueError(f"{value!r} is not an address like 127.0.0.1:9400, [::1]:9400 or :9400")
    return (host[1:-1] if bracketed else host), number
