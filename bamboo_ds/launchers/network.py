"""Addresses and ports of this host."""

from __future__ import annotations

import logging
import random
import socket
from collections.abc import Callable
from typing import TypeVar

from tenacity import RetryCallState, Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

from ..errors import BambooError, LaunchError
from ..store.endpoints import parse_endpoints

logger = logging.getLogger("bamboo_ds.launchers")

#: Where members of ``bamboo run`` meet unless it is told.
LOOPBACK = "127.0.0.1"
#: Below the ports that Linux hands out (ip_local_port_range), and below those of Kubernetes' services.
_PORTS = range(20000, 30000)
_TRIES = 20
_POLL_S = 0.5

_T = TypeVar("_T")


def own_address(host: str, port: int) -> str:
    """This host's address on the way to ``host``; nothing is sent. Raises ``OSError`` if no way leads there."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    # Others may know an address of version 4 only, of "localhost" for one.
    family, _, _, _, name = next((each for each in found if each[0] == socket.AF_INET), found[0])
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(name)
        return str(probe.getsockname()[0])


def awaited(call: Callable[[], _T], refusal: type[BambooError], wait_s: float) -> _T:
    """The result of ``call``, once it does not fail by ``refusal`` any more; the first failure is told.

    Raises:
        BambooError: the newest refusal, after ``wait_s`` seconds.
    """

    def tell(state: RetryCallState) -> None:
        if state.attempt_number == 1 and state.outcome is not None:
            logger.warning("%s. It is waited for, up to %g s", state.outcome.exception(), wait_s)

    retried = Retrying(
        retry=retry_if_exception_type(refusal),
        stop=stop_after_delay(wait_s),
        wait=wait_fixed(_POLL_S),
        before_sleep=tell,
        reraise=True,
    )
    return retried(call)


def address_towards(urls: str, wait_s: float = 0.0) -> str:
    """This host's address on the way to the etcd at ``urls``; members reach each other where they reach it.

    Args:
        wait_s: seconds to wait for names and ways, which a host may not have yet that has just started.

    Raises:
        ConfigError: ``urls`` are wrong.
        LaunchError: there is no such way.
    """
    endpoints = parse_endpoints(urls.split(","), None)

    def find() -> str:
        refused = None
        for endpoint in endpoints:
            if endpoint.path:
                return LOOPBACK  # the etcd of a job whose members are all on this host
            try:
                return own_address(endpoint.host, endpoint.port)
            except OSError as error:
                refused = error
        raise LaunchError(f"no way leads to --store {urls} ({refused}); if it is right, say --address") from refused

    return awaited(find, LaunchError, wait_s)


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
