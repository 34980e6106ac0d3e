"""Addresses as users write them."""

from __future__ import annotations

from urllib.parse import urlsplit


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
