"""Addresses and certificates of etcd, checked before any connection is made."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from ..errors import ConfigError
from ..variables import ENV_STORE
from .records import TlsFiles

#: Name and password to authenticate with, and PEM files for TLS; all optional.
ENV_USER = "BAMBOO_STORE_USER"
ENV_PASSWORD = "BAMBOO_STORE_PASSWORD"
ENV_CA = "BAMBOO_STORE_CA"
ENV_CERT = "BAMBOO_STORE_CERT"
ENV_KEY = "BAMBOO_STORE_KEY"
#: What messages call the addresses.
ADDRESSES = f"--store ({ENV_STORE})"
#: What the URL of an embedded etcd on this host begins with; its socket's path follows.
UNIX = "unix://"
#: What the URL of a job's own etcd begins with that serves who knows the job's secret; its address and port follow.
OWN = "bamboo://"
_CURE = "write http://host:port, https://host:port or host:port, such as http://10.0.0.1:2379"


@dataclass(frozen=True)
class Endpoint:
    """One member of the etcd cluster as clients see it.

    Attributes:
        path: of the socket of an etcd on this host, which has neither host nor port.
        own: it is the job's, with certificates made of the job's secret.
    """

    host: str
    port: int
    secure: bool
    path: str = ""
    own: bool = False

    @property
    def target(self) -> str:
        """``host:port`` as gRPC wants it."""
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def loopback(self) -> bool:
        """Whether the traffic stays on this machine."""
        if self.path:
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def __str__(self) -> str:
        if self.path:
            return UNIX + self.path
        return f"{OWN if self.own else 'https://' if self.secure else 'http://'}{self.target}"


@dataclass(frozen=True)
class Certificates:
    """Contents of the TLS files, PEM.

    Attributes:
        name: that the other end's certificate must have; ``None``: its address.
    """

    ca: bytes | None
    cert: bytes | None
    key: bytes | None
    name: str | None = None

    def __repr__(self) -> str:
        return "Certificates(...)"


def parse_endpoints(endpoints: Sequence[str], tls: TlsFiles | None) -> tuple[Endpoint, ...]:
    """Checks and parses; raises :class:`ConfigError` naming the endpoint and how to write it."""
    if isinstance(endpoints, str) or not endpoints:
        raise ConfigError(f"{ADDRESSES}: found {endpoints!r}, expected a list of at least one address; {_CURE}")
    return tuple(dict.fromkeys(_parse(text, tls) for text in endpoints))


def _parse(text: str, tls: TlsFiles | None) -> Endpoint:
    address = str(text).strip()
    if "@" in address:  # never repeat it: it holds a password
        raise ConfigError(f"{ADDRESSES}: an endpoint holds user:password@; give them as {ENV_USER} and {ENV_PASSWORD}")
    if address.startswith(UNIX):
        return Endpoint("", 0, False, address.removeprefix(UNIX))
    scheme, separator, rest = address.partition("://")
    if not separator:
        scheme, rest = ("https" if tls else "http"), address
    own = address.startswith(OWN)
    if scheme not in ("http", "https") and not own:
        raise ConfigError(f"{ADDRESSES}: {text!r} has the scheme {scheme!r}; {_CURE}")
    if scheme == "http" and tls:
        raise ConfigError(
            f"{ADDRESSES}: {text!r} is plain text although {ENV_CA} or the like is set; write https:// or unset it"
        )
    try:
        parts = urlsplit(f"{scheme}://{rest}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"{ADDRESSES}: {text!r}: {error}; {_CURE}") from error
    if not host or not port or parts.path.strip("/") or parts.query or parts.fragment:
        raise ConfigError(f"{ADDRESSES}: {text!r} is not an address with a port; {_CURE}")
    if ":" not in host and not re.fullmatch(r"[A-Za-z0-9._-]+", host):
        raise ConfigError(f"{ADDRESSES}: {text!r} has the host {host!r}; {_CURE}")
    return Endpoint(host, port, scheme != "http", own=own)


def read_certificates(tls: TlsFiles | None) -> Certificates:
    """Reads the TLS files; raises :class:`ConfigError` naming the setting and file at fault."""
    if tls is None:
        return Certificates(None, None, None)
    if (tls.cert is None) != (tls.key is None):
        missing, given = (ENV_KEY, ENV_CERT) if tls.key is None else (ENV_CERT, ENV_KEY)
        raise ConfigError(f"{missing} is not set although {given} is; set both or neither")
    return Certificates(_pem(ENV_CA, tls.ca), _pem(ENV_CERT, tls.cert), _pem(ENV_KEY, tls.key))


def _pem(setting: str, path: Path | str | None) -> bytes | None:
    if path is None:
        return None
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{setting}: cannot read {path}: {error.strerror}") from error
    wanted = b"PRIVATE KEY-----" if setting == ENV_KEY else b"-----BEGIN CERTIFICATE-----"
    if wanted not in data:
        kind = "private key" if setting == ENV_KEY else "certificate"
        raise ConfigError(f"{setting}: {path} holds no {kind} in PEM format")
    return data
