"""Lines over a stream socket, without ever blocking on the other end."""

from __future__ import annotations

import logging
import select
import socket
import threading
import time

logger = logging.getLogger("bamboo_ds.control.wire")


class LineSocket:
    """One end of a socket pair; both ends exchange lines.

    :meth:`send` may be called from any thread; :meth:`receive` from one.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sock.setblocking(False)
        self._unread = b""
        self._outbox = bytearray()
        self._lock = threading.Lock()

    def fileno(self) -> int:
        """The descriptor, for selectors; -1 when closed."""
        return self._sock.fileno()

    @property
    def backlog(self) -> int:
        """Bytes that the other end has not taken yet."""
        return len(self._outbox)

    def send(self, line: bytes) -> None:
        """Queue ``line`` (with its newline) and write what the socket takes now."""
        with self._lock:
            self._outbox += line
        self.flush()

    def flush(self) -> None:
        """Writes what the socket takes now. When the other end is gone, the queue is dropped."""
        with self._lock:
            while self._outbox:
                try:
                    sent = self._sock.send(self._outbox, socket.MSG_NOSIGNAL)
                except BlockingIOError:
                    return
                except OSError as error:  # whoever reads learns of the end
                    logger.debug("the other end is gone, dropping %d bytes: %s", len(self._outbox), error)
                    self._outbox.clear()
                    return
                del self._outbox[:sent]

    def flush_within(self, timeout_s: float) -> None:
        """Writes what is queued, waiting up to ``timeout_s`` seconds for the other end to read."""
        deadline = time.monotonic() + timeout_s
        self.flush()
        while self._outbox and (left := deadline - time.monotonic()) > 0:
            self.poll(left, writing=True)
            self.flush()

    def receive(self) -> list[bytes] | None:
        """The lines that have arrived, without newlines; ``None`` when the other end is gone."""
        try:
            data = self._sock.recv(1 << 16)
        except BlockingIOError:
            return []
        except ConnectionError:
            return None
        if not data:
            return None
        *lines, self._unread = (self._unread + data).split(b"\n")
        return lines

    def poll(self, timeout_s: float, writing: bool) -> int:
        """Waits for input, or for room if ``writing``; returns the ``select.POLL*`` bits.

        It polls because ``select`` cannot watch descriptors above 1023.
        """
        poll = select.poll()
        poll.register(self._sock, select.POLLIN | (select.POLLOUT if writing else 0))
        events = poll.poll(max(0.0, timeout_s) * 1000)
        return events[0][1] if events else 0

    def shutdown(self) -> None:
        """Ends the connection and wakes its waiters; the descriptor stays."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            logger.debug("the other end had closed already: %s", error)

    def close(self) -> None:
        """Closes the descriptor. Idempotent."""
        with self._lock:
            self._sock.close()
