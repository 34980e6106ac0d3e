"""Access to a job's page: for holders of a token that is derived from the job's secret."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from urllib.parse import urlsplit

from ...secret import JobSecret

_BEARER = "Bearer "


def token_of(secret: JobSecret, job: str) -> str:
    """The token of ``job``: it gives access to its page and does not lead back to its secret."""
    return secret.tag("web", job).hex()


class Access:
    """Tells requests of holders of the token from others."""

    def __init__(self, secret: JobSecret, job: str) -> None:
        self._token = token_of(secret, job)
        self._cookie = secret.tag("web cookie", job).hex()
        # Cookies know no ports: those of two jobs on one host must not replace each other.
        self._name = f"bamboo-{secret.tag('web name', job).hex()[:16]}"

    def knows(self, token: str) -> bool:
        """Whether ``token`` is the one."""
        return _equal(token, self._token)

    def bears(self, headers: Mapping[str, str]) -> bool:
        """Whether a request brings the token in a header, which no other site can make a browser do."""
        given = headers.get("Authorization", "")
        return given.startswith(_BEARER) and self.knows(given[len(_BEARER) :].strip())

    def admits(self, headers: Mapping[str, str], cookies: Mapping[str, str]) -> bool:
        """Whether a request may read."""
        return self.bears(headers) or _equal(cookies.get(self._name, ""), self._cookie)

    def admits_change(self, headers: Mapping[str, str], cookies: Mapping[str, str]) -> bool:
        """Whether a request may change something: with a cookie it must come from a page of this server."""
        origin = urlsplit(headers.get("Origin", ""))
        own = origin.scheme in ("http", "https") and origin.netloc == headers.get("Host")
        return self.bears(headers) or (own and self.admits(headers, cookies))

    def cookie(self) -> str:
        """The header that sets the cookie, for as long as the browser runs."""
        return f"{self._name}={self._cookie}; Path=/; HttpOnly; SameSite=Strict"


def _equal(given: str, known: str) -> bool:
    return hmac.compare_digest(given.encode(errors="surrogateescape"), known.encode())
