"""HTTP to metadata services: no proxies, no redirects, no cookies, bounded in time and size.

Metadata services live on a link-local address; whoever redirects or wants a proxy is not one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError

from ...errors import BambooError, faults_of

if TYPE_CHECKING:
    import aiohttp

#: Seconds that a connection may take; metadata services are at most one hop away.
CONNECT_TIMEOUT_S = 2.0
#: Seconds that an answer may take where nothing else is said.
ANSWER_TIMEOUT_S = 5.0
#: Bytes of the longest answer that is read.
MAX_ANSWER = 256 * 1024

Model = TypeVar("Model", bound=BaseModel)


class SourceError(BambooError, RuntimeError):
    """A source of notices gave no usable answer. Stays inside this package: the watcher logs it."""


class SourceSilent(SourceError):
    """No answer: connection refused or broken, timeout, unreadable file."""


class SourceBroken(SourceError):
    """An answer that the protocol does not allow."""


@dataclass(frozen=True)
class Answer:
    """An HTTP answer, read to its end. Header names are case-insensitive."""

    url: str
    status: int
    headers: Mapping[str, str]
    body: bytes

    def expect(self, *statuses: int) -> Answer:
        """This answer; raises :class:`SourceBroken` if its status is none of ``statuses``."""
        if self.status not in statuses:
            raise SourceBroken(f"{self.url} answered {self.status}: {self.body[:200]!r}")
        return self

    @property
    def now(self) -> datetime:
        """The service's time when it answered, which is what its notices go by; this host's where it does not tell."""
        try:
            return http_date(self.headers["Date"])
        except (KeyError, ValueError):
            return datetime.now(timezone.utc)

    @property
    def text(self) -> str:
        """The body as text without white space around it; raises :class:`SourceBroken` if it is none."""
        try:
            return self.body.decode().strip()
        except UnicodeDecodeError as error:
            raise SourceBroken(f"{self.url} answered bytes that are no text: {self.body[:200]!r}") from error

    def parse(self, model: type[Model]) -> Model:
        """The body as JSON of the form ``model``; raises :class:`SourceBroken` for anything else."""
        return parse_json(model, self.body, self.url)


def http_date(text: str) -> datetime:
    """The time that an HTTP date means; raises ``ValueError`` for anything else."""
    when = parsedate_to_datetime(text)
    return when if when.tzinfo is not None else when.replace(tzinfo=timezone.utc)


def parse_json(model: type[Model], body: bytes, where: str) -> Model:
    """``body``, found at ``where``, as ``model``; raises :class:`SourceBroken` for anything else."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise SourceBroken(f"{where} holds {body[:200]!r}: {faults_of(error)}") from error


def open_session() -> aiohttp.ClientSession:
    """A session for metadata services. Call it inside the event loop; loads aiohttp."""
    import aiohttp

    return aiohttp.ClientSession(
        trust_env=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        connector=aiohttp.TCPConnector(limit=0, use_dns_cache=False),
    )


async def request(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    *,
    headers: Mapping[str, str] | None = None,
    params: Mapping[str, str] | None = None,
    json: Any = None,
    timeout_s: float = ANSWER_TIMEOUT_S,
) -> Answer:
    """Makes one request and reads its answer, whatever its status; redirects are not followed.

    Raises:
        SourceSilent: no complete answer within ``timeout_s`` seconds.
        SourceBroken: the answer is too long, or no HTTP.
    """
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
    try:
        async with session.request(
            method, url, headers=headers, params=params, json=json, allow_redirects=False, timeout=timeout
        ) as response:
            body = bytearray()
            async for chunk in response.content.iter_chunked(MAX_ANSWER):
                body += chunk
                if len(body) > MAX_ANSWER:
                    raise SourceBroken(f"{url} answered more than {MAX_ANSWER} bytes")
            return Answer(url, response.status, response.headers, bytes(body))
    except asyncio.TimeoutError as error:
        raise SourceSilent(f"{method} {url}: no answer within {timeout_s:g} s") from error
    except (aiohttp.ClientResponseError, aiohttp.ClientPayloadError, aiohttp.InvalidURL) as error:
        raise SourceBroken(f"{method} {url}: {error!r}") from error
    except (aiohttp.ClientError, OSError) as error:
        raise SourceSilent(f"{method} {url}: {error!r}") from error
