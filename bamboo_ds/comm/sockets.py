"""Finding and shutting down the sockets of one epoch among all descriptors of this process (Linux).

gloo neither tells its sockets nor can be told to abort, but a socket that is shut down makes every
operation on it fail at once. Descriptors belong to gloo and may be closed and reused at any moment:
each is duplicated first, identified by the names of the duplicate, and never closed itself.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from collections.abc import Callable, Iterable, Iterator

#: Numeric host and port.
Endpoint = tuple[str, int]
#: Local endpoint and remote endpoint of a TCP socket.
Matcher = Callable[[Endpoint, Endpoint], bool]

_SYN_SENT = 2
#: Open files. No more: there are programs that close, at their start, as many as they might have.
_DESCRIPTORS = 1 << 16
_TCP_TABLES = ("/proc/self/net/tcp", "/proc/self/net/tcp6")
_BACKLOG = 4096


def endpoint(name: tuple[object, ...]) -> Endpoint:
    """Normalises a socket name: IPv4 addresses mapped into IPv6 become IPv4, scopes are dropped."""
    host, port = str(name[0]), int(str(name[1]))
    return (host.removeprefix("::ffff:").partition("%")[0], port)


def resolve(host: str, port: int) -> tuple[socket.AddressFamily, tuple[object, ...]]:
    """The address family and socket address of ``host``; raises ``OSError`` if it has none."""
    family, _, _, _, name = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return family, name


def watch_silence(opened: socket.socket, seconds: float) -> None:
    """Has a TCP connection fail when the peer's host has answered nothing for so long.

    Its kernel answers for a process that computes or is stopped, unless data waits there that is not read.
    """
    pause = max(1, int(seconds / 3))
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, pause)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, pause)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))


def socket_descriptors() -> dict[int, str]:
    """All sockets among this process's descriptors, with the kernel's identity of each."""
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed since the listing
            target = os.readlink(f"/proc/self/fd/{entry}")
            if target.startswith("socket:"):
                found[int(entry)] = target
    return found


def _tcp(descriptors: Iterable[int]) -> Iterator[socket.socket]:
    """A duplicate of each of ``descriptors`` that is still an open TCP socket, for one turn of the loop."""
    for descriptor in descriptors:
        try:
            copy = socket.socket(fileno=os.dup(descriptor))
        except OSError:
            continue
        with copy:
            if copy.family in (socket.AF_INET, socket.AF_INET6):
                yield copy


def new_listener(before: dict[int, str], host: str) -> Endpoint | None:
    """The endpoint of the one socket that listens on ``host`` since ``before``; ``None`` if not unique."""
    found = set()
    new = [number for number, identity in socket_descriptors().items() if before.get(number) != identity]
    for copy in _tcp(new):
        if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            name = endpoint(copy.getsockname())
            if name[0] == host:
                found.add(name)
    return found.pop() if len(found) == 1 else None


def shut_down(matches: Matcher) -> int:
    """Shuts down every TCP connection (also one still connecting) whose endpoints satisfy ``matches``.

    Returns:
        The number of sockets shut down.
    """
    count = 0
    connecting: dict[int, tuple[Endpoint, Endpoint]] | None = None
    for copy in _tcp(socket_descriptors()):
        try:
            local = endpoint(copy.getsockname())
            remote = endpoint(copy.getpeername())
        except OSError:
            # Listening, closed, or waiting for the peer's host to answer. For the last only the kernel's table
            # has the peer's name; it is slow to read.
            if _state(copy) != _SYN_SENT:
                continue
            if connecting is None:
                connecting = _connecting()
            names = connecting.get(os.fstat(copy.fileno()).st_ino)
            if names is None:
                continue
            local, remote = names
        if matches(local, remote):
            with contextlib.suppress(OSError):  # the peer or gloo was faster
                # Reading only: gloo ends a connection whose end it reads, but forgets an operation whose write
                # failed just before that.
                copy.shutdown(socket.SHUT_RD)
                count += 1
    return count


def _state(opened: socket.socket) -> int:
    """The state of a TCP socket, as in the kernel's tcp_states.h; 0 if it has none."""
    try:
        return opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    except OSError:
        return 0


def _connecting() -> dict[int, tuple[Endpoint, Endpoint]]:
    """Local and remote endpoint by inode of all sockets in state SYN_SENT."""
    endpoints = {}
    for table in _TCP_TABLES:
        try:
            with open(table) as lines:
                rows = [line.split() for line in lines][1:]
        except OSError:  # no IPv6
            continue
        for row in rows:
            if int(row[3], 16) == _SYN_SENT:
                endpoints[int(row[9])] = (_parse(row[1]), _parse(row[2]))
    return endpoints


def _parse(text: str) -> Endpoint:
    """An endpoint of /proc/net/tcp: hexadecimal 32-bit words in host byte order, colon, port."""
    address, port = text.split(":")
    words = [int(address[i : i + 8], 16).to_bytes(4, "little") for i in range(0, len(address), 8)]
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    return endpoint((socket.inet_ntop(family, b"".join(words)), int(port, 16)))


def allow_descriptors() -> None:
    """Raises this process's limit of open files from what is customary, which a large job exceeds. Idempotent."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def listen(host: str) -> socket.socket:
    """A socket listening on a free port of ``host`` and of no other interface."""
    family, name = resolve(host, 0)
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind(name)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def shut(opened: socket.socket, how: int = socket.SHUT_RDWR) -> None:
    """Shuts down a socket of ours, whatever its state; threads that wait for it are woken."""
    with contextlib.suppress(OSError):  # not connected any more
        opened.shutdown(how)
