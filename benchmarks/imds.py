"""Amazon's instance metadata service, version 2, as far as spot notices need it, for slots that play instances."""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_TOKEN, _ACTION = "/latest/api/token", "/latest/meta-data/spot/instance-action"


class Metadata(ThreadingHTTPServer):
    """Answers below ``/<slot>``: nothing without a token; an action for those slots only that :meth:`notify` names."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.tokens: set[str] = set()
        self.actions: dict[str, dict[str, str]] = {}

    @property
    def url(self) -> str:
        """With a placeholder for the slot, as ``BAMBOO_AWS_METADATA_URL`` wants it."""
        return f"http://127.0.0.1:{self.server_address[1]}/{{slot}}"

    def notify(self, slot: int, seconds: float) -> None:
        """The instance of ``slot`` will be terminated in so many seconds."""
        until = datetime.now(timezone.utc) + timedelta(seconds=seconds)
        self.actions[str(slot)] = {"action": "terminate", "time": f"{until:%Y-%m-%dT%H:%M:%SZ}"}


class _Handler(BaseHTTPRequestHandler):
    server: Metadata

    def do_PUT(self) -> None:
        """A token."""
        if not self.path.endswith(_TOKEN) or "X-aws-ec2-metadata-token-ttl-seconds" not in self.headers:
            return self._answer(400)
        token = secrets.token_urlsafe(24)
        self.server.tokens.add(token)
        self._answer(200, token)

    def do_GET(self) -> None:
        """The slot's action, if it has one."""
        if self.headers.get("X-aws-ec2-metadata-token") not in self.server.tokens:
            return self._answer(401)
        slot, _, path = self.path.lstrip("/").partition("/")
        action = self.server.actions.get(slot)
        if f"/{path}" != _ACTION or action is None:
            return self._answer(404)
        self._answer(200, json.dumps(action))

    def _answer(self, status: int, text: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@contextmanager
def metadata() -> Iterator[Metadata]:
    """The service on a port of 127.0.0.1."""
    with Metadata() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.1,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
