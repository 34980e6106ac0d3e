"""Addresses and ports of this host."""

from __future__ import annotations

import random
import socket

from ..errors import ConfigError
from ..store.endpoints import parse_endpoints

#: Where members of ``bamboo run`` meet unless it is told.
LOOPBACK = "127.0.0.1"
#: Below the ports that Linux hands out (ip_local_port_range), and below those of Kubernetes' services.
_PORTS = range(20000, 30000)
_TRIES = 20


def own_address(host: str, port: int) -> str:
    """This host's address on the way to ``host``; nothing is sent. Raises ``OSError`` if no way leads there."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    # Others may know an address of version 4 only, of "localhost" for one.
    family, _, _, _, name = next((each for each in found if each[0] == socket.AF_INET), found[0])
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(name)
        return str(probe.getsockname()[0])


def address_towards(urls: str) -> str:
    """This host's address on the way to the etcd at ``urls``; members reach each other where they reach it.

    Raises:
        ConfigError: there is no such way, or ``urls`` are wrong.
    """
    refused = None
    for endpoint in parse_endpoints(urls.split(","), None):
        if endpoint.path:
            return LOOPBACK  # the etcd of a job whose members are all on this host
        try:
            return own_address(endpoint.host, endpoint.port)
        except OSError as error:
            refused = error
    raise ConfigError(f"no way leads to --store {urls} ({refused}); if it is right, say --address") from refused


def free_port(address: str) -> int:
    """A port at ``address`` that nobody listens at, and that the system gives to nobody who asks for any port.

    So it is still free when a worker has loaded its libraries and listens there.

    Raises:
        OSError: one cannot listen at ``address``.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    refused: OSError | None = None
    for port in random.SystemRandom().sample(_PORTS, _TRIES):
        try:
            with socket.create_server((address, port), family=family):
                return port
        except OSError as error:
            refused = error
    assert refused is not None
    raise refused
